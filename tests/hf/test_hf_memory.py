"""Converting needs memory for a few tensors, whatever the model's size: done under a limit that the system enforces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.families import FAMILIES
from megatron_fp8.hf.folder import write_shards

VOCAB_SIZE, NUM_LAYERS = 2048, 24
MODEL = ModelConfig(
    num_layers=NUM_LAYERS,
    hidden_size=768,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=2304,
    seq_length=64,
)
LAYER_BYTES = 4 * 768 * (768 + 2 * 384 + 768 + 3 * 2304)
# Stacks of threads (8 MB each: the progress display, sums of files) and what malloc keeps for them count too.
LIMIT_BYTES = 6 * LAYER_BYTES
# All that is needed is imported before the limit is set; what libraries allocate for themselves is not counted.
PROGRAM = """
import resource, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint, safetensors.torch
import megatron_fp8.checkpoint.tensor_files
from megatron_fp8.commands.convert import main
torch.set_num_threads(1)
limit_bytes = int(sys.argv[1])
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + limit_bytes, used + limit_bytes))
try:
    torch.ones(limit_bytes // 2)
except RuntimeError:
    sys.exit(main(sys.argv[2:]))
sys.exit("there is no limit")
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
def test_a_model_many_times_the_limit_is_converted_both_ways(tmp_path) -> None:
    groups = list(FAMILIES["llama"].tensor_groups(MODEL, VOCAB_SIZE))
    shapes = {name: shape for group in groups for name, shape in group.their_shapes.items()}
    values = ((name, torch.randn(shape)) for name, shape in shapes.items())
    (tmp_path / "model").mkdir()
    # Small files: the limit counts mappings of them too.
    num_bytes = write_shards(tmp_path / "model", shapes, torch.float32, 4_000_000, values)
    assert num_bytes > 4 * LIMIT_BYTES
    (tmp_path / "model" / "config.json").write_text(json.dumps(FAMILIES["llama"].config_json(MODEL, VOCAB_SIZE)))
    _convert("import", tmp_path / "model", tmp_path / "in", "--no-tokenizer")
    _convert("export", tmp_path / "in", tmp_path / "out", "--no-tokenizer", "--max-shard-size", "1GB")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > num_bytes


def _convert(*arguments: object) -> None:
    command = [sys.executable, "-c", PROGRAM, str(LIMIT_BYTES), *map(str, arguments)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
