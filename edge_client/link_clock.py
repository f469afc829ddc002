"""The link and the verifier's steps, as seen from the device: round trip, step time, and when the next step begins.

Pure: times are arguments, in seconds of one clock. Must not know: frames' contents, drafting. Used by `edge_engine`.
All is learnt from commits (docs/adr/0011): a commit says how long its step took and how long the newest hint it saw had
waited for it, so the rest of the time since that hint was sent is the round trip.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from edge_client.uplink import Uplink

FOLLOW = 0.3
"""Weight of a new measurement."""
RECENT_STEPS = 16
SENT_REMEMBERED = 128
MOST_GUESSED_S = 0.2
"""An answer to an open that took longer has waited for something else than the link."""


class Smoothed:
    """A mean that follows its measurements, and how far they scatter about it."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.scatter = 0.0
        self._odd: list[float] = []

    def note(self, value: float) -> None:
        """One more. Three in a row that all lie far off on one side are a change, not scatter: they are believed."""
        if self.value is None:
            self.value, self.scatter = value, value / 16
            return
        off = value - self.value
        if abs(off) > 4 * self.scatter + 0.1 * self.value:
            self._odd.append(value)
            if len(self._odd) < 3 or not all((each > self.value) == (off > 0) for each in self._odd[-3:]):
                self.scatter += FOLLOW / 4 * (min(abs(off), 4 * self.scatter + 0.02 * self.value) - self.scatter)
                return
            self.value = sum(self._odd[-3:]) / 3
        else:
            self.value += FOLLOW * off
            self.scatter += FOLLOW / 2 * (abs(off) - self.scatter)
        self._odd.clear()


class LinkClock:
    """Follows one session's link. Unknown times are None until something was measured."""

    def __init__(self, uplink: Uplink | None = None) -> None:
        """`uplink`: what is known of the way up from earlier texts."""
        self.uplink = uplink or Uplink()
        self._round_trip, self._step, self._draft = Smoothed(), Smoothed(), Smoothed()
        self._guessed_round_trip: float | None = None
        self._hinted_step = Smoothed()
        self._plain_steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._running_s: float | None = None
        self._sent: OrderedDict[int, tuple[float, tuple[float, ...]]] = OrderedDict()
        self.last_commit_at: float | None = None
        self.queue_s = 0.0

    # ------------------------------------------------------------ what happened

    def note_sent(self, last_node: int, now: float, ids: int = 1) -> None:
        """A hint of so many ids went out; its last node has this number."""
        self._sent[last_node] = now, self.uplink.send(now, ids)
        if len(self._sent) > SENT_REMEMBERED:
            self._sent.popitem(last=False)

    def note_draft(self, seconds: float) -> None:
        """A draft step took so long."""
        self._draft.note(seconds)

    def note_opened(self, seconds: float) -> None:
        """An open or resume was answered after so long: a first idea of the round trip, and no more."""
        self._guessed_round_trip = min(MOST_GUESSED_S, seconds)
        self.uplink.begin()
        self._sent.clear()  # the numbers of another stream

    def note_commit(
        self, now: float, step_s: float, queue_s: float, seen_node: int, hint_wait_s: float | None, is_plain: bool
    ) -> float | None:
        """A commit came; returns the round trip that it shows, if it shows one. `is_plain`: no hint was in its step."""
        measured = None
        sent = self._sent.get(seen_node)
        if sent is not None and hint_wait_s is not None:
            sent_at, ways_s = sent
            measured = max(0.0, now - sent_at - hint_wait_s - step_s)
            self.uplink.note(ways_s, measured)
            self._round_trip.note(max(0.0, measured - self.uplink.way_of(ways_s)))
        for node in [node for node in self._sent if node <= seen_node]:
            del self._sent[node]
        if step_s > 0 and self.last_commit_at is not None:  # the first step of a stream reads the prompt
            self._step.note(step_s)
            if is_plain:
                self._plain_steps.append(step_s)
            else:
                self._hinted_step.note(step_s)
        self.queue_s += FOLLOW * (queue_s - self.queue_s)
        self.last_commit_at, self._running_s = now, None
        return measured

    def newest_arrived(self, now: float, seen_node: int) -> int:
        """The highest node number that the verifier had when it sent the commit that came now."""
        before = now - (self.round_trip_s or 0.0)
        sent = ((node, at + self.uplink.way_of(ways_s)) for node, (at, ways_s) in self._sent.items())
        return max([seen_node, *(node for node, up_at in sent if up_at <= before)])

    def expect_step(self, has_hints: bool) -> None:
        """The step that began when the last commit left: with hints, or without."""
        self._running_s = self._hinted_step.value if has_hints else self.plain_step_s

    # ------------------------------------------------------------ reading

    @property
    def round_trip_s(self) -> float | None:
        """There and back, without the verifier's own time, and without what a narrow uplink takes for each id."""
        return self._guessed_round_trip if self._round_trip.value is None else self._round_trip.value

    @property
    def step_s(self) -> float | None:
        """A recent step of the verifier, with what hints it verified."""
        return self._step.value

    @property
    def is_measured(self) -> bool:
        """True if the round trip is more than a guess."""
        return self._round_trip.value is not None

    @property
    def hinted_step_s(self) -> float | None:
        """A recent step that verified hints; None if there was none."""
        return self._hinted_step.value

    @property
    def plain_step_s(self) -> float | None:
        """A recent step without hints; with hints if there was none without."""
        if not self._plain_steps:
            return self._step.value
        return sorted(self._plain_steps)[len(self._plain_steps) // 2]

    @property
    def draft_s(self) -> float | None:
        """One draft step."""
        return self._draft.value

    @property
    def jitter_s(self) -> float:
        """How far arrivals scatter: steps and the link together."""
        return self._round_trip.scatter + self._step.scatter

    def plans_missed(self, sent_at: float) -> int:
        """How many steps a verifier that runs on begins, from the last commit known here on, before a hint arrives
        whose last bytes went out then. At least 1 after a commit: the step that began when that commit left."""
        last, step, round_trip = self.last_commit_at, self.step_s, self.round_trip_s
        if last is None or not step or round_trip is None or (arrives := sent_at - last + round_trip) < 0:
            return 0
        return 1 if arrives < self._first_s else 2 + math.floor((arrives - self._first_s) / (step + self.queue_s))

    @property
    def _first_s(self) -> float:
        """The step that runs now, and the queue before it."""
        return (self._running_s or self.step_s or 0.0) + self.queue_s

    def next_departure(self, now: float, ids: int = 1) -> float | None:
        """The latest moment to send a hint of so many ids that the next step that can still be reached is to see.

        None: not known.
        """
        last, step, round_trip = self.last_commit_at, self.step_s, self.round_trip_s
        if last is None or not step or round_trip is None:
            return None
        missed = self.plans_missed(now + self.uplink.way_s(now, ids))  # the queue before it is gone by the departure
        begins = 0.0 if missed == 0 else self._first_s + (missed - 1) * (step + self.queue_s)
        return last - round_trip - self.uplink.own_s(ids) + begins
