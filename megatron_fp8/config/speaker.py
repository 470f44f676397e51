"""Owns who of a job's ranks writes what the command line answers, and who ends when. Imports no torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

EXIT_CODE_OF_A_MISTAKE = 2
# A launcher ends all ranks of a machine when it sees that one has ended, also one that is about to speak.
SECONDS_FOR_THE_SPEAKER = 10.0


class Speaker:
    """Writes for the whole job: rank 0's messages, and nobody else's. Who has nothing to say ends last.

    A mistake on another machine only (a file that is missing there) would go unsaid; that machine's first rank
    leaves it where its torchrun looks for the reason of a failure.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.speaks = environ.get("RANK", "0") == "0"
        self._first_elsewhere = not self.speaks and environ.get("LOCAL_RANK") == "0"
        self._error_file = environ.get("TORCHELASTIC_ERROR_FILE")

    def answer(self, text: str) -> None:
        """Write what was asked for to standard output."""
        if self.speaks:
            sys.stdout.write(text)
            sys.stdout.flush()

    def warn(self, warning: str) -> None:
        """Write a warning to standard error."""
        if self.speaks:
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    def end_with_answer(self, text: str) -> NoReturn:
        """Write what was asked for and end with code 0."""
        self.answer(text)
        raise SystemExit(0)

    def end_with_mistake(self, text: str) -> NoReturn:
        """Say what is wrong and end with code 2."""
        if self.speaks:
            print(text, file=sys.stderr, flush=True)
        elif self._first_elsewhere and self._error_file:
            extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
            content = {"message": {"message": text, "extraInfo": extra}}
            Path(self._error_file).write_text(json.dumps(content), encoding="utf-8")
        else:
            time.sleep(SECONDS_FOR_THE_SPEAKER)
        raise SystemExit(EXIT_CODE_OF_A_MISTAKE)
