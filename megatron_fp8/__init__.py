"""Megatron-style distributed GPT pretraining with FP8, on CPUs and on GPU clusters alike."""

__version__ = "0.1.0"
