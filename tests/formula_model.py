"""A target without a model: scores are a hash of the whole path, and a slot that remembers which ids it holds.

A wrong parent, position, kept row or roll-back changes the path and so the scores. `Desk` runs sessions on it in the
test's own thread: Session, Scheduler, Judge and Worker.run_step are the product's, time is the test's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cloud_verifier.judge import Judge
from cloud_verifier.reports import Gauges, NoObserver, Observer, StepReport
from cloud_verifier.scheduler import Scheduler, StepBudget
from cloud_verifier.sessions import Session
from cloud_verifier.step_cost import StepCost
from cloud_verifier.target_model import KvUse, RowInput, Timing
from cloud_verifier.worker import Worker
from shared.errors import DraftwireError
from shared.sampling import GREEDY, SamplingParams
from shared.types import (
    Commit,
    DownFrame,
    Epoch,
    Fault,
    Finished,
    Hint,
    Limits,
    Open,
    Opened,
    PaceKind,
    Rule,
    SessionId,
)
from tests.oracle import Row, plain_ids

VOCABULARY = 24
VALID = np.arange(VOCABULARY) < VOCABULARY - 2
"""The last two ids are padding rows."""
EPOCH = Epoch(3)


def formula_row(path: Sequence[int]) -> Row:
    """Scores after a path: nothing but the path decides them. Shapes: (V,) float32."""
    digest = hashlib.blake2b(np.asarray(path, dtype="<u4").tobytes(), digest_size=8).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    row = generator.normal(0.0, 2.0, VOCABULARY).astype(np.float32)
    row[VOCABULARY - 2 :] += 4.0
    return row


class PathSlot:
    """A Slot that keeps the ids themselves. Pages are only counted: of 16 rows, from the target's `free_pages`."""

    def __init__(self, target: FormulaTarget) -> None:
        self.kept: list[int] = []
        self.scratch: list[int] = []
        self.pages: list[int] = []
        self.is_released = False
        self.scrubbed: list[int] = []
        self._target = target

    def try_reserve(self, count: int) -> bool:
        """See Slot."""
        return self._resize(len(self.kept) + count)

    def _resize(self, rows: int) -> bool:
        wanted = -(-rows // 16)
        if wanted - len(self.pages) > self._target.free_pages:
            return False
        self._target.free_pages -= wanted - len(self.pages)
        self.pages = list(range(wanted))
        return True

    def seal(self, ids: Sequence[int]) -> None:
        """See Slot."""
        assert self.kept == list(ids[: len(self.kept)])

    def adopt(self, ids: Sequence[int]) -> int:
        """See Slot: nothing is shared here."""
        return 0

    def scrub(self, from_row: int) -> None:
        """See Slot. `scrubbed` remembers from where."""
        self.scrubbed.append(from_row)
        self.scratch = []

    @property
    def length(self) -> int:
        """Rows kept."""
        return len(self.kept)

    def keep(self, offsets: Sequence[int], is_checked: bool = True) -> None:
        """See Slot."""
        assert list(offsets) == sorted(set(offsets))
        self.kept += [self.scratch[offset] for offset in offsets]
        self._resize(len(self.kept))

    def roll_back(self, length: int) -> None:
        """See Slot."""
        assert 0 <= length <= len(self.kept)
        del self.kept[length:]
        self._resize(length)

    def clear(self) -> int:
        """See Slot."""
        held = len(self.pages)
        self.kept = []
        self._resize(0)
        return held


@dataclass
class SeenRow:
    """What one session asked of one forward."""

    slot: PathSlot
    kept: int
    ids: list[int]
    positions: list[int]
    wanted: list[int]


@dataclass
class FormulaTarget:
    """A TargetModel. `seen` is every row of every forward; `fail_next` makes the next forward raise.

    `on_forward` is called with the rows of each forward and may raise, or move the clock.
    """

    context_size: int = 4096
    seen: list[SeenRow] = field(default_factory=list)
    fail_next: Exception | None = None
    poisoned: set[int] = field(default_factory=set)
    """ids() of slots whose rows are not finite."""
    released: int = 0
    free_pages: int = 1_000_000
    recovered: int = 0
    on_forward: Callable[[Sequence[RowInput]], None] = lambda rows: None

    def new_slot(self, principal: str = "") -> PathSlot:
        """See TargetModel."""
        return PathSlot(self)

    def release(self, slot: PathSlot) -> None:
        """See TargetModel."""
        self.released += 1
        slot.clear()
        slot.is_released = True

    def settle(self) -> None:
        """See TargetModel: nothing is left to do."""

    def timing(self) -> Timing:
        """See TargetModel."""
        return Timing()

    def recover(self) -> None:
        """See TargetModel."""
        self.recovered += 1

    def kv_use(self) -> KvUse:
        """See TargetModel."""
        return KvUse(total=self.free_pages)

    def kv_room(self, slots: Sequence[PathSlot]) -> int:
        """See TargetModel."""
        return self.free_pages + sum(len(slot.pages) for slot in slots)

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        for row in rows:  # keys land before anything can fail, as in a real model
            row.slot.scratch = list(row.ids)  # type: ignore[attr-defined]
        if self.fail_next is not None:
            failure, self.fail_next = self.fail_next, None
            raise failure
        self.on_forward(rows)
        parts = [self._scores(row) for row in rows]
        return torch.cat(parts)

    def _scores(self, row: RowInput) -> torch.Tensor:
        slot = row.slot
        assert isinstance(slot, PathSlot)
        paths: list[list[int]] = []
        for token, parent in zip(row.ids, row.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else slot.kept), token])
        positions = [len(path) - 1 for path in paths]
        self.seen.append(SeenRow(slot, slot.length, list(row.ids), positions, list(row.wanted)))
        scores = torch.zeros(0, VOCABULARY)
        if row.wanted:
            scores = torch.from_numpy(np.stack([formula_row(paths[index]) for index in row.wanted]))
        if id(slot) in self.poisoned and row.wanted:
            scores[-1, 3] = float("nan")
        return scores


