"""Prints for a whole job: rank 0 writes, the other ranks exit after it. Imports no torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

EXIT_CODE_BAD_INPUT = 2
# torchrun kills the other ranks of a node as soon as one has exited, rank 0 in the middle of its report included.
SECONDS_FOR_RANK_ZERO = 10.0


class RankZeroOutput:
    """Prints on rank 0 only; the other ranks exit later, so that the launcher reports rank 0's error.

    A mistake that only another node sees (a file missing there) would go unreported: the first rank of that node leaves
    its error where its torchrun looks for the reason of a failure.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.is_rank_zero = environ.get("RANK", "0") == "0"
        self._is_first_of_other_node = not self.is_rank_zero and environ.get("LOCAL_RANK") == "0"
        self._error_file = environ.get("TORCHELASTIC_ERROR_FILE")

    def answer(self, text: str) -> None:
        """Write what was asked for to standard output."""
        if self.is_rank_zero:
            sys.stdout.write(text)
            sys.stdout.flush()

    def warn(self, warning: str) -> None:
        """Write a warning to standard error."""
        if self.is_rank_zero:
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    def exit_with_answer(self, text: str) -> NoReturn:
        """Write what was asked for and exit with code 0."""
        self.answer(text)
        raise SystemExit(0)

    def exit_with_error(self, text: str) -> NoReturn:
        """Report what is wrong and exit with code 2."""
        if self.is_rank_zero:
            print(text, file=sys.stderr, flush=True)
        elif self._is_first_of_other_node and self._error_file:
            extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
            content = {"message": {"message": text, "extraInfo": extra}}
            Path(self._error_file).write_text(json.dumps(content), encoding="utf-8")
        else:
            time.sleep(SECONDS_FOR_RANK_ZERO)
        raise SystemExit(EXIT_CODE_BAD_INPUT)
