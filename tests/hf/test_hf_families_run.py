"""Every family generates as in transformers, with a cache; trains here in FP8; and trains there once exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformers import AutoModelForCausalLM

from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config
from megatron_fp8.hf.export import ExportSettings, export_checkpoint
from megatron_fp8.hf.families import FAMILIES
from megatron_fp8.hf.import_model import ImportSettings, import_folder
from megatron_fp8.prepare.train_tokenizer import train_bpe
from tests.generate.models import continuations
from tests.hf.our_models import logits_of, train_and_save
from tests.hf.their_configs import MODELS
from tests.hf.their_models import logits_of_folder, make_folder, weights_of
from tests.ranks import run_on_ranks
from tests.small_run import run_small

PROMPTS = [[5, 17, 99, 3, 42], [7, 7, 120]]
NUM_TOKENS = 6
# One model of every class; windows, caps and norms where a family has them.
CHOSEN = {
    "mistral": "mistral-no-window", "qwen2": "qwen2-windows", "gemma3_text": "gemma3", "phi": "phi-qk-norm",
    "smollm3": "smollm3-windows", "falcon": "falcon-one-norm",
}  # fmt: skip
NAMES = {family: CHOSEN.get(family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Every model as transformers saved it (`NAME`), and imported (`NAME-in`)."""
    root = tmp_path_factory.mktemp("families")
    for name in NAMES.values():
        make_folder(root / name, *MODELS[name])
        import_folder(root / name, root / f"{name}-in", ImportSettings(16, None, False), lambda *_: None)
    return root


def generate_all(paths: list[Path]) -> list[Any]:
    """The tokens after each prompt, with and without a cache, for each model."""
    from megatron_fp8.generate.generation import Limits

    asked = [{"limits": Limits(NUM_TOKENS)}]
    return [[list(answer.tokens) for answer in continuations(path, PROMPTS, asked)[0]] for path in paths]


def test_generation_with_a_cache_is_that_of_transformers(root) -> None:
    (ours,) = run_on_ranks(1, generate_all, [root / f"{name}-in" for name in NAMES.values()])
    for name, answers in zip(NAMES.values(), ours, strict=True):
        model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens = torch.tensor([prompt])
            with torch.no_grad():
                for _ in range(len(answer)):
                    tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
            assert answer == tokens[0, len(prompt) :].tolist(), name
            assert len(answer) == NUM_TOKENS


def first_steps(configs: list[Config]) -> list[tuple[float, float | None]]:
    """Loss and gradient norm of one step of each."""
    return [(step.loss, step.grad_norm) for config in configs for step in run_small(config, 1).steps]


def test_every_family_trains_in_fp8(root) -> None:
    """A step in FP8 is that in BF16 but for its rounding."""
    found = {}
    for mode in ("bf16", "fp8"):
        configs = []
        for name in NAMES.values():
            config = load_config(root / f"{name}-in" / "config.yaml").config
            precision = config.precision.model_copy(update={"mode": mode})
            configs.append(config.model_copy(update={"precision": precision}))
        (found[mode],) = run_on_ranks(1, first_steps, configs)
    for name, (loss, norm), (loss_before, norm_before) in zip(NAMES.values(), found["fp8"], found["bf16"], strict=True):
        assert loss != loss_before, name
        assert loss == pytest.approx(loss_before, rel=5e-3), name
        assert norm == pytest.approx(norm_before, rel=0.1), name


# Norms over heads that ranks share, norms of shared heads, biases of the head, one norm for two parts.
SHARDED = ("olmo2", "gemma3", "phi-qk-norm", "gpt_neox", "falcon-one-norm")


def train_and_save_all(configs: list[Config], directories: list[Path]) -> None:
    for config, directory in zip(configs, directories, strict=True):
        FP8GlobalStateManager.reset()
        initialize_rng_tracker(force_reset=True)
        train_and_save(config, directory)


def test_models_trained_on_ranks_go_out_whole(root) -> None:
    configs = []
    for name in SHARDED:
        config = load_config(root / f"{name}-in" / "config.yaml").config
        parallel = config.parallel.model_copy(update={"tensor_model_parallel_size": 2, "sequence_parallel": True})
        training = config.training.model_copy(update={"global_batch_size": 2, "train_iters": 2})
        optimizer = config.optimizer.model_copy(update={"lr": 1e-2, "lr_warmup_iters": 0})
        changes = {"parallel": parallel, "training": training, "optimizer": optimizer}
        configs.append(config.model_copy(update=changes))
    directories = [root / f"{name}-run" / "checkpoints" for name in SHARDED]
    run_on_ranks(2, train_and_save_all, configs, directories)
    tokens = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(1))
    (ours,) = run_on_ranks(1, logits_of, directories, [tokens] * len(directories))
    for name, logits in zip(SHARDED, ours, strict=True):
        settings = ExportSettings("fp32", with_tokenizer=False)
        export_checkpoint(root / f"{name}-run", root / f"{name}-whole", settings, lambda *_: None)
        theirs = logits_of_folder(root / f"{name}-whole", tokens)
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_every_family_trains_under_transformers_once_exported(root) -> None:
    train_bpe(["for batch in data: loss = model(batch)"], 270, root / "tokenizer.json")
    folders = []
    for name in NAMES.values():
        folders.append(root / f"{name}-trained")
        settings = ExportSettings("fp32", tokenizer=root / "tokenizer.json")
        export_checkpoint(root / f"{name}-in", folders[-1], settings, lambda *_: None)
    program = Path(__file__).with_name("train_folders.py")
    done = subprocess.run([sys.executable, program, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 2 * len(folders)
    for which, result in results.items():
        assert result["steps"] == len(result["losses"]) == 2, which
        assert all(2 < loss < 12 for loss in result["losses"]), which
        # Every parameter takes part, but what the two steps' text does not reach.
        assert result["changed"] >= len(weights_of(Path(which.split()[1]))) - 1, which
