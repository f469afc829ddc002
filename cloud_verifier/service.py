"""The gRPC rim of the verifier: streams in, frames to the engine, frames out. Knows nothing of models.

Called by grpc.aio. The one place on this side where errors become Faults and gRPC statuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import numpy as np
import numpy.typing as npt

from cloud_verifier.engine import Engine, EngineStream
from shared import codec
from shared.errors import DraftwireError, RemoteProtocolError
from shared.pb import verifier_pb2 as pb
from shared.pb import verifier_pb2_grpc
from shared.types import Open, Resume

log = logging.getLogger("draftwire.service")

FIRST_FRAME_TIMEOUT_S = 30.0


class VerifierService(verifier_pb2_grpc.VerifierServicer):
    """Serves Describe and Session over one engine."""

    def __init__(self, engine: Engine, valid_ids: npt.NDArray[np.bool_]) -> None:
        self._engine = engine
        self._rim = codec.Rim(engine.describe().limits, valid_ids)
        self._reply = codec.encode_card(engine.describe())

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeReply:
        """What is served."""
        return self._reply

    async def Session(
        self, requests: AsyncIterator[pb.Up], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Down]:
        """One session's stream: the first frame opens or resumes, the rest is hints up and commits down."""
        stream: EngineStream | None = None
        reader: asyncio.Task[None] | None = None
        answers = "open"
        try:
            async with asyncio.timeout(FIRST_FRAME_TIMEOUT_S):
                first = await anext(aiter(requests), None)
            if first is None:
                return
            answers = first.WhichOneof("frame") or "frame"
            stream = await self._attach(first)
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
            log.info("stream ends: %s", error)
            await context.abort(getattr(grpc.StatusCode, error.grpc_status), error.message)
        finally:
            if reader is not None:
                reader.cancel()
            if stream is not None:
                stream.detach()

    async def _attach(self, first: pb.Up) -> EngineStream:
        frame = codec.decode_up(first, self._rim)
        match frame:
            case Open():
                return await self._engine.open(frame)
            case Resume():
                return await self._engine.resume(frame)
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
