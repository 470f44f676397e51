"""Ranges of numbers that a run's arithmetic allows, each with its reason, and kinds of paths that config keys name.

A schema bound that is one of these states its reason in `--help` and in the error for a value out of range.
Imports nothing of the project.
"""

from __future__ import annotations

import enum


class WholeLimit(int):
    """An integer bound; `why` completes "because ..."."""

    why: str

    def __new__(cls, value: int, why: str) -> WholeLimit:
        """The bound `value`."""
        limit = super().__new__(cls, value)
        limit.why = why
        return limit


class RealLimit(float):
    """A floating-point bound; `why` as in `WholeLimit`."""

    why: str

    def __new__(cls, value: float, why: str) -> RealLimit:
        """The bound `value`."""
        limit = super().__new__(cls, value)
        limit.why = why
        return limit


# Sizes of the model and of batches.
MAX_LAYERS = WholeLimit(2**12, "every process builds Python objects for its share of the layers")
MAX_FEATURES = WholeLimit(2**24, "norms divide by the number of features in FP32, which is exact only up to 2^24")
MAX_HEADS = WholeLimit(65_535, "attention kernels launch one block per head along a grid axis of at most 65,535 blocks")
MAX_POSITIONS = WholeLimit(2**24, "RoPE multiplies positions in FP32, which holds integers exactly only up to 2^24")
MAX_VOCABULARY = WholeLimit(2**30, "token ids are 32-bit integers, and padding enlarges the vocabulary further")
MAX_DIVISIBLE_BY = WholeLimit(2**20, "padding rows take memory and compute like any others")
MAX_SAMPLES_A_PASS = WholeLimit(2**20, "the tokens of a micro-batch are a GEMM dimension, a 32-bit integer")
MAX_SAMPLES_A_STEP = WholeLimit(2**20, "Python schedules the micro-batches of a step one by one")
MAX_SIZE = WholeLimit(2**31 - 1, "a GEMM dimension is a 32-bit integer")

# Lengths.
MAX_SEED = WholeLimit(2**32 - 1, "NumPy's generator, which shuffles the samples, takes a 32-bit seed")
MAX_STEPS = WholeLimit(2**31 - 1, "Adam's kernels count steps in 32 bits")
MAX_SAMPLES = WholeLimit(2**40, "the sample index is kept in memory, at least 8 bytes per sample")
MAX_TOKENS = WholeLimit(2**62, "tokens are counted in 64 bits")
MAX_EPOCHS = RealLimit(2.0**20, "documents are reshuffled every epoch, and the whole order is kept in memory")
MIN_MINUTES = RealLimit(1e-3, "PyTorch's process groups count time in milliseconds, and a message takes a few")
MAX_MINUTES = RealLimit(5_256_000.0, "this is ten years; 64-bit nanosecond clocks overflow in 292 years")

# Ranks and threads.
MAX_RANKS = WholeLimit(2**20, "every rank is a process that keeps a list of all the others")
MAX_THREADS = WholeLimit(1024, "every data-parallel rank starts this many threads")
MAX_HISTORY = WholeLimit(2**20, "every FP8 tensor keeps this many FP32 amaxes, and each step reads them all")
MAX_WINDOW = WholeLimit(2**20, "every step takes the median of all losses in the window")

# Real numbers, which the device holds in FP32.
FP32_SMALLEST_NORMAL = RealLimit(2.0**-126, "FP32 has no smaller normal number, and GPUs flush subnormals to 0")
FP32_ROOM = RealLimit(2.0**120, "it is converted to FP32 and multiplied further")
MAX_LEARNING_RATE = RealLimit(2.0**120, "learning rates are converted to FP32 and multiplied further")
MAX_EPSILON = RealLimit(1.0, "it only guards against division by 0; above 1 it would dominate the divisor")
MAX_WEIGHT_DECAY = RealLimit(1e6, "it is multiplied by the learning rate, and a product of 1 sets weights to 0")
MAX_DROPOUT = RealLimit(0.99, "kept values are scaled by 1 / (1 - p), which must stay within FP16 and BF16")
MAX_BETA = RealLimit(1 - 2.0**-23, "Adam divides by 1 - beta in FP32, which would round to 0")
MIN_STD = RealLimit(2.0**-40, "squares of weights are summed in FP32 and would underflow")
MAX_STD = RealLimit(2.0**10, "squares of weights are summed in FP32, and products of them go through FP16 and BF16")
MIN_ROTARY_BASE = RealLimit(1.0, "RoPE's wavelengths must not shrink from feature to feature")
MAX_ROTARY_BASE = RealLimit(2.0**100, "its powers and their inverses must fit in FP32")
MAX_THRESHOLD = RealLimit(1e9, "no loss is that far off; to disable the check, use its own switch")
MAX_ERROR = RealLimit(1e9, "no error is that large; to disable the check, use its own switch")
MAX_FACTOR = RealLimit(1e6, "no rank is that slow; null disables the check")


class Place(enum.Enum):
    """What a run does with the file or directory that a key names."""

    FILE = "the path of a file that can be read"
    FILE_OR_FOLDER = "the path of a file, or of a directory with it, that can be read"
    TOKEN_FILES = "prefixes of token files that can be read"
    CHECKPOINTS = "the path of a directory that can be read"
    RUNS = "the path of a directory of your own"
    CACHE = "the path of a directory that can be written to"
    IN_RUN = "the path of a directory that can be written to; null, or a relative one, for one inside the run directory"
