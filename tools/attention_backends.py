"""Which attention Transformer Engine would take on an H100 for each config, asked of it and of cuDNN without a GPU.

    python tools/attention_backends.py            the table, as docs/gpu.md has it
    python tools/attention_backends.py --write    put it there

TE's own selection (`get_attention_backend`) runs with compute capability 9.0 and the installed cuDNN's version; what it
asks its library is answered by that library (`tools/fused_attention.py`). Needs the packages of docker/gpu.lock.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config
from tools.fused_attention import Answers, missing

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- made by tools/attention_backends.py -->", "<!-- end of the table -->"
# Documents of a micro-batch, which are counted up to a power of two.
_MOST_DOCUMENTS = 1 << 12
Ask = Callable[[dict[str, float]], tuple[int, str]]


@dataclass(frozen=True)
class Attention:
    """One rank's attention: heads and groups are those of its share, `batch` of the micro-batch."""

    config: str
    heads: int
    groups: int
    head_dim: int
    seq_length: int
    batch: int
    dropout: float


def attentions() -> list[Attention]:
    """The attention of every config in configs/, by name."""
    return [_attention(path.stem, load_config(str(path), []).config) for path in sorted(CONFIGS.glob("*.yaml"))]


def _attention(name: str, config: Config) -> Attention:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    groups = model.num_query_groups or model.num_attention_heads
    dim = model.kv_channels or model.hidden_size // model.num_attention_heads
    heads, batch = model.num_attention_heads // tp, config.training.micro_batch_size
    return Attention(name, heads, groups // tp, dim, model.seq_length, batch, model.attention_dropout)


def chosen(one: Attention, ask: Ask, documents: int | None, deterministic: bool, dtype: str = "bfloat16") -> str:
    """`cuDNN` or `unfused`; `documents`: how many are kept apart in the micro-batch, None: samples are whole."""
    import torch
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    packed = documents is not None
    tokens = one.batch * one.seq_length if packed else 0
    # Without rotary positions query, key and value stay in the one tensor that their GEMM wrote.
    layouts = ["thd_thd_thd"] if packed else ["sbhd_sbhd_sbhd", *(["sbh3d"] if one.heads == one.groups else [])]
    found = set()
    for layout in layouts:
        asked = utils.AttentionParams(
            qkv_dtype=getattr(torch, dtype),
            qkv_layout=layout,
            batch_size=documents or one.batch,
            num_heads=one.heads,
            num_gqa_groups=one.groups,
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), one.seq_length),
            **dict.fromkeys(("num_tokens_q", "num_tokens_kv"), tokens),
            **dict.fromkeys(("head_dim_qk", "head_dim_v"), one.head_dim),
            attn_mask_type="padding_causal" if packed else "causal",
            core_attention_bias_requires_grad=False,
            attention_dropout=one.dropout,
            deterministic=deterministic,
            softmax_scale=one.head_dim**-0.5,
        )
        with _on_an_h100(utils, ask):
            flash, _, fused, _, unfused, _ = utils.get_attention_backend(asked)
        found.add("flash-attn" if flash else "cuDNN" if fused else "unfused" if unfused else "none")
    return " or ".join(sorted(found))


@contextmanager
def _on_an_h100(utils: Any, ask: Ask) -> Iterator[None]:
    def backend(params: Any) -> tuple[int, str]:
        values = {field.name: getattr(params, field.name) for field in fields(params)}
        asked = {name: value if isinstance(value, float) else int(value) for name, value in values.items()}
        number, reason = ask(asked)
        return utils.FusedAttnBackend(number) if number >= 0 else utils.FusedAttnBackend.No_Backend, reason

    from megatron_fp8.doctor.packages import installed

    version = tuple(map(int, (installed("nvidia-cudnn-cu13") or "").split(".")[:3]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    with (
        mock.patch.object(utils, "get_device_compute_capability", return_value=(9, 0)),
        mock.patch.object(utils, "get_cudnn_version", return_value=version),
        mock.patch.object(utils.tex, "get_fused_attn_backend", backend),
        mock.patch.dict(os.environ, clean, clear=True),
    ):
        yield


def packed(one: Attention, ask: Ask, deterministic: bool) -> str:
    """What documents kept apart are given, by how many a micro-batch has."""
    counts = [1 << power for power in range(_MOST_DOCUMENTS.bit_length())]
    choices = [chosen(one, ask, count, deterministic) for count in counts]
    if len(set(choices)) == 1:
        return choices[0]
    changes = next(place for place, choice in enumerate(choices) if choice != choices[0])
    most = counts[changes - 1]
    return f"{choices[0]} up to {most} document{'s' if most > 1 else ''}, then {choices[changes]}"


def rows(ask: Ask) -> list[list[str]]:
    """The table's cells, its head first."""
    head = ["config", "heads / groups x dim", "samples x tokens", "dropout", "as it is", "documents apart"]
    table = [[*head, "deterministic", "deterministic, documents apart", "FP32"]]
    for one in attentions():
        shape = [f"{one.heads} / {one.groups} x {one.head_dim}", f"{one.batch} x {one.seq_length}", f"{one.dropout:g}"]
        whole = [chosen(one, ask, None, deterministic) for deterministic in (False, True)]
        apart = [packed(one, ask, deterministic) for deterministic in (False, True)]
        single = chosen(one, ask, None, False, "float32")
        table.append([f"`{one.config}`", *shape, whole[0], apart[0], whole[1], apart[1], single])
    return table


def markdown(table: list[list[str]]) -> str:
    """The table as docs/gpu.md has it."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]]) + "\n"


def in_docs(page: str) -> str:
    """The table that a page has between its marks."""
    return page.partition(f"{BEGIN}\n")[2].partition(END)[0]


def main() -> int:
    """Print or write the table; exit code 2 where something is not installed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    settings = parser.parse_args()
    if (lacking := missing()) is not None:
        parser.error(f"{lacking} is missing: install docker/gpu.lock")
    from megatron_fp8 import cpu

    cpu.install()
    answers = Answers()
    table = markdown(rows(answers.ask))
    answers.close()
    if settings.write:
        page = PAGE.read_text(encoding="utf-8")
        before, begin, rest = page.partition(f"{BEGIN}\n")
        _, end, after = rest.partition(END)
        PAGE.write_text(f"{before}{begin}{table}{end}{after}", encoding="utf-8")
    else:
        print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
