"""Encodes texts into Megatron token files, one `PREFIX_KEY_document.bin/.idx` pair per key (`--help`; docs/data.md)."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit codes as `--help` says."""
    try:
        # Imported here so that Ctrl-C while modules load ends with one line too.
        from megatron_fp8.commands.preprocess import main as run

        run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
