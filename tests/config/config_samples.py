"""A small valid config, and ways to load variations of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_fp8.config.load import LoadedConfig, load_config

SMALL = """\
run:
  name: small
model:
  num_layers: 4
  hidden_size: 128
  num_attention_heads: 8
  num_query_groups: 4
  ffn_hidden_size: 256
  seq_length: 64
training:
  micro_batch_size: 2
  global_batch_size: 16
  train_iters: 100
optimizer:
  lr: 1e-3
data:
  train_data_path: [data/train]
  valid_data_path: [data/valid]
  tokenizer_model: data/tokenizer.json
"""
VOCAB_SIZE = 1000


def write(directory: Path, text: str = SMALL, name: str = "config.yaml") -> Path:
    """The path of a file with `text`."""
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def load_small(directory: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The small config with `overrides`."""
    return load_config(write(directory), overrides)
