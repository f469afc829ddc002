"""A share of right ones among tries, old tries fading: how often hints of one kind stood.

Must not know: what was tried. Called by the verifier's `hint_choice` and the device's `calibration`.
"""

from __future__ import annotations


class FadingShare:
    """Begins at a prior that counts as much as some tries and fades as they do."""

    def __init__(self, decay: float, prior_tries: float) -> None:
        """`decay`: what a try still weighs after one more; `prior_tries`: tries that the prior counts as much as."""
        self._decay, self._prior_tries = decay, prior_tries
        self._tries = self._right = 0.0
        self.count = 0
        """Tries so far, unfaded."""

    def note(self, is_right: bool) -> None:
        """One more try."""
        self._tries = self._tries * self._decay + 1
        self._right = self._right * self._decay + is_right
        self._prior_tries *= self._decay
        self.count += 1

    def mixed_with(self, prior: float) -> float:
        """The share of right ones, with what it was taken to be before there were any."""
        return (self._right + prior * self._prior_tries) / (self._tries + self._prior_tries)
