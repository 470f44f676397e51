"""What ranks hold alike is compared: any flipped bit is found and its rank named, and a clean run raises no alarm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.monitors.replicas import Difference, checksum, suspects
from tests.ranks import run_on_ranks
from tests.small_run import run_small, small_config

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.float8_e4m3fn]


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit of a tensor's bytes in place."""
    content = tensor.detach().view(-1).view(torch.uint8)
    content[bit // 8] ^= 1 << (bit % 8)


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
    draw=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 9),
)
def test_any_flipped_bit_changes_the_checksum(size: int, dtype: torch.dtype, seed: int, draw: int, offset: int) -> None:
    """Whatever the dtype, length and place in a buffer; the same bytes elsewhere have the same sum."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randint(0, 256, ((size + offset) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    tensor = buffer.view(dtype)[offset:]
    before = checksum(tensor)
    assert torch.equal(before, checksum(tensor.clone()))
    flip(tensor, draw % (size * dtype.itemsize * 8))
    assert not torch.equal(before, checksum(tensor))


def test_every_bit_counts_also_beyond_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_fp8.monitors import replicas

    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(50, generator=generator)
    whole = checksum(tensor)
    monkeypatch.setattr(replicas, "_CHUNK_BYTES", 64)
    assert torch.equal(checksum(tensor), whole)
    sums = {int(whole)}
    for bit in range(tensor.numel() * 32):
        flip(tensor, bit)
        sums.add(int(checksum(tensor)))
        flip(tensor, bit)
    assert len(sums) == 1 + tensor.numel() * 32


def test_two_changes_do_not_cancel() -> None:
    """The highest bits of two words, two words exchanged, zeros appended by nobody."""
    tensor = torch.zeros(4, dtype=torch.int64)
    high = torch.tensor([-(2**63), -(2**63), 0, 0])
    exchanged = [torch.tensor([1, 2, 0, 0]), torch.tensor([2, 1, 0, 0])]
    assert len({int(checksum(each)) for each in (tensor, high, *exchanged)}) == 4


def test_the_checksum_is_this_number() -> None:
    """Computed by Python's whole numbers: what a device may do differently (overflow, shifts) shows here."""
    words = [3, -1, 2**62, -(2**63) + 5]
    total = 0
    for place, word in enumerate(words):
        x = (word + place * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        total = (total + (x ^ (x >> 31))) % 2**64
    assert int(checksum(torch.tensor(words))) % 2**64 == total


def test_the_majority_decides() -> None:
    assert suspects((0, 1, 2), (5, 7, 5)) == (1,)
    assert suspects((4, 9), (5, 7)) == ()
    assert suspects((0, 1, 2, 3), (5, 7, 5, 7)) == ()
    assert suspects((0, 1, 2, 3, 4), (5, 7, 5, 8, 5)) == (1, 3)
    hosts = ["a", "b", "c"]
    assert Difference("w", (0, 1, 2), (1,)).text(hosts) == "w on rank 1 (b) differs from the 2 other replicas"
    assert "rank 0 (a), rank 2 (c); which of them is wrong" in Difference("w", (0, 2), ()).text(hosts)


FP8 = {"mode": "fp8", "fp8_amax_history_len": 4, "amax_reduction": "auto"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2-whole-optimizer": (2, {"parallel": {"use_distributed_optimizer": False}}),
    "dp2-overlap": (2, {"parallel": {"overlap_param_gather": True, "overlap_grad_reduce": True}}),
    "tp2-sp": (2, {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    "tp2": (2, {"parallel": {"tensor_model_parallel_size": 2}}),
    "pp2-tied": (
        2,
        {
            "parallel": {"pipeline_model_parallel_size": 2},
            "model": {"untie_embeddings_and_output_weights": False, "hidden_dropout": 0.1},
        },
    ),
    "tp2-pp2-vpp2": (
        4,
        {
            "parallel": {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
        },
    ),
    "fp8-dp3": (3, {"precision": FP8, "training": {"global_batch_size": 12}}),
    "fp8-tp2-dp2": (4, {"precision": FP8, "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    "fp8-weights-dp2": (2, {"precision": {**FP8, "fp8_param_gather": True}}),
    "fp8-no-reduction": (2, {"precision": {**FP8, "amax_reduction": "off"}}),
    "mxfp8-dp2": (2, {"precision": {"mode": "fp8", "fp8_recipe": "mxfp8"}}),
}
QUICK = ("pp2-tied", "fp8-tp2-dp2")


def check_of(parts: Any) -> Any:
    from megatron_fp8.monitors.replicas import ReplicaMonitor

    return ReplicaMonitor(parts.config, parts.chunks, parts.groups, parts.precision)


def flip_each_kind(parts: Any) -> list[tuple[str, int, str, list[dict]]]:
    """After a clean comparison: flip a bit of one tensor of each group on the last rank, and back.

    (name, rank, error, records) of each.
    """
    import torch

    from megatron_fp8.monitors.replicas import ReplicaError

    check = check_of(parts)
    assert list(check.after_step(1, updated=True)) == []
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = []
    for alike in list(check._alike()):
        live = dict(alive(parts))
        held_twice = [name for name in alike.tensors if name in live and alike.group.size() > 1]
        names = [held_twice[0], held_twice[-1]] if held_twice else []
        everywhere: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(everywhere, names)
        for number in range(2):
            victim = world_size - 1
            if not everywhere[victim]:
                continue
            name = everywhere[victim][number]
            if rank == victim:
                flip(live[name], 3)
            error, events = "", []
            try:
                events.extend({"event": event, **values} for event, values in check.after_step(2, updated=True))
            except ReplicaError as raised:
                error = str(raised)
            if rank == victim:
                flip(live[name], 3)
            found.append((name, victim, error, events))
    assert list(check.after_step(3, updated=True)) == []
    return found


RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def compare_every_recipe() -> list[list[str]]:
    """Names of what two ranks compare of FP8's state in each recipe; a device must hold all of it."""
    return [run_small(small_config(precision={**FP8, "fp8_recipe": recipe}), 1, compared).probe for recipe in RECIPES]


def compared(parts: Any) -> list[str]:
    check = check_of(parts)
    check._interval = 1
    assert list(check.after_step(1, updated=True)) == []
    state = parts.precision.state_dict()
    assert {tensor.device for tensor in state.values()} == {parts.device.torch_device}
    return list(state)


def test_scaling_state_is_compared_on_the_device() -> None:
    for delayed, *others in run_on_ranks(2, compare_every_recipe):
        assert len(delayed) > 4
        assert all({"num_updates", "units.margin"} <= set(names) for names in (delayed, *others))


def alive(parts: Any) -> Any:
    """Live tensors by name: scaling state is compared as copies."""
    from megatron_fp8.model.build import global_parameters
    from megatron_fp8.monitors.replicas import _stored

    for parameter_name, parameter in global_parameters(parts.chunks):
        yield from _stored(parameter_name, parameter).items()
    for state in parts.precision.scaling_states():
        yield f"{state.name}.scale", state.scale
        yield f"{state.name}.amax_history", state.amax_history


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_flipped_bit_is_named_and_a_clean_run_is_left_alone(layout: str) -> None:
    world_size, sections = LAYOUTS[layout]
    config = small_config(faults={"replica_check_interval": 1}, **sections)
    records = run_on_ranks(world_size, run_small, config, 2, flip_each_kind)
    found = [record.probe for record in records]
    assert len(found[0]) >= 2
    if layout == "dp2-overlap":
        # The gathering that comes before the comparison makes all alike again, as it does before each forward pass.
        assert not any(error for each in found for _, _, error, _ in each)
        return
    for number, (name, victim, _, _) in enumerate(found[0]):
        errors = [each[number][2] for each in found]
        assert len(set(errors)) == 1, "every rank ends with the same words"
        assert f"replicas differ at iteration 2: {name}" in errors[0]
        assert f"rank {victim} (" in errors[0]
        assert "agreed at iteration 1" in errors[0]
        (record,) = found[0][number][3]
        assert record["event"] == "replica"
        assert record["first tensor"] == name
        if "other replicas" in errors[0]:
            assert record["ranks"] == [victim]
