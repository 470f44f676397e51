"""Owns the config's sections and fields: names, units, ranges, defaults. Key names are Megatron's.

What must hold between fields is in `config/check.py`, where values come from in `config/load.py`, sizes that
follow from them in `config/layout.py`. Imports no torch.
"""

from typing import Annotated, Literal

from pydantic import Field

from megatron_fp8.config.limits import (
    FP32_ROOM,
    FP32_SMALLEST_NORMAL,
    MOST_BETA,
    MOST_EPOCHS,
    MOST_EPSILON,
    MOST_LAYERS,
    MOST_LEARNING_RATE,
    MOST_MINUTES,
    MOST_RANKS,
    MOST_SAMPLES,
    MOST_SAMPLES_A_PASS,
    MOST_SAMPLES_A_STEP,
    MOST_SEED,
    MOST_STEPS,
    MOST_THREADS,
    MOST_WEIGHT_DECAY,
    SHORTEST_MINUTES,
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
    """Name of the run and of its directory. At most 240 characters: file systems take 255, some for NAME-2, NAME-3."""
    root: Annotated[str, Place.RUNS] = "runs"
    """Directory that run directories are made in, relative to where the program was started."""
    new_name_if_exists: bool = False
    """When the run directory exists, take NAME-2, NAME-3, ... instead of refusing."""


class ParallelConfig(Section):
    """How ranks share the work; data-parallel size is what is left of the world size."""

    tensor_model_parallel_size: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Stages that the layers are divided into."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2, le=MOST_LAYERS)
    """Model chunks per stage (interleaved schedule); null: one."""
    context_parallel_size: Literal[1] = 1
    """Ranks that share each sequence; only 1 is supported yet."""
    sequence_parallel: bool = False
    """Divide norms and dropout along the sequence over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Divide masters and optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the forward pass already runs (needs use_distributed_optimizer)."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Collective library; auto: NCCL on GPUs, gloo elsewhere."""
    distributed_timeout_minutes: float = Field(default=10.0, ge=SHORTEST_MINUTES, le=MOST_MINUTES)
    """Minutes after which a collective that does not end is an error."""
    environment: list[str] = Field(default_factory=list)
    """Variables of CUDA, NCCL, torch and Transformer Engine, as NAME=value, that every rank sets when it starts; what
    the job's own environment sets stays."""


class TrainingConfig(Section):
    """Batches, length, evaluation."""

    micro_batch_size: int = Field(ge=1, le=MOST_SAMPLES_A_PASS)
    """Samples per rank in one forward/backward pass."""
    global_batch_size: int = Field(ge=1, le=MOST_SAMPLES_A_STEP)
    """Samples per optimizer step over all ranks."""
    train_iters: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Optimizer steps of the whole run; 0: as train_samples or train_epochs says."""
    train_samples: int | None = Field(default=None, ge=1, le=MOST_SAMPLES)
    """Length of the run in samples, a multiple of global_batch_size, instead of train_iters."""
    train_epochs: float | None = Field(default=None, gt=0, le=MOST_EPOCHS)
    """Length of the run in passes over the training text, in whole steps, instead of train_iters."""
    eval_interval: int = Field(default=1000, ge=0, le=MOST_STEPS)
    """Steps between evaluations; 0: only at the start and the end."""
    eval_iters: int = Field(default=10, ge=0, le=MOST_STEPS)
    """Global batches per evaluation, always the same ones; 0: no evaluation."""
    multiple_validation_sets: bool = False
    """Evaluate each file of data.valid_data_path alone, eval_iters global batches of it, with a series of its own."""
    full_validation: bool = False
    """Evaluate on the whole of every validation file, each token once, instead of eval_iters global batches."""
    seed: int = Field(default=1234, ge=0, le=MOST_SEED)
    """Seed of weights, sample order and dropout."""
    deterministic_mode: bool = False
    """On GPUs take algorithms that give the same bits in every run of the same layout; slower."""


class OptimizerConfig(Section):
    """AdamW with FP32 masters and moments, and its schedule."""

    lr: float = Field(ge=FP32_SMALLEST_NORMAL, le=MOST_LEARNING_RATE)
    """Highest learning rate."""
    min_lr: float = Field(default=0.0, ge=0, le=MOST_LEARNING_RATE)
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["cosine", "linear", "constant", "WSD"] = "cosine"
    """Form of the decay after the warm-up; WSD: constant, then a decay over the last lr_wsd_decay_iters."""
    lr_warmup_iters: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps of linear warm-up from lr_warmup_init."""
    lr_warmup_init: float = Field(default=0.0, ge=0, le=MOST_LEARNING_RATE)
    """Learning rate that the warm-up starts from."""
    lr_decay_iters: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Step at which the decay ends; null: train_iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Form of WSD's last phase."""
    lr_wsd_decay_iters: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Steps of WSD's last phase; needed with WSD."""
    weight_decay: float = Field(default=0.1, ge=0, le=MOST_WEIGHT_DECAY)
    """Decoupled weight decay of matrices; norms and biases have none."""
    adam_beta1: float = Field(default=0.9, ge=0, le=MOST_BETA)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, le=MOST_BETA)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, ge=FP32_SMALLEST_NORMAL, le=MOST_EPSILON)
    """Added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=0, le=FP32_ROOM)
    """Largest global gradient norm; 0: no clipping."""


class DataConfig(Section):
    """Token files in Megatron's `.bin/.idx` format and the tokenizer that made them."""

    train_data_path: Annotated[list[str], Place.TOKEN_FILES] = Field(default_factory=list)
    """Prefixes of token files, or a blend: weight, prefix, weight, prefix, ..."""
    valid_data_path: Annotated[list[str], Place.TOKEN_FILES] = Field(default_factory=list)
    """The same for validation."""
    data_path: Annotated[list[str], Place.TOKEN_FILES] = Field(default_factory=list)
    """The same for both at once, instead of the two: `split` divides each file's documents between them."""
    split: str | None = None
    """Shares of training, validation and test in the documents of data_path; null: 969,30,1."""
    tokenizer_model: Annotated[str | None, Place.FILE_OR_FOLDER] = None
    """Path of the tokenizer that made the files: a `tokenizer.json`, SentencePiece model or tiktoken's ranks."""
    tokenizer_type: Literal[
        "auto", "HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer", "ByteLevelTokenizer"
    ] = "auto"
    """What kind of file tokenizer_model is; auto: seen from the file. ByteLevelTokenizer needs none."""
    eod_token: str | None = None
    """Name of the token that ends documents; null: `<|endoftext|>`, else the tokenizer's own end token."""
    tiktoken_pattern: str | None = None
    """How ranks split text into words: gpt2, cl100k_base, o200k_base, v1, v2 or a regular expression; null: by name."""
    data_cache_path: Annotated[str | None, Place.CACHE] = None
    """Directory for sample indices; null: beside the token files."""
    num_workers: int = Field(default=1, ge=0, le=MOST_THREADS)
    """Threads that read batches ahead, per data-parallel rank; 0: read in the loop."""
    eod_mask_loss: bool = False
    """Leave what follows an end-of-document token (the first token of the next document) out of the loss."""
    reset_position_ids: bool = False
    """Count positions from 0 again after an end-of-document token."""
    reset_attention_mask: bool = False
    """Keep documents apart that lie in one sample: no token attends one before an end-of-document token."""


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
