"""Any parallel layout trains the same model: losses and gradient norms in FP32 are those of one rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import pytest

from tests.ranks import run_on_ranks
from tests.small_run import StepRecord, run_small, small_config

# Of the issue: losses within 1e-5, gradient norms within 1e-4 relative, over 5 steps.
LOSS_TOLERANCE = 1e-5
GRAD_NORM_RELATIVE_TOLERANCE = 1e-4
GLOBAL_BATCH_SIZE = 8


@dataclass(frozen=True)
class Variant:
    """One way to run the model; `vpp` None: no interleaving."""

    tp: int
    pp: int
    vpp: int | None
    sequence_parallel: bool
    distributed_optimizer: bool
    tied: bool
    recompute: bool
    micro_batch_size: int

    def config(self):
        return small_config(
            model={
                "untie_embeddings_and_output_weights": not self.tied,
                "recompute_granularity": "full" if self.recompute else "none",
            },
            parallel={
                "tensor_model_parallel_size": self.tp,
                "pipeline_model_parallel_size": self.pp,
                "virtual_pipeline_model_parallel_size": self.vpp,
                "sequence_parallel": self.sequence_parallel,
                "use_distributed_optimizer": self.distributed_optimizer,
            },
            training={"micro_batch_size": self.micro_batch_size, "global_batch_size": GLOBAL_BATCH_SIZE},
        )

    def __str__(self) -> str:
        return (
            f"tp{self.tp}-pp{self.pp}-vpp{self.vpp or 1}-sp{int(self.sequence_parallel)}"
            f"-do{int(self.distributed_optimizer)}-{'tied' if self.tied else 'untied'}"
            f"-rc{int(self.recompute)}-mbs{self.micro_batch_size}"
        )


def every_variant(world_size: int) -> list[Variant]:
    """All layouts that fit the world, with all that must not matter."""
    variants = []
    for tp, pp in itertools.product((1, 2, 4), (1, 2, 4)):
        if world_size % (tp * pp):
            continue
        for vpp, sp, do, tied, recompute, size in itertools.product(
            (None, 2), (False, True), (False, True), (False, True), (False, True), (1, 2, 4)
        ):
            num_microbatches = GLOBAL_BATCH_SIZE // (size * (world_size // (tp * pp)))
            fits_interleaving = vpp is None or (pp == 2 and num_microbatches % pp == 0)
            if num_microbatches > 0 and fits_interleaving and (tp > 1 or not sp):
                variants.append(Variant(tp, pp, vpp, sp, do, tied, recompute, size))
    return variants


def covering(variants: list[Variant]) -> list[Variant]:
    """A few variants in which every pair of values of two settings occurs that occurs in any of `variants`."""
    names = list(Variant.__dataclass_fields__)

    def pairs(variant: Variant) -> set:
        settings = [(name, getattr(variant, name)) for name in names]
        return set(itertools.combinations(settings, 2))

    left = set().union(*map(pairs, variants))
    chosen = []
    while left:
        best = max(variants, key=lambda variant: len(pairs(variant) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def run_variants(variants: list[Variant]) -> list[list[StepRecord]]:
    """One after the other in the running world."""
    return [run_small(variant.config(), evaluate=True).steps for variant in variants]


@cache
def one_rank(tied: bool) -> list[StepRecord]:
    """The reference: one rank, the whole batch in one micro-batch, nothing parallel."""
    variant = Variant(1, 1, None, False, False, tied, False, GLOBAL_BATCH_SIZE)
    (result,) = run_on_ranks(1, run_variants, [variant])
    return result[0]


def assert_same(steps: list[StepRecord], reference: list[StepRecord], what: str) -> None:
    for number, (step, expected) in enumerate(zip(steps, reference, strict=True), start=1):
        assert step.loss == pytest.approx(expected.loss, abs=LOSS_TOLERANCE), f"{what}: loss of step {number}"
        assert step.validation_loss == pytest.approx(expected.validation_loss, abs=LOSS_TOLERANCE), what
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=GRAD_NORM_RELATIVE_TOLERANCE), (
            f"{what}: grad norm of step {number}"
        )


def check_variants(world_size: int, variants: list[Variant]) -> None:
    results = run_on_ranks(world_size, run_variants, variants, timeout_seconds=2400)
    for variant, steps in zip(variants, results[0], strict=True):
        assert_same(steps, one_rank(variant.tied), str(variant))
    for rank in results[1:]:
        assert rank == results[0], "every rank reports the same numbers"


def test_the_model_learns_and_tying_matters() -> None:
    for tied in (False, True):
        assert one_rank(tied)[-1].validation_loss < one_rank(tied)[0].loss - 0.3
    assert one_rank(True)[-1].loss != pytest.approx(one_rank(False)[-1].loss, abs=1e-3)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layouts_train_the_same_model(world_size: int) -> None:
    """Every pair of settings at least once; the slow test below has every combination."""
    check_variants(world_size, covering(every_variant(world_size)))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_trains_the_same_model(world_size: int) -> None:
    check_variants(world_size, every_variant(world_size))
