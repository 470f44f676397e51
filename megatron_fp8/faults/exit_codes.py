"""The exit codes of the training program. Imports no torch."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the program's exit status says."""

    DONE = 0
    """Training reached its last step."""
    FAILED = 1
    """An exception; its traceback is printed last."""
    BAD_INPUT = 2
    """A config, data or command-line mistake, found before training."""
    STOPPED = 75
    """Saved and ended before the last step, because of a signal or a `checkpoint.exit_*` key: start it again with
    --resume (75 is EX_TEMPFAIL of sysexits.h)."""


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm became NaN or infinite."""


class RollbackError(RuntimeError):
    """A run has to go back to a checkpoint and cannot, or has done so as often as it may."""
