"""The process in which one check runs, so that what it loads, sets, crashes or hangs touches no other.

`python -m megatron_fp8.doctor.worker FD CHECK`: reads the surroundings, a line of JSON, from standard input, and writes
the answer to the file descriptor. An exception ends it; its last line of standard error says which.
"""

from __future__ import annotations

import json
import os
import sys

from megatron_fp8.doctor.examination import GATHER, call, carry_out
from megatron_fp8.doctor.finding import Surroundings


def main() -> None:
    """Carry out the check."""
    descriptor, check = int(sys.argv[1]), sys.argv[2]
    surroundings = Surroundings.from_json(json.loads(sys.stdin.readline()))
    answer = call(GATHER, surroundings) if check == GATHER else carry_out(check, surroundings).as_json()
    with os.fdopen(descriptor, "w", encoding="utf-8") as answers:
        json.dump(answer, answers)
    # Without waiting for threads of libraries: everything has been said.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
