"""A made-up text and a drafter that knows it, right as often as a test says, for `bench.virtual.World`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.recorded_target import Times
from bench.traces import Trace
from bench.virtual import Outcome, World
from edge_client.controller import EngineSettings
from edge_client.drafter import Budget, Drafter, DraftTask, HintTree
from edge_client.edge_engine import DraftJob
from shared.types import DownFrame, Hint, Pace

PROMPT = tuple(range(5))
WRONG = 999


def trace_of(count: int, prompt: Sequence[int] = PROMPT) -> Trace:
    """A text that does not repeat itself soon."""
    return Trace("made up", tuple(prompt), tuple(index * index * 37 % 900 for index in range(count)), 1)


class ScriptedDrafter:
    """Right at the given share of positions, evenly spread; `rank`: so many wrong alternatives come before the right.

    Past `context_size` ids it has nothing to say, as a model whose context is full.
    """

    name = "model"

    def __init__(
        self,
        trace: Trace,
        acceptance: float | Callable[[int], float],
        rank: int = 0,
        told: float = 0.8,
        context_size: int = 1 << 20,
    ) -> None:
        self._text = [*trace.prompt, *trace.ids]
        self._acceptance, self._rank, self._told, self._context_size = acceptance, rank, told, context_size
        self._ids: list[int] = []
        self.asked: list[int] = []
        """Lengths of the prefixes that it was asked to go on from."""

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""
        self._ids = list(ids)

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        prefix = [*self._ids, *budget.path]
        at = len(prefix)
        self.asked.append(at)
        if at >= self._context_size:
            return HintTree()
        share = self._acceptance if isinstance(self._acceptance, float) else self._acceptance(at)
        is_right = prefix == self._text[:at] and at < len(self._text) and at * 37 % 100 < 100 * share
        ids = [*range(WRONG - self._rank, WRONG), self._text[at] if is_right else WRONG][: budget.width]
        told = [self._told, *(0.9 * (1 - self._told) / max(1, len(ids) - 1) for _ in ids[1:])]
        return HintTree(tuple(ids), (-1,) * len(ids), tuple(told))


@dataclass(frozen=True)
class Seen:
    """How things stood at a commit."""

    at: float
    length: int
    acceptance: float
    round_trip_s: float
    is_drafting: bool


class WatchedWorld(World):
    """A World that keeps what happened in it."""

    seen: list[Seen]
    jobs: list[DraftJob]
    sent: list[Hint]

    def watch(self) -> Outcome:
        """Runs it."""
        self.seen, self.jobs, self.sent = [], [], []
        return self.run()

    def change_at(self, time: float, **changes: float) -> None:
        """From then on the times are others. Step times cannot be changed so."""

        def change(now: float) -> None:
            self.times = replace(self.times, **changes)  # type: ignore[arg-type]

        self._at(time, change)

    def _receive(self, now: float, frame: DownFrame) -> None:
        super()._receive(now, frame)
        engine = self.engine
        share, round_trip_s = engine.controller.acceptance.share, engine.clock.round_trip_s or 0.0
        self.seen.append(Seen(now, len(self.ids), share, round_trip_s, engine.decision.is_drafting))

    def _draft_s(self, job: DraftJob) -> float:
        self.jobs.append(job)
        return super()._draft_s(job)

    def _send(self, now: float, frame: Hint | Pace) -> None:
        if isinstance(frame, Hint):
            self.sent.append(frame)
        super()._send(now, frame)

    def hinted_positions(self) -> list[int]:
        """Where in the whole sequence each hinted id was to stand."""
        places: dict[int, int] = {}
        for hint in self.sent:
            base = places[hint.base_node] + 1 if hint.base_node else hint.base_position
            for index in range(len(hint.ids)):
                number = hint.first_node + index
                delta = hint.parents[index] if hint.parents else int(index > 0)
                places[number] = places[number - delta] + 1 if delta else base
        return list(places.values())

    def mean(self, of: Callable[[Seen], float], start: float, seconds: float) -> float:
        """Of what was seen in that time."""
        values = [of(seen) for seen in self.seen if start <= seen.at < start + seconds]
        assert values, f"no commit came from {start} s on"
        return sum(values) / len(values)


def streaming_s(trace: Trace, times: Times) -> float:
    """How long the text takes without hints."""
    return World(trace, times, EngineSettings(depth=0), None).run().seconds


def gain(trace: Trace, times: Times, drafter: Drafter, settings: EngineSettings | None = None) -> float:
    """Ids a second over those of plain streaming."""
    world = World(trace, times, settings or EngineSettings(), drafter)
    return streaming_s(trace, times) / world.run().seconds
