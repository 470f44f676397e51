"""torchrun whose ranks are forked from itself, which has imported the libraries: a start takes tenths of a second.

Agent, restarts, signals and store are torchrun's own. `warm_torchrun.py NUM_RANKS MAX_RESTARTS SCRIPT ARGUMENT ...`
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import uuid

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_rank(arguments: list[str]) -> None:
    """What a rank does: run a script, as a process of its own would."""
    # The agent's handlers are not for its ranks.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """Launch; end with 1 where torchrun does."""
    num_ranks, max_restarts, *arguments = sys.argv[1:]
    # As many devices as ranks, which is fixed when the stand-in takes CUDA's place.
    os.environ["LOCAL_WORLD_SIZE"] = num_ranks
    import tests.ranks_preload  # noqa: F401 - the libraries that ranks then have

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(num_ranks),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=int(max_restarts),
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(config, run_rank)(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
