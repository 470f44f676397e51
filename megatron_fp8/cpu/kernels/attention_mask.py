"""Which keys a query attends: causal, sliding window, and how the diagonal is aligned.

Owns the interval arithmetic of TE's mask arguments. Must not know tensors' layouts or kernels.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionMask:
    """Query i attends keys j with `i + shift - left <= j <= i + shift + right`; None is no bound.

    `shift` is 0 for the top-left diagonal and `num_keys - num_queries` for the bottom-right one.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    @classmethod
    def from_te(cls, causal: bool, window: tuple[int, int] | None, bottom_right: bool) -> "AttentionMask":
        """From TE's arguments: window `(left, right)`, -1 on a side is no bound; causal bounds the right by 0."""
        left, right = window if window is not None else (-1, -1)
        if causal:
            right = 0
        return cls(None if left < 0 else left, None if right < 0 else right, bottom_right)

    def shift(self, num_queries: int, num_keys: int) -> int:
        """Key index that query 0's diagonal lies on."""
        return num_keys - num_queries if self.bottom_right else 0

    def is_plain_causal(self, num_queries: int, num_keys: int) -> bool:
        """Whether it is exactly `j <= i`."""
        return self.left is None and self.right == 0 and self.shift(num_queries, num_keys) == 0

    def is_full(self) -> bool:
        """Whether every query attends every key."""
        return self.left is None and self.right is None

    def key_range(self, start: int, stop: int, num_queries: int, num_keys: int) -> tuple[int, int]:
        """Half-open range of keys that any query in `[start, stop)` attends; may be empty."""
        shift = self.shift(num_queries, num_keys)
        first = 0 if self.left is None else max(0, start + shift - self.left)
        last = num_keys if self.right is None else min(num_keys, stop + shift + self.right)
        return min(first, num_keys), max(min(first, num_keys), last)
