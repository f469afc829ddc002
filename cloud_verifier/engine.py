"""The seam below the service: what any engine offers (`Engine`), and the one that runs our own worker (`TorchEngine`).

Must not know: grpc, protobuf. Called by `service` on the event loop; commands go to the worker's thread, frames come
back through `call_soon_threadsafe`. The event loop never runs a forward.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

from cloud_verifier.judge import Judge
from cloud_verifier.scheduler import Scheduler
from cloud_verifier.sessions import Session
from cloud_verifier.target_model import TargetModel
from cloud_verifier.worker import Worker
from shared.codec import fault_of
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
    DownFrame,
    Draining,
    Edit,
    Fault,
    Finished,
    Hint,
    ModelCard,
    Open,
    Opened,
    Pace,
    Reason,
    Resume,
    Score,
    SessionId,
)

log = logging.getLogger("draftwire.engine")

T = TypeVar("T")

RETRY_WHEN_FULL_MS = 1000
MAX_UNHANDLED_FRAMES = 64
MAX_UNREAD_FRAMES = 4096


class EngineStream(Protocol):
    """One device's attachment to one session. Calls return at once; what they cause comes back as frames."""

    opened: Opened

    def frames(self) -> AsyncIterator[DownFrame]:
        """Frames in order until the stream ends; raises the DraftwireError that ended it, if one did."""
        ...

    async def send(self, frame: Hint | Edit | Score | Pace | Close) -> None:
        """Hands a frame from the device to the engine; a refusal comes back as a Fault.

        Waits while too many of this stream's frames are still unhandled, so that a flood meets gRPC's flow control.
        """
        ...

    def finish_writing(self) -> None:
        """The device sends no more frames; it still reads what comes until its epoch has ended."""
        ...

    def refuse(self, fault: Fault) -> None:
        """Tells the device of a frame that never reached the engine, in order with the other frames."""
        ...

    def detach(self) -> None:
        """The device is gone; its session is kept for its lease."""
        ...


class Engine(Protocol):
    """What the service needs; knows nothing of tensors above this line."""

    def describe(self) -> ModelCard:
        """What is served."""
        ...

    async def open(self, frame: Open) -> EngineStream:
        """A new session. Raises: RemoteProtocolError, ModelMismatch, Overloaded, DeviceFailure."""
        ...

    async def resume(self, frame: Resume) -> EngineStream:
        """An old session. Raises: SessionNotFound, PrefixMismatch, DeviceFailure."""
        ...

    async def drain(self, within_ms: int) -> None:
        """Tells every attached device to reopen elsewhere and ends its stream with a retryable error."""
        ...


class _Ended:
    """The last thing in a stream's queue."""

    def __init__(self, error: DraftwireError | None) -> None:
        self.error = error


class _QueueSink:
    """Carries frames from the worker's thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[DownFrame | _Ended] = asyncio.Queue()
        self._loop = loop
        self._is_overrun = False

    def send(self, frame: DownFrame) -> None:
        self._put(frame)

    def end(self, error: DraftwireError | None) -> None:
        self._put(_Ended(error))

    def call(self, act: Callable[[], None]) -> None:
        """Runs `act` on the event loop. From any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act)

    def _put(self, item: DownFrame | _Ended) -> None:
        self.call(lambda: self._deliver(item))

    def _deliver(self, item: DownFrame | _Ended) -> None:
        """Credit bounds commits; this bounds the rest for a device that asks and does not read."""
        if self.queue.qsize() < MAX_UNREAD_FRAMES:
            self.queue.put_nowait(item)
        elif not self._is_overrun:
            self._is_overrun = True
            self.queue.put_nowait(_Ended(Overloaded(f"{MAX_UNREAD_FRAMES} frames were not read: the stream ends")))


