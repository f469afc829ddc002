"""Draft models made worse on purpose: right at about a given share, or never.

Must not know: wire, verifier. Called by `link`. They cost what the real model costs, and are as sure of themselves.
What is spoilt follows from the prefix alone (its length, its last id, the model's own choice), so a prefix that is fed
again gives the same row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.drafter import Budget, Drafter, DraftTask, NextTokenModel, Row
from shared.randomness import noise_hash, unit

SEED = 20_261_130
NEXT_RANKS = 8
"""The true choice changes places with one of so many that come after it, as where a real draft errs: there too the
target's choice is mostly near the top."""


class DegradedModel:
    """A NextTokenModel whose choice stands with probability `keep`; 0 and `is_useless`: scores of other ids."""

    def __init__(self, model: NextTokenModel, valid_ids: npt.NDArray[np.bool_]) -> None:
        self.keep, self.is_useless = 1.0, False
        self._model, self.valid_ids = model, valid_ids
        self.context_size = model.context_size

    @property
    def length(self) -> int:
        """See NextTokenModel."""
        return self._model.length

    def rewind(self, length: int) -> None:
        """See NextTokenModel."""
        self._model.rewind(length)

    def save_rows(self, start: int) -> Any:
        """See NextTokenModel."""
        return self._model.save_rows(start)

    def append_rows(self, rows: Any) -> None:
        """See NextTokenModel."""
        self._model.append_rows(rows)

    def feed(self, ids: Sequence[int]) -> Row:
        """See NextTokenModel; the scores are spoilt."""
        row = self._model.feed(ids)
        if self.keep >= 1 and not self.is_useless:
            return row
        known = np.where(self.valid_ids, row, -np.inf)
        best = int(np.argmax(known))
        hashed = noise_hash(SEED + ids[-1], self.length, best)
        if self.is_useless:
            return np.roll(row, 1 + hashed % (len(row) - 1))
        return row if unit(hashed) < self.keep else _swapped(row, known, best, hashed % NEXT_RANKS)


def _swapped(row: Row, known: Row, best: int, rank: int) -> Row:
    """The row with its best score at the id that was `rank` places behind the second, and the other way round."""
    count = min(NEXT_RANKS + 1, len(row))
    near = np.argpartition(-known, count - 1)[:count]
    near = near[np.argsort(-known[near], kind="stable")]
    other = int(near[1 + rank % (count - 1)])
    spoilt = row.copy()
    spoilt[best], spoilt[other] = row[other], row[best]
    return spoilt


def agreement(drafter: Drafter, task: DraftTask, context: Sequence[int], ids: Sequence[int]) -> float:
    """Share of the positions of a text at which the drafter's first proposal is the text's own id."""
    drafter.begin(task)
    hits = 0
    for place, token in enumerate(ids):
        drafter.sync([*context, *ids[:place]])
        hits += drafter.propose(Budget(1)).ids[:1] == (token,)
    return hits / max(1, len(ids))
