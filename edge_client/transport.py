"""The device's side of the wire: one gRPC channel, one stream per session, bytes counted.

Must not know: drafting, text. Called by `generate` and `client`. The one place on this side where gRPC statuses become
errors of shared/errors.py. `Transport` and `Connection` are the seam that tests replace.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt

from shared import codec
from shared.errors import (
    VERIFIER_SAYS,
    ConfigError,
    DraftwireError,
    ModelMismatch,
    Overloaded,
    PrefixMismatch,
    RemoteProtocolError,
    SessionNotFound,
    Timeout,
    TransportError,
    Unimplemented,
    VerifierUnavailable,
)
from shared.pb import verifier_pb2 as pb
from shared.pb import verifier_pb2_grpc
from shared.types import SHARE_KEY_METADATA, DownFrame, Hint, ModelCard, UpFrame

PING_INTERVAL_MS = 10_000
"""At least the verifier's minimum; a dead peer is noticed after this and PING_TIMEOUT_MS."""
PING_TIMEOUT_MS = 5_000

_ERRORS: dict[grpc.StatusCode, type[DraftwireError]] = {
    grpc.StatusCode.UNAVAILABLE: VerifierUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Timeout,
    grpc.StatusCode.CANCELLED: TransportError,
    grpc.StatusCode.NOT_FOUND: SessionNotFound,
    grpc.StatusCode.ABORTED: PrefixMismatch,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatch,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: RemoteProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
}


@dataclass
class Traffic:
    """Protobuf bytes of a session, framing of HTTP/2 and gRPC not included."""

    up_bytes: int = 0
    down_bytes: int = 0
    hint_bytes: int = 0
    up_frames: int = 0
    down_frames: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def count_up(self, frame: UpFrame, size: int) -> None:
        """One frame sent."""
        self.up_bytes += size
        self.up_frames += 1
        self.hint_bytes += size if isinstance(frame, Hint) else 0
        self._kind(frame)

    def count_down(self, frame: DownFrame, size: int) -> None:
        """One frame received."""
        self.down_bytes += size
        self.down_frames += 1
        self._kind(frame)

    def _kind(self, frame: UpFrame | DownFrame) -> None:
        name = type(frame).__name__.lower()
        self.kinds[name] = self.kinds.get(name, 0) + 1


class Connection(Protocol):
    """One stream. A failure of the network raises TransportError from either call."""

    async def send(self, frame: UpFrame) -> None:
        """Sends one frame."""
        ...

    async def receive(self) -> DownFrame | None:
        """The next frame; None if the verifier ended the stream in order."""
        ...

    async def close(self) -> None:
        """Ends the stream from this side; never raises."""
        ...


class Transport(Protocol):
    """A way to one verifier."""

    async def describe(self) -> ModelCard:
        """What it serves."""
        ...

    async def connect(self, traffic: Traffic) -> Connection:
        """A new stream whose bytes are counted in `traffic`."""
        ...

    async def close(self) -> None:
        """Gives the channel back."""
        ...


class GrpcTransport:
    """A Transport over one grpc.aio channel."""

    def __init__(self, address: str, valid_ids: npt.NDArray[np.bool_] | None = None, timeout_s: float = 5.0) -> None:
        """`address` is HOST:PORT; `timeout_s` bounds Describe. Raises: ConfigError for an address of another form."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"verifier address must be HOST:PORT, got {address!r}", field="verifier")
        self.address = address
        self._timeout_s = timeout_s
        self._valid_ids = valid_ids
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
                ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.enable_retries", 0),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        self._stub = verifier_pb2_grpc.VerifierStub(self._channel)
        self._metadata = ((SHARE_KEY_METADATA, secrets.token_bytes(16)),)

    async def describe(self) -> ModelCard:
        """See Transport. Raises: VerifierUnavailable naming the address."""
        try:
            reply = await self._stub.Describe(pb.DescribeRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error.code(), error.details()) from error
        return codec.decode_card(reply)

    async def connect(self, traffic: Traffic) -> GrpcConnection:
        """See Transport."""
        return GrpcConnection(self._stub.Session(metadata=self._metadata), traffic, self)

    async def close(self) -> None:
        """See Transport."""
        await self._channel.close()

    def _translated(self, code: grpc.StatusCode, details: str | None) -> DraftwireError:
        kind = _ERRORS.get(code, TransportError)
        if kind in (VerifierUnavailable, Timeout) and not (details or "").startswith(VERIFIER_SAYS):
            return kind(f"no verifier answers at {self.address}; start one with cloud-verifier")
        return kind(details or str(code))


class GrpcConnection:
    """A Connection over one gRPC stream."""

    def __init__(self, call: Any, traffic: Traffic, transport: GrpcTransport) -> None:
        self._call, self._traffic, self._transport = call, traffic, transport
        self._rim = codec.Rim(valid_ids=transport._valid_ids)
        self._writing: asyncio.Future[None] | None = None

    async def send(self, frame: UpFrame) -> None:
        """See Connection. A caller that is cancelled here leaves the write to finish: grpc would end the stream.

        So it is counted whoever waits for it.
        """
        message = codec.encode_up(frame)
        if self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})
        self._writing = asyncio.ensure_future(self._call.write(message))
        self._writing.add_done_callback(lambda done: self._count(done, frame, message.ByteSize()))
        try:
            await asyncio.shield(self._writing)
        except grpc.aio.AioRpcError as error:
            raise self._transport._translated(error.code(), error.details()) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            if self._call.done():
                raise self._transport._translated(await self._call.code(), await self._call.details()) from error
            raise TransportError("the stream has ended") from error

    def _count(self, write: asyncio.Future[None], frame: UpFrame, size: int) -> None:
        if not write.cancelled() and write.exception() is None:
            self._traffic.count_up(frame, size)

    async def receive(self) -> DownFrame | None:
        """See Connection."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._transport._translated(error.code(), error.details()) from error
        if message is grpc.aio.EOF:
            return None
        frame = codec.decode_down(message, self._rim)
        self._traffic.count_down(frame, message.ByteSize())
        return frame

    async def close(self) -> None:
        """See Connection."""
        self._call.cancel()