class TorchStream:
    """An EngineStream of TorchEngine."""

    def __init__(self, engine: TorchEngine, session: Session, sink: _QueueSink, opened: Opened) -> None:
        self.opened = opened
        self._engine, self._session, self._sink = engine, session, sink
        self._room = asyncio.Semaphore(MAX_UNHANDLED_FRAMES)
        self._is_half_closed = False

    async def frames(self) -> AsyncIterator[DownFrame]:
        """See EngineStream."""
        while True:
            item = await self._sink.queue.get()
            if not isinstance(item, _Ended):
                yield item
                if isinstance(item, Finished) and self._is_half_closed:
                    return
            elif item.error is not None:
                raise item.error
            else:
                return

    async def send(self, frame: Hint | Edit | Score | Pace | Close) -> None:
        """See EngineStream."""
        await self._room.acquire()
        self._engine.submit(lambda: self._handle(frame))

    def finish_writing(self) -> None:
        """See EngineStream."""
        self._is_half_closed = True
        if self._session.finished is not None:
            self._sink.end(None)

    def _handle(self, frame: Hint | Edit | Score | Pace | Close) -> None:
        """(worker)"""
        self._sink.call(self._room.release)
        if self._session.sink is not self._sink:
            return
        try:
            self._engine.handle(self._session, frame)
        except DraftwireError as error:
            self._sink.send(fault_of(error, type(frame).__name__.lower()))
        except Exception as error:  # one session's trouble stays one session's
            log.exception("a frame of session %s failed", self._session.id.hex())
            self._engine.end_with(self._session, LocalProtocolError(f"internal error: {error!r}"))

    def refuse(self, fault: Fault) -> None:
        """See EngineStream."""
        self._sink.send(fault)

    def detach(self) -> None:
        """See EngineStream."""
        self._engine.detach(self._session, self._sink)


