"""What the security tests share: the data of the tests of whole runs."""

from tests.e2e.conftest import tiny

__all__ = ["tiny"]
