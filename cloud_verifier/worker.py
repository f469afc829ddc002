"""The one thread that owns the device: takes commands, plans a step, runs it, commits or rolls back, emits.

Must not know: grpc, asyncio, model files. Driven by `engine`. A step is a transaction: whatever fails in it leaves
every session at its committed length.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from cloud_verifier.judge import Judge, Verdict
from cloud_verifier.scheduler import PlannedRow, Scheduler, StepPlan
from cloud_verifier.sessions import Session
from cloud_verifier.target_model import RowInput, TargetModel
from shared.codec import fault_of
from shared.errors import DeviceFailure, DraftwireError, LocalProtocolError
from shared.types import Commit, Reason

log = logging.getLogger("draftwire.worker")

MAX_COMMANDS_A_TURN = 1024

Clock = Callable[[], float]
Command = Callable[[], None]


class Worker:
    """Runs steps until stopped. Every method but `submit` and `stop` belongs to the worker's thread."""

    def __init__(
        self,
        model: TargetModel,
        judge: Judge,
        scheduler: Scheduler,
        on_failure: Callable[[DeviceFailure], None] = lambda failure: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`on_failure` is called once, on the worker's thread, if the thread has to end."""
        self.scheduler = scheduler
        self.steps = 0
        self.failure: DeviceFailure | None = None
        self._model = model
        self._judge = judge
        self._clock = clock
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="draftwire-device", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Runs `command` on the worker's thread before the next step. Safe from any thread."""
        self._commands.put(command)

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after the step in progress."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            failure = error if isinstance(error, DeviceFailure) else DeviceFailure(f"internal error: {error!r}")
            log.critical("the device thread ends: %s", failure, exc_info=not isinstance(error, DeviceFailure))
            self.failure = failure
            for session in list(self.scheduler.sessions()):
                self._end_with(session, failure)
            self._on_failure(failure)
            while self._run_commands(wait_s=None):  # whoever still asks is told
                pass

    def _serve(self) -> None:
        while self._run_commands(wait_s=0.0):
            plan = self.scheduler.plan(self._clock())
            if plan is not None:
                self.run_step(plan)
            elif not self._run_commands(wait_s=self._sleep_s()):
                return

    def _run_commands(self, wait_s: float | None) -> bool:
        """Runs the commands that wait now; without any, waits for one so long (None: for ever). False: stop.

        Commands that arrive meanwhile wait for the next turn: a flood of them does not keep steps from running.
        """
        try:
            command = self._commands.get(block=wait_s != 0, timeout=wait_s)
            for _ in range(min(self._commands.qsize(), MAX_COMMANDS_A_TURN)):
                if command is None:
                    return False
                command()
                command = self._commands.get_nowait()
            if command is None:
                return False
            command()
        except queue.Empty:
            pass
        return True

    def _sleep_s(self) -> float | None:
        now = self._clock()
        wake_at = self.scheduler.wake_at(now)
        return None if wake_at is None else max(0.001, wake_at - now)

    # ------------------------------------------------------------ a step

    def run_step(self, plan: StepPlan) -> None:
        """One forward over all planned rows, then per row judge, commit or roll back, emit.

        Raises: DeviceFailure if the forward failed in a way that ends the process.
        """
        started = self._clock()
        lengths = [row.session.slot.length for row in plan.rows]
        try:
            scores = self._model.forward([_row_input(row) for row in plan.rows])
            verdicts = [self._verdict(row, rows_scores) for row, rows_scores in zip(plan.rows, scores, strict=True)]
        except RuntimeError as error:
            for row, length in zip(plan.rows, lengths, strict=True):
                row.session.slot.roll_back(length)
            raise DeviceFailure(f"the step failed: {str(error).splitlines()[0]}") from error
        self.steps += 1
        step_us = int((self._clock() - started) * 1e6)
        for row, verdict in zip(plan.rows, verdicts, strict=True):
            if isinstance(verdict, DraftwireError):
                self._end_with(row.session, verdict)
            else:
                self._commit(row, verdict, step_us, len(plan.rows))

    def _verdict(self, row: PlannedRow, scores: torch.Tensor) -> Verdict | DraftwireError | None:
        if not row.is_judged:
            return None
        try:
            return self._judge.judge(row, scores)
        except DraftwireError as error:
            return error
        except Exception as error:  # one session's trouble stays one session's
            log.exception("judging session %s failed", row.session.id.hex())
            return LocalProtocolError(f"internal error while judging: {error!r}")

    def _commit(self, row: PlannedRow, verdict: Verdict | None, step_us: int, batch_size: int) -> None:
        session = row.session
        place = {id(node): len(row.feed) + index for index, node in enumerate(row.nodes)}
        kept = [] if verdict is None else [place[id(node)] for node in verdict.accepted]
        start, is_dry = session.length, not row.nodes
        session.slot.keep([*range(len(row.feed)), *kept])
        session.idle_since = self._clock()
        session.runnable_since = None
        if verdict is None:
            return
        dropped = session.commit(verdict.tokens, len(verdict.accepted), verdict.logprobs)
        session.slot.roll_back(min(session.slot.length, session.length - 1))
        if is_dry:
            session.usage = replace(session.usage, dry_steps=session.usage.dry_steps + 1)
        late, disagreeing, over_budget = dropped.values()
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
        )
        self._emit(session, commit)
        self.finish_if_ended(session)

    def finish_if_ended(self, session: Session) -> None:
        """Closes the epoch if nothing may follow, and says so."""
        reason = session.ended_reason()
        if reason is not None and session.sink is not None:
            session.sink.send(session.finish(reason))

    def _emit(self, session: Session, commit: Commit) -> None:
        if session.sink is not None:
            session.sink.send(commit)

    def _end_with(self, session: Session, error: DraftwireError) -> None:
        """This session ends with an error; the others go on."""
        log.warning("session %s ends: %s", session.id.hex(), error)
        session.finish(Reason.CANCELLED)
        if session.sink is not None:
            session.sink.send(fault_of(error, ""))
            session.sink.end(error)
        self.drop(session)

    def drop(self, session: Session) -> None:
        """Forgets a session and frees its keys and values; once, however often it is called."""
        if self.scheduler.maybe_remove(session):
            session.is_dropped = True
            self._model.release(session.slot)


def _row_input(row: PlannedRow) -> RowInput:
    """Committed ids as a chain, then the nodes by their parents; scores wanted after the last id and each node."""
    fed = len(row.feed)
    place = {id(node): fed + index for index, node in enumerate(row.nodes)}
    parents = [*range(-1, fed - 1)]
    parents += [place[id(node.parent)] if node.parent is not None else fed - 1 for node in row.nodes]
    wanted = range(fed - 1, fed + len(row.nodes))
    return RowInput(row.session.slot, [*row.feed, *(node.token for node in row.nodes)], parents, wanted)
