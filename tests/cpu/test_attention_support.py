"""Which attention is fused is cuDNN's answer: cases that its library gave, and where it is installed, the library."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.attention.dot_product_attention import utils  # noqa: E402
from transformer_engine.pytorch.constants import TE_DType  # noqa: E402

from tools import attention_backends  # noqa: E402

NO_BACKEND = int(tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend)
SOFTMAX = tex.NVTE_Softmax_Type
VANILLA, OFF_BY_ONE, LEARNABLE = SOFTMAX(0), SOFTMAX(1), SOFTMAX(2)


def params(
    layout: str = "SBHD_SBHD_SBHD",
    mask: str = "CAUSAL",
    sizes: tuple[int, int] = (64, 64),
    lengths: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Any:
    """TE's description of an attention as its selection makes it."""
    out = getattr(tex.NVTE_QKV_Format, "NVTE_" + {"S": "SBHD", "B": "BSHD", "T": "THD"}[layout[0]])
    packed, batch = layout.startswith("T"), more.setdefault("batch_size", 2)
    values = {
        "is_training": True,
        "attn_mask_type": getattr(tex.NVTE_Mask_Type, f"NVTE_{mask}_MASK"),
        "bias_type": tex.NVTE_Bias_Type.NVTE_NO_BIAS,
        "window_size_left": -1,
        "window_size_right": 0 if "CAUSAL" in mask else -1,
        "bottom_right_diagonal": "BOTTOM" in mask,
        "softmax_type": VANILLA,
        "attn_scale": 0.1,
        **dict.fromkeys(("qkv_dtype", "o_dtype", "do_dtype", "dqkv_dtype"), TE_DType[dtype]),
        **dict.fromkeys(("qkv_layout", "dqkv_layout"), getattr(tex.NVTE_QKV_Layout, f"NVTE_{layout}")),
        **dict.fromkeys(("o_format", "do_format"), out),
        "num_attn_heads": 8,
        "num_gqa_groups": 8,
        "head_dim_qk": sizes[0],
        "head_dim_v": sizes[1],
        "max_seqlen_q": lengths[0],
        "max_seqlen_kv": lengths[1],
        "num_tokens_q": batch * lengths[0] if packed else 0,
        "num_tokens_kv": batch * lengths[1] if layout.endswith(("THD", "T3HD")) else 0,
    }
    return utils.FusedAttentionParams(**{**values, **more})


CACHED = {"layout": "SBHD_BSHD_BSHD", "mask": "PADDING_CAUSAL_BOTTOM_RIGHT", "is_training": False}
PACKED = {"layout": "THD_THD_THD", "mask": "PADDING_CAUSAL"}
TAKEN: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16, "sizes": (256, 256)},
    {"sizes": (192, 128)},
    {"sizes": (256, 192)},
    {"sizes": (264, 264), "is_training": False},
    {"window_size_left": 15},
    {"window_size_left": 15, "dropout": 0.1},
    {"softmax_type": LEARNABLE},
    {"softmax_type": OFF_BY_ONE, "window_size_left": 15, "dropout": 0.1, "sizes": (256, 256)},
    {**PACKED, "window_size_left": 15},
    {**PACKED, "softmax_type": LEARNABLE, "is_training": False},
    {**PACKED, "lengths": (1, 1)},
    {**CACHED, "lengths": (1, 256), "window_size_left": 31, "sizes": (256, 256)},
    {**CACHED, "lengths": (16, 256), "softmax_type": LEARNABLE},
    {**CACHED, "layout": "THD_BSHD_BSHD", "lengths": (1, 256), "softmax_type": LEARNABLE},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float32}, "qkv dtype torch.float32"),
    ({"sizes": (60, 60)}, "heads of 60 and 60"),
    ({"sizes": (264, 264)}, "heads of 264 and 264"),
    ({**PACKED, "softmax_type": LEARNABLE}, "a sink in packed sequences"),
    ({**PACKED, "softmax_type": OFF_BY_ONE}, "a sink in packed sequences"),
    ({**CACHED, "lengths": (1, 256), "softmax_type": LEARNABLE}, "one query"),
    ({"lengths": (1, 1)}, "s_q = s_kv = 1"),
    ({"mask": "CAUSAL_BOTTOM_RIGHT", "dropout": 0.1}, "bottom right"),
    ({"return_max_logit": True}, "return_max_logit"),
]


