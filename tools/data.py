"""Looks at Megatron token files, checks them, joins and divides them (`--help`; docs/data.md).

Needs no torch. Exit codes: 0: done, whole; 1: verify found a damaged file; 2: a wrong path or option; 130: interrupted.
"""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Exit codes as in the module's text."""
    try:
        # Here, so that Ctrl-C while modules are loaded is told as any other.
        from megatron_fp8.data.look_command import run

        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
