"""Decides how to draft: whether at all, how far, how wide, when hints leave, and at which pace the verifier runs.

Pure: times are arguments. Must not know: wire, models, trees. Used by `edge_engine`. What it goes by: the link clock
(round trip, step, draft time) and how often drafted ids stood. "No hints at all" is one of its choices: text then comes
as from plain streaming; now and then one id is drafted, and sent if only to measure the link, to see whether things
have changed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from edge_client.calibration import Calibration, Recent
from edge_client.link_clock import LinkClock
from edge_client.uplink import Uplink
from shared.types import PaceKind

FIRST_ACCEPTANCE, FIRST_FREE_ACCEPTANCE, FIRST_OTHERS = 0.7, 0.3, 0.4
FREE_SHARE = 0.1
"""What one id of look-up is taken to cost, as a share of a step."""
RARE = 0.05
WORTH_IT, NOT_WORTH_IT = 1.04, 1.005
"""Drafting begins again when the expected gain is above the first, and ends when it is below the second."""
LOSS, CLEARLY = 0.97, 1.1
"""Drafting ends when text comes slower than this share of what streaming alone would give."""
WINDOW_S, WINDOW_COMMITS = 1.0, 12
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.5, 8.0
PROBE_EVERY_S, PROBE_SHARE, MOST_PROBE_WAIT_S = 0.1, 0.1, 2.0
"""While resting one id is drafted so often, and for this share of the device's time; but where taking in what was
committed meanwhile takes longer, every two seconds all the same, or the draft would fall behind for ever."""
LEAST_MARGIN_S, MARGIN_SHARE = 0.0015, 0.04
"""Hints leave at least so long before the last moment, and this share of a step: steps with few hints are a little
shorter than those with many, and a hint that comes late waits for a whole step."""

ID_COST, MOST_ID_COST = 0.2, 0.5
LEAST_DRAFT_SHARE = 0.08
"""On a narrow uplink an id is worth sending where its reach is `ID_COST` times the draft steps that its way takes: what
is sent earlier for its sake would have been drafted meanwhile. It costs no more than the second. A draft step counts as
no less than the third of a step of the verifier: so fast a draft is not what is short."""


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


@dataclass
class Experience:
    """What was learnt of a pair of models, and of the way up to the verifier; it outlives a text."""

    calibration: Calibration = field(default_factory=Calibration)
    acceptance: Recent = field(default_factory=lambda: Recent(FIRST_ACCEPTANCE))
    """How often the likeliest id was right where the model had drafted."""
    free_acceptance: Recent = field(default_factory=lambda: Recent(FIRST_FREE_ACCEPTANCE))
    """How often look-up had the right id; having none counts as wrong."""
    others: Recent = field(default_factory=lambda: Recent(FIRST_OTHERS))
    """How often, where the likeliest was wrong, another drafted id was right."""
    backoff_s: float = FIRST_BACKOFF_S
    """How long drafting rests after it was measured to cost more than it brought."""
    uplink: Uplink = field(default_factory=Uplink)
    """Of the device, to the verifier that it is used with."""


@dataclass(frozen=True)
class Decision:
    """How to go on, and why."""

    is_drafting: bool
    """Hints leave."""
    uses_model: bool
    """Draft steps are run; False: look-up alone, or nothing."""
    is_probe: bool
    """The model rests, but one id may be drafted now to see how often it is right."""
    depth: int
    width: int
    pace: PaceKind
    margin_s: float
    """Hints leave so long before the last moment."""
    send_reach: float
    """What will be reached less often than this is not sent."""
    reason: str
    why: str
    """The reason and all that was gone by, in one line."""


@dataclass(frozen=True)
class _Gap:
    """The time between two commits, and the ids that the second brought."""

    seconds: float
    ids: int


class Controller:
    """One text's choices."""

    def __init__(self, settings: EngineSettings, experience: Experience | None = None, has_free: bool = False) -> None:
        """`has_free`: there is a drafter that costs next to no time."""
        self.settings, self._has_free = settings, has_free
        self.experience = experience or Experience()
        self._seen: deque[_Gap] = deque()
        self._plain_gaps: deque[float] = deque(maxlen=16)
        self._last_at: float | None = None
        self._was_plain_single = False
        self._is_resting = False
        self._rest_until = self._free_rest_until = self._probe_at = -math.inf
        self._reason = "begins"
        self.rests = self.slow_rests = 0
        self.is_stopped = False

    @property
    def acceptance(self) -> Recent:
        """See Experience."""
        return self.experience.acceptance

    # ------------------------------------------------------------ what happened

    def note_judged(self, was_right: bool, was_another: bool = False) -> None:
        """The target chose an id where the model had drafted. `was_another`: it was drafted, but not the likeliest."""
        self.experience.acceptance.learn(was_right)
        if not was_right:
            self.experience.others.learn(was_another)

    def note_free(self, was_right: bool) -> None:
        """The target chose an id; look-up had it or not."""
        self.experience.free_acceptance.learn(was_right)

    def note_commit(self, now: float, ids: int, is_plain: bool) -> None:
        """A commit of so many ids. `is_plain`: its step had no hints."""
        is_plain_single = is_plain and ids == 1
        if self._last_at is not None:
            gap_s = now - self._last_at
            if is_plain_single and self._was_plain_single:
                self._plain_gaps.append(gap_s)
            if not self._is_resting or (self._has_free and now >= self._free_rest_until):
                self._seen.append(_Gap(gap_s, ids))
        self._last_at, self._was_plain_single = now, is_plain_single
        while len(self._seen) > WINDOW_COMMITS and self._seen_s > WINDOW_S:
            self._seen.popleft()

    def note_probe(self, now: float, took_s: float) -> None:
        """A probe was drafted; with what was committed since the one before, it took so long."""
        self._probe_at = now + min(MOST_PROBE_WAIT_S, max(PROBE_EVERY_S, took_s / PROBE_SHARE))

    def stop(self, why: str) -> None:
        """No hints any more."""
        self._is_resting, self._reason, self._rest_until = True, why, math.inf
        self.is_stopped = True

    def note_pause(self) -> None:
        """The stream was cut: the time until the next commit says nothing."""
        self._last_at = None
        self._seen.clear()

    # ------------------------------------------------------------ choosing

    def decide(self, now: float, clock: LinkClock, has_model: bool = True) -> Decision:
        """What to do now."""
        gain = self.expected_gain(clock) if has_model else 1.0
        free = self.expected_gain(clock, is_free=True) if self._has_free else 1.0
        if self.settings.depth <= 0:
            return self._decision(now, clock, gain, False, "none are wanted")
        if self.is_stopped:
            return self._decision(now, clock, gain, False, self._reason)
        if not has_model:  # under the rejection rule what was drafted before is sent all the same
            if self._has_free:
                self._is_resting, self._reason = True, "look-up alone"
        elif self._is_resting:
            if now >= self._rest_until and gain > WORTH_IT:
                self._is_resting, self._reason = False, f"expected gain {gain:.2f}"
                self._seen.clear()
        else:
            self._maybe_rest(now, clock, gain)
        has_free = self._is_resting and now >= self._free_rest_until and free > NOT_WORTH_IT
        if has_free and self._is_losing(clock):
            self._rest_from_loss(now)
            self.rests += 1
            has_free = False
        elif self._is_gaining(clock):
            self.experience.backoff_s = FIRST_BACKOFF_S
        return self._decision(now, clock, gain, has_free, self._reason)

    def _maybe_rest(self, now: float, clock: LinkClock, gain: float) -> None:
        is_slow = clock.draft_s is not None and clock.draft_s >= (clock.plain_step_s or math.inf)
        if gain < NOT_WORTH_IT and (is_slow or self.acceptance.count >= 4):
            self._is_resting, self._reason = True, f"expected gain {gain:.2f}"
            self._rest_until = now + FIRST_BACKOFF_S  # probes tell when it would pay again, and cost nobody anything
            self.slow_rests += is_slow
            self.rests += 1
            self._seen.clear()  # what look-up brings from now on is counted by itself
        elif self._is_losing(clock):
            self._reason = f"{self._rate():.1f} ids/s with hints, {self._streaming_rate(clock):.1f} without"
            self._is_resting = True
            self.rests += 1
            self._rest_from_loss(now)

    def _is_gaining(self, clock: LinkClock) -> bool:
        return self._is_full_window and self._rate() > CLEARLY * self._streaming_rate(clock) > 0

    def _rest_from_loss(self, now: float) -> None:
        self._rest_until = self._free_rest_until = now + self.experience.backoff_s
        self.experience.backoff_s = min(MOST_BACKOFF_S, 2 * self.experience.backoff_s)
        self._seen.clear()

    def _is_losing(self, clock: LinkClock) -> bool:
        streaming = self._streaming_rate(clock)
        return self._is_full_window and streaming > 0 and self._rate() < LOSS * streaming

    @property
    def _is_full_window(self) -> bool:
        return len(self._seen) >= WINDOW_COMMITS and self._seen_s >= WINDOW_S / 2

    @property
    def _seen_s(self) -> float:
        return sum(gap.seconds for gap in self._seen)

    def _rate(self) -> float:
        return sum(gap.ids for gap in self._seen) / max(1e-9, self._seen_s)

    def _streaming_rate(self, clock: LinkClock) -> float:
        """Ids a second without hints, by the time between plain commits; 0 while that is not known."""
        if self.settings.pace is PaceKind.WAIT:
            return 0.0
        if len(self._plain_gaps) < 4 or clock.plain_step_s is None:
            return 0.0
        gap = sorted(self._plain_gaps)[len(self._plain_gaps) // 2]
        return 1 / max(1e-9, gap, clock.plain_step_s)  # commits that the link brings in bunches are no faster steps

    def expected_gain(self, clock: LinkClock, is_free: bool = False) -> float:
        """Ids a second with hints over ids a second without, by the measured times and acceptance.

        A model of one cycle, from a correction to the next: the verifier runs alone while the round trip passes and the
        draft overtakes it, then takes what is drafted meanwhile in each step. It is told in docs/edge_engine.md.
        """
        step, draft, round_trip = clock.plain_step_s, clock.draft_s, clock.round_trip_s
        draft = FREE_SHARE * step if is_free and step is not None else draft
        if step is None or round_trip is None or draft is None:
            return math.inf
        if draft >= step:
            return 1.0
        share = min(0.98, (self.experience.free_acceptance if is_free else self.acceptance).share)
        alone = round_trip / (step - draft)
        run = min(share / (1 - share), float(self.settings.depth))
        usable = run * math.pow(share, alone)
        costs = max(1.0, min(1.5, (clock.hinted_step_s or step) / step))
        return (alone + usable + 1) / (alone + costs * (usable * draft / step + 1))

    def _decision(self, now: float, clock: LinkClock, gain: float, has_free: bool, why: str) -> Decision:
        is_on = not self._is_resting and not self.is_stopped and self.settings.depth > 0
        is_drafting = is_on or has_free
        is_probe = self._is_resting and not self.is_stopped and now >= self._probe_at
        waits_for_look_up = has_free and not is_on and self.settings.pace is PaceKind.WAIT
        pace = self.settings.pace if is_on or waits_for_look_up else PaceKind.RUN_ON
        step_s = clock.step_s or 0.0
        margin_s = LEAST_MARGIN_S + MARGIN_SHARE * step_s + min(2 * clock.jitter_s, 0.25 * step_s)
        send_reach = self._send_reach(clock)
        what = "on" if is_on else "by look-up" if has_free else "off"
        text = (
            f"hints {what} ({why}), pace {pace.value}; gain {gain:.2f}, acceptance {self.acceptance.share:.2f}, "
            f"depth {self._depth()}, width {self._width()}, "
            f"round trip {_ms(clock.round_trip_s)}{'' if clock.is_measured else ' (a guess)'}, "
            f"step {_ms(clock.step_s)}, draft {_ms(clock.draft_s)}, margin {_ms(margin_s)}"
            f"{f', uplink {_ms(clock.uplink.id_s)} an id, sent from {send_reach:.2f}' if clock.uplink.id_s else ''}"
        )
        return Decision(
            is_drafting, is_on, is_probe, self._depth(), self._width(), pace, margin_s, send_reach, reason=why, why=text
        )

    def _send_reach(self, clock: LinkClock) -> float:
        draft_s = max(clock.draft_s or 0.0, LEAST_DRAFT_SHARE * (clock.step_s or math.inf))
        return max(self.settings.send_reach, min(MOST_ID_COST, ID_COST * clock.uplink.id_s / draft_s))

    def _depth(self) -> int:
        """As far as the text would follow half as often as is asked for, were every id right as often as usual."""
        if self.settings.reach <= 0:
            return self.settings.depth
        share = min(0.98, max(0.05, self.acceptance.share))
        return min(self.settings.depth, 2 + math.ceil(math.log(self.settings.reach / 2) / math.log(share)))

    def _width(self) -> int:
        """As many alternatives as are allowed while they turn out right now and then; else one."""
        return self.settings.width if self.experience.others.share >= RARE else min(2, self.settings.width)


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1000 * seconds:.1f} ms"
