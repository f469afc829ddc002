"""How long ids are on their way up: what a narrow uplink costs, learnt from round trips.

Pure: times are arguments. Must not know: frames' contents. Used by `link_clock` and `edge_engine`. Several guesses are
held against what round trips show, each with a queue of its own, for on a narrow link frames wait for each other; the
guess that leaves the least unexplained is believed. Ids are counted, not bytes: under the rejection rule what leaves
when must not depend on what was drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FRAME_IDS = 3
"""What a frame without ids weighs, as ids."""
GUESSES_S = (0.0, *(0.0002 * 2 ** (step / 2) for step in range(16)))
"""Of one id; the first: the link is wide, and ids cost no time."""
DECAY = 0.87
"""What a round trip still counts after one more."""
LEAST_FRAMES = 4
CLEARLY = 0.5
LEAST_SCATTER_S = 0.001
"""A guess is believed when it leaves less than this share of the scatter that a wide link would leave, and there that
is more than the second: less is not worth explaining."""
IMPOSSIBLE_SHARE, IMPOSSIBLE_S = 1.2, 0.002
"""No frame is longer on its way up than its round trip took; so much is left to a guess that is a little off."""
DOUBTS, MOST_DOUBTS = 2, 4
"""A guess that said the impossible so often is not believed until it was right again as often; no more are held."""


@dataclass
class _Guess:
    """One id takes `id_s`: when the link would be free again, and how round trips scatter less the way up.

    A queue that a round trip has shown to be shorter than thought is cut by what was too much: `cut_s`, all told.
    """

    id_s: float
    free_at: float = -math.inf
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    cut_s: float = 0.0
    doubts: int = 0

    def way_s(self, now: float, ids: int) -> float:
        return max(0.0, self.free_at - now) + (FRAME_IDS + ids) * self.id_s

    def send(self, now: float, ids: int) -> float:
        """The way of a frame that leaves, as if nothing had ever been cut: what is cut later shortens it too."""
        way_s = self.way_s(now, ids)
        self.free_at = now + way_s
        return way_s + self.cut_s

    def way_of(self, sent: float) -> float:
        """What `send` said, by what is known now."""
        return max(0.0, sent - self.cut_s)

    def note(self, sent: float, round_trip_s: float) -> None:
        rest_s = round_trip_s - self.way_of(sent)
        if round_trip_s - rest_s > IMPOSSIBLE_SHARE * round_trip_s + IMPOSSIBLE_S:
            self.free_at += rest_s
            self.cut_s -= rest_s
            self.doubts = min(MOST_DOUBTS, self.doubts + 1)
        else:
            self.doubts = max(0, self.doubts - 1)
        self.weight = DECAY * self.weight + 1
        self.total = DECAY * self.total + rest_s
        self.squares = DECAY * self.squares + rest_s * rest_s

    @property
    def scatter(self) -> float:
        mean = self.total / self.weight
        return max(0.0, self.squares / self.weight - mean * mean)


class Uplink:
    """Follows one device's way up to its verifier; it outlives a text."""

    def __init__(self) -> None:
        self._guesses = [_Guess(id_s) for id_s in GUESSES_S]
        self._believed, self._answered = 0, 0

    @property
    def id_s(self) -> float:
        """Seconds that one id is on its way for its length alone; 0 on a wide link, and until round trips tell."""
        return self._guesses[self._believed].id_s

    def begin(self) -> None:
        """A new stream: nothing is in the queue. What was learnt stays."""
        for guess in self._guesses:
            guess.free_at = -math.inf

    def send(self, now: float, ids: int) -> tuple[float, ...]:
        """A frame of so many ids leaves. What `note` and `way_of` want to be told of it; see them."""
        return tuple(guess.send(now, ids) for guess in self._guesses)

    def note(self, ways_s: tuple[float, ...], round_trip_s: float) -> None:
        """The frame of which `send` said this was answered after so long, the verifier's own time taken off."""
        for guess, way_s in zip(self._guesses, ways_s, strict=True):
            guess.note(way_s, round_trip_s)
        self._answered += 1
        if self._answered >= LEAST_FRAMES:
            possible = [index for index, guess in enumerate(self._guesses) if guess.doubts < DOUBTS]
            best = min(possible, key=lambda index: self._guesses[index].scatter)
            wide = self._guesses[0].scatter
            is_clear = wide > LEAST_SCATTER_S**2 and self._guesses[best].scatter < CLEARLY * wide
            self._believed = best if is_clear else 0

    def way_of(self, ways_s: tuple[float, ...]) -> float:
        """How much longer than no bytes that frame was on its way."""
        return self._guesses[self._believed].way_of(ways_s[self._believed])

    def way_s(self, now: float, ids: int) -> float:
        """How much longer than no bytes a frame of so many ids would be on its way, were it to leave now."""
        return self._guesses[self._believed].way_s(now, ids)

    def own_s(self, ids: int) -> float:
        """The same, but for the queue before it."""
        return (FRAME_IDS + ids) * self.id_s
