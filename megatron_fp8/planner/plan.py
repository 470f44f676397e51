"""Plans one run: what is known before it starts, put together. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_fp8.config.check import DataReport, check_config, fitting_world_sizes
from megatron_fp8.config.layout import (
    Layout,
    block_parameters,
    count_parameters,
    derive_layout,
    head_parameters,
    norm_parameters,
    position_parameters,
)
from megatron_fp8.config.load import LoadedConfig
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.run_start import resolve_length
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.communication import Traffic, step_traffic
from megatron_fp8.planner.flops import (
    DEFAULT_MFU,
    Duration,
    FlopsPerToken,
    Fp8Gain,
    flops_per_token,
    fp8_gain,
    run_duration,
)
from megatron_fp8.planner.gpus import Gpu
from megatron_fp8.planner.memory import StageMemory, stage_memories
from megatron_fp8.planner.pipeline import RankParameters, bubble_share, rank_parameters, stage_chunks

DataCheck = Callable[[Config], DataReport]


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of the whole model. `head` is 0 where it shares the word embedding's weight.

    All but `without_padding` count the rows that pad the vocabulary.
    """

    total: int
    without_padding: int
    word_embedding: int
    position_embedding: int
    per_layer: int
    final_norm: int
    head: int


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    `memories`, `rank_parameters` and `traffic` are by pipeline stage. `fp8` and `bytes_in_bf16`, what the fullest rank
    would hold in BF16, are None where nothing runs in FP8.
    """

    config: Config
    gpu: Gpu
    layout: Layout
    parameters: ModelParameters
    rank_parameters: list[RankParameters]
    memories: list[StageMemory]
    flops: FlopsPerToken
    bubble_share: float
    traffic: list[list[Traffic]]
    duration: Duration
    fp8: Fp8Gain | None
    bytes_in_bf16: float | None

    @property
    def fullest(self) -> StageMemory:
        """The stage whose ranks hold most."""
        return max(self.memories, key=lambda memory: memory.total)


def make_plan(
    config: Config, layout: Layout, gpu: Gpu, num_tokens: float | None = None, mfu: float = DEFAULT_MFU
) -> Plan:
    """The plan of `config` on `layout`; `num_tokens`: the budget (None: the config's own length)."""
    stages = range(layout.pipeline_model_parallel_size)
    flops = flops_per_token(config, layout)
    tokens = num_tokens or float(layout.tokens_per_global_batch * config.training.train_iters)
    in_fp8 = config.precision.mode == "fp8"
    return Plan(
        config=config,
        gpu=gpu,
        layout=layout,
        parameters=model_parameters(config, layout),
        rank_parameters=[rank_parameters(config, layout, stage_chunks(config, layout, stage)) for stage in stages],
        memories=stage_memories(config, layout, gpu),
        flops=flops,
        bubble_share=bubble_share(layout),
        traffic=[step_traffic(config, layout, stage) for stage in stages],
        duration=run_duration(config, layout, flops, gpu, tokens, mfu),
        fp8=fp8_gain(layout) if in_fp8 else None,
        bytes_in_bf16=_bytes_in_bf16(config, layout, gpu) if in_fp8 else None,
    )


def model_parameters(config: Config, layout: Layout) -> ModelParameters:
    """The whole model's parameters by part."""
    model = config.model
    vocabulary = layout.padded_vocab_size * model.hidden_size
    return ModelParameters(
        total=layout.num_parameters,
        without_padding=count_parameters(model, layout.vocab_size),
        word_embedding=vocabulary,
        position_embedding=position_parameters(model),
        per_layer=sum(shape.size for shape in block_parameters(model)),
        final_norm=norm_parameters(model),
        head=head_parameters(model, layout.padded_vocab_size),
    )


def _bytes_in_bf16(config: Config, layout: Layout, gpu: Gpu) -> float:
    precision = config.precision.model_copy(update={"mode": "bf16"})
    memories = stage_memories(config.model_copy(update={"precision": precision}), layout, gpu)
    return max(memory.total for memory in memories)


def resolve_sizes(loaded: LoadedConfig, check_data: DataCheck) -> tuple[LoadedConfig, int]:
    """The config with its length in steps, where that is known, and the vocabulary's size before padding.

    The tokenizer is read for its size if the config does not give one; missing training text is no mistake here.
    Raises ConfigError.
    """
    config = loaded.config
    epoch_samples, vocab_size = None, config.model.vocab_size
    if vocab_size is None or config.training.train_epochs is not None:
        report = check_data(config)
        epoch_samples, vocab_size = report.epoch_samples, vocab_size or report.vocab_size
        problems = [
            replace(problem, use_instead=f"{problem.use_instead}; or model.vocab_size=N")
            for problem in report.problems
            if "tokenizer" in problem.key
        ]
        if vocab_size is None and problems:
            raise ConfigError.from_problems(problems)
    if vocab_size is None:
        raise ConfigError("the vocabulary size is unknown; use model.vocab_size=N or data.tokenizer_model=FILE")
    loaded, problems = resolve_length(loaded, epoch_samples)
    if problems:
        raise ConfigError.from_problems(problems)
    return loaded, vocab_size


def resolve_layout(loaded: LoadedConfig, world_size: int | None, vocab_size: int) -> Layout:
    """The layout on `world_size` ranks (None: on the fewest that fit). Raises ConfigError with every mistake."""
    if world_size is None:
        world_size = next(iter(fitting_world_sizes(loaded.config)), None)
    # A plan need not know the run's length, nor what its learning-rate schedule makes of that.
    ignored = ("data.",) if loaded.config.training.train_iters else ("data.", "training.train_iters", "optimizer.lr")
    problems = [item for item in check_config(loaded, world_size, vocab_size) if not item.key.startswith(ignored)]
    if problems:
        raise ConfigError.from_problems(problems)
    if world_size is None:
        raise ConfigError("no number of ranks fits the config; pretrain.py CONFIG --check --world-size N says why")
    return derive_layout(loaded.config, world_size, vocab_size)