class ListSink:
    """A Sink that keeps every frame."""

    def __init__(self) -> None:
        self.frames: list[DownFrame] = []
        self.ended: list[DraftwireError | None] = []

    def send(self, frame: DownFrame) -> None:
        """See Sink."""
        self.frames.append(frame)

    def end(self, error: DraftwireError | None) -> None:
        """See Sink."""
        self.ended.append(error)

    @property
    def commits(self) -> list[Commit]:
        """The commits, in order."""
        return [frame for frame in self.frames if isinstance(frame, Commit)]

    @property
    def ids(self) -> list[int]:
        """All committed ids; asserts that each commit starts where the one before it ended."""
        ids: list[int] = []
        for commit in self.commits:
            assert commit.start == self.commits[0].start + len(ids)
            ids += commit.ids
        return ids

    @property
    def finished(self) -> Finished | None:
        """Finished, if it came; asserts that no commit follows it."""
        places = [index for index, frame in enumerate(self.frames) if isinstance(frame, Finished)]
        assert not places or (len(places) == 1 and not any(isinstance(f, Commit) for f in self.frames[places[0] :]))
        found = self.frames[places[0]] if places else None
        return found if isinstance(found, Finished) else None

    @property
    def faults(self) -> list[Fault]:
        """The faults, in order."""
        return [frame for frame in self.frames if isinstance(frame, Fault)]


@dataclass
class Guest:
    """One session with its sink and what the target alone would write."""

    session: Session
    sink: ListSink
    opened: Opened

    @property
    def generated(self) -> list[int]:
        """Committed ids from generated_from on."""
        return self.session.ids[self.session.generated_from :]

    def plain(self, count: int) -> list[int]:
        """What the target alone would write from the start of the epoch."""
        request = self.session.opened_with
        context = request.ids[: request.generated_from]
        return plain_ids(
            formula_row, context, count, request.sampling, self.session.seed, request.stop_ids, valid=VALID
        )


def open_frame(ids: Sequence[int] = (1, 2, 3), generated_from: int | None = None, **changes: object) -> Open:
    """An Open of a greedy session of 24 ids that runs on."""
    values: dict[str, object] = {
        "fingerprint": bytes(32),
        "sampling": GREEDY,
        "max_new_tokens": 24,
        "epoch": EPOCH,
        "seed": 11,
        "pace": PaceKind.RUN_ON,
        "rule": Rule.AGREEMENT,
        **changes,
    }
    return Open(ids=tuple(ids), generated_from=len(ids) if generated_from is None else generated_from, **values)  # type: ignore[arg-type]


