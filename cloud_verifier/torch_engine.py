"""Sessions on our own worker: one device, one thread (`TorchEngine`).

Must not know: grpc, protobuf, tensors. Called by `service` on the event loop through the seam of `engine`; commands go
to the worker's thread, frames come back through a `Mailbox`. The event loop never runs a forward.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cloud_verifier.admission import Admission, AdmissionLimits, Entry
from cloud_verifier.judge import Judge
from cloud_verifier.logs import event, short_id
from cloud_verifier.reports import Gauges, NoObserver, Observer
from cloud_verifier.scheduler import Scheduler, StepBudget
from cloud_verifier.sessions import Session
from cloud_verifier.step_cost import StepCost
from cloud_verifier.target_model import TargetModel
from cloud_verifier.torch_stream import Mailbox, QueueSink, TorchStream
from cloud_verifier.worker import Worker
from shared.errors import (
    DeviceFailure,
    DraftwireError,
    LocalProtocolError,
    ModelMismatch,
    Overloaded,
    RemoteProtocolError,
    SessionDisplaced,
    SessionNotFound,
    Unimplemented,
    VerifierUnavailable,
)
from shared.types import (
    PROTOCOL_VERSION,
    Close,
    Draining,
    Edit,
    Hint,
    ModelCard,
    Open,
    Pace,
    Reason,
    Resume,
    Score,
    SessionId,
)

log = logging.getLogger("draftwire.engine")

T = TypeVar("T")

DRAIN_LOOK_S = 0.02
GAUGES_EVERY_S = 0.25
STOPPING = "the verifier is going away"


@dataclass(eq=False)
class _Waiting:
    """An open that has no place yet."""

    frame: Open
    principal: str
    share_key: bytes
    sink: QueueSink
    settle: Callable[[TorchStream | DraftwireError], None]
    session: Session | None = None
    """Once it has its place."""


class TorchEngine:
    """Sessions on our own worker: one device, one thread. Methods marked (worker) run on the worker's thread."""

    def __init__(
        self,
        model: TargetModel,
        judge: Judge,
        card: ModelCard,
        *,
        admission: AdmissionLimits | None = None,
        max_queue_ms: int = 10_000,
        absent_grace_ms: int = 3_000,
        idle_ms: int = 60_000,
        budget: StepBudget | None = None,
        cost: StepCost | None = None,
        observer: Observer | None = None,
        on_failure: Callable[[DeviceFailure], None] = lambda failure: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_queue_ms`: how long an open waits for a place; `observer` should not fail (see GuardedObserver).

        When others wait: `absent_grace_ms` after its device left, a session may lose its place, and `idle_ms` after it
        was over or out of credit one whose device is there.
        """
        self._model, self._card, self._clock = model, card, clock
        self._admission: Admission[_Waiting] = Admission(admission or AdmissionLimits())
        self._max_queue_s = max_queue_ms / 1000
        self._absent_grace_s, self._idle_s = absent_grace_ms / 1000, idle_ms / 1000
        self._observer = observer or NoObserver()
        self._sessions: dict[SessionId, Session] = {}
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._is_sweep_due_again = False
        self._is_draining = False
        self._gauges_at = float("-inf")
        self.worker = Worker(
            model,
            judge,
            Scheduler(budget, cost),
            on_failure=on_failure,
            on_drop=self._dropped,
            on_turn=self._on_turn,
            observer=self._observer,
            clock=clock,
        )

    def start(self) -> None:
        """Starts the device thread."""
        self.worker.start()

    def stop(self) -> None:
        """Ends the device thread after the step in progress."""
        self.worker.stop()

    def describe(self) -> ModelCard:
        """See Engine."""
        return self._card

    @property
    def sessions(self) -> int:
        """Sessions held, absent ones included."""
        return len(self._sessions)

    async def open(self, frame: Open, principal: str = "", share_key: bytes = b"") -> TorchStream:
        """See Engine."""
        self._check_open(frame)
        waiting: list[_Waiting] = []

        def act(sink: QueueSink, settle: Callable[[TorchStream | DraftwireError], None]) -> None:
            waiting.append(_Waiting(frame, principal, share_key, sink, settle))
            self._enter(waiting[0])

        timer = asyncio.get_running_loop().call_later(self._max_queue_s, self.submit, lambda: self._expire(waiting))
        try:
            return await self._on_worker(act)
        except asyncio.CancelledError:
            self.submit(lambda: self._withdraw(waiting))
            raise
        finally:
            timer.cancel()

    async def resume(self, frame: Resume, principal: str = "", share_key: bytes = b"") -> TorchStream:
        """See Engine."""
        return await self._on_worker(lambda sink, settle: settle(self._resume(frame, principal, share_key, sink)))

    async def drain(self, within_ms: int) -> None:
        """See Engine."""

        def begin(_: QueueSink, settle: Callable[[None], None]) -> None:
            self._is_draining = True
            for waiting in iter(self._admission.next_queued, None):
                self._observer.refused("draining")
                waiting.settle(VerifierUnavailable(STOPPING))
            for session in self._attached():
                if session.sink is not None:
                    session.sink.send(Draining(within_ms))
            settle(None)

        def look(_: QueueSink, settle: Callable[[int], None]) -> None:
            settle(sum(1 for session in self._attached() if session.finished is None))

        def end(_: QueueSink, settle: Callable[[None], None]) -> None:
            for session in self._attached():
                if session.sink is not None:
                    session.sink.end(VerifierUnavailable(STOPPING))
                    session.sink, session.detached_at = None, self._clock()
            settle(None)

        loop = asyncio.get_running_loop()
        until = loop.time() + within_ms / 1000
        await self._on_worker(begin)
        while await self._on_worker(look) and loop.time() < until:  # noqa: ASYNC110 (what is awaited happens on another thread)
            await asyncio.sleep(DRAIN_LOOK_S)
        await self._on_worker(end)

    def now(self) -> float:
        """Seconds, as the engine counts them."""
        return self._clock()

    def submit(self, command: Callable[[], None]) -> None:
        """Runs a command on the worker's thread."""
        self.worker.submit(command)

    async def _on_worker(self, act: Callable[[QueueSink, Callable[[T | DraftwireError], None]], None]) -> T:
        """Runs `act` on the worker's thread; it settles the result, at once or later. Errors it raises settle too."""
        if self.worker.failure is not None:
            raise self.worker.failure
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.setdefault(loop, Mailbox(loop))
        sink, result = QueueSink(mailbox), loop.create_future()

        def settle(value: T | DraftwireError) -> None:
            mailbox.post(lambda: _settle(result, value))

        def command() -> None:
            try:
                act(sink, settle)
            except DraftwireError as error:
                settle(error)
            except Exception as error:
                log.exception("a command failed")
                settle(LocalProtocolError(f"internal error: {error!r}"))

        self.submit(command)
        try:
            outcome: T = await asyncio.shield(result)
            return outcome
        except asyncio.CancelledError:  # the device left while the worker had not answered, or just had
            result.add_done_callback(_detach_unwanted)
            raise

    # ------------------------------------------------------------ open and resume

    def _check_open(self, frame: Open) -> None:
        card = self._card
        if not frame.lowest_version <= PROTOCOL_VERSION <= frame.highest_version:
            raise RemoteProtocolError(
                f"protocol versions {frame.lowest_version}-{frame.highest_version} asked, this verifier speaks "
                f"{PROTOCOL_VERSION}",
                field="open.lowest_version",
            )
        if frame.fingerprint != card.fingerprint:
            raise ModelMismatch(
                f"the draft's vocabulary is not that of target {card.model_name}; Describe tells the first difference",
                field="open.fingerprint",
            )
        if frame.target_id and frame.target_id != card.target_id:
            raise ModelMismatch(
                f"the text was begun by target {frame.target_id.hex()[:12]}, this is {card.model_name} "
                f"({card.target_id.hex()[:12]})",
                field="open.target_id",
            )
        if len(frame.ids) + (0 if frame.is_continued else 1) > card.context_size:
            self._observer.refused("context")
            raise RemoteProtocolError(
                f"open.ids: the context of {len(frame.ids)} tokens leaves no room in {card.model_name}'s "
                f"{card.context_size}",
                field="open.ids",
            )

    def _enter(self, waiting: _Waiting) -> None:
        """(worker) Opens at once, or when a place is free. Raises: Overloaded, VerifierUnavailable, DeviceFailure."""
        if self.worker.failure is not None:
            raise self.worker.failure
        if self._is_draining:
            self._observer.refused("draining")
            raise VerifierUnavailable(STOPPING)
        if not self._admission.has_share(waiting.principal):
            self._maybe_make_room(waiting.principal)
        elif not self._admission.has_place():
            self._maybe_make_room()
        entry = self._admission.enter(waiting.principal, waiting)
        if entry is Entry.ADMITTED:
            self._open(waiting)
        elif entry is not Entry.QUEUED:
            self._observer.refused(entry.value)
            raise Overloaded(self._refusal(entry), retry_after_ms=self._admission.retry_after_ms())

    def _refusal(self, entry: Entry) -> str:
        limits = self._admission.limits
        if entry is Entry.PRINCIPAL_SESSIONS:
            return f"this connection has its {limits.principal_sessions} sessions already: close one first"
        return f"the verifier serves its {limits.max_sessions} sessions, and {self._admission.queued} more wait"

    def _withdraw(self, waiting: list[_Waiting]) -> None:
        """(worker) Whoever waited is gone, and knows no session to resume."""
        if waiting and waiting[0].session is not None:
            self._forget(waiting[0].session, "cancelled")
        elif waiting:
            self._admission.maybe_withdraw(waiting[0])

    def _expire(self, waiting: list[_Waiting]) -> None:
        """(worker) Whoever still waits has waited long enough."""
        if waiting and self._admission.maybe_withdraw(waiting[0]):
            self._observer.refused("queue_timeout")
            text = f"no place became free within {self._max_queue_s:g} s"
            waiting[0].settle(Overloaded(text, retry_after_ms=self._admission.retry_after_ms()))

    def _open(self, waiting: _Waiting) -> None:
        """(worker)"""
        frame, sink = waiting.frame, waiting.sink
        session_id = SessionId(secrets.token_bytes(16))
        sharing = waiting.share_key or session_id  # without a key: with nobody
        session = Session(
            id=session_id,
            opened_with=frame,
            seed=secrets.randbits(64) if frame.seed is None else frame.seed,
            slot=self._model.new_slot(f"{waiting.principal} {sharing.hex()}"),
            limits=self._card.limits,
            context_size=self._card.context_size,
            target_id=self._card.target_id,
            now=self._clock(),
        )
        session.principal, session.share_key = waiting.principal, waiting.share_key
        self._sessions[session.id] = waiting.session = session
        session.sink = sink
        self.worker.scheduler.add(session)
        session.take_shared()
        stream = TorchStream(self, session, sink, session.opened(session.reused_tokens))
        waiting.settle(stream)
        self._gauges_at = float("-inf")
        self._observer.session_opened(session.length, session.reused_tokens)
        event(
            log,
            logging.INFO,
            "session_opened",
            session=short_id(session.id),
            principal=session.principal,
            context_tokens=session.length,
            reused_tokens=session.reused_tokens,
            pace=session.pace.value,
        )
        session.finish_if_ended()

    def _resume(self, frame: Resume, principal: str, share_key: bytes, sink: QueueSink) -> TorchStream:
        """(worker)"""
        session = self._sessions.get(frame.session_id)
        is_theirs = session is not None and secrets.compare_digest(session.share_key, share_key)
        if session is None or session.is_dropped or not is_theirs:
            raise SessionNotFound("this verifier does not hold the session; reopen it", field="resume.session_id")
        session.check_resume(frame)
        if session.sink is not None:
            session.sink.end(SessionDisplaced("another stream resumed this session"))
        session.sink, session.detached_at = sink, None
        session.idle_since, session.paused_since = self._clock(), None
        self._admission.move(session.principal, principal)
        session.principal = principal
        event(log, logging.INFO, "session_resumed", session=short_id(session.id), principal=principal, have=frame.have)
        stream = TorchStream(self, session, sink, session.opened(reused=session.slot.length))
        if self._is_draining:
            sink.send(Draining())
        for replayed in session.replay(frame.have):
            sink.send(replayed)
        return stream

    # ------------------------------------------------------------ frames of a session

    def handle(self, session: Session, frame: Hint | Edit | Score | Pace | Close, received_at: float) -> None:
        """(worker) Raises: DraftwireError, which becomes a Fault; the session is unharmed."""
        match frame:
            case Hint():
                self._hint(session, frame, received_at)
            case Pace():
                session.set_pace(frame)
            case Close():
                self._close(session)
            case Edit() | Score():
                raise Unimplemented(
                    f"{type(frame).__name__.lower()} is not implemented by this version: close and open again"
                )

    def _hint(self, session: Session, frame: Hint, received_at: float) -> None:
        had_none = not session.trie.children
        is_welcome = self._admission.may_send(session.principal, len(frame.ids), received_at)
        fresh = session.hint(frame, is_welcome, received_at)
        if had_none and fresh:
            session.note_hint(received_at)
        self._observer.hints(len(frame.ids), fresh)

    def _close(self, session: Session) -> None:
        sink, was_finished = session.sink, session.finished is not None
        if not was_finished and sink is not None:
            sink.send(session.finish(Reason.CANCELLED))
        if sink is not None:
            sink.end(None)
        self._forget(session, "finished" if was_finished else "cancelled")

    def detach(self, session: Session, sink: QueueSink) -> None:
        """The stream is gone: the session waits for its lease, unless a newer stream has it. On the event loop."""

        def command() -> None:
            if session.sink is sink:
                session.sink, session.detached_at = None, self._clock()
                self._gauges_at = float("-inf")
                event(log, logging.INFO, "session_detached", session=short_id(session.id), committed=session.length)
                self._make_room_for_waiting()

        self.submit(command)
        self._is_sweep_due_again = True
        if self._sweep is None:
            self._sweep_later(asyncio.get_running_loop())

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all leases, running while sessions are absent."""
        interval_s = max(0.05, min(1.0, self._card.limits.lease_ms / 4000))

        def sweep() -> None:
            """(worker)"""
            now, lease_s = self._clock(), self._card.limits.lease_ms / 1000
            absent = [session for session in self._sessions.values() if session.detached_at is not None]
            for session in absent:
                if now - (session.detached_at or now) >= lease_s:
                    self._forget(session, "lease")
            self._make_room_for_waiting()
            if not loop.is_closed():
                loop.call_soon_threadsafe(again, any(not session.is_dropped for session in absent))

        def begin() -> None:
            self._is_sweep_due_again = False  # who leaves from here on comes behind the sweep
            self.submit(sweep)

        def again(is_needed: bool) -> None:
            self._sweep = None
            if is_needed or self._is_sweep_due_again:
                self._sweep_later(loop)

        self._sweep = loop.call_later(interval_s, begin)

    def end_with(self, session: Session, error: DraftwireError) -> None:
        """(worker) Ends one session with an error; the others go on."""
        self.worker.end_with(session, error)

    def _attached(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.sink is not None]

    def _make_room_for_waiting(self) -> None:
        """(worker)"""
        while self._admission.queued and self._maybe_make_room():
            pass

    def _maybe_make_room(self, principal: str | None = None) -> bool:
        """(worker) Ends a session that makes no use of its place, for somebody who would; False if there is none.

        First those that are over and whose device is away, then others whose device has been away for a while, then
        those that have long been over, or without credit. `principal`: only one of its own.
        """
        now, grace_s, idle_s = self._clock(), self._absent_grace_s, self._idle_s
        useless: list[tuple[int, float, Session]] = []
        for session in self._sessions.values():
            away, stands_since = session.detached_at, session.paused_since or session.idle_since
            if principal not in (None, session.principal):
                continue
            if away is not None and (session.finished is not None or now - away >= grace_s):
                useless.append((0 if session.finished is not None else 1, away, session))
            elif away is None and not session.is_at_work and now - stands_since >= idle_s:
                useless.append((2, stands_since, session))
        if not useless:
            return False
        session = min(useless, key=lambda each: each[:2])[2]
        if session.sink is not None:
            session.sink.end(Overloaded("the session stood idle while others waited for its place"))
        self._forget(session, "displaced")
        return True

    def _forget(self, session: Session, why: str) -> None:
        session.sink = None
        self.worker.drop(session, why)

    def _dropped(self, session: Session, why: str) -> None:
        """(worker) A session is gone: its place is the next one's."""
        session.sink = None
        self._sessions.pop(session.id, None)
        self._admission.leave(session.principal, self._clock())
        self._observer.session_ended(why)
        event(
            log,
            logging.INFO,
            "session_ended",
            session=short_id(session.id),
            reason=why,
            generated_tokens=session.usage.generated_tokens,
            steps=session.usage.steps,
        )
        self._gauges_at = float("-inf")
        if self.worker.failure is not None:
            for told in iter(self._admission.next_queued, None):
                told.settle(self.worker.failure)
        if self.worker.failure is not None or self._is_draining:
            return
        while (waiting := self._admission.next_to_enter()) is not None:
            self._open(waiting)

    def _on_turn(self, is_idle: bool) -> None:
        """(worker)"""
        if is_idle or self._clock() - self._gauges_at >= GAUGES_EVERY_S:
            self._tell_gauges()
        for mailbox in list(self._mailboxes.values()):
            mailbox.flush()

    def _tell_gauges(self) -> None:
        """(worker) Now and then, when a session began or ended, and whenever nothing is to run."""
        self._gauges_at = self._clock()
        attached = self._attached()
        finished = sum(1 for session in attached if session.finished is not None)
        use = self._model.kv_use()
        self._observer.gauges(
            Gauges(
                sessions_attached=len(attached) - finished,
                sessions_absent=len(self._sessions) - len(attached),
                sessions_finished=finished,
                queue_length=self._admission.queued,
                kv_pages_used=use.used,
                kv_pages_shared=use.shared,
                kv_pages_total=use.total,
                kv_pages_cached=use.cached,
            )
        )


def _settle(future: asyncio.Future[T], value: T | DraftwireError) -> None:
    if future.done():
        return
    if isinstance(value, DraftwireError):
        future.set_exception(value)
    else:
        future.set_result(value)


def _detach_unwanted(future: asyncio.Future[object]) -> None:
    if future.exception() is None and isinstance(stream := future.result(), TorchStream):
        stream.detach()
