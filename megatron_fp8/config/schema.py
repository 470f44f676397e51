"""The config's sections and fields: names, units, ranges, defaults. Key names are Megatron's.

What must hold between fields is in `config/check.py`, where values come from in `config/load.py`, sizes that
follow from them in `config/layout.py`. Imports no torch.
"""

from typing import Annotated, Literal

from pydantic import Field

from megatron_fp8.config.limits import (
    FP32_ROOM,
    FP32_SMALLEST_NORMAL,
    MAX_BETA,
    MAX_EPOCHS,
    MAX_EPSILON,
    MAX_LAYERS,
    MAX_LEARNING_RATE,
    MAX_MINUTES,
    MAX_RANKS,
    MAX_SAMPLES,
    MAX_SAMPLES_A_PASS,
    MAX_SAMPLES_A_STEP,
    MAX_SEED,
    MAX_STEPS,
    MAX_THREADS,
    MAX_WEIGHT_DECAY,
    MIN_MINUTES,
    Place,
)
from megatron_fp8.config.schema_model import ModelConfig, PrecisionConfig
from megatron_fp8.config.schema_run import CheckpointConfig, FaultsConfig, LoggingConfig, ProfileConfig, Section

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "FaultsConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "RunConfig",
    "TrainingConfig",
]


class RunConfig(Section):
    """Where the run lives."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,239}$")
    """Name of the run and of its directory; at most 240 characters, so that NAME-2, NAME-3, ... fit in 255."""
    root: Annotated[str, Place.RUNS] = "runs"
    """Parent of the run directories, relative to the working directory."""
    new_name_if_exists: bool = False
    """If the run directory exists, use NAME-2, NAME-3, ... instead of refusing to start."""


class ParallelConfig(Section):
    """How ranks share the work; the data-parallel size follows from the world size."""

    tensor_model_parallel_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Pipeline stages that the layers are split into."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2, le=MAX_LAYERS)
    """Model chunks per stage (interleaved schedule); null: one."""
    context_parallel_size: Literal[1] = 1
    """Ranks that share each sequence; only 1 is supported so far."""
    sequence_parallel: bool = False
    """Shard norms and dropout along the sequence over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Shard master weights and optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the all-gather of updated parameters with the forward pass (requires use_distributed_optimizer)."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Collective library; auto: NCCL on GPUs, gloo elsewhere."""
    distributed_timeout_minutes: float = Field(default=10.0, ge=MIN_MINUTES, le=MAX_MINUTES)
    """Minutes after which a collective times out."""
    environment: list[str] = Field(default_factory=list)
    """CUDA, NCCL, torch and Transformer Engine variables, as NAME=value, that every rank sets when it starts; the job's
    own environment takes precedence."""


class TrainingConfig(Section):
    """Batches, length, evaluation."""

    micro_batch_size: int = Field(ge=1, le=MAX_SAMPLES_A_PASS)
    """Samples per rank in one forward/backward pass."""
    global_batch_size: int = Field(ge=1, le=MAX_SAMPLES_A_STEP)
    """Samples per optimizer step over all ranks."""
    train_iters: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Optimizer steps of the whole run; 0: derived from train_samples or train_epochs."""
    train_samples: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Length of the run in samples, divisible by global_batch_size; an alternative to train_iters."""
    train_epochs: float | None = Field(default=None, gt=0, le=MAX_EPOCHS)
    """Length of the run in epochs, rounded down to whole steps; an alternative to train_iters."""
    eval_interval: int = Field(default=1000, ge=0, le=MAX_STEPS)
    """Steps between evaluations; 0: only at the start and the end."""
    eval_iters: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Global batches per evaluation, always the same ones; 0: no evaluation."""
    multiple_validation_sets: bool = False
    """Evaluate each file of data.valid_data_path separately, on eval_iters global batches, as its own series."""
    full_validation: bool = False
    """Evaluate on every token of the validation files once, instead of on eval_iters global batches."""
    seed: int = Field(default=1234, ge=0, le=MAX_SEED)
    """Seed of weights, sample order and dropout."""
    deterministic_mode: bool = False
    """Use algorithms that give the same bits in every run of the same layout on GPUs; slower."""


class OptimizerConfig(Section):
    """AdamW with FP32 master weights and moments, and its schedule."""

    lr: float = Field(ge=FP32_SMALLEST_NORMAL, le=MAX_LEARNING_RATE)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0, le=MAX_LEARNING_RATE)
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["cosine", "linear", "constant", "WSD"] = "cosine"
    """Shape of the decay after warmup; WSD: constant, then a decay over the last lr_wsd_decay_iters."""
    lr_warmup_iters: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps of linear warmup from lr_warmup_init."""
    lr_warmup_init: float = Field(default=0.0, ge=0, le=MAX_LEARNING_RATE)
    """Learning rate at the start of warmup."""
    lr_decay_iters: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Step at which the decay ends; null: train_iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay phase."""
    lr_wsd_decay_iters: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Steps of WSD's decay phase; required with WSD."""
    weight_decay: float = Field(default=0.1, ge=0, le=MAX_WEIGHT_DECAY)
    """Decoupled weight decay; norms and biases are exempt."""
    adam_beta1: float = Field(default=0.9, ge=0, le=MAX_BETA)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, le=MAX_BETA)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, ge=FP32_SMALLEST_NORMAL, le=MAX_EPSILON)
    """Added to the square root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=0, le=FP32_ROOM)
    """Global gradient norm to clip to; 0: no clipping."""


class DataConfig(Section):
    """Token files in Megatron's `.bin/.idx` format and the tokenizer that made them."""

    train_data_path: Annotated[list[str], Place.TOKEN_FILES] = Field(default_factory=list)
    """Prefixes of token files, or a blend: weight, prefix, weight, prefix, ..."""
    valid_data_path: Annotated[list[str], Place.TOKEN_FILES] = Field(default_factory=list)
    """The same for validation."""
    data_path: Annotated[list[str], Place.TOKEN_FILES] = Field(default_factory=list)
    """Token files for training and validation, instead of the two keys above: `split` splits each file's documents."""
    split: str | None = None
    """Shares of training, validation and test in the documents of data_path; null: 969,30,1."""
    tokenizer_model: Annotated[str | None, Place.FILE_OR_FOLDER] = None
    """Path of the tokenizer of the token files: a `tokenizer.json`, SentencePiece model or tiktoken rank file."""
    tokenizer_type: Literal[
        "auto", "HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer", "ByteLevelTokenizer"
    ] = "auto"
    """Kind of tokenizer_model; auto: detected from the file. ByteLevelTokenizer needs no file."""
    eod_token: str | None = None
    """End-of-document token; null: `<|endoftext|>` if the tokenizer has it, else its EOS token."""
    tiktoken_pattern: str | None = None
    """Pre-tokenization of a rank file: gpt2, cl100k_base, o200k_base, v1, v2 or a regular expression; null: by name."""
    data_cache_path: Annotated[str | None, Place.CACHE] = None
    """Directory for sample indices; null: beside the token files."""
    num_workers: int = Field(default=1, ge=0, le=MAX_THREADS)
    """Threads that prefetch batches, per data-parallel rank; 0: no prefetching."""
    eod_mask_loss: bool = False
    """Mask the loss of the token after an end-of-document token, the first of the next document."""
    reset_position_ids: bool = False
    """Restart positions at 0 after an end-of-document token."""
    reset_attention_mask: bool = False
    """Mask attention across documents in a sample: no token attends to one before an end-of-document token."""


class Config(Section):
    """The whole config."""

    run: RunConfig
    model: ModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()
    faults: FaultsConfig = FaultsConfig()
