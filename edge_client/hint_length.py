"""How many ids to draft ahead, from how often drafted ids stood. Pure: no clock, no model.

Must not know: wire, drafting. Called by `generate`. The length is fixed before anything is drawn, from past judgements
alone, so it may be used under every rule.
"""

from __future__ import annotations

import math

FIRST_GUESS = 0.85
"""Taken to be how often a drafted id stands, until measured; weighs as much as FIRST_WEIGHT judged ids."""
FIRST_WEIGHT = 6.0
MEMORY = 0.95
"""What a judgement still weighs after one more hint was judged: about the last twenty hints count."""


class HintLength:
    """Follows acceptance and says where drafting further stops paying."""

    def __init__(self, reach: float) -> None:
        """`reach`: draft as far as the chance that all of it stands is at least this; 0 sets no bound."""
        self._reach = reach
        self._stood = FIRST_GUESS * FIRST_WEIGHT
        self._judged = FIRST_WEIGHT

    @property
    def acceptance(self) -> float:
        """How often a drafted id stood, of those that were judged."""
        return self._stood / self._judged

    def learn(self, accepted: int, is_wholly_accepted: bool) -> None:
        """One hint was judged: so many of its ids stood before the first that did not, if any did not."""
        self._stood = self._stood * MEMORY + accepted
        self._judged = self._judged * MEMORY + accepted + (0 if is_wholly_accepted else 1)

    def depth(self, most: int) -> int:
        """How many ids to draft, from 1 to `most`."""
        if self._reach <= 0 or self.acceptance >= 1:
            return most
        if self.acceptance <= self._reach:
            return 1
        return max(1, min(most, int(math.log(self._reach) / math.log(self.acceptance))))
