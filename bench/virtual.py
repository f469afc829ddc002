"""A verifier, a device and the link between them under a virtual clock: the product's engines, simulated time.

The device's `EdgeEngine` and the verifier's scheduler, sessions, hint trie and step run as they are; only three things
are stood in for: the target (its recorded ids), the socket (a delay) and the time that a forward takes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bench.traces import Trace
from cloud_verifier.judge import Judge, Tested, Verdict
from cloud_verifier.reports import NoObserver
from cloud_verifier.scheduler import PlannedRow, Scheduler
from cloud_verifier.sessions import Session
from cloud_verifier.slot import Slot
from cloud_verifier.step import StepRunner
from cloud_verifier.step_cost import StepCost
from cloud_verifier.target_model import KvUse, RowInput, Timing
from edge_client.controller import EngineSettings
from edge_client.drafter import Drafter, HintTree
from edge_client.edge_engine import DraftJob, EdgeEngine, Experience
from edge_client.generate import draft_task
from shared.codec import encode_down, encode_up
from shared.errors import DraftwireError
from shared.hint_trie import Node
from shared.sampling import GREEDY, SamplingParams
from shared.types import Commit, DownFrame, Epoch, Finished, Hint, Limits, Open, Pace, Rule, SessionId

UNLIMITED = 1e12
MOST_EVENTS = 1_000_000


@dataclass(frozen=True)
class Times:
    """How long things take, in seconds."""

    step_s: float
    round_trip_s: float
    draft_s: float
    node_cost: float = 0.003
    """What a hint node adds to a step, as a share of it."""
    costs: Callable[[int], float] | None = None
    """Seconds of a step over so many tokens; overrides `step_s` and `node_cost`."""
    refeed: float = 1 / 3
    """What each further id in one draft step costs, as a share of a draft step."""
    jitter: float = 0.0
    """Standard deviation of link and step times, as a share of them."""
    loss: float = 0.0
    """Share of messages that are lost and come a round trip later, all behind them waiting."""
    up_bytes_per_s: float = UNLIMITED
    commit_s: float = 0.0
    """The verifier's own time between two steps."""

    def step(self, tokens: int) -> float:
        """One session's step over so many tokens."""
        return self.costs(tokens) if self.costs else self.step_s * (1 + self.node_cost * (tokens - 1))


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
    log: list[str] = field(default_factory=list)


class SimSlot:
    """A Slot that only counts."""

    pages: tuple[int, ...] = ()

    def __init__(self, length: int = 0) -> None:
        self.length = length

    def try_reserve(self, count: int) -> bool:
        """See Slot."""
        return True

    def keep(self, offsets: Sequence[int], is_checked: bool = True) -> None:
        """See Slot."""
        self.length += len(offsets)

    def roll_back(self, length: int) -> None:
        """See Slot."""
        self.length = min(self.length, length)

    def seal(self, ids: Sequence[int]) -> None:
        """See Slot."""

    def adopt(self, ids: Sequence[int]) -> int:
        """See Slot."""
        return self.length

    def scrub(self, from_row: int) -> None:
        """See Slot."""

    def clear(self) -> int:
        """See Slot."""
        return 0


class RecordedTarget:
    """A TargetModel that takes time and gives nothing; `RecordedJudge` knows the ids."""

    context_size = 1 << 20

    def __init__(self, times: Times, clock: VerifierClock, noise: random.Random) -> None:
        self._times, self._clock, self._noise = times, clock, noise
        self._forward_s = 0.0

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        seconds = self._times.step(sum(len(row.ids) for row in rows))
        self._forward_s = seconds * _scatter(self._noise, self._times.jitter)
        self._clock.now += self._forward_s
        return torch.zeros(0)

    def settle(self) -> None:
        """See TargetModel."""

    def timing(self) -> Timing:
        """See TargetModel."""
        return Timing(stage_s=0.0, forward_s=self._forward_s, gather_s=0.0)

    def recover(self) -> None:
        """See TargetModel."""

    def new_slot(self, principal: str) -> SimSlot:
        """See TargetModel."""
        return SimSlot()

    def release(self, slot: Slot) -> None:
        """See TargetModel."""

    def kv_use(self) -> KvUse:
        """See TargetModel."""
        return KvUse()

    def kv_room(self, slots: Sequence[Slot]) -> int:
        """See TargetModel."""
        return 1 << 20