@pytest.mark.parametrize("asked", TAKEN, ids=str)
def test_cudnn_takes(asked: dict[str, Any]) -> None:
    backend, reason = tex.get_fused_attn_backend(params(**asked))
    assert (backend, reason) == (tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "")


@pytest.mark.parametrize(("asked", "named"), REFUSED, ids=str)
def test_cudnn_refuses(asked: dict[str, Any], named: str) -> None:
    backend, reason = tex.get_fused_attn_backend(params(**asked))
    assert backend == NO_BACKEND
    assert named in reason


def test_newer_gpus_train_fewer_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    answers = {sizes: tex.get_fused_attn_backend(params(sizes=sizes))[0] for sizes in ((256, 256), (192, 128))}
    assert {sizes: int(backend) != NO_BACKEND for sizes, backend in answers.items()} == {
        (256, 256): False,
        (192, 128): True,
    }


def drawn(draw: random.Random) -> Any:
    """A description such as a model of this program, or generation with it, may give."""
    layouts = ["SBHD_SBHD_SBHD", "SBH3D", "BSHD_BSHD_BSHD", "THD_THD_THD", "T3HD", "SBHD_BSHD_BSHD", "THD_BSHD_BSHD"]
    layout = draw.choice(layouts)
    is_cached, is_one = layout.endswith("_BSHD_BSHD") and layout[0] != "B", "3" in layout
    padded = layout.startswith("T") or is_cached or draw.random() < 0.3
    mask = draw.choice(["CAUSAL", "CAUSAL_BOTTOM_RIGHT", "" if padded else "NO"])
    mask = f"PADDING_{mask}".removesuffix("_") if padded else mask
    keys = draw.choice([1, 2, 7, 64, 100, 512, 2048])
    queries = min(keys, draw.choice([1, 1, 5, keys])) if is_cached else keys
    size = draw.choice([8, 60, 64, 72, 100, 128, 136, 192, 256, 264])
    heads, groups = draw.choice([(8, 8), (8, 2), (4, 1), (6, 3)])
    training = not is_cached and draw.random() < 0.7
    return params(
        layout,
        mask,
        (size, size if is_one else draw.choice([size, size, 64, 128, 192, 256])),
        (queries, keys),
        draw.choice([torch.bfloat16, torch.float16]),
        is_training=training,
        deterministic=draw.random() < 0.3,
        window_size_left=draw.choice([-1, -1, 0, 3, 63]),
        softmax_type=draw.choice([VANILLA, VANILLA, OFF_BY_ONE, LEARNABLE]),
        dropout=draw.choice([0.0, 0.0, 0.1]) if training else 0.0,
        batch_size=draw.choice([1, 2, 4]),
        num_attn_heads=heads,
        num_gqa_groups=heads if is_one else groups,
    )


@pytest.mark.skipif(
    attention_backends.missing() is not None, reason="the GPU image's packages are not installed (locks/gpu.lock)"
)
def test_the_library_gives_the_same_answers() -> None:
    draw, answers = random.Random(0), attention_backends.Answers()
    counts = {True: 0, False: 0}
    try:
        for _ in range(500):
            asked = drawn(draw)
            values = {field.name: getattr(asked, field.name) for field in fields(asked)}
            numbers = {name: value if isinstance(value, float) else int(value) for name, value in values.items()}
            number, reason = answers.ask(numbers)
            is_taken = number >= 0
            backend, mine = tex.get_fused_attn_backend(asked)
            assert (int(backend) != NO_BACKEND) is is_taken, f"{values}: cuDNN says {reason!r}, here {mine!r}"
            counts[is_taken] += 1
    finally:
        answers.close()
    assert min(counts.values()) > 100
