"""The key/value cache: attention with it, token by token, is attention over everything at once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.attention import InferenceParams, RotaryPositionEmbedding  # noqa: E402

HEADS, GROUPS, SIZE = 4, 2, 16
HIDDEN, LONGEST, LAYERS = HEADS * SIZE, 16, 2
# A sequence's number -> its tokens in each pass; the second one ends early, another comes then.
PASSES = [{0: 5, 1: 2, 2: 3}, {0: 1, 1: 1, 2: 1}, {0: 1, 2: 1, 3: 4}, {2: 1, 3: 1}, {2: 1, 3: 1}]


# Forms of attention, with windows and caps so small that they matter.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (3, 0)},
    "sinks": {"softmax_type": "learnable"},
    "sinks in a window": {"softmax_type": "learnable", "window_size": (3, 0)},
    "off by one": {"softmax_type": "off-by-one"},
    "cap": {"softcap": 0.02},
    "cap in a window": {"softcap": 0.02, "window_size": (3, 0)},
    "norms of heads": {"qk_norm_type": "RMSNorm"},
}


def layers(dtype: torch.dtype, qkv_format: str, form: dict[str, Any]) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    made = torch.nn.ModuleList(
        te.TransformerLayer(
            HIDDEN,
            2 * HIDDEN,
            HEADS,
            num_gqa_groups=GROUPS,
            layer_number=number + 1,
            self_attn_mask_type="causal",
            attn_input_format=qkv_format,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            device="cuda",
            **form,
        )
        for number in range(LAYERS)
    ).eval()
    if form.get("softmax_type") == "learnable":
        for layer in made:
            torch.nn.init.uniform_(layer.self_attention.core_attention.softmax_offset, 0.0, 2.0)
    return made


@torch.no_grad()
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("paged", [False, True], ids=["one page", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_cached_pass_is_the_end_of_a_whole_one(form: str, qkv_format: str, paged: bool, dtype: torch.dtype) -> None:
    model, batch_axis = layers(dtype, qkv_format, FORMS[form]), qkv_format.index("b")
    rope = RotaryPositionEmbedding(SIZE)(LONGEST)
    inputs = torch.randn(4, LONGEST, HIDDEN, generator=torch.Generator("cuda").manual_seed(1)).to(dtype)
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 3 * LONGEST // 4} if paged else {}
    cache = InferenceParams(3, LONGEST, GROUPS, SIZE, dtype, qkv_format=qkv_format, **pages)
    lengths = dict.fromkeys(range(4), 0)
    seen: dict[int, list[torch.Tensor]] = {number: [] for number in range(4)}
    for step in PASSES:
        cache.pre_step(OrderedDict(step))
        hidden = torch.zeros(len(step), max(step.values()), HIDDEN, dtype=dtype)
        for row, (number, new) in zip(hidden, step.items(), strict=True):
            row[:new] = inputs[number, lengths[number] : lengths[number] + new]
        hidden = hidden if batch_axis == 0 else hidden.transpose(0, 1).contiguous()
        for layer in model:
            hidden = layer(hidden, self_attn_mask_type="padding_causal", rotary_pos_emb=rope, inference_params=cache)
        for index, (number, new) in enumerate(step.items()):
            seen[number].append(hidden.select(batch_axis, index)[:new])
            lengths[number] += new
    for number, parts in seen.items():
        whole = inputs[number, : lengths[number]].unsqueeze(batch_axis)
        for layer in layers(dtype, qkv_format, FORMS[form]):
            whole = layer(whole, rotary_pos_emb=rope)
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(torch.cat(parts), whole.squeeze(batch_axis), atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_each_form_gives_other_numbers() -> None:
    inputs = torch.randn(LONGEST, 1, HIDDEN, generator=torch.Generator("cuda").manual_seed(1))
    outs = [layers(torch.float32, "sbhd", form)[0](inputs) for form in FORMS.values()]
    for index, out in enumerate(outs):
        assert all((out - other).abs().max() > 1e-4 for other in outs[:index])


def test_new_tokens_of_packed_sequences_are_put_behind_the_old_ones() -> None:
    new = torch.arange(1.0, 6.0).view(5, 1, 1)
    cache = torch.zeros(2, 4, 1, 1)
    table = torch.tensor([1, 0], dtype=torch.int32)
    new_lens, lens = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    thd = tex.NVTE_QKV_Format.NVTE_THD
    tex.copy_to_kv_cache(new, new, cache, cache.clone(), table, new_lens, lens, thd, 2, 3, 4, 1, False)
    assert cache.flatten(1).tolist() == [[0, 0, 4, 5], [1, 2, 3, 0]]


def test_sequences_move_up_into_the_places_of_those_that_ended() -> None:
    cache = torch.arange(1.0, 10.0).view(3, 3, 1, 1)
    new = torch.tensor([-1.0, -2.0]).view(1, 2, 1, 1)
    table = torch.tensor([0, 2, 1], dtype=torch.int32)
    new_lens, lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    sbhd = tex.NVTE_QKV_Format.NVTE_SBHD
    tex.copy_to_kv_cache(new, new, cache, cache.clone(), table, new_lens, lens, sbhd, 2, 1, 3, 1, True)
    assert cache.flatten(1).tolist() == [[1, -1, 3], [7, 8, -2], [7, 8, 9]]
