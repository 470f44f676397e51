"""Owns the process in which checks run, so that what crashes or hangs in one is a finding of the doctor.

`python -m megatron_fp8.doctor.worker FD`: reads one request, a line of JSON, from standard input, and writes a line for
each check that is done to the file descriptor. An exception ends it; its last line of standard error says which.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from megatron_fp8.doctor.checks import carry_out
from megatron_fp8.doctor.finding import Surroundings

GATHER = "gather"


def main() -> None:
    """Carry out the request."""
    request = json.loads(sys.stdin.readline())
    surroundings = Surroundings.from_json(request["surroundings"])
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as answers:
        for check in request["checks"]:
            if check == GATHER:
                from megatron_fp8.doctor.together import gather

                answers.write(json.dumps(gather(surroundings)) + "\n")
                continue
            finding = carry_out(check, surroundings)
            surroundings = replace(surroundings, findings=(*surroundings.findings, finding))
            answers.write(json.dumps(finding.as_json()) + "\n")
    # Without waiting for threads of libraries: everything has been said.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
