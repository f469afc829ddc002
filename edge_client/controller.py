"""Decides how to draft: whether at all, how far, how wide, when hints leave, and at which pace the verifier runs.

Pure: times are arguments. Must not know: wire, models, trees. Used by `edge_engine`. What it goes by: the link clock
(round trip, step, draft time) and how often drafted ids stood. "No hints at all" is one of its choices: text then comes
as from plain streaming, and now and then one id is drafted without being sent, to see whether things have changed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from edge_client.calibration import Recent
from edge_client.link_clock import LinkClock
from shared.types import PaceKind

FIRST_ACCEPTANCE = 0.7
WORTH_IT, NOT_WORTH_IT = 1.04, 1.005
"""Drafting begins again when the expected gain is above the first, and ends when it is below the second."""
LOSS = 0.97
"""Drafting ends when text comes slower than this share of what streaming alone would give."""
WINDOW_S, WINDOW_COMMITS = 1.0, 12
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.5, 8.0
PROBE_EVERY_S, PROBE_SHARE = 0.1, 0.1
"""While resting one id is drafted so often, and on no more than this share of the device's time."""
LEAST_MARGIN_S = 0.0015


@dataclass(frozen=True)
class EngineSettings:
    """What the caller allows."""

    depth: int = 24
    """Ids drafted ahead of the committed ones at most; 0: no hints."""
    width: int = 4
    """Alternatives of one id at most; 1: chains."""
    reach: float = 0.03
    """What will be reached less often than this is not drafted."""
    send_reach: float = 0.02
    """What will be reached less often than this is not sent."""
    pace: PaceKind = PaceKind.RUN_ON


@dataclass(frozen=True)
class Decision:
    """How to go on, and why."""

    is_drafting: bool
    is_probe: bool
    """Not drafting, but one id may be drafted now to see how often drafts are right."""
    depth: int
    width: int
    pace: PaceKind
    margin_s: float
    """Hints leave so long before the last moment."""
    reason: str
    why: str
    """The reason and all that was gone by, in one line."""


@dataclass(frozen=True)
class _Seen:
    """A commit: when it came and how many ids it brought."""

    at: float
    ids: int


