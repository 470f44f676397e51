"""The families that are converted, by the `model_type` of their `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_fp8.hf.families.falcon import FALCON
from megatron_fp8.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from megatron_fp8.hf.families.glm import GLM, GLM4
from megatron_fp8.hf.families.gpt2 import GPT2
from megatron_fp8.hf.families.gpt_neox import GPT_NEOX
from megatron_fp8.hf.families.granite import GRANITE
from megatron_fp8.hf.families.llama import LLAMA
from megatron_fp8.hf.families.mistral import MISTRAL
from megatron_fp8.hf.families.nemotron import NEMOTRON
from megatron_fp8.hf.families.olmo import OLMO, OLMO2
from megatron_fp8.hf.families.phi import PHI, PHI3
from megatron_fp8.hf.families.qwen import QWEN2, QWEN3
from megatron_fp8.hf.families.smollm3 import SMOLLM3
from megatron_fp8.hf.families.starcoder2 import STARCODER2
from megatron_fp8.hf.family import Family

# In this order they are asked whether they can hold a model.
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GPT_NEOX, GRANITE, SMOLLM3, STARCODER2, PHI, PHI3, NEMOTRON),
        *(OLMO, OLMO2, GEMMA, GEMMA2, GEMMA3, FALCON, GLM, GLM4),
    )
}
