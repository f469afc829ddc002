"""One session's stream through all cuts: open, resume, reopen elsewhere, end. Frames in and out, nothing of text.

Must not know: drafting, text, gRPC. Called by `generate`. What makes a cut harmless: the committed ids held by the
device are all it takes to go on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from edge_client.transport import Connection, Traffic, Transport
from shared.codec import error_of
from shared.errors import (
    DeviceFailure,
    DraftwireError,
    Overloaded,
    RemoteProtocolError,
    SessionNotFound,
    TransportError,
)
from shared.randomness import ids_digest
from shared.types import Close, DownFrame, Fault, Finished, Open, Opened, Resume, UpFrame

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
GOODBYE_S = 1.0
RECONNECT_FOR_S = 60.0
"""Bridges a verifier that restarts and loads its model again."""
OVERLOAD_WAIT_S = 30.0
"""How long a text may wait for room before its first id."""


def cut_or_error(fault: Fault) -> DraftwireError:
    """A verifier that goes down with its device is a cut, to be bridged like any other; else what the fault says."""
    error = error_of(fault)
    return TransportError(error.message) if isinstance(error, DeviceFailure) else error


class SessionStream:
    """At most one connection at a time, and what it takes to replace it."""

    def __init__(
        self,
        transport: Transport,
        request: Open,
        reconnect_for_s: float = RECONNECT_FOR_S,
        overload_wait_s: float = OVERLOAD_WAIT_S,
    ) -> None:
        """`reconnect_for_s` bounds one cut, `overload_wait_s` the wait for room before the session is first open."""
        self.request = request
        self.ids = list(request.ids)
        """All ids held: the context and what was committed since."""
        self.opened: Opened | None = None
        self.finished: Finished | None = None
        self.traffic = Traffic()
        self.reconnects = 0
        self.answered_s = 0.0
        """How long the last open or resume took to be answered."""
        self.on_opened: Callable[[Opened], None] = lambda opened: None
        """Called after every successful open, resume or reopen."""
        self._transport = transport
        self._reconnect_for_s, self._overload_wait_s = reconnect_for_s, overload_wait_s
        self._connection: Connection | None = None
        self._receive: asyncio.Task[DownFrame | None] | None = None
        self._is_taken = True

    async def send(self, frame: UpFrame) -> None:
        """Raises: TransportError if the stream is cut."""
        assert self._connection is not None
        await self._connection.send(frame)

    def receiving(self) -> asyncio.Task[DownFrame | None]:
        """The read in progress; the next call after it is done starts another.

        It is never cancelled while the stream is wanted, for that would cancel the stream.
        """
        if self._receive is None or self._is_taken:
            assert self._connection is not None
            self._receive, self._is_taken = asyncio.ensure_future(self._connection.receive()), False
        return self._receive

    @property
    def has_frame(self) -> bool:
        """True if `take` gives something new."""
        return self._receive is not None and not self._is_taken and self._receive.done()

    def take(self) -> DownFrame | None:
        """The frame of the read that is done. Raises: TransportError if the stream is cut."""
        assert self._receive is not None
        self._is_taken = True
        frame = self._receive.result()
        if isinstance(frame, Finished) and frame.epoch == self.request.epoch:
            self.finished = frame
        return frame

    async def open(self) -> None:
        """A new session, from what is held: the first, or one that carries the text to another verifier.

        Raises: what the verifier answers, or TransportError.
        """
        request = self.request
        if self.opened is not None:
            request = replace(request, ids=tuple(self.ids), seed=self.opened.seed, target_id=self.opened.target_id)
        await self._attach(request)

    async def _attach(self, frame: Open | Resume) -> None:
        await self._disconnect()
        self._connection = await self._transport.connect(self.traffic)
        asked_at = asyncio.get_running_loop().time()
        answer = self.receiving()  # first: a stream that was refused at once can be read still, if a read was waiting
        try:
            await self.send(frame)
        except DraftwireError:
            await asyncio.wait({answer}, timeout=GOODBYE_S)
            if not self.has_frame:
                raise
        await asyncio.wait({self.receiving()})  # a caller that is cancelled here still has a stream to say goodbye on
        match self.take():
            case Opened() as opened:
                self.opened, self.answered_s = opened, asyncio.get_running_loop().time() - asked_at
                self.on_opened(opened)
            case Fault() as fault:
                raise cut_or_error(fault)
            case None:
                raise TransportError("the verifier ended the stream")
            case other:
                raise RemoteProtocolError(f"{type(other).__name__} came instead of Opened", field="frame")

    async def reconnect(self, cause: DraftwireError) -> None:
        """Resumes the session, or opens it where it is not known; waits as long as an overloaded verifier asks, else
        longer after each failure.

        Raises: the last failure when the time for failures of its kind is used up.
        """
        clock = asyncio.get_running_loop().time
        began, backoff_s = clock(), FIRST_BACKOFF_S
        was_cut = isinstance(cause, TransportError)
        while (left_s := began + self._patience_s(cause) - clock()) > 0:
            await asyncio.sleep(min(left_s, _pause_s(cause, backoff_s)))
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
            try:
                await self._resume_or_reopen()
                self.reconnects += was_cut
                return
            except (TransportError, Overloaded) as error:
                cause, was_cut = error, was_cut or isinstance(error, TransportError)
        raise cause

    def _patience_s(self, cause: DraftwireError) -> float:
        is_first = self.opened is None and isinstance(cause, Overloaded)
        return self._overload_wait_s if is_first else self._reconnect_for_s

    async def _resume_or_reopen(self) -> None:
        if self.opened is None:
            await self.open()
            return
        resume = Resume(self.opened.session_id, self.opened.epoch, len(self.ids), ids_digest(self.ids))
        try:
            await self._attach(resume)
        except SessionNotFound:
            await self.open()

    async def say_goodbye(self) -> None:
        """Closes the session, hears the verifier out for its usage, ends the stream. Never raises, bounded in time."""
        if self._connection is None:
            return
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.send(Close(self.request.epoch, len(self.ids)))
                while True:
                    await self.receiving()
                    if self.take() is None:
                        break
        except (DraftwireError, TimeoutError):
            pass
        finally:
            await self._disconnect()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        receive, self._receive = self._receive, None
        try:
            if receive is not None:
                receive.cancel()
                await asyncio.wait({receive})
                if not receive.cancelled():
                    receive.exception()
        finally:
            if connection is not None:
                await connection.close()


def _pause_s(cause: DraftwireError, backoff_s: float) -> float:
    """Not before the time that the verifier names, and spread out behind it: many may have been told the same."""
    if cause.retry_after_ms > 0:
        return cause.retry_after_ms / 1000 * random.uniform(1.0, 1.25)
    return backoff_s * random.uniform(0.5, 1.0)
