"""A small trained model of two forms, its text, and what is measured of it on real ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fp8.checkpoint.saved_model import InferenceSettings, read_saved_model
from megatron_fp8.config.schema import Config
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare.token_file_writer import TokenFileWriter
from megatron_fp8.prepare.train_tokenizer import train_bpe
from tests.small_run import small_config

SENTENCE = "the rank of this tensor is a scale that every step of training keeps in its history — Füße"
SEQ_LENGTH = 32
FP32 = InferenceSettings(mode="fp32")


def words(number: int, seed: int) -> str:
    """A text of so many words."""
    return " ".join(random.Random(seed).choices(SENTENCE.split(), k=number))


def write_text(directory: Path) -> dict[str, list[str]]:
    """A tokenizer and two token files in `directory`; returns the documents' texts by file."""
    tokenizer = train_bpe([SENTENCE], 300, directory / "tokenizer.json")
    texts = {"one": [words(9 + 13 * number, number) for number in range(5)], "two": [words(20, 9), "Ü"]}
    for name, documents in texts.items():
        with TokenFileWriter(directory / name, tokenizer.vocab_size) as writer:
            for document in documents:
                ids = [*tokenizer.encode(document), tokenizer.eod_id]
                writer.add_documents(np.array(ids, dtype=writer.dtype), [len(ids)])
    return texts


def model_config(directory: Path, **sections: Any) -> Config:
    """Two layers that know the tokenizer in `directory`."""
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    return small_config(
        model={"num_layers": 2, "seq_length": SEQ_LENGTH, "vocab_size": tokenizer.vocab_size, "hidden_size": 64},
        training={"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 2},
        optimizer={"lr": 1e-2},
        data={"tokenizer_model": str(directory / "tokenizer.json"), "valid_data_path": [str(directory / "one")]},
        **sections,
    )


def measured(run: Path, prefixes: list[str], settings: InferenceSettings, num_windows: int | None = None) -> list[Any]:
    """`FileLoss` of each file by the model of a run, in the running world."""
    import torch
    from megatron.core import parallel_state

    from megatron_fp8 import device as devices
    from megatron_fp8.evaluate.file_loss import measure_files
    from megatron_fp8.evaluate.files import evaluation_files, model_tokenizer
    from megatron_fp8.generate.loaded_model import load_model

    saved = read_saved_model(run, settings, torch.distributed.get_world_size())
    model = load_model(saved, devices.prepare())
    losses = list(measure_files(model, evaluation_files(saved, prefixes), model_tokenizer(saved, None), num_windows))
    assert not any(stage.training for stage in model.stages), "dropout would be on in what comes next"
    parallel_state.destroy_model_parallel()
    return losses


def harness_results(run: Path, task_folder: Path, tasks: list[str], settings: InferenceSettings) -> dict[str, Any]:
    """What lm-eval finds with our adapter in the running world: metrics by task, and each document's answers."""
    import torch
    from megatron.core import parallel_state

    from megatron_fp8 import device as devices
    from megatron_fp8.evaluate.files import model_tokenizer
    from megatron_fp8.evaluate.harness import HarnessModel
    from megatron_fp8.generate.loaded_model import load_model

    saved = read_saved_model(run, settings, torch.distributed.get_world_size())
    model = load_model(saved, devices.prepare())
    found = evaluate_tasks(HarnessModel(model, model_tokenizer(saved, None), batch_size=3), task_folder, tasks)
    parallel_state.destroy_model_parallel()
    return found


def evaluate_tasks(model: Any, task_folder: Path, tasks: list[str]) -> dict[str, Any] | None:
    """lm-eval's metrics by task, and what the model answered for each document; lm-eval gives them to rank 0 alone."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    results = simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    if results is None:
        return None
    answers = {task: [sample["filtered_resps"] for sample in results["samples"][task]] for task in tasks}
    return {"results": results["results"], "answers": answers}


def write_tasks(folder: Path) -> None:
    """Three tasks of lm-eval in yaml and JSONL: choices, texts longer than the model's samples, writing."""
    choices = [
        {"question": words(2 + number, number), "choices": [words(1 + k, 50 + number + k) for k in range(3)]}
        for number in range(7)
    ]
    records = {
        "choice": [{**choice, "answer": number % 3} for number, choice in enumerate(choices)],
        "text": [{"page": words(number, number)} for number in (3, 30, 60)],
        "writing": [{"question": words(1 + number, 80 + number), "answer": "scale"} for number in range(5)],
    }
    specific = {
        "choice": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: choices\n'
        "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "text": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{page}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
        "writing": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["e"], max_gen_toks: 8, do_sample: false}\nmetric_list: [{metric: exact_match}]\n',
    }
    for name, rows in records.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(
            f"task: tiny_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\n{specific[name]}",
            encoding="utf-8",
        )
