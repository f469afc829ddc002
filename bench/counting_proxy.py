"""A TCP proxy on loopback that counts what really crosses, and reads HTTP/2 frames to tell payload from framing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA = 0
GRPC_PREFIX_BYTES = 5
FRAME_HEADER_BYTES = 9


@dataclass
class Direction:
    """Bytes of one direction of one or more connections."""

    tcp_bytes: int = 0
    message_bytes: int = 0
    """gRPC messages without their 5-byte prefixes: what the codec counts."""
    messages: int = 0
    _buffer: bytearray = field(default_factory=bytearray)
    _body: dict[int, bytearray] = field(default_factory=dict)

    def feed(self, chunk: bytes) -> None:
        """More bytes of the stream."""
        self.tcp_bytes += len(chunk)
        self._buffer += chunk
        if self._buffer.startswith(PREFACE):
            del self._buffer[: len(PREFACE)]
        while len(self._buffer) >= FRAME_HEADER_BYTES:
            length = int.from_bytes(self._buffer[:3])
            if len(self._buffer) < FRAME_HEADER_BYTES + length:
                return
            if self._buffer[3] == DATA:
                stream = int.from_bytes(self._buffer[5:9]) & 0x7FFFFFFF
                self._messages(stream, self._buffer[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + length])
            del self._buffer[: FRAME_HEADER_BYTES + length]

    def _messages(self, stream: int, data: bytearray) -> None:
        body = self._body.setdefault(stream, bytearray())
        body += data
        while len(body) >= GRPC_PREFIX_BYTES:
            length = int.from_bytes(body[1:5])
            if len(body) < GRPC_PREFIX_BYTES + length:
                return
            self.messages += 1
            self.message_bytes += length
            del body[: GRPC_PREFIX_BYTES + length]


class CountingProxy:
    """`async with CountingProxy("127.0.0.1:PORT") as proxy:` listens on `proxy.address`."""

    def __init__(self, upstream: str) -> None:
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self.up, self.down = Direction(), Direction()
        self.address = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink, direction in ((reader, far_writer, self.up), (far_reader, writer, self.down)):
            task = asyncio.create_task(_pump(source, sink, direction))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction) -> None:
    try:
        while chunk := await source.read(65536):
            direction.feed(chunk)
            sink.write(chunk)
            await sink.drain()
    except ConnectionError:
        pass
    finally:
        sink.close()
