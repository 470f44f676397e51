"""GPT-2: LayerNorm, learned positions, biases, weights as `[in, out]`."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import (
    NEUTRAL,
    PLAIN,
    Biases,
    Choice,
    Dropout,
    Fixed,
    Heads,
    MlpOfWidth,
    Only,
    Size,
    Tied,
    Value,
    positions_key,
)
from megatron_fp8.hf.tensor_names import TensorNames

_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys=(
        Size("n_layer", "num_layers"),
        Heads("n_embd", "n_head", groups="", head_dim=""),
        MlpOfWidth("n_inner", "n_embd"),
        positions_key("n_positions", 1024),
        # The name that its files have comes first.
        Choice("activation_function", "activation", {"gelu_new": "gelu", **PLAIN}, "gelu_new"),
        Fixed({"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}),
        Value("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Biases(True, True, True),
        Dropout(("resid_pdrop", "embd_pdrop"), 0.1),
        Value("attn_pdrop", "attention_dropout", 0.1),
        Value("initializer_range", "init_method_std", 0.02),
        Size("vocab_size", "vocab_size"),
        Tied(True),
        Only({"scale_attn_weights": True}, "attention is always scaled"),
        Only({"scale_attn_by_inverse_layer_idx": False}, "attention has the same scale in every layer"),
        Only(NEUTRAL),
    ),
    names=TensorNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h.{}",
        pre_attention_norm="ln_1",
        qkv=("attn.c_attn",),
        proj="attn.c_proj",
        pre_mlp_norm="ln_2",
        fc1=("mlp.c_fc",),
        fc2="mlp.c_proj",
        final_norm="transformer.ln_f",
        transposed=True,
    ),
    examples="GPT-2",
    # How attention is computed in FP16, the older name of n_positions, and a summary's head.
    harmless=frozenset({"reorder_and_upcast_attn", "n_ctx", *(f"summary_{name}" for name in _SUMMARY)}),
)
