"""Sample indices of real ranks: built once on each disk, safe when two jobs start together, never of other files."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fp8.config.schema import Config
from megatron_fp8.data import index_cache
from megatron_fp8.data.index_cache import IndexCacheError, Key, build_cached, cache_key
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare.token_file_writer import TokenFileWriter
from tests.ranks import RankError, run_on_ranks

NUM_SAMPLES = 24


def write(prefix: Path, seed: int = 0, num_documents: int = 30) -> None:
    """Documents of 1 to 39 tokens below 250."""
    generator = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(prefix, vocab_size=300) as writer:
        for length in generator.integers(1, 40, size=num_documents):
            writer.add_documents(generator.integers(0, 250, size=length).astype(writer.dtype), [int(length)])


def config() -> Config:
    """A blend of two files and validation, with paths relative to the node's directory."""
    sizes = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": NUM_SAMPLES // 8, "eval_iters": 1}
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 16},
            "training": sizes,
            "optimizer": {"lr": 1e-3},
            "data": {"train_data_path": ["1", "text/a", "2", "text/b"], "valid_data_path": ["text/a"]},
        }
    )


def samples_on_rank(nodes: list[str], tokenizer_path: str, log: str) -> list[list[int]]:
    """The samples that a rank of the node with this number reads; builds are counted in `log`."""
    import torch.distributed

    from megatron_fp8.data import dataset

    rank = torch.distributed.get_rank()
    os.chdir(nodes[rank * len(nodes) // torch.distributed.get_world_size()])
    original = dataset.save_order

    def counted(order: Any, directory: Path, name: str) -> None:
        with Path(log).open("a") as stream:
            stream.write(f"{rank} {name}\n")
        original(order, directory, name)

    dataset.save_order = counted
    built = dataset.build_datasets(config(), Tokenizer.load(tokenizer_path))
    return [built.train[number]["tokens"].tolist() for number in range(NUM_SAMPLES)]


def node(path: Path) -> str:
    """A node's disk with the token files of `config`."""
    write(path / "text/a", seed=1)
    write(path / "text/b", seed=2)
    return str(path)


def names_in(directory: Path | str) -> list[str]:
    """Names in a directory, hidden ones included."""
    return sorted(path.name for path in Path(directory).iterdir())


def left_in(node: str) -> list[str]:
    """Names in a node's cache."""
    return names_in(f"{node}/text/cache")


def test_ranks_that_share_a_disk_build_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    disk, log = node(tmp_path / "disk"), tmp_path / "log"
    results = run_on_ranks(3, samples_on_rank, [disk], tokenizer.path, str(log))
    assert all(result == results[0] for result in results)
    assert log.read_text().splitlines() == ["0 train", "0 valid"]
    assert len(left_in(disk)) == 1


def test_eight_ranks_of_two_nodes_with_disks_of_their_own_build_once_each(tmp_path: Path, tokenizer: Tokenizer) -> None:
    disks, log = [node(tmp_path / "first"), node(tmp_path / "second")], tmp_path / "log"
    results = run_on_ranks(8, samples_on_rank, disks, tokenizer.path, str(log))
    assert all(result == results[0] for result in results)
    assert sorted(log.read_text().splitlines()) == ["0 train", "0 valid", "4 train", "4 valid"]
    assert [len(left_in(disk)) for disk in disks] == [1, 1]
    # A node that is new, or lost its cache, builds; the other one loads.
    shutil.rmtree(Path(disks[1]) / "text/cache")
    log.unlink()
    assert run_on_ranks(2, samples_on_rank, disks, tokenizer.path, str(log)) == results[:2]
    assert log.read_text().splitlines() == ["1 train", "1 valid"]


def test_two_jobs_that_start_together_agree(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Two process groups that know nothing of each other, on one cold disk."""
    disk, log = node(tmp_path / "disk"), tmp_path / "log"
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_on_ranks, 2, samples_on_rank, [disk], tokenizer.path, str(log)) for _ in range(2)]
        results = [result for job in jobs for result in job.result()]
    assert len(results) == 4
    assert all(result == results[0] for result in results)
    assert len(left_in(disk)) == 1


def test_who_is_slower_takes_what_the_faster_one_published(tmp_path: Path) -> None:
    """The race at its worst moment: another job publishes while this one builds."""

    def build(directory: Path) -> None:
        (directory / "ours").touch()
        build_cached(tmp_path, lambda: Key("key", {}), lambda other: (other / "theirs").touch())

    final = build_cached(tmp_path, lambda: Key("key", {}), build)
    assert final == tmp_path / "key"
    assert names_in(tmp_path) == ["key"]
    assert names_in(final) == ["theirs"]


def test_copies_of_token_files_that_differ_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    disks = [node(tmp_path / "first"), node(tmp_path / "second")]
    write(tmp_path / "second/text/b", seed=2, num_documents=31)
    with pytest.raises(
        RankError, match=r"text/b\.idx has \d+ bytes on the disk of rank 0 and \d+ bytes on that of rank 1"
    ):
        run_on_ranks(2, samples_on_rank, disks, tokenizer.path, str(tmp_path / "log"))


def fail_on_rank(root: str) -> list[str]:
    """What every rank raises when the one that builds fails, and when the root cannot be written."""
    messages = []

    def build(directory: Path) -> None:
        raise ValueError("there is no such index")

    for path in (Path(root), Path(root) / "a-file" / "cache"):
        try:
            build_cached(path, lambda: Key("key", {}), build)
        except IndexCacheError as error:
            messages.append(str(error))
    return messages


def test_a_failed_build_is_reported_to_every_rank(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("in the way")
    first, second = run_on_ranks(2, fail_on_rank, str(tmp_path))
    assert first == second
    assert first[0] == "there is no such index"
    assert "data.data_cache_path" in first[1]
    assert names_in(tmp_path) == ["a-file"]


def load_on_rank(root: str) -> str:
    """The directory of indices that are there, on a disk that cannot be written."""

    def build(directory: Path) -> None:
        raise AssertionError("there is nothing to build")

    def leave_probe(path: Path, left: list[Path]) -> None:
        raise AssertionError("nothing may be written")

    index_cache._create_probe = leave_probe  # type: ignore[assignment]
    return str(build_cached(Path(root), lambda: Key("key", {}), build))


def test_indices_that_are_there_are_loaded_without_writing(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    assert run_on_ranks(2, load_on_rank, str(tmp_path)) == [str(tmp_path / "key")] * 2
    assert names_in(tmp_path) == ["key"]


def files_gone_on_rank(root: str) -> str:
    """What both ranks raise when one of them does not find the token files."""
    import torch.distributed

    rank = torch.distributed.get_rank()
    try:
        build_cached(Path(root), lambda: cache_key([f"{root}/a{rank}"], {}), lambda directory: None)
    except IndexCacheError as error:
        return str(error)
    return "no error"


def test_missing_token_files_on_one_node_are_reported_to_all(tmp_path: Path) -> None:
    write(tmp_path / "a0")
    first, second = run_on_ranks(2, files_gone_on_rank, str(tmp_path))
    assert first == second
    assert "a1.idx" in first


def only_some_read_on_rank(root: str) -> str | None:
    """Rank 1 reads nothing."""
    import torch.distributed

    reads = torch.distributed.get_rank() != 1
    directory = build_cached(Path(root), lambda: Key("key", {}), lambda path: (path / "file").touch(), reads)
    return str(directory) if directory is not None else None


def test_ranks_that_read_nothing_get_no_directory(tmp_path: Path) -> None:
    final = str(tmp_path / "key")
    assert run_on_ranks(3, only_some_read_on_rank, str(tmp_path)) == [final, None, final]
    assert names_in(final) == ["file"]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_the_key_follows_the_files(suffix: str, tmp_path: Path) -> None:
    write(tmp_path / "a")
    before = cache_key([str(tmp_path / "a")], {"seed": 1})
    assert cache_key([str(tmp_path / "a")], {"seed": 1}) == before
    assert cache_key([str(tmp_path / "a")], {"seed": 2}).name != before.name
    path = tmp_path / f"a{suffix}"
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1000))
    changed = cache_key([str(tmp_path / "a")], {"seed": 1})
    assert changed.name != before.name
    assert changed.sizes == before.sizes


def test_what_killed_builds_left_goes_after_a_week(tmp_path: Path) -> None:
    old, young = tmp_path / f".x{index_cache.INCOMPLETE}1", tmp_path / f".x{index_cache.INCOMPLETE}2"
    for directory in (old, young):
        directory.mkdir()
    os.utime(old, (0, 0))
    build_cached(tmp_path, lambda: Key("key", {}), lambda directory: None)
    assert names_in(tmp_path) == [young.name, "key"]
