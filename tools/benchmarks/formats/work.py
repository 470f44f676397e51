"""Owns what goes into one run and what comes out of it, as plain data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LINEARS = ("qkv", "proj", "fc1", "fc2")
KINDS = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class RunTask:
    """One mode at one seed. `overrides`: everything that changes the config file, mode and seed among them.

    `samples`: file of the seed's samples (`compare/samples.py`).
    """

    mode: str
    seed: int
    config: Path
    overrides: tuple[str, ...]
    samples: Path
    num_threads: int


@dataclass(frozen=True)
class OperandNoise:
    """What quantization did to one GEMM operand in the last step.

    `sqnr_db`: signal to quantization noise in dB, 20 log10(||x|| / ||x - q(x)||), of the tensor as its first GEMM
    reads it (input and weight: forward; output gradient: input gradient). `clipped`: share of elements beyond the
    format's largest number; `flushed`: share of the non-zero elements that became 0.
    """

    sqnr_db: float
    clipped: float
    flushed: float


@dataclass(frozen=True)
class RunResult:
    """What one run did.

    `losses`: nats per token before each step. `skipped`: numbers of steps, from 0, that changed no weights (overflow
    under FP16's loss scale). `operands`: by layer, linear layer and kind, as in `layers.0/fc1/input`; empty where
    nothing was quantized.
    """

    mode: str
    seed: int
    losses: list[float]
    skipped: list[int]
    operands: Mapping[str, OperandNoise]
    num_parameters: int
    seconds: float
