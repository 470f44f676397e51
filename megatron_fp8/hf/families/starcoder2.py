"""StarCoder 2: LayerNorm, biases, an MLP without a gate."""

from __future__ import annotations

from megatron_fp8.hf.family import Family
from megatron_fp8.hf.keys import PLAIN, Biases, Choice, Dropout, Fixed, Heads, Value, common_keys, mlp_key
from megatron_fp8.hf.layer_keys import WindowOfAll
from megatron_fp8.hf.rope_keys import Rope
from megatron_fp8.hf.tensor_names import TensorNames

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    keys=(
        *common_keys(4096, Heads(default_groups=2), tied=True, std=0.018042),
        mlp_key(),
        Choice("hidden_act", "activation", PLAIN, "gelu_pytorch_tanh"),
        Fixed({"normalization": "LayerNorm"}),
        Value("norm_epsilon", "norm_epsilon", 1e-5),
        Biases("use_bias", "use_bias", "use_bias", {"use_bias": True}),
        Dropout(("residual_dropout", "embedding_dropout")),
        WindowOfAll(),
        Rope(),
    ),
    names=TensorNames(fc1=("mlp.c_fc",), fc2="mlp.c_proj"),
    examples="StarCoder 2",
)
