"""Encoding processes that get signals: a killed one is reported, and Ctrl-C interrupts none that is starting."""

import multiprocessing
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_fp8.prepare.encode import Settings, TokenizerFile, WorkerEndedError, encode_blocks
from megatron_fp8.prepare.text_blocks import Block, Position

SETTINGS = Settings(TokenizerFile(None, "ByteLevelTokenizer"))
NUM_BLOCKS = 20


def blocks(signal_number: int, before_block: int) -> Iterator[Block]:
    """Blocks of a line each; before one of them all processes that there are get a signal."""
    for number in range(NUM_BLOCKS):
        if number == before_block:
            children = [child.pid for child in multiprocessing.active_children()]
            assert children
            for child in children:
                assert child is not None
                os.kill(child, signal_number)
        yield Block("lines", "a", number, Position(0, number, number), 13, number, lines=b'{"text": "a"}')


def test_a_worker_that_is_killed_ends_the_work_with_a_reason() -> None:
    with pytest.raises(WorkerEndedError, match=r"of 2 encoding processes was killed.* fewer --workers"):
        list(encode_blocks(blocks(signal.SIGKILL, 10), SETTINGS.tokenizer.load(), SETTINGS, 2))


def test_ctrl_c_is_left_to_the_parent_even_while_workers_start() -> None:
    # Before the second block the first worker has just been started, and is importing.
    encoded = list(encode_blocks(blocks(signal.SIGINT, 1), SETTINGS.tokenizer.load(), SETTINGS, 2))
    assert np.concatenate([each.by_key["text"].tokens for each in encoded]).tolist() == [97] * NUM_BLOCKS
