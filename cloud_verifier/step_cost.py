"""What a step costs by how many tokens it feeds, measured as steps go.

Must not know: models, clocks (durations are handed in). Used by `scheduler` to say which hints are worth their room.
The curve is no straight line (on a CPU the first tokens cost most, on a GPU some hundreds cost nothing), so it is kept
as points: one for each doubling of the size.
"""

from __future__ import annotations

import math
from bisect import bisect_right

DECAY = 0.9
MOST_SURPRISE = 4.0
LEAST_S = 1e-6
"""A step is taken to last so long at least: a coarse clock may have seen nothing of it."""


class StepCost:
    """Seconds over tokens: means per size, old steps fading, straight lines between them."""

    def __init__(self, token_share: float = 0.05) -> None:
        """`token_share`: what one more token costs, as a share of an empty step, wherever nothing was measured yet."""
        self._share = token_share
        self._points: dict[int, tuple[float, float]] = {}
        self._line: list[tuple[float, float]] = []
        self._mean_s = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A step over so many tokens took so long. One that took absurdly long is believed only in part."""
        size, seconds = tokens.bit_length(), max(seconds, LEAST_S)
        if self._line:
            seconds = min(seconds, MOST_SURPRISE * self.seconds(tokens))
        old_tokens, old_seconds = self._points.get(size, (float(tokens), seconds))
        self._points[size] = _mixed(old_tokens, tokens), _mixed(old_seconds, seconds)
        self._line = sorted(self._points.values())
        self._mean_s = _mixed(self._mean_s or seconds, seconds)

    @property
    def mean_s(self) -> float:
        """Seconds of a recent step; 0 before the first."""
        return self._mean_s

    def seconds(self, tokens: int) -> float:
        """What a step over so many tokens should take; before any was measured in units of an empty step."""
        place = bisect_right(self._line, (tokens, math.inf))
        if not self._line:
            return self._guess(tokens)
        if 0 < place < len(self._line):
            (at, low), (to, high) = self._line[place - 1], self._line[place]
            return low + (high - low) * (tokens - at) / (to - at)
        at, known = self._line[-1] if place else self._line[0]
        return known * self._guess(tokens) / self._guess(at)

    def _guess(self, tokens: float) -> float:
        return 1 + self._share * tokens


def _mixed(old: float, new: float) -> float:
    return DECAY * old + (1 - DECAY) * new