class TorchEngine:
    """Sessions on our own worker: one device, one thread. Methods marked (worker) run on the worker's thread."""

    def __init__(
        self,
        model: TargetModel,
        judge: Judge,
        card: ModelCard,
        *,
        max_sessions: int = 64,
        on_failure: Callable[[DeviceFailure], None] = lambda failure: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._card, self._clock = model, card, clock
        self._max_sessions = max_sessions
        self._sessions: dict[SessionId, Session] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self.worker = Worker(model, judge, Scheduler(), on_failure, clock)

    def start(self) -> None:
        """Starts the device thread."""
        self.worker.start()

    def stop(self) -> None:
        """Ends the device thread after the step in progress."""
        self.worker.stop()

    def describe(self) -> ModelCard:
        """See Engine."""
        return self._card

    async def open(self, frame: Open) -> TorchStream:
        """See Engine."""
        self._check_open(frame)
        return await self._on_worker(lambda sink: self._open(frame, sink))

    async def resume(self, frame: Resume) -> TorchStream:
        """See Engine."""
        return await self._on_worker(lambda sink: self._resume(frame, sink))

    async def drain(self, within_ms: int) -> None:
        """See Engine."""

        def end_streams(_: _QueueSink) -> None:
            for session in self._sessions.values():
                if session.sink is not None:
                    session.sink.send(Draining(within_ms))
                    session.sink.end(VerifierUnavailable("the verifier is going away"))
                    session.sink, session.detached_at = None, self._clock()

        await self._on_worker(end_streams)

    def submit(self, command: Callable[[], None]) -> None:
        """Runs a command on the worker's thread."""
        self.worker.submit(command)

    async def _on_worker(self, act: Callable[[_QueueSink], T]) -> T:
        if self.worker.failure is not None:
            raise self.worker.failure
        loop = asyncio.get_running_loop()
        sink, result = _QueueSink(loop), loop.create_future()

        def command() -> None:
            try:
                value = act(sink)
                loop.call_soon_threadsafe(_settle, result, value, None)
            except DraftwireError as error:
                loop.call_soon_threadsafe(_settle, result, None, error)
            except Exception as error:
                log.exception("a command failed")
                failure = LocalProtocolError(f"internal error: {error!r}")
                loop.call_soon_threadsafe(_settle, result, None, failure)

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
            raise RemoteProtocolError(
                f"open.ids: the context of {len(frame.ids)} tokens leaves no room in {card.model_name}'s "
                f"{card.context_size}",
                field="open.ids",
            )

    def _open(self, frame: Open, sink: _QueueSink) -> TorchStream:
        """(worker)"""
        if self.worker.failure is not None:
            raise self.worker.failure
        if len(self._sessions) >= self._max_sessions and not self._drop_longest_detached():
            raise Overloaded(
                f"the verifier serves its {self._max_sessions} sessions already", retry_after_ms=RETRY_WHEN_FULL_MS
            )
        session = Session(
            id=SessionId(secrets.token_bytes(16)),
            opened_with=frame,
            seed=secrets.randbits(64) if frame.seed is None else frame.seed,
            slot=self._model.new_slot(),
            limits=self._card.limits,
            context_size=self._card.context_size,
            target_id=self._card.target_id,
            now=self._clock(),
        )
        self._sessions[session.id] = session
        session.sink = sink
        self.worker.scheduler.add(session)
        stream = TorchStream(self, session, sink, session.opened())
        self.worker.finish_if_ended(session)
        return stream

    def _resume(self, frame: Resume, sink: _QueueSink) -> TorchStream:
        """(worker)"""
        session = self._sessions.get(frame.session_id)
        if session is None or session.is_dropped:
            raise SessionNotFound("this verifier does not hold the session; reopen it", field="resume.session_id")
        session.check_resume(frame)
        if session.sink is not None:
            session.sink.end(SessionDisplaced("another stream resumed this session"))
        session.sink, session.detached_at = sink, None
        session.idle_since, session.paused_since = self._clock(), None
        stream = TorchStream(self, session, sink, session.opened(reused=session.slot.length))
        for replayed in session.replay(frame.have):
            sink.send(replayed)
        return stream

    # ------------------------------------------------------------ frames of a session

    def handle(self, session: Session, frame: Hint | Edit | Score | Pace | Close) -> None:
        """(worker) Raises: DraftwireError, which becomes a Fault; the session is unharmed."""
        match frame:
            case Hint():
                session.hint(frame)
            case Pace():
                session.set_pace(frame)
            case Close():
                self._close(session)
            case Edit() | Score():
                raise Unimplemented(
                    f"{type(frame).__name__.lower()} is not implemented by this version: close and open again"
                )

    def _close(self, session: Session) -> None:
        sink = session.sink
        if session.finished is None and sink is not None:
            sink.send(session.finish(Reason.CANCELLED))
        if sink is not None:
            sink.end(None)
        self._forget(session)

    def detach(self, session: Session, sink: _QueueSink) -> None:
        """The stream is gone: the session waits for its lease, unless a newer stream has it. On the event loop."""

        def command() -> None:
            if session.sink is sink:
                session.sink, session.detached_at = None, self._clock()

        self.submit(command)
        if self._sweep is None:
            self._sweep_later(asyncio.get_running_loop())

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all leases, running while sessions are absent."""
        interval_s = max(0.05, self._card.limits.lease_ms / 4000)

        def sweep() -> None:
            """(worker)"""
            now, lease_s = self._clock(), self._card.limits.lease_ms / 1000
            absent = [session for session in self._sessions.values() if session.detached_at is not None]
            for session in absent:
                if now - (session.detached_at or now) >= lease_s:
                    self._forget(session)
            if not loop.is_closed():
                loop.call_soon_threadsafe(again, any(not session.is_dropped for session in absent))

        def again(is_needed: bool) -> None:
            self._sweep = None
            if is_needed:
                self._sweep_later(loop)

        self._sweep = loop.call_later(interval_s, self.submit, sweep)

    def end_with(self, session: Session, error: DraftwireError) -> None:
        """(worker) Ends one session with an error; the others go on."""
        if session.sink is not None:
            session.sink.send(fault_of(error, ""))
            session.sink.end(error)
        self._forget(session)

    def _drop_longest_detached(self) -> bool:
        absent = [session for session in self._sessions.values() if session.detached_at is not None]
        if absent:
            self._forget(min(absent, key=lambda session: session.detached_at or 0.0))
        return bool(absent)

    def _forget(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            session.sink = None
            self.worker.drop(session)


def _settle(future: asyncio.Future[T], value: T, error: DraftwireError | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _detach_unwanted(future: asyncio.Future[object]) -> None:
    if future.exception() is None and isinstance(stream := future.result(), TorchStream):
        stream.detach()
