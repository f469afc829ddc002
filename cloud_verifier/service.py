"""The gRPC rim of the verifier: streams in, frames to the engine, frames out. Knows nothing of models.

Called by grpc.aio. The one place on this side where errors become Faults and gRPC statuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc
import numpy as np
import numpy.typing as npt

from cloud_verifier.engine import Engine, EngineStream
from cloud_verifier.logs import event
from shared import codec
from shared.errors import DraftwireError, Overloaded, RemoteProtocolError, VerifierUnavailable
from shared.pb import verifier_pb2 as pb
from shared.pb import verifier_pb2_grpc
from shared.types import SHARE_KEY_METADATA, Open, Resume

log = logging.getLogger("draftwire.service")

FIRST_FRAME_TIMEOUT_S = 30.0
RETRY_STREAM_MS = 1000


@dataclass(frozen=True)
class StreamLimits:
    """How many streams may be open at once, those included that have not said yet what they want."""

    all_streams: int = 4096
    principal_streams: int = 0
    """Streams of one principal; 0: no limit of its own."""


class VerifierService(verifier_pb2_grpc.VerifierServicer):
    """Serves Describe and Session over one engine, once there is one. A principal is a connection, for now."""

    def __init__(
        self, limits: StreamLimits | None = None, on_refused: Callable[[str], None] = lambda reason: None
    ) -> None:
        """`on_refused` hears of streams that were one too many."""
        self._limits = limits or StreamLimits()
        self._on_refused = on_refused
        self._streams: Counter[str] = Counter()
        self._engine: Engine | None = None

    def begin(self, engine: Engine, valid_ids: npt.NDArray[np.bool_]) -> None:
        """From now on calls are served; before, they are told that the model is being loaded."""
        self._rim = codec.Rim(engine.describe().limits, valid_ids)
        self._reply = codec.encode_card(engine.describe())
        self._engine = engine

    def _ready(self) -> Engine:
        if self._engine is None:
            raise VerifierUnavailable("the verifier is loading its model")
        return self._engine

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeReply:
        """What is served."""
        try:
            self._ready()
        except DraftwireError as error:
            await context.abort(getattr(grpc.StatusCode, error.grpc_status), error.message)
        return self._reply

    async def Session(
        self, requests: AsyncIterator[pb.Up], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Down]:
        """One session's stream: the first frame opens or resumes, the rest is hints up and commits down."""
        stream: EngineStream | None = None
        reader: asyncio.Task[None] | None = None
        answers = "open"
        admitted = ExitStack()
        try:
            admitted.enter_context(self._counted(context.peer()))
            async with asyncio.timeout(FIRST_FRAME_TIMEOUT_S):
                first = await anext(aiter(requests), None)
            if first is None:
                return
            answers = first.WhichOneof("frame") or "frame"
            stream = await self._attach(first, context)
            yield codec.encode_opened(stream.opened)
            answers = ""
            reader = asyncio.create_task(self._read(requests, stream))
            async for frame in stream.frames():
                yield codec.encode_down(frame)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "a stream begins with open or resume: none came")
        except DraftwireError as error:
            if answers:
                yield codec.encode_fault(codec.fault_of(error, answers))
            event(log, logging.INFO, "stream_ended", error=type(error).__name__, field=error.field)
            await context.abort(getattr(grpc.StatusCode, error.grpc_status), error.message)
        finally:
            if reader is not None:
                reader.cancel()
            if stream is not None:
                stream.detach()
            admitted.close()

    @contextmanager
    def _counted(self, principal: str) -> Iterator[None]:
        """One more stream. Raises: Overloaded, VerifierUnavailable."""
        self._ready()
        most, most_of_one = self._limits.all_streams, self._limits.principal_streams
        is_one_too_many = self._streams.total() >= most
        if is_one_too_many or (most_of_one and self._streams[principal] >= most_of_one):
            self._on_refused("streams")
            whose = f"{most} in all" if is_one_too_many else f"{most_of_one} of this connection"
            raise Overloaded(f"too many streams are open: {whose}", retry_after_ms=RETRY_STREAM_MS)
        self._streams[principal] += 1
        try:
            yield
        finally:
            self._streams[principal] -= 1
            if not self._streams[principal]:
                del self._streams[principal]

    async def _attach(self, first: pb.Up, context: grpc.aio.ServicerContext) -> EngineStream:
        principal = context.peer()
        frame = codec.decode_up(first, self._rim)
        match frame:
            case Open():
                return await self._ready().open(frame, principal, _share_key(context))
            case Resume():
                return await self._ready().resume(frame, principal, _share_key(context))
            case _:
                raise RemoteProtocolError("a stream begins with open or resume", field="frame")

    async def _read(self, requests: AsyncIterator[pb.Up], stream: EngineStream) -> None:
        async for message in requests:
            try:
                frame = codec.decode_up(message, self._rim)
                if isinstance(frame, (Open, Resume)):
                    raise RemoteProtocolError("a session is open on this stream already", field="frame")
                await stream.send(frame)
            except RemoteProtocolError as error:
                stream.refuse(codec.fault_of(error, message.WhichOneof("frame") or "frame"))
        stream.finish_writing()


def _share_key(context: grpc.aio.ServicerContext) -> bytes:
    """The secret of a connection under which its sessions share what was computed; empty if it sent none.

    The address of a connection is not enough: another tenant may come from the same one later, or from behind the
    same proxy. Every device draws its own key, so nobody else can name it.
    """
    for name, value in context.invocation_metadata() or ():
        if name == SHARE_KEY_METADATA and isinstance(value, bytes) and 16 <= len(value) <= 64:
            return value
    return b""
