"""What sessions, scheduler and worker know of a session's keys and values. `kv_pool.KvSlot` is the real one.

Must not know: tensors. A slot is a cache: it may be cleared at any time, and a new prefill gives the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Slot(Protocol):
    """Where one session's keys and values are. Rows past `length` are scratch of the step in progress."""

    @property
    def length(self) -> int:
        """Rows kept: those of the session's first `length` ids."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """The pages it holds."""
        ...

    def try_reserve(self, count: int) -> bool:
        """Makes room for `count` rows behind the kept ones; False if the pool is full."""
        ...

    def keep(self, offsets: Sequence[int], is_checked: bool = True) -> None:
        """Keeps these rows of the last forward, in rising order, right after the kept ones.

        `is_checked`: scores of this forward were finite; rows that nobody has checked go to no other session.
        """
        ...

    def roll_back(self, length: int) -> None:
        """Forgets rows from `length` on."""
        ...

    def seal(self, ids: Sequence[int]) -> None:
        """Makes full pages findable for others of the same principal. `ids`: the session's."""
        ...

    def adopt(self, ids: Sequence[int]) -> int:
        """Into an empty slot, takes what is there of a beginning of `ids`; returns the rows it holds now."""
        ...

    def scrub(self, from_row: int) -> None:
        """Makes rows from `from_row` on finite; they may hold what is not."""
        ...

    def clear(self) -> int:
        """Gives everything back; returns how many pages that were."""
        ...
