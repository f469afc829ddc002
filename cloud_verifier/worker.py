"""The one thread that owns the device: takes commands, plans steps, has them run, ends sessions.

Must not know: grpc, asyncio, model files, tensors. Driven by `torch_engine`; the step itself is `step.StepRunner`'s.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from cloud_verifier.judge import Judge
from cloud_verifier.logs import event, short_id
from cloud_verifier.reports import NoObserver, Observer
from cloud_verifier.scheduler import Scheduler, StepPlan
from cloud_verifier.sessions import Session
from cloud_verifier.step import StepRunner
from cloud_verifier.target_model import TargetModel
from shared.codec import fault_of
from shared.errors import DeviceFailure, DraftwireError
from shared.types import Reason

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
        on_drop: Callable[[Session, str], None] = lambda session, why: None,
        on_turn: Callable[[bool], None] = lambda is_idle: None,
        observer: Observer | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`on_failure` is called once, if the thread has to end; `on_drop` for each session that goes, with the reason;
        `on_turn` before and after every step and before every sleep (True: nothing is to run). All on the worker's
        thread.
        """
        self.scheduler = scheduler
        self.steps = 0
        self.failure: DeviceFailure | None = None
        self._model, self._clock = model, clock
        self._on_failure, self._on_drop, self._on_turn = on_failure, on_drop, on_turn
        self._runner = StepRunner(model, judge, scheduler, observer or NoObserver(), clock, self.end_with)
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
                try:
                    self.end_with(session, failure)
                except Exception:  # nothing of a broken device may keep the others from being told
                    log.exception("ending session %s failed", short_id(session.id))
            self._on_failure(failure)
            self._on_turn(True)
            while self._run_commands(wait_s=None):  # whoever still asks is told
                self._on_turn(True)
        self._on_turn(True)

    def _serve(self) -> None:
        while self._run_commands(wait_s=0.0):
            self._on_turn(False)
            started = self._clock()
            plan = self.scheduler.plan(started)
            if plan is not None:
                self.run_step(plan, self._clock() - started)
            self._on_turn(plan is None)
            if plan is None and not self._run_commands(wait_s=self._sleep_s()):
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

    # ------------------------------------------------------------ steps and sessions

    def run_step(self, plan: StepPlan, plan_s: float = 0.0) -> None:
        """One step; see StepRunner."""
        self.steps += self._runner.run(plan, plan_s)

    def end_with(self, session: Session, error: DraftwireError) -> None:
        """This session ends with an error; the others go on."""
        event(log, logging.WARNING, "session_failed", session=short_id(session.id), error=error.message)
        session.finish(Reason.CANCELLED)
        if session.sink is not None:
            session.sink.send(fault_of(error, ""))
            session.sink.end(error)
        self.drop(session, "failed")

    def drop(self, session: Session, why: str) -> None:
        """Forgets a session and frees its keys and values; once, however often it is called."""
        if self.scheduler.maybe_remove(session):
            session.is_dropped = True
            try:
                self._model.release(session.slot)
            finally:
                self._on_drop(session, why)
