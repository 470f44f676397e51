"""Token files, a tokenizer and a config small enough that a run takes seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_fp8.prepare import quickstart
from megatron_fp8.prepare.quickstart import Document

VOCAB_SIZE = 300
TRAIN_ITERS = 6
SENTENCE = "the rank of this tensor is a scale that every step of training keeps in its history"
CONFIG = """\
run:
  name: tiny
model:
  num_layers: 2
  hidden_size: 64
  num_attention_heads: 4
  num_query_groups: 2
  ffn_hidden_size: 128
  seq_length: 32
precision:
  mode: {mode}
  fp8_amax_history_len: 4
parallel:
  tensor_model_parallel_size: {tp}
  sequence_parallel: {sequence_parallel}
training:
  micro_batch_size: 2
  global_batch_size: 4
  train_iters: {train_iters}
  eval_interval: 3
  eval_iters: 1
optimizer:
  lr: 1.0e-2
  lr_warmup_iters: 2
data:
  train_data_path: [{data}/train]
  valid_data_path: [{data}/valid]
  tokenizer_model: {data}/tokenizer.json
logging:
  log_interval: 1
"""


@dataclass(frozen=True)
class Tiny:
    """A directory with the token files, and configs that use them."""

    data: Path

    def write_config(self, directory: Path, tp: int = 1, mode: str = "fp8") -> Path:
        """A config in `directory`; FP8 with `tp` ranks and sequence parallelism, unless asked for otherwise."""
        path = directory / "tiny.yaml"
        text = CONFIG.format(
            data=self.data, tp=tp, mode=mode, sequence_parallel=str(tp > 1).lower(), train_iters=TRAIN_ITERS
        )
        path.write_text(text, encoding="utf-8")
        return path


def documents() -> list[Document]:
    """Sentences of a few words: enough to learn something in a few steps."""
    words = SENTENCE.split()
    generator = random.Random(0)
    return [Document(f"document{number}", " ".join(generator.choices(words, k=120)) + "\n") for number in range(60)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Files as `tools/prepare_quickstart.py` makes them, of another text."""
    directory = tmp_path_factory.mktemp("tiny") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "read_corpus", documents)
        quickstart.prepare(directory, VOCAB_SIZE, lambda *step: None)
    return Tiny(directory)
