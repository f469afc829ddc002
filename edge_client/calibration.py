"""What a drafter's confidence is worth: how often ids of that confidence turned out right, learnt as commits come.

Must not know: models, wire, time. Owned by the client (it outlives a text), used by `edge_engine`. A draft's
probability of an id is not the probability that the target chooses it, and a gap between noised scores is none at all.
"""

from __future__ import annotations

from bisect import bisect_right

from shared.fading_share import FadingShare

BIN_EDGES = (0.01, 0.03, 0.08, 0.16, 0.28, 0.42, 0.56, 0.7, 0.82, 0.9, 0.96, 0.99)
PRIOR_TRIES = 6.0
"""Tries of the same bin that the drafter's own word counts as much as, before anything was learnt."""
DECAY = 0.985
"""What a try still weighs after one more in its bin: about the last sixty count."""
RECENT_DECAY = 0.9
MOST, LEAST = 0.995, 0.001


class Recent:
    """A share that follows the last dozen tries."""

    def __init__(self, first: float, weight: float = 4.0) -> None:
        """`first`: taken to be the share until tries come, as if of `weight` of them."""
        self._first, self._share = first, FadingShare(RECENT_DECAY, weight)

    @property
    def share(self) -> float:
        """The share of right ones."""
        return self._share.mixed_with(self._first)

    @property
    def count(self) -> int:
        """Tries so far."""
        return self._share.count

    def learn(self, is_right: bool) -> None:
        """One more try."""
        self._share.note(is_right)


class Calibration:
    """Measured shares by who drafted, whether it was the first choice, and how confident it was."""

    def __init__(self) -> None:
        self._bins: dict[tuple[str, int, int], FadingShare] = {}

    def chance(self, source: str, rank: int, confidence: float) -> float:
        """The probability that the target chooses such an id where the text stands there."""
        found = self._bins.get(self._key(source, rank, confidence))
        share = found.mixed_with(confidence) if found is not None else confidence
        return min(MOST, max(LEAST, share))

    def learn(self, source: str, rank: int, confidence: float, is_right: bool) -> None:
        """The text stood where such an id was proposed: the target chose it, or not."""
        self._bins.setdefault(self._key(source, rank, confidence), FadingShare(DECAY, PRIOR_TRIES)).note(is_right)

    def _key(self, source: str, rank: int, confidence: float) -> tuple[str, int, int]:
        return source, min(rank, 2), bisect_right(BIN_EDGES, confidence)
