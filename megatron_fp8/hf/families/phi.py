"""Phi 1, 1.5 and 2, with attention and MLP in parallel behind one norm; Phi 3, 3.5 and 4, with fused weights."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import (
    GATED,
    PLAIN,
    Biases,
    Choice,
    Dropout,
    Fixed,
    Heads,
    Only,
    QkNorm,
    Value,
    common_keys,
    mlp_key,
)
from megatron_fp8.hf.layer_keys import WindowOfAll
from megatron_fp8.hf.rope_keys import Rope
from megatron_fp8.hf.tensor_names import TensorNames

PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    keys=(
        *common_keys(2048, Heads(head_dim="")),
        mlp_key(),
        Choice("hidden_act", "activation", PLAIN, "gelu_new"),
        Fixed({"normalization": "LayerNorm", "parallel_attention_mlp": "shared_norm", "add_output_bias": True}),
        Value("layer_norm_eps", "norm_epsilon", 1e-5),
        Biases(True, True, True),
        Dropout(("resid_pdrop", "embd_pdrop")),
        QkNorm("qk_layernorm"),
        Rope(share=0.5, partial=True),
    ),
    names=TensorNames(
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        proj="self_attn.dense",
        fc1=("mlp.fc1",),
        fc2="mlp.fc2",
        final_norm="model.final_layernorm",
    ),
    examples="Phi 1, 1.5, 2",
)
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys=(
        *common_keys(4096, Heads(head_dim="")),
        mlp_key(),
        Choice("hidden_act", "activation", GATED, "silu"),
        Value("rms_norm_eps", "norm_epsilon", 1e-5),
        Biases(False, False, False),
        Dropout(("resid_pdrop", "embd_pdrop")),
        # The first files have it, and the class ignores it.
        Only({"attention_bias": False}),
        WindowOfAll(),
        Rope(partial=True, outer_original=True),
    ),
    names=TensorNames(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",)),
    examples="Phi 3, 3.5, 4, 4-mini",
)
