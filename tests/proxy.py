"""A TCP proxy in the test's own loop: counts bytes, cuts connections at a byte count, and changes where it leads.

Must not know: HTTP/2, gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

BLOCK = 65536


@dataclass
class Proxy:
    """`budget()` gives the bytes, both ways together, after which a new connection is cut; None: never."""

    target_port: int
    budget: Callable[[], int | None] = lambda: None
    port: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    cuts: int = 0
    connections: int = 0
    _pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def cut_all(self) -> None:
        """Resets every connection now."""
        for pair in list(self._pairs):
            self._cut(pair)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        left = [self.budget()]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        pair = (writer, far_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, "up_bytes", left, pair),
                self._pump(far_reader, writer, "down_bytes", left, pair),
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.transport.abort()
            self._tasks.discard(task)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        counter: str,
        left: list[int | None],
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        while data := await reader.read(BLOCK):
            room = left[0]
            if room is not None and len(data) >= room:
                writer.write(data[:room])  # cut in the middle of a frame
                self.cuts += 1
                self._cut(pair)
                return
            if room is not None:
                left[0] = room - len(data)
            setattr(self, counter, getattr(self, counter) + len(data))
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    def _cut(self, pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self._pairs.discard(pair)
        for writer in pair:
            writer.transport.abort()


@asynccontextmanager
async def proxying(target_port: int, budget: Callable[[], int | None] = lambda: None) -> AsyncIterator[Proxy]:
    """A proxy on a free port."""
    proxy = Proxy(target_port, budget)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut_all()
        for task in list(proxy._tasks):
            task.cancel()
        await asyncio.gather(*proxy._tasks, return_exceptions=True)
