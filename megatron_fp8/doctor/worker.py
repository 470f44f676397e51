"""The process of one check, so that what it loads, sets or breaks affects no other check.

`python -m megatron_fp8.doctor.worker FD CHECK`: reads the context, a line of JSON, from standard input, and writes
the answer to the file descriptor. An exception ends it; its last line of standard error says which.
"""

from __future__ import annotations

import json
import os
import sys

from megatron_fp8.doctor.examination import GATHER, call, run_check
from megatron_fp8.doctor.finding import HostContext


def main() -> None:
    """Run the check."""
    descriptor, check = int(sys.argv[1]), sys.argv[2]
    context = HostContext.from_json(json.loads(sys.stdin.readline()))
    answer = call(GATHER, context) if check == GATHER else run_check(check, context).as_json()
    with os.fdopen(descriptor, "w", encoding="utf-8") as answers:
        json.dump(answer, answers)
    # Without waiting for threads of libraries: the answer is written.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
