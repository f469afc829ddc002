"""One device's attachment to one session of `torch_engine`, and the way from the worker's thread to the event loop.

Must not know: grpc, protobuf, tensors, scheduling. Frames go to the worker as commands and come back through a
`Mailbox`, which wakes the event loop once for all that a step emits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from cloud_verifier.logs import short_id
from cloud_verifier.sessions import Session
from shared.codec import fault_of
from shared.errors import DraftwireError, LocalProtocolError, Overloaded
from shared.types import Close, DownFrame, Edit, Fault, Finished, Hint, Opened, Pace, Score

if TYPE_CHECKING:
    from cloud_verifier.torch_engine import TorchEngine

log = logging.getLogger("draftwire.engine")

MAX_UNHANDLED_FRAMES = 64
MAX_UNREAD_FRAMES = 4096


class Mailbox:
    """Takes calls from the worker's thread to the event loop, in order, waking it once for many.

    Waking the loop lets it take the interpreter from the worker, so that is left for a good moment: `flush`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_called = False

    def post(self, act: Callable[[], None]) -> None:
        """Runs `act` on the event loop, some time after the next `flush`."""
        self._waiting.append(act)

    def flush(self) -> None:
        """Wakes the event loop if anything waits for it."""
        if self._waiting and not self._is_called and not self._loop.is_closed():
            self._is_called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False  # before looking: what is flushed from here on calls again
        while self._waiting:
            self._waiting.popleft()()


class _Ended:
    """The last thing in a stream's queue."""

    def __init__(self, error: DraftwireError | None) -> None:
        self.error = error


class QueueSink:
    """Carries frames from the worker's thread to the event loop."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.queue: asyncio.Queue[DownFrame | _Ended] = asyncio.Queue()
        self._mailbox = mailbox
        self._is_overrun = False

    def send(self, frame: DownFrame) -> None:
        self._put(frame)

    def end(self, error: DraftwireError | None) -> None:
        self._put(_Ended(error))

    def call(self, act: Callable[[], None]) -> None:
        """Runs `act` on the event loop. From any thread."""
        self._mailbox.post(act)

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

    def __init__(self, engine: TorchEngine, session: Session, sink: QueueSink, opened: Opened) -> None:
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
        received_at = self._engine.now()  # here, since the worker may take the frame a whole step later
        await self._room.acquire()
        self._engine.submit(lambda: self._handle(frame, received_at))

    def finish_writing(self) -> None:
        """See EngineStream."""
        self._is_half_closed = True
        self._engine.submit(self._end_if_finished)

    def _end_if_finished(self) -> None:
        """(worker) Behind all frames that were sent before."""
        if self._session.finished is not None and self._session.sink is self._sink:
            self._sink.end(None)

    def _handle(self, frame: Hint | Edit | Score | Pace | Close, received_at: float) -> None:
        """(worker)"""
        self._sink.call(self._room.release)
        if self._session.sink is not self._sink:
            return
        try:
            self._engine.handle(self._session, frame, received_at)
        except DraftwireError as error:
            self._sink.send(fault_of(error, type(frame).__name__.lower()))
        except Exception as error:  # one session's trouble stays one session's
            log.exception("a frame of session %s failed", short_id(self._session.id))
            self._engine.end_with(self._session, LocalProtocolError(f"internal error: {error!r}"))

    def refuse(self, fault: Fault) -> None:
        """See EngineStream."""
        self._engine.submit(lambda: self._sink.send(fault))

    def detach(self) -> None:
        """See EngineStream."""
        self._engine.detach(self._session, self._sink)
