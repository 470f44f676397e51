"""Which attention Transformer Engine would take on an H100 for each form of a model's attention, without a GPU.

    python tools/attention_forms.py            the table, as docs/gpu.md has it
    python tools/attention_forms.py --write    put it there

Asks as `attention_backends` does, and needs what that needs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import attention_backends
from attention_backends import PAGE, Ask, Attention, chosen

BEGIN, END = "<!-- made by tools/attention_forms.py -->", "<!-- end of the table of forms -->"
# Eight documents in two samples of 2048 tokens: determinism alone leaves them fused.
COMMON = Attention("", heads=16, groups=8, head_dim=128, seq_length=2048, batch=2, dropout=0.0)
DOCUMENTS = 8
WINDOW = {"window_size": (1023, 0)}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": WINDOW,
    "window, dropout": {**WINDOW, "attention_dropout": 0.1},
    "soft cap": {"softcap": 50.0},
    "soft cap, window": {"softcap": 50.0, **WINDOW},
    "sinks, learnable": {"softmax_type": "learnable"},
    "sinks, learnable, window": {"softmax_type": "learnable", **WINDOW},
    "sinks, learnable, dropout": {"softmax_type": "learnable", "attention_dropout": 0.1},
    "sinks, off-by-one": {"softmax_type": "off-by-one"},
    "another `softmax_scale`": {"softmax_scale": 0.0625},
    "head dimension 256": {"head_dim": 256},
    "head dimension 256, window": {"head_dim": 256, **WINDOW},
    "head dimension 256, sinks": {"head_dim": 256, "softmax_type": "learnable"},
    "head dimension 264": {"head_dim": 264},
    "head dimension 100": {"head_dim": 100},
}


def in_generation(one: Attention, ask: Ask, queries: int, **form: Any) -> str:
    """With a key/value cache of `seq_length` tokens, as `tools/generate.py` has it."""
    import torch
    from transformer_engine.pytorch.attention import InferenceParams

    form.pop("attention_dropout", None)
    cache = InferenceParams(one.batch, one.seq_length, one.groups, one.head_dim, torch.bfloat16, qkv_format="sbhd")
    return chosen(
        one,
        ask,
        None,
        False,
        layouts=("sbhd_bshd_bshd",),
        attn_mask_type="padding_causal_bottom_right",
        bottom_right_diagonal=True,
        max_seqlen_q=queries,
        is_training=False,
        inference_params=cache,
        **form,
    )


def rows(ask: Ask) -> list[list[str]]:
    """The table's cells, its head first."""
    head = ["form", "as it is", "documents apart", "deterministic", "deterministic, documents apart"]
    table = [[*head, "generation, prompt", "generation, a token"]]
    for name, form in FORMS.items():
        fields = {key: value for key, value in form.items() if key != "head_dim"}
        one = replace(COMMON, head_dim=form.get("head_dim", COMMON.head_dim))
        training = [
            chosen(one, ask, documents, deterministic, **fields)
            for deterministic in (False, True)
            for documents in (None, DOCUMENTS)
        ]
        table.append([name, *training, *(in_generation(one, ask, queries, **fields) for queries in (16, 1))])
    return table


def in_docs() -> str:
    """The table that docs/gpu.md has."""
    return PAGE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")[2].partition(END)[0]


def main() -> int:
    """Print or write the table; exit code 2 where something is not installed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    settings = parser.parse_args()
    if (lacking := attention_backends.missing()) is not None:
        parser.error(f"{lacking} is missing: install locks/gpu.lock")
    from megatron_fp8 import cpu

    cpu.install()
    answers = attention_backends.Answers()
    table = attention_backends.markdown(rows(answers.ask))
    answers.close()
    if settings.write:
        PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(in_docs(), table), encoding="utf-8")
    else:
        print(table, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
