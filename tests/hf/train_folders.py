"""A user's program: trains the models in folders under transformers' Trainer and under Accelerate, two steps each.

Prints a JSON object: for each folder and trainer its losses, steps, and how many parameters changed. It runs in a
process of its own, since nothing of this project belongs to it.
"""

import json
import sys
import tempfile

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

BLOCK, STEPS, BATCH = 16, 2, 2
TEXT = "def train(model, data):\n    for step, batch in enumerate(data):\n        loss = model(batch)\n" * 8


def blocks(tokenizer) -> list[dict[str, list[int]]]:
    """The text in blocks of as many tokens."""
    ids = tokenizer(TEXT, verbose=False)["input_ids"]
    cut = [ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK + 1, BLOCK)]
    return [{"input_ids": block, "labels": block} for block in cut[: STEPS * BATCH]]


def with_trainer(folder: str) -> dict:
    """What transformers' Trainer does with a folder."""
    set_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=blocks(tokenizer), processing_class=tokenizer)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "steps": trainer.state.global_step, "changed": changed(model, before)}


def with_accelerate(folder: str) -> dict:
    """What a loop under Accelerate does with a folder."""
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batches = torch.utils.data.DataLoader(
        [{name: torch.tensor(values) for name, values in block.items()} for block in blocks(tokenizer)], BATCH
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "steps": len(losses), "changed": changed(accelerator.unwrap_model(model), before)}


def changed(model, before) -> int:
    """Parameters that are not what they were."""
    return sum(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps(
            {
                f"{kind} {folder}": train(folder)
                for folder in sys.argv[1:]
                for kind, train in (("trainer", with_trainer), ("accelerate", with_accelerate))
            }
        )
    )
