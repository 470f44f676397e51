"""Owns the largest and smallest numbers that a run's arithmetic allows, each with its reason.

A bound of the schema that is one of these says why it is where it is: in `--help`, and to whoever went beyond it.
Imports nothing of the project.
"""

from __future__ import annotations


class WholeLimit(int):
    """A whole number that is a bound; `why` completes "because ..."."""

    why: str

    def __new__(cls, value: int, why: str) -> WholeLimit:
        """The bound `value`."""
        limit = super().__new__(cls, value)
        limit.why = why
        return limit


class RealLimit(float):
    """The same as a floating-point number."""

    why: str

    def __new__(cls, value: float, why: str) -> RealLimit:
        """The bound `value`."""
        limit = super().__new__(cls, value)
        limit.why = why
        return limit


# Sizes of the model and of batches.
MOST_LAYERS = WholeLimit(2**12, "every process builds Python objects for its share of the layers")
MOST_FEATURES = WholeLimit(2**24, "norms divide by the number of features in FP32, exact up to there")
MOST_HEADS = WholeLimit(
    65_535, "attention kernels launch a block for each head, along an axis of the grid that has no more"
)
MOST_POSITIONS = WholeLimit(2**24, "positions are multiplied in FP32 for RoPE, which counts exactly up to there")
MOST_VOCABULARY = WholeLimit(2**30, "token ids are 32-bit integers, and the vocabulary is padded beyond its size")
MOST_DIVISIBLE_BY = WholeLimit(2**20, "padding rows are real memory and real work")
MOST_SAMPLES_A_PASS = WholeLimit(2**20, "its tokens are a dimension of GEMMs, which is a 32-bit integer")
MOST_SAMPLES_A_STEP = WholeLimit(2**20, "the micro-batches of a step are scheduled one by one in Python")
MOST_SIZE = WholeLimit(2**31 - 1, "a dimension of a GEMM is a 32-bit integer")

# Lengths.
MOST_SEED = WholeLimit(2**32 - 1, "NumPy's generator, which shuffles samples, takes 32 bits")
MOST_STEPS = WholeLimit(2**31 - 1, "Adam's kernels count steps in 32 bits")
MOST_SAMPLES = WholeLimit(2**40, "the order of samples is an index in memory, eight bytes and more for each")
MOST_TOKENS = WholeLimit(2**62, "tokens are counted in 64 bits")
MOST_EPOCHS = RealLimit(2.0**20, "documents are shuffled anew for each epoch, and the order is kept in memory")
SHORTEST_MINUTES = RealLimit(1e-3, "PyTorch's process groups count whole milliseconds, and a message takes some")
MOST_MINUTES = RealLimit(5_256_000.0, "ten years; clocks count nanoseconds in 64 bits, and overflow in 292 years")

# Ranks and threads.
MOST_RANKS = WholeLimit(2**20, "a process is started for every rank, and each one knows all the others")
MOST_THREADS = WholeLimit(1024, "each is a thread of every data-parallel rank")
MOST_HISTORY = WholeLimit(2**20, "every FP8 tensor keeps that many FP32 numbers, and each step reads them all")
MOST_WINDOW = WholeLimit(2**20, "the median of all its losses is taken at every step")

# Real numbers, which become FP32 on the device.
FP32_SMALLEST_NORMAL = RealLimit(2.0**-126, "FP32 has no smaller normal number, and GPUs take one for 0")
FP32_ROOM = RealLimit(2.0**120, "it becomes an FP32 number, which is multiplied further")
MOST_LEARNING_RATE = RealLimit(2.0**120, "learning rates become FP32 numbers, which are multiplied further")
MOST_EPSILON = RealLimit(1.0, "it is to keep from dividing by 0, and above 1 it would be most of what is divided by")
MOST_WEIGHT_DECAY = RealLimit(1e6, "it is multiplied with the learning rate, and at a product of 1 weights become 0")
MOST_DROPOUT = RealLimit(0.99, "what is kept is divided by what is left of 1, and FP16 and BF16 have to hold it")
MOST_BETA = RealLimit(1 - 2.0**-23, "1 minus it is an FP32 number that is divided by, and would be 0")
SMALLEST_STD = RealLimit(2.0**-40, "squares of weights are summed in FP32, and vanish")
MOST_STD = RealLimit(2.0**10, "squares of weights are summed in FP32, and products of them in FP16 and BF16")
SMALLEST_ROTARY_BASE = RealLimit(1.0, "RoPE's wavelengths grow from feature to feature")
MOST_ROTARY_BASE = RealLimit(2.0**100, "its powers and their inverses are FP32 numbers")
MOST_THRESHOLD = RealLimit(1e9, "no loss is so far from the others; use the switch of the check to do without it")
MOST_ERROR = RealLimit(1e9, "no error is so large; use the switch of the check to do without it")
MOST_FACTOR = RealLimit(1e6, "no rank is so slow; null does without the check")
