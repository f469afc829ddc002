"""A verifier, a device and the link between them under a virtual clock: the product's engines, simulated time.

The device's `EdgeEngine` and the verifier's scheduler, sessions, hint trie and step run as they are; only three things
are stood in for: the target (its recorded ids), the socket (a delay) and the time that a forward takes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.recorded_target import (
    UNLIMITED,
    Frames,
    RecordedJudge,
    RecordedTarget,
    SimSlot,
    Times,
    VerifierClock,
    scatter,
)
from bench.traces import Trace
from cloud_verifier.reports import NoObserver
from cloud_verifier.scheduler import Scheduler
from cloud_verifier.sessions import Session
from cloud_verifier.step import StepRunner
from cloud_verifier.step_cost import StepCost
from edge_client.controller import EngineSettings, Experience
from edge_client.drafter import Drafter, DraftTask, HintTree
from edge_client.edge_engine import DraftJob, EdgeEngine
from shared.codec import encode_down, encode_up
from shared.sampling import GREEDY, SamplingParams
from shared.types import Commit, DownFrame, Epoch, Finished, Hint, Limits, Open, Pace, Rule, SessionId

MOST_EVENTS = 1_000_000


@dataclass
class Outcome:
    """What one simulated text took."""

    tokens: int
    seconds: float
    steps: int
    dry_steps: int
    ids_sent: int
    up_bytes: int
    down_bytes: int
    hints: int
    draft_steps: int
    judged_by_depth: tuple[int, ...] = ()
    right_by_depth: tuple[int, ...] = ()
    log: list[str] = field(default_factory=list)


class World:
    """One text: a device and a verifier that serves it alone."""

    def __init__(
        self,
        trace: Trace,
        times: Times,
        settings: EngineSettings,
        drafter: Drafter | None,
        *,
        retrieval: Drafter | None = None,
        experience: Experience | None = None,
        sampling: SamplingParams = GREEDY,
        stop_ids: tuple[int, ...] = (),
        seed: int = 1,
        explain: bool = False,
    ) -> None:
        self.trace, self.times = trace, times
        self._noise = random.Random(seed)
        self.request = Open(
            ids=trace.prompt,
            generated_from=len(trace.prompt),
            fingerprint=b"",
            sampling=sampling,
            max_new_tokens=len(trace.ids),
            epoch=Epoch(0),
            seed=trace.seed,
            rule=Rule.AGREEMENT,
            stop_ids=stop_ids,
            pace=settings.pace,
        )
        self.clock = VerifierClock()
        self.frames = Frames(self.clock)
        limits = Limits(max_wait_ms=500)
        self.session = Session(
            SessionId(b"s"), self.request, trace.seed, SimSlot(len(trace.prompt) - 1), limits, 1 << 20, b"t", 0.0
        )
        self.session.sink = self.frames
        cost = StepCost()
        for tokens in (1, 2, 4, 8, 16, 32, 64):  # a verifier that has been at work knows its steps
            for _ in range(30):
                cost.note(tokens, times.step(tokens))
        self.scheduler = Scheduler(cost=cost)
        self.scheduler.add(self.session)
        target = RecordedTarget(times, self.clock, self._noise)
        self.runner = StepRunner(
            target,
            RecordedJudge(trace),
            self.scheduler,
            NoObserver(),
            self.clock,
            self._fail,
        )
        self.ids = list(trace.prompt)
        self.engine = EdgeEngine(
            self.request, settings, has_model=drafter is not None, retrieval=retrieval, experience=experience
        )
        self._drafter = drafter
        if retrieval is not None:
            retrieval.begin(DraftTask.of(self.request, trace.seed))
        self._fed: set[tuple[int, ...]] = {()}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._up_free = self._down_free = 0.0
        self._inbox: list[Callable[[], None]] = []
        self._turn_at: float | None = None
        self._busy_until = 0.0
        self._timer: float | None = None
        self._pace = settings.pace
        self._is_over = False
        self.out = Outcome(0, 0.0, 0, 0, 0, 0, 0, 0, 0)
        self._explain = explain

    # ------------------------------------------------------------ time

    def run(self) -> Outcome:
        """Until the whole text is on the device."""
        self._verifier_turn_at(0.0)
        self._at(self.times.round_trip_s / 2, self._opened)
        for _ in range(MOST_EVENTS):
            if self._is_over:
                break
            now, _, action = heapq.heappop(self._events)
            action(now)
        assert self.ids == [*self.trace.prompt, *self.trace.ids], "the device does not hold the recorded text"
        usage = self.session.usage
        counters = self.engine.usage()
        self.out.tokens, self.out.steps, self.out.dry_steps = len(self.trace.ids), usage.steps, usage.dry_steps
        self.out.ids_sent, self.out.hints = counters.hint_nodes, counters.hints
        self.out.draft_steps = counters.draft_steps
        self.out.judged_by_depth, self.out.right_by_depth = counters.judged_by_depth, counters.right_by_depth
        return self.out

    def _opened(self, now: float) -> None:
        self.engine.opened(self.session.opened(), self.ids, now, self.times.round_trip_s)
        self._device_turn(now)

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _link_s(self) -> float:
        half = self.times.round_trip_s / 2 * scatter(self._noise, self.times.jitter)
        return half + (self.times.round_trip_s if self._noise.random() < self.times.loss else 0.0)

    # ------------------------------------------------------------ the verifier

    def _verifier_turn_at(self, time: float) -> None:
        time = max(time, self._busy_until)
        if self._turn_at is None or time < self._turn_at:
            self._turn_at = time
            self._at(time, self._verifier_turn)

    def _verifier_turn(self, now: float) -> None:
        if self._turn_at != now or self._is_over:
            return
        self._turn_at = None
        self.clock.now = max(self.clock.now, now)
        commands, self._inbox = self._inbox, []
        for command in commands:
            command()
        plan = self.scheduler.plan(self.clock.now)
        if plan is None:
            wake = self.scheduler.wake_at(self.clock.now)
            if wake is not None and self.session.finished is None:
                self._verifier_turn_at(max(wake, self.clock.now + 1e-6))
            return
        self.runner.run(plan, 0.0)
        for left, frame in self.frames.sent:
            self._deliver(left, frame)
        self.frames.sent.clear()
        self._busy_until = self.clock.now + self.times.commit_s
        self._verifier_turn_at(self._busy_until)

    def _deliver(self, left: float, frame: DownFrame) -> None:
        self.out.down_bytes += encode_down(frame).ByteSize()
        arrives = self._down_free = max(self._down_free, left + self._link_s())
        self._at(arrives, lambda now: self._receive(now, frame))

    def _fail(self, session: Session, error: Exception) -> None:
        raise AssertionError(f"the simulated session failed: {error}")

    # ------------------------------------------------------------ the device

    def _receive(self, now: float, frame: DownFrame) -> None:
        if isinstance(frame, Finished):
            self.out.seconds, self._is_over = now, True
            return
        if isinstance(frame, Commit):
            self.ids.extend(frame.ids)
            self.engine.committed(self.ids, frame, now)
            if self._explain:
                self.out.log.append(f"{1000 * now:8.1f} +{len(frame.ids)} {self.engine.explain()}")
        self._device_turn(now)

    def _device_turn(self, now: float) -> None:
        job = self.engine.next_job(now)
        if job is not None:
            self._at(now + self._draft_s(job), lambda later: self._drafted(later, job, later - now))
        pace, run_ahead = self.engine.pace(now), self.request.run_ahead
        if pace is not self._pace or self.engine.unacknowledged >= run_ahead // 2:
            self._pace = pace
            self._send(now, Pace(self.request.epoch, pace, run_ahead, self.engine.length))
            self.engine.acknowledged()
        due = self.engine.send_at(now)
        if due is not None and due <= now:
            hint = self.engine.take_hint(now)
            if hint is not None:
                self._send(now, hint)
        elif due is not None and due < UNLIMITED and (self._timer is None or due < self._timer or self._timer < now):
            self._timer = due
            self._at(due, self._device_turn)

    def _send(self, now: float, frame: Hint | Pace) -> None:
        size = encode_up(frame).ByteSize()
        self.out.up_bytes += size
        leaves = max(now, self._up_free - self.times.round_trip_s / 2) + size / self.times.up_bytes_per_s
        arrives = self._up_free = max(self._up_free, leaves + self._link_s())
        self._at(arrives, lambda later: self._arrive(later, frame))

    def _arrive(self, now: float, frame: Hint | Pace) -> None:
        self._inbox.append(lambda: self._take(frame, now))
        self._verifier_turn_at(now)

    def _take(self, frame: Hint | Pace, received_at: float) -> None:
        if isinstance(frame, Pace):
            self.session.set_pace(frame)
            return
        had_none = not self.session.trie.children
        self.session.hint(frame, received_at=received_at)
        if had_none and self.session.trie.children:
            self.session.note_hint(self.clock.now)

    def _draft_s(self, job: DraftJob) -> float:
        """By how many ids of the path have no keys and values on the device yet."""
        generated = tuple(self.ids[len(self.trace.prompt) : job.length]) + job.budget.path
        unfed = 0
        at = generated
        while at not in self._fed:
            self._fed.add(at)
            unfed, at = unfed + 1, at[:-1]
        return self.times.draft_s * (1 + self.times.refeed * max(0, unfed - 1))

    def _drafted(self, now: float, job: DraftJob, took_s: float) -> None:
        assert self._drafter is not None
        self._drafter.sync(self.ids[: job.length])
        proposed: HintTree = self._drafter.propose(job.budget)
        self.engine.drafted(job, proposed, self._drafter.name, now, took_s)
        self._device_turn(now)