class FreeTokens(StepCost):
    """Tokens cost next to nothing, whatever is measured: every hint is worth verifying."""

    def seconds(self, tokens: int) -> float:
        """See StepCost."""
        return 1 + 1e-4 * tokens


class Recorder(NoObserver):
    """An observer that keeps all it is told."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.opened: list[tuple[int, int]] = []
        self.ended: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.hinted: list[tuple[int, int]] = []
        self.drops: list[tuple[int, int, int]] = []
        self.evictions: list[int] = []
        self.out_of_memories = 0
        self.last_gauges: Gauges | None = None

    def step(self, report: StepReport) -> None:
        """See Observer."""
        self.steps.append(report)

    def session_opened(self, context_tokens: int, reused_tokens: int) -> None:
        """See Observer."""
        self.opened.append((context_tokens, reused_tokens))

    def session_ended(self, reason: str) -> None:
        """See Observer."""
        self.ended[reason] += 1

    def refused(self, reason: str) -> None:
        """See Observer."""
        self.refusals[reason] += 1

    def hints(self, nodes: int, fresh: int) -> None:
        """See Observer."""
        self.hinted.append((nodes, fresh))

    def dropped(self, late: int, disagreeing: int, over_budget: int) -> None:
        """See Observer."""
        self.drops.append((late, disagreeing, over_budget))

    def evicted(self, pages: int) -> None:
        """See Observer."""
        self.evictions.append(pages)

    def out_of_memory(self) -> None:
        """See Observer."""
        self.out_of_memories += 1

    def gauges(self, g: Gauges) -> None:
        """See Observer."""
        self.last_gauges = g


class Desk:
    """A verifier without threads: `step()` runs what the scheduler plans at `now`, in seconds."""

    def __init__(
        self,
        sessions_per_step: int = 1,
        prefill_tokens: int = 256,
        limits: Limits | None = None,
        pages: int = 1_000_000,
        nodes: int = 256,
        observer: Observer | None = None,
        cost: StepCost | None = None,
    ) -> None:
        self.now = 100.0
        self.model = FormulaTarget(free_pages=pages)
        self.limits = limits or Limits()
        budget = StepBudget(sessions_per_step, prefill_tokens, nodes)
        self.scheduler = Scheduler(budget, cost or FreeTokens())
        self.worker = Worker(self.model, Judge(VALID), self.scheduler, observer=observer, clock=lambda: self.now)
        self._opened = 0

    def open(self, frame: Open) -> Guest:
        """A session that is served from the next step on."""
        self._opened += 1
        session = Session(
            id=SessionId(self._opened.to_bytes(16, "big")),
            opened_with=frame,
            seed=frame.seed or 0,
            slot=self.model.new_slot(),  # type: ignore[arg-type]
            limits=self.limits,
            context_size=self.model.context_size,
            target_id=bytes(32),
            now=self.now,
        )
        session.sink = sink = ListSink()
        self.scheduler.add(session)
        opened = session.opened()
        session.finish_if_ended()
        return Guest(session, sink, opened)

    def step(self) -> bool:
        """Runs one step if one is due; says whether it did."""
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        self.worker.run_step(plan)
        for session in self.scheduler.sessions():
            session.trie.check_integrity()
            slot = session.slot
            assert isinstance(slot, PathSlot)
            assert slot.kept == session.ids[: slot.length]
            assert slot.length < session.length
        return True

    def run(self, most: int = 10_000) -> None:
        """Steps until nothing is due."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"still busy after {most} steps")


def chain(guest: Guest, ids: Sequence[int], at: int | None = None, **changes: object) -> Hint:
    """A chain of ids at a committed position (None: right behind the committed ids), numbered after all before it."""
    values: dict[str, object] = {
        "epoch": EPOCH,
        "first_node": guest.session.trie.highest_number + 1,
        "ack": guest.session.length,
        "base_position": guest.session.length if at is None else at,
        **changes,
    }
    return Hint(ids=tuple(ids), **values)  # type: ignore[arg-type]


PARAMS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0),
    "cut": SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02),
    "hot": SamplingParams(temperature=5.0),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=-0.8, top_p=0.95
    ),
    "greedy with penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=1.5),
    "bias": SamplingParams(temperature=0.9, logit_bias={3: 4.0, 5: float("-inf"), 7: -2.0}),
    "top_k 1": SamplingParams(temperature=1.0, top_k=1),
}
