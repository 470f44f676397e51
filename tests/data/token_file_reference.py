"""An independent reader of token files: struct and numpy, following the published layout of the format."""

import struct
from pathlib import Path

import numpy as np


def decode_token_file(prefix: str | Path) -> list[list[int]]:
    """The documents of a token file."""
    content = Path(f"{prefix}.idx").read_bytes()
    assert content[:9] == b"MMIDIDX\x00\x00"
    version, code, num_sequences, num_marks = struct.unpack_from("<QBQQ", content, 9)
    assert version == 1
    assert num_marks == num_sequences + 1
    dtype = {4: "<i4", 8: "<u2"}[code]
    lengths = struct.unpack_from(f"<{num_sequences}i", content, 34)
    offsets = struct.unpack_from(f"<{num_sequences}q", content, 34 + 4 * num_sequences)
    tokens = Path(f"{prefix}.bin").read_bytes()
    size = np.dtype(dtype).itemsize
    return [
        np.frombuffer(tokens[start : start + length * size], dtype=dtype).tolist()
        for start, length in zip(offsets, lengths, strict=True)
    ]
