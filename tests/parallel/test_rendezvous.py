"""Ranks of one start find each other in a store in which earlier starts have left their keys, as torchrun's has."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store, TCPStore

from megatron_fp8.parallel.process_group import ConnectError, store_of_this_launch

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.5)


def start(server: TCPStore, world_size: int) -> list[Store]:
    """The stores of all ranks of a start, each over a connection of its own."""

    def of(rank: int) -> Store:
        client = TCPStore("localhost", server.port, is_master=False, timeout=LONG)
        return store_of_this_launch(client, rank, world_size, LONG)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(of, reversed(range(world_size))))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_start_sees_nothing_of_the_starts_before(world_size: int) -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for number in range(3):
        stores = start(server, world_size)
        assert not any(store.check(["address"]) for store in stores)
        stores[0].set("address", str(number))
        assert [store.get("address").decode() for store in stores] == [str(number)] * world_size


def test_a_start_whose_ranks_were_killed_half_way_leaves_nothing_that_counts() -> None:
    """One has asked and was killed; one was told of a start that is over."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    server.set("question of rank 1", "of the start before")
    start(server, 2)
    server.set("question of rank 2", "of the start before")
    stores = start(server, 3)
    stores[0].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 3


def test_who_did_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(ConnectError, match=r"2 of 3 ranks did not connect within .*: 1, 2"):
        store_of_this_launch(store, 0, 3, SHORT)
    # One of the start before had come.
    store.set("question of rank 1", "of the start before")
    with pytest.raises(ConnectError, match=r"2 of 3 ranks did not connect within .*: 1, 2"):
        store_of_this_launch(store, 0, 3, SHORT)


def test_a_rank_says_when_rank_0_does_not_come() -> None:
    with pytest.raises(ConnectError, match=r"rank 0 did not connect within 0\.5 s"):
        store_of_this_launch(HashStore(), 1, 2, SHORT)