class Controller:
    """One text's choices. Acceptance is carried over from text to text by the caller."""

    def __init__(self, settings: EngineSettings, acceptance: Recent | None = None) -> None:
        self.settings = settings
        self.acceptance = acceptance or Recent(FIRST_ACCEPTANCE)
        self._seen: deque[_Seen] = deque()
        self._plain_gaps: deque[float] = deque(maxlen=16)
        self._last: _Seen | None = None
        self._was_plain = False
        self._is_resting = False
        self._rest_until = self._probed_at = -math.inf
        self._backoff_s = FIRST_BACKOFF_S
        self._reason = "begins"
        self.rests = 0
        self.is_stopped = False

    # ------------------------------------------------------------ what happened

    def note_judged(self, was_right: bool) -> None:
        """The target chose an id where something had been drafted."""
        self.acceptance.learn(was_right)

    def note_commit(self, now: float, ids: int, is_plain: bool) -> None:
        """A commit of so many ids. `is_plain`: its step had no hints."""
        if self._last is not None:
            gap = now - self._last.at
            if is_plain and self._was_plain and ids == self._last.ids == 1:
                self._plain_gaps.append(gap)
            if not self._is_resting:
                self._seen.append(_Seen(gap, ids))
        self._last, self._was_plain = _Seen(now, ids), is_plain
        while len(self._seen) > WINDOW_COMMITS and sum(seen.at for seen in self._seen) > WINDOW_S:
            self._seen.popleft()

    def note_probe(self, now: float) -> None:
        """A probe was drafted."""
        self._probed_at = now

    def stop(self, why: str) -> None:
        """No hints any more."""
        self._is_resting, self._reason, self._rest_until = True, why, math.inf
        self._probed_at = math.inf
        self.is_stopped = True

    def note_pause(self) -> None:
        """The stream was cut: the time until the next commit says nothing."""
        self._last = None
        self._seen.clear()

    # ------------------------------------------------------------ choosing

    def decide(self, now: float, clock: LinkClock, has_free_hints: bool = False) -> Decision:
        """What to do now. `has_free_hints`: some drafter costs no time to speak of."""
        gain = self.expected_gain(clock, has_free_hints)
        if self.settings.depth <= 0:
            return self._decision(now, clock, gain, "none are wanted")
        if self._is_resting:
            if now >= self._rest_until and gain > WORTH_IT:
                self._is_resting, self._reason = False, f"expected gain {gain:.2f}"
                self._seen.clear()
        elif (why := self._why_rest(clock, gain)) is not None:
            self._is_resting, self._reason = True, why
            self._rest_until = now + self._backoff_s
            self._backoff_s = min(MOST_BACKOFF_S, 2 * self._backoff_s)
            self.rests += 1
        elif self._is_full_window and self._rate() > 1.1 * self._streaming_rate(clock):
            self._backoff_s = FIRST_BACKOFF_S
        return self._decision(now, clock, gain, self._reason)

    def _why_rest(self, clock: LinkClock, gain: float) -> str | None:
        if self.acceptance.count >= 4 and gain < NOT_WORTH_IT:
            return f"expected gain {gain:.2f}"
        streaming = self._streaming_rate(clock)
        if self._is_full_window and streaming > 0 and self._rate() < LOSS * streaming:
            return f"{self._rate():.1f} ids/s with hints, {streaming:.1f} without"
        return None

    @property
    def _is_full_window(self) -> bool:
        return len(self._seen) >= WINDOW_COMMITS and sum(seen.at for seen in self._seen) >= WINDOW_S / 2

    def _rate(self) -> float:
        return sum(seen.ids for seen in self._seen) / max(1e-9, sum(seen.at for seen in self._seen))

    def _streaming_rate(self, clock: LinkClock) -> float:
        """Ids a second without hints: by the time between plain commits, else by plain steps."""
        if self.settings.pace is PaceKind.WAIT:
            return 0.0
        if len(self._plain_gaps) >= 4:
            return 1 / max(1e-9, sorted(self._plain_gaps)[len(self._plain_gaps) // 2])
        return 0.0

    def expected_gain(self, clock: LinkClock, has_free_hints: bool = False) -> float:
        """Ids a second with hints over ids a second without, by the measured times and acceptance.

        A model of one cycle, from a correction to the next: the verifier runs alone while the round trip passes and the
        draft overtakes it, then takes what is drafted meanwhile in each step. It is told in docs/edge_engine.md.
        """
        step, draft, round_trip = clock.plain_step_s, clock.draft_s, clock.round_trip_s
        if step is None or round_trip is None or (draft is None and not has_free_hints):
            return math.inf
        draft = 0.1 * step if has_free_hints or draft is None else draft
        if draft >= step:
            return 1.0
        share = min(0.98, self.acceptance.share)
        alone = round_trip / (step - draft)
        run = min(share / (1 - share), float(self.settings.depth))
        usable = run * math.pow(share, alone)
        costs = 1.0 if clock.step_s is None else max(1.0, min(1.5, clock.step_s / step))
        return (alone + usable + 1) / (alone + costs * (usable * draft / step + 1))

    def _decision(self, now: float, clock: LinkClock, gain: float, why: str) -> Decision:
        is_drafting = not self._is_resting and self.settings.depth > 0
        draft_s = clock.draft_s or 0.0
        every_s = max(PROBE_EVERY_S, draft_s / PROBE_SHARE)
        is_probe = self._is_resting and now - self._probed_at >= every_s
        pace = self.settings.pace if is_drafting else PaceKind.RUN_ON
        margin_s = LEAST_MARGIN_S + min(2 * clock.jitter_s, 0.25 * (clock.step_s or 0.0))
        what = f"hints {'on' if is_drafting else 'off'} ({why}), pace {pace.value}"
        text = (
            f"{what}; gain {gain:.2f}, acceptance {self.acceptance.share:.2f}, round trip {_ms(clock.round_trip_s)}, "
            f"step {_ms(clock.step_s)}, draft {_ms(clock.draft_s)}, margin {_ms(margin_s)}"
        )
        return Decision(
            is_drafting, is_probe, self.settings.depth, self.settings.width, pace, margin_s, reason=why, why=text
        )


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1000 * seconds:.1f} ms"
