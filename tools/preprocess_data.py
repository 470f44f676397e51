"""Texts to Megatron token files: one `PREFIX_KEY_document.bin/.idx` pair per key (`--help`; docs/data.md).

Needs no torch. Exit codes: 0: written; 1: a worker was killed; 2: an input is wrong; 130: interrupted.
"""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Exit codes as in the module's text."""
    try:
        # Here, so that Ctrl-C while modules are loaded is told as any other.
        from megatron_fp8.data.preprocess_command import run

        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
