"""One step as a transaction: reserve pages, one forward over all sessions, judge, commit or roll back, emit.

Must not know: threads, grpc, model files. Called by `worker` with a plan. Whatever fails in a step leaves every session
at its committed length; what is one session's fault ends that session only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from cloud_verifier.judge import Judge, Verdict
from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.reports import Observer, StepReport
from cloud_verifier.scheduler import PlannedRow, Scheduler, StepPlan
from cloud_verifier.sessions import Session
from cloud_verifier.target_model import RowInput, TargetModel
from shared.errors import DeviceFailure, DraftwireError, LocalProtocolError, Overloaded
from shared.types import Commit

log = logging.getLogger("draftwire.step")

Outcome = Verdict | DraftwireError | None
"""What a row decided, what ends its session, or nothing (prefill)."""


@dataclass(frozen=True)
class _Verified:
    """What a forward and its judgement gave, and the seconds that both took."""

    outcomes: list[Outcome]
    seconds: float


class StepRunner:
    """Runs planned steps. Belongs to the worker's thread."""

    def __init__(
        self,
        model: TargetModel,
        judge: Judge,
        scheduler: Scheduler,
        observer: Observer,
        clock: Callable[[], float],
        end_with: Callable[[Session, DraftwireError], None],
    ) -> None:
        """`end_with` ends one session with an error."""
        self._model, self._judge, self._scheduler = model, judge, scheduler
        self._observer, self._clock, self._end_with = observer, clock, end_with

    def run(self, plan: StepPlan, plan_s: float) -> bool:
        """Runs one step; False if nothing of it could be run. `plan_s`: seconds that planning took.

        Out of memory halves the step and tries once more; if the smaller one does not fit either, the session ends that
        brought most tokens to the whole step.
        Raises: DeviceFailure if the forward failed in a way that ends the process.
        """
        started = self._clock()
        self._settle()
        rows = self._reserved([row for row in plan.rows if row.is_current])
        if len(rows) < len(plan.rows):
            served = {id(row.session) for row in rows}
            without = [row.session for row in plan.rows if id(row.session) not in served]
            self._scheduler.note_no_room(without, started, is_whole_plan=not rows)
        if not rows:
            return False
        reserve_s = self._clock() - started
        verified = self._try_verify(rows)
        whole = rows
        if verified is None:
            rows = self._halved(rows)
            if not rows:
                return False
            verified = self._try_verify(rows)
        if verified is None:
            largest = max(whole, key=lambda row: row.tokens)
            self._end_with(largest.session, Overloaded("the device has no memory for this session's step"))
            return False
        verified_at = self._clock()
        step_us = int((verified_at - started) * 1e6)
        for row, outcome in zip(rows, verified.outcomes, strict=True):
            if isinstance(outcome, DraftwireError):
                row.session.slot.scrub(0)
                self._end_with(row.session, outcome)
            else:
                self._commit(row, outcome, step_us, len(rows))
        now = self._clock()
        is_fetched = any(row.is_judged for row in rows)  # else the device may still be at work
        seconds = verified.seconds if is_fetched else self._model.timing().forward_s
        self._scheduler.note_step(sum(row.tokens for row in rows), len(rows), seconds, now)
        try:
            self._observer.step(self._report(rows, verified, plan_s, reserve_s, now - verified_at))
        except Exception:  # a figure is lost, no session is
            log.exception("a step could not be reported")
        return True

    def _reserved(self, rows: Sequence[PlannedRow]) -> list[PlannedRow]:
        """The rows that found room in the KV pool, in their order; others give up pages for them, or wait."""
        kept: dict[int, PlannedRow] = {}
        cleared: set[int] = set()
        for row in self._scheduler.oldest_first(rows):
            fitting = None if id(row.session) in cleared else self._try_reserve(row, kept.keys(), cleared)
            if fitting is not None:
                kept[id(row.session)] = fitting
        return [kept[id(row.session)] for row in rows if id(row.session) in kept]

    def _try_reserve(self, row: PlannedRow, fixed: Collection[int], cleared: set[int]) -> PlannedRow | None:
        """The row with room for it; None if there is none.

        Its hints are given up before others' pages are, and nobody's pages are given up for a row that would not fit.
        """
        session, plain = row.session, row.without_nodes()
        for wanted in (row, plain):
            if session.slot.try_reserve(wanted.tokens):
                return wanted
        victims = self._scheduler.victims(session, fixed)
        room = self._model.kv_room([session.slot, *(victim.slot for victim in victims)])
        if room * PAGE_TOKENS >= session.slot.length + plain.tokens:
            for victim in victims:
                cleared.add(id(victim))
                self._observer.evicted(victim.slot.clear())
                if session.slot.try_reserve(plain.tokens):
                    return plain
        session.slot.roll_back(session.slot.length)
        return None

    def _halved(self, rows: list[PlannedRow]) -> list[PlannedRow]:
        """The smaller half of a step, without hints; the rest waits. The scratch is gone, the kept rows stand."""
        self._observer.out_of_memory()
        self._scheduler.note_out_of_memory()
        rows = [row for row in rows if row.is_current]
        if not rows:
            return []
        smallest = sorted((row.without_nodes() for row in rows), key=lambda row: row.tokens)[: len(rows) // 2]
        fitting = []
        for row in smallest or [rows[0].halved()]:
            if row.session.slot.try_reserve(row.tokens):
                fitting.append(row)
            else:
                row.session.slot.roll_back(row.session.slot.length)
        return fitting

    def _settle(self) -> None:
        """Compactions of the last step. Without the memory for them the sessions concerned are prefilled again."""
        try:
            self._model.settle()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise DeviceFailure(f"the step failed: {str(error).splitlines()[0]}") from error
            self._observer.out_of_memory()
            self._model.recover()

    def _try_verify(self, rows: list[PlannedRow]) -> _Verified | None:
        """What each row decided; None if memory ran out."""
        started = self._clock()
        try:
            scores = self._model.forward([_row_input(row) for row in rows])
            outcomes = self._judged(rows, scores)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                self._model.recover()
                for row in rows:
                    row.session.slot.scrub(row.session.slot.length)
                    row.session.slot.roll_back(row.session.slot.length)
                log.warning("out of memory in a step of %d sessions", len(rows))
                return None
            with suppress(RuntimeError):  # of a device that is gone nothing more is asked
                for row in rows:
                    row.session.slot.roll_back(row.session.slot.length)
            raise DeviceFailure(f"the step failed: {str(error).splitlines()[0]}") from error
        return _Verified(outcomes, self._clock() - started)

    def _judged(self, rows: list[PlannedRow], scores: torch.Tensor) -> list[Outcome]:
        """All rows at once; if that fails in itself, one after another, so that one session's trouble stays its own."""
        try:
            return list(self._judge.judge(rows, scores))
        except (RuntimeError, MemoryError):
            raise
        except Exception:
            log.exception("judging a step failed; its rows are judged one by one")
        outcomes: list[Outcome] = []
        at = 0
        for row in rows:
            count = 1 + len(row.nodes) if row.is_judged else 0
            try:
                outcomes += self._judge.judge([row], scores[at : at + count])
            except (RuntimeError, MemoryError):
                raise
            except Exception as error:
                outcomes.append(LocalProtocolError(f"internal error while judging: {error!r}"))
            at += count
        return outcomes

    def _commit(self, row: PlannedRow, verdict: Verdict | None, step_us: int, batch_size: int) -> None:
        session, slot = row.session, row.session.slot
        place = {id(node): len(row.feed) + index for index, node in enumerate(row.nodes)}
        kept = [] if verdict is None else [place[id(node)] for node in verdict.accepted]
        if verdict is not None and not verdict.is_clean:
            slot.scrub(slot.length)
            slot.roll_back(slot.length)
        else:
            slot.keep([*range(len(row.feed)), *kept], is_checked=verdict is not None)
        session.idle_since = self._clock()
        session.runnable_since = None
        if verdict is None:
            return
        for test in verdict.tested:
            session.acceptance.note(test.depth, test.rank, test.is_right, test.confidence)
        start, is_dry = session.length, not row.nodes
        dropped = session.commit(verdict.tokens, len(verdict.accepted), verdict.logprobs)
        slot.roll_back(min(slot.length, session.length - 1))
        slot.seal(session.ids)
        if is_dry:
            session.usage = replace(session.usage, dry_steps=session.usage.dry_steps + 1)
        late, disagreeing, over_budget = dropped.values()
        self._observer.dropped(late, disagreeing, over_budget)
        commit = Commit(
            epoch=session.opened_with.epoch,
            start=start,
            ids=tuple(verdict.tokens),
            accepted=len(verdict.accepted),
            seen_node=row.seen_node,
            last_accepted_node=max(verdict.accepted[-1].numbers) if verdict.accepted else 0,
            dropped_late=late,
            dropped_disagreeing=disagreeing,
            dropped_over_budget=over_budget,
            queue_us=row.queue_us,
            step_us=step_us,
            batch_size=batch_size,
            logprobs=tuple(verdict.logprobs),
            hint_wait_us=row.hint_wait_us,
        )
        session.timed_node = row.seen_node
        if session.sink is not None:
            session.sink.send(commit)
        session.finish_if_ended()

    def _report(
        self, rows: list[PlannedRow], verified: _Verified, plan_s: float, reserve_s: float, commit_s: float
    ) -> StepReport:
        timing = self._model.timing()
        verdicts = [outcome for outcome in verified.outcomes if isinstance(outcome, Verdict)]
        deepest = max((len(verdict.tokens) for verdict in verdicts), default=0)
        offered, accepted = [0] * deepest, [0] * deepest
        for verdict in verdicts:
            for depth in {test.depth for test in verdict.tested}:
                offered[depth - 1] += 1
                accepted[depth - 1] += depth <= len(verdict.accepted)
        return StepReport(
            sessions=len(rows),
            prefill_tokens=sum(len(row.feed) - row.is_judged for row in rows),
            nodes=sum(len(row.nodes) for row in rows),
            committed=sum(len(verdict.tokens) for verdict in verdicts),
            accepted=sum(len(verdict.accepted) for verdict in verdicts),
            dry_rows=sum(1 for row in rows if row.is_judged and not row.nodes),
            offered_by_depth=tuple(offered),
            accepted_by_depth=tuple(accepted),
            plan_s=plan_s,
            stage_s=reserve_s + timing.stage_s,
            forward_s=timing.forward_s,
            gather_s=timing.gather_s,
            judge_s=max(0.0, verified.seconds - timing.stage_s - timing.forward_s),
            commit_s=commit_s,
            judged_rows=sum(row.is_judged for row in rows),
        )


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """True if a forward failed for want of memory only: a smaller one may succeed."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _row_input(row: PlannedRow) -> RowInput:
    """Committed ids as a chain, then the nodes by their parents; scores wanted after the last id and each node."""
    fed = len(row.feed)
    place = {id(node): fed + index for index, node in enumerate(row.nodes)}
    parents = [*range(-1, fed - 1)]
    parents += [place[id(node.parent)] if node.parent is not None else fed - 1 for node in row.nodes]
    wanted = range(fed - 1, fed + len(row.nodes)) if row.is_judged else range(0)
    return RowInput(row.session.slot, [*row.feed, *(node.token for node in row.nodes)], parents, wanted)
