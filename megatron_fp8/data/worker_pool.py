"""Owns the processes that encode blocks. Results come in the order of the blocks, whatever the number of processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import wait

from megatron_fp8.data.encode import EncodedBlock, Settings, TokenizerFile, encode_block
from megatron_fp8.data.sources.block import Block
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.parallel.process_environment import encode_on_one_thread

BLOCKS_AHEAD_PER_WORKER = 3


class WorkerEndedError(Exception):
    """A worker is gone; the text says why that can be."""


def encode_blocks(
    blocks: Iterator[Block], tokenizer: Tokenizer, settings: Settings, num_workers: int
) -> Generator[EncodedBlock, None, None]:
    """`encode_block` of each; one worker is this process. A bounded number of blocks is in memory.

    Raises WorkerEndedError when a worker is killed, and what `encode_block` raises.
    """
    if num_workers == 1:
        encode_on_one_thread()
        for block in blocks:
            yield encode_block(block, tokenizer, settings)
        return
    # Spawned, not forked: the tokenizer's library keeps threads that do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker) as pool:
        waiting: deque[Future[EncodedBlock]] = deque()
        try:
            for block in blocks:
                with _interrupt_held_back():
                    waiting.append(pool.submit(_encode_in_worker, block, settings))
                if len(waiting) >= num_workers * BLOCKS_AHEAD_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise WorkerEndedError(
                f"one of {num_workers} encoding processes was killed from outside, as the system does when memory is "
                "short: use fewer --workers"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Workers start when work is submitted, and take over what is held back: Ctrl-C does not end them half started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    """The program's end is this process's end too, however it comes; Ctrl-C is the program's matter."""
    encode_on_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@lru_cache(maxsize=1)
def _tokenizer_of_worker(file: TokenizerFile) -> Tokenizer:
    """Loaded once a process: it costs as much as encoding a block."""
    return file.load()


def _encode_in_worker(block: Block, settings: Settings) -> EncodedBlock:
    return encode_block(block, _tokenizer_of_worker(settings.tokenizer), settings)
