"""What cannot be converted is refused with every reason, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.commands.convert import main
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf import family_for
from megatron_fp8.hf.folder import divide, write_shards
from megatron_fp8.hf.weights import read_folder
from tests.command_line import exit_code
from tests.hf.our_models import convert
from tests.hf.their_models import LLAMA, MODELS, make_folder

OURS: dict[str, Any] = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 8}
OURS_GPT2 = {
    **OURS,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
}
TOOL = Path("tools") / "convert_hf.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A folder that can be imported."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    make_folder(folder, LLAMA, torch.float32)
    return folder


@pytest.fixture
def folder(source, tmp_path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(source, tmp_path / "folder"))


def refused(capsys, *arguments: object) -> str:
    """What is said when a conversion is refused; its output must not exist, nor anything beside it."""
    out = Path(str(arguments[2]))
    before = sorted(out.parent.iterdir())
    assert exit_code(main, *arguments) == 2
    assert sorted(out.parent.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ({**OURS, "softmax_type": "learnable", "rotary_base": 500.0}, ["softmax_type"]),
        ({**OURS, "qk_layernorm": "per_head_after_rope"}, ["qk_layernorm"]),
        ({**OURS, "softmax_scale": 0.5, "window_size": [3, 0]}, ["window_size", "softmax_scale"]),
        ({**OURS_GPT2, "hf_model_type": "gpt2", "num_query_groups": 2, "kv_channels": 8, "activation": "swiglu"},
         ["num_query_groups", "kv_channels", "activation"]),
        ({**OURS_GPT2, "normalization": "RMSNorm"}, ["normalization"]),
    ],
)  # fmt: skip
def test_our_models_that_no_family_can_hold_are_refused_with_every_key(model, keys) -> None:
    with pytest.raises(ConfigError) as caught:
        family_for(ModelConfig.model_validate(model))
    assert {problem.key for problem in caught.value.problems} <= {f"model.{key}" for key in keys}
    assert caught.value.problems


@pytest.mark.parametrize(
    ("model", "family"),
    [
        (OURS, "llama"),
        ({**OURS, "hf_model_type": "qwen2"}, "llama"),
        ({**OURS, "hf_model_type": "qwen2", "add_qkv_bias": True}, "qwen2"),
        ({**OURS, "hidden_size": 60, "num_attention_heads": 8, "kv_channels": 16}, "mistral"),
        ({**OURS, "add_qkv_bias": True}, "qwen2"),
        (OURS_GPT2, "gpt2"),
    ],
)
def test_a_family_that_can_hold_the_model_is_taken(model, family) -> None:
    """Llama's class refuses a width that its heads do not divide, and Qwen 2's always has biases on QKV."""
    assert family_for(ModelConfig.model_validate(model)).model_type == family


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, ["model_type = mamba"]),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}, "hidden_act": "tanh", "is_decoder": True},
            ["rope_parameters.low_freq_factor = null", "hidden_act = tanh", "is_decoder = true"],
        ),
        ({"rope_scaling": {"type": "proportional", "factor": 2}}, ["rope_scaling.rope_type = proportional"]),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 3}}, ["rope_scaling.beta = 3"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor = 0.5"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling.factor = null"]),
        ({"use_sliding_window": True, "qk_norm": False}, ["use_sliding_window = true", "qk_norm = false"]),
        ({"hidden_size": 60}, ["hidden_size = 60", "num_attention_heads=8"]),
        ({"hidden_size": None, "vocab_size": "many"}, ["hidden_size = null", "vocab_size = many"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"intermediate_size": 128}, ["mlp.gate_proj.weight has shape [96, 64]; config.json makes it [128, 64]"]),
        ({"num_hidden_layers": 3}, ["model.layers.2.input_layernorm.weight is missing"]),
        ({"num_hidden_layers": 1}, ["model.layers.1.input_layernorm.weight is not part of the model"]),
    ],
)
def test_config_json_that_cannot_be_expressed(capsys, folder, tmp_path, changes, said) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    text = refused(capsys, "import", folder, tmp_path / "out", "--no-tokenizer")
    assert all(part in text for part in said), text


def test_gpt2_switches_and_positions(capsys, tmp_path) -> None:
    make_folder(tmp_path / "gpt2", *MODELS["gpt2"])
    text = refused(capsys, "import", tmp_path / "gpt2", tmp_path / "out", "--no-tokenizer", "--seq-length", 25)
    assert "--seq-length = 25" in text
    path = tmp_path / "gpt2" / "config.json"
    changes = {"activation_function": "mish", "scale_attn_by_inverse_layer_idx": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    text = refused(capsys, "import", tmp_path / "gpt2", tmp_path / "out", "--no-tokenizer")
    assert all(f"{key} = " in text for key in changes)


def test_folders_that_are_not_whole(capsys, folder, tmp_path) -> None:
    out = tmp_path / "out"
    assert "tokenizer.json does not exist" in refused(capsys, "import", folder, out)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert str(shard) in refused(capsys, "import", folder, out, "--no-tokenizer")
    shard.unlink()
    assert shard.name in refused(capsys, "import", folder, out, "--no-tokenizer")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is a pickle" in refused(capsys, "import", folder, out, "--no-tokenizer")
    assert "is not a folder" in refused(capsys, "import", tmp_path / "nothing", out, "--no-tokenizer")


def test_a_tied_head_that_differs(capsys, tmp_path) -> None:
    folder = tmp_path / "tied"
    make_folder(folder, MODELS["llama-tied-biases"][0], torch.float32)
    shard = next(path for path in folder.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(path))
    weights = load_file(shard)
    head = tmp_path / "head.safetensors"
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["lm_head.weight"] = "head.safetensors"
    index_path.write_text(json.dumps(index))
    save_file({"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, folder / head.name)
    text = refused(capsys, "import", folder, tmp_path / "out", "--no-tokenizer")
    assert "tie_word_embeddings=true, but lm_head.weight" in text
    save_file({"lm_head.weight": weights["model.embed_tokens.weight"]}, folder / head.name)
    convert("import", folder, tmp_path / "out", "--no-tokenizer")


def test_checkpoints_that_are_not_whole_and_outputs_that_exist(capsys, source, tmp_path) -> None:
    convert("import", source, tmp_path / "in", "--no-tokenizer")
    out = tmp_path / "out"
    assert "data.tokenizer_model" in refused(capsys, "export", tmp_path / "in", out)
    assert "no checkpoint" in refused(capsys, "export", tmp_path / "nothing", out, "--no-tokenizer")
    checkpoint = CheckpointDirectory(tmp_path / "in" / "checkpoints").path(0)
    file = sorted(checkpoint.glob("*.distcp"))[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert f"{file} is corrupt" in refused(capsys, "export", tmp_path / "in", out, "--no-tokenizer")
    file.write_bytes(content[:-1])
    text = refused(capsys, "export", checkpoint, out, "--no-tokenizer", "--skip-verify")
    assert str(file) in text
    out.mkdir()
    assert "nothing is overwritten" in refused(capsys, "export", tmp_path / "in", out, "--no-tokenizer")
    assert "nothing is overwritten" in refused(capsys, "import", source, out, "--no-tokenizer")


def test_numbers_that_a_format_does_not_reach(tmp_path) -> None:
    with pytest.raises(BadInputError, match="large reaches 7e\\+04, out of range of float16"):
        write_shards(tmp_path, {"large": (2,)}, torch.float16, 100, [("large", torch.tensor([1.0, 7e4]))])


def test_files_are_divided_in_order() -> None:
    assert divide({"a": 3, "b": 3, "c": 9, "d": 1, "e": 1}, 6) == [["a", "b"], ["c"], ["d", "e"]]
    assert divide({"a": 3}, 6) == [["a"]]


def test_files_are_what_the_library_reads(tmp_path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(2, 2)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_shards(tmp_path, shapes, torch.bfloat16, 1000, iter(tensors.items()))
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in tensors.items())
    assert {name: (weight.shape, weight.dtype) for name, weight in read_folder(tmp_path).items()} == {
        name: (shape, "BF16") for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "export"),
        (["export", "nothing", "out", "--max-shard-size", "0GB"], 2, "'0GB' is not a size"),
        (["import", "nothing", "out", "--seq-length", "0"], 2, "'0' is not an integer of at least 1"),
        (["import", "nothing", "out"], 2, "nothing is not a folder"),
    ],
)
def test_command_line_answers_without_torch(tmp_path, arguments, code, said) -> None:
    root = Path(__file__).parents[2]
    program = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        f"sys.argv[0] = 'convert_hf.py'\n"
        f"runpy.run_path({str(root / TOOL)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr
