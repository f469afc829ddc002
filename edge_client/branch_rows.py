"""Keys and values of branches that a drafter left, kept so that going back to one costs a copy and no forward.

Must not know: models, sampling. Used by `drafter.ModelDrafter`. Rows depend on nothing but the ids up to them, so a
saved row stands for the row that feeding the same ids again would give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_BRANCHES = 24
MAX_TOKENS = 192
"""Of all saved branches together: 9 MiB for a model with 46 KiB a token."""


@dataclass(frozen=True)
class _Branch:
    """Rows of positions `start` to `base + len(ids)`; `ids` are those from `base` on, before it all is committed."""

    base: int
    ids: tuple[int, ...]
    start: int
    rows: Any

    @property
    def tokens(self) -> int:
        return self.base + len(self.ids) - self.start

    def reach(self, wanted: Sequence[int]) -> int:
        """How many of the wanted ids this branch agrees with, from the first."""
        count = self.base
        for token in self.ids:
            if count >= len(wanted) or wanted[count] != token:
                break
            count += 1
        return count


class BranchRows:
    """A few saved branches of one epoch, the newest kept longest."""

    def __init__(self) -> None:
        self._branches: deque[_Branch] = deque(maxlen=MAX_BRANCHES)

    def clear(self) -> None:
        """A new epoch: nothing saved is of use."""
        self._branches.clear()

    def save(self, ids: Sequence[int], committed_length: int, start: int, rows: Any) -> None:
        """Keeps the rows of ids[start:]. `rows` (.., .., len(ids) - start, ..); ids before `committed_length` stand."""
        base = min(committed_length, start)
        self._branches.append(_Branch(base, tuple(ids[base:]), start, rows))
        while sum(branch.tokens for branch in self._branches) > MAX_TOKENS:
            self._branches.popleft()

    def keep_agreeing(self, committed: Sequence[int]) -> None:
        """Forgets branches that the committed ids have left or passed."""
        end = len(committed)
        kept = [b for b in self._branches if b.base + len(b.ids) > end and b.reach(committed) == end]
        self._branches = deque(kept, maxlen=MAX_BRANCHES)

    def find(self, wanted: Sequence[int], at: int) -> Any | None:
        """Rows of wanted[at : at + n] for the largest n that a saved branch has; None if none has any."""
        best = max(
            (branch for branch in self._branches if branch.start <= at),
            key=lambda branch: branch.reach(wanted),
            default=None,
        )
        if best is None or (stop := best.reach(wanted)) <= at:
            return None
        return best.rows[:, :, at - best.start : stop - best.start]
