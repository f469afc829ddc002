"""What a step is expected to cost, measured as steps go: a base, and so much for each token fed.

Must not know: models, clocks (durations are handed in). Used by `scheduler` to say which hints are worth their room.
"""

from __future__ import annotations

DECAY = 0.97
PRIOR_STEPS = 4.0
MIN_SHARE, MAX_SHARE = 1e-4, 1.0


class StepCost:
    """Least squares of seconds over tokens, old steps fading."""

    def __init__(self, token_share: float = 0.05) -> None:
        """`token_share`: what one more token costs, as a share of an empty step, until it is measured."""
        self._prior = token_share
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A step over so many tokens took so long."""
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", tokens),
            ("_seconds", seconds),
            ("_squares", tokens * tokens),
            ("_products", tokens * seconds),
        ):
            setattr(self, name, getattr(self, name) * DECAY + value)

    @property
    def mean_s(self) -> float:
        """Seconds of a recent step; 0 before the first."""
        return self._seconds / self._weight if self._weight else 0.0

    @property
    def token_share(self) -> float:
        """What one more token costs, as a share of a step without tokens; within 1e-4..1."""
        if not self._weight:
            return self._prior
        mean_tokens = self._tokens / self._weight
        spread = self._squares / self._weight - mean_tokens**2
        slope = (self._products / self._weight - mean_tokens * self.mean_s) / spread if spread > 0.5 else 0.0
        base = self.mean_s - slope * mean_tokens
        if slope <= 0 or base <= 0:
            return self._prior
        trust = self._weight / (self._weight + PRIOR_STEPS)
        measured = min(MAX_SHARE, max(MIN_SHARE, slope / base))
        return trust * measured + (1 - trust) * self._prior