class RecordedJudge(Judge):
    """Judges by what the target wrote."""

    def __init__(self, trace: Trace) -> None:
        self._text = [*trace.prompt, *trace.ids]

    def judge(self, rows: Sequence[PlannedRow], scores: torch.Tensor) -> list[Verdict | DraftwireError | None]:
        """See Judge."""
        return [self._verdict(row) for row in rows]

    def _verdict(self, row: PlannedRow) -> Verdict:
        verdict, at = Verdict(), row.session.length
        planned = {id(node) for node in row.nodes}
        children: list[Node] = list(row.session.trie.children.values())
        while at < len(self._text):
            token = self._text[at]
            here = [node for node in children if id(node) in planned]
            depth = at - row.session.length + 1
            for rank, node in enumerate(here):
                verdict.tested.append(Tested(depth, rank, node.probability, node.token == token))
            verdict.tokens.append(token)
            found = next((node for node in here if node.token == token), None)
            at += 1
            if found is None:
                break
            verdict.accepted.append(found)
            children = list(found.children.values())
        verdict.logprobs = [0.0] * len(verdict.tokens)
        return verdict


@dataclass
class VerifierClock:
    """The verifier's time; a forward moves it on."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Frames:
    """A Sink that keeps frames with the time at which they left."""

    def __init__(self, clock: VerifierClock) -> None:
        self._clock = clock
        self.sent: list[tuple[float, DownFrame]] = []

    def send(self, frame: DownFrame) -> None:
        """See Sink."""
        self.sent.append((self._clock.now, frame))

    def end(self, error: Exception | None) -> None:
        """See Sink."""


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
            retrieval.begin(draft_task(self.request, trace.seed, 0))
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
        self.engine.opened(self.session.opened(), self.ids, 0.0, self.times.round_trip_s)
        self._verifier_turn_at(0.0)
        self._device_turn(0.0)
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
        return self.out

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _link_s(self) -> float:
        half = self.times.round_trip_s / 2 * _scatter(self._noise, self.times.jitter)
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
        self._note_wait(plan.rows[0].seen_node, self.clock.now)
        self.runner.run(plan, 0.0)
        for left, frame in self.frames.sent:
            self._deliver(left, frame)
        self.frames.sent.clear()
        self._busy_until = self.clock.now + self.times.commit_s
        self._verifier_turn_at(self._busy_until)

    def _note_wait(self, seen_node: int, now: float) -> None:
        """Nothing here: the product measures how long a hint waited."""

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
        pace = self.engine.pace(now)
        if pace is not self._pace:
            self._pace = pace
            self._send(now, Pace(self.request.epoch, pace, self.request.run_ahead, self.engine.length))
            self.engine.acknowledged()
        due = self.engine.send_at(now)
        if due is not None and due <= now:
            hint = self.engine.take_hint(now)
            if hint is not None:
                self._send(now, hint)
        elif due is not None and due < UNLIMITED and (self._timer is None or due < self._timer or self._timer < now):
            self._timer = due
            self._at(due, self._device_turn)
        if self.engine.unacknowledged >= self.request.run_ahead // 2:
            self._send(now, Pace(self.request.epoch, pace, self.request.run_ahead, self.engine.length))
            self.engine.acknowledged()

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


def _scatter(noise: random.Random, jitter: float) -> float:
    return max(0.2, noise.gauss(1.0, jitter)) if jitter > 0 else 1.0
