"""`pretrain.py` on one rank whose loss is NaN in the steps that FAULTY_STEPS names, counted over the process."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

from megatron_fp8 import device
from tests.faults.training import Fault


def main() -> None:
    """Train; the fault is put in when the parts of the run have been built."""
    device.prepare()
    from megatron_fp8.train import setup

    build = setup.build_parts
    steps = {int(step) for step in os.environ["FAULTY_STEPS"].split()}

    def built(*arguments: Any, **named: Any) -> Any:
        parts = build(*arguments, **named)
        Fault(0, steps, "loss").put_into(parts)
        return parts

    with patch.object(setup, "build_parts", built):
        import pretrain

        pretrain.main()


if __name__ == "__main__":
    main()
