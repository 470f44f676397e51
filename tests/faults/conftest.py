"""Token files and configs of runs that take seconds, as in `tests/e2e`."""

from tests.e2e.conftest import tiny

__all__ = ["tiny"]
