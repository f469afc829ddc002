"""A TCP proxy that is a link: it delays each direction by half a round trip, counts bytes, can be cut and restored.

Must not know: HTTP/2, gRPC, Draftwire. Called by `link`, in a process of its own, so that no interpreter waits for it.
`python -m bench.delay_check` measures its accuracy. Chunks queue without bound: HTTP/2's own windows bound them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from bench.delay_line import DelayLine, Shape
from shared.errors import DraftwireError

END_TIMEOUT_S = 5.0
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class _End(asyncio.Protocol):
    """One socket. What it receives goes into its line and comes out at the peer's socket."""

    def __init__(self, server: DelayServer, is_device: bool) -> None:
        self._server, self.is_device = server, is_device
        self._loop = asyncio.get_running_loop()
        self._line = server.line(is_device)
        self._timer: asyncio.TimerHandle | None = None
        self.peer: _End | None = None
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._server.joined(self)

    def data_received(self, data: bytes) -> None:
        self._server.count(self.is_device, len(data))
        self._line.put(data, self._loop.time())
        self._deliver()

    def eof_received(self) -> bool:
        self._line.put(b"", self._loop.time())
        self._deliver()
        return True  # this side may still be written to

    def connection_lost(self, error: Exception | None) -> None:
        self._server.left(self)
        if error is not None and self.peer is not None:
            self.peer.drop()

    def drop(self) -> None:
        """Resets the socket; what was in flight is lost."""
        if self._timer is not None:
            self._timer.cancel()
        if self.transport is None:  # not connected yet
            return
        if not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        self.transport.abort()

    def _deliver(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self.peer is not None  # nothing is read before both ends stand
        for chunk in self._line.take(self._loop.time()):
            if chunk:
                self.peer.transport.write(chunk)
            elif not self.peer.transport.is_closing():
                self.peer.transport.write_eof()
                self._server.ended(self)
        if (at := self._line.next_at) is not None:
            self._timer = self._loop.call_at(at, self._deliver)


class DelayServer:
    """The proxy in the running loop: `start`, then `port`; `cut`, `restore`, `stop`."""

    def __init__(self, upstream: str, shape: Shape) -> None:
        """`upstream` is HOST:PORT."""
        self._host, _, port = upstream.rpartition(":")
        self._upstream_port, self._shape = int(port), shape
        self.port = self.up_bytes = self.down_bytes = self.connections = 0
        self._ends: set[_End] = set()
        self._half_closed: set[_End] = set()
        self._joining: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens, on the port of before if there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self, True), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    restore = start

    def cut(self) -> None:
        """Drops all connections with what is in flight, and refuses new ones until `restore`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._joining):
            task.cancel()
        for end in list(self._ends):
            end.drop()

    async def stop(self) -> None:
        """Cut for ever."""
        self.cut()
        await asyncio.gather(*self._joining, return_exceptions=True)

    # ------------------------------------------------------------ called by the ends

    def line(self, is_device: bool) -> DelayLine:
        """A new line for what comes from this side."""
        shape = self._shape
        self.connections += is_device
        bytes_per_s = shape.up_bytes_per_s if is_device else shape.down_bytes_per_s
        seed = 2 * (shape.seed + self.connections) + is_device
        return DelayLine(shape.rtt_ms / 2000, shape.jitter_ms / 1000, bytes_per_s, seed)

    def count(self, is_device: bool, size: int) -> None:
        """Bytes came in from a side."""
        if is_device:
            self.up_bytes += size
        else:
            self.down_bytes += size

    def joined(self, end: _End) -> None:
        """A socket stands; a device's waits for its peer before anything is read."""
        self._ends.add(end)
        if end.is_device:
            end.transport.pause_reading()
            task = asyncio.get_running_loop().create_task(self._join(end))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    async def _join(self, device: _End) -> None:
        loop = asyncio.get_running_loop()
        far = _End(self, False)
        far.peer, device.peer = device, far
        try:
            await loop.create_connection(lambda: far, self._host, self._upstream_port)
        except OSError:
            device.drop()
        else:
            if device.transport.is_closing():  # gone meanwhile
                far.drop()
            device.transport.resume_reading()

    def ended(self, end: _End) -> None:
        """The end of a stream came out; when both have, the sockets close."""
        self._half_closed.add(end)
        if end.peer in self._half_closed:
            for each in (end, end.peer):
                each.transport.close()

    def left(self, end: _End) -> None:
        """A socket is gone."""
        self._ends.discard(end)
        self._half_closed.discard(end)


# ---------------------------------------------------------------- in a process of its own


class DelayProxy:
    """`with DelayProxy(verifier.address, Shape(rtt_ms=50)) as proxy:` listens on `proxy.address`."""

    def __init__(self, upstream: str, shape: Shape) -> None:
        self._command = [sys.executable, "-m", "bench.delay_proxy", "--upstream", upstream]
        for name, value in vars(shape).items():
            self._command += [f"--{name.replace('_', '-')}", str(value)]
        self.address = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.address = f"127.0.0.1:{self._reply()['port']}"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def counts(self) -> tuple[int, int]:
        """TCP bytes up and down so far."""
        reply = self._ask("counts")
        return reply["up_bytes"], reply["down_bytes"]

    def cpu_s(self) -> float:
        """CPU time that the proxy has used."""
        return float(self._ask("counts")["cpu_s"])

    def cut(self, for_s: float = 0.0) -> None:
        """Drops all connections and refuses new ones: for so long, or (0) until `restore`."""
        self._ask(f"cut {for_s}")

    def restore(self) -> None:
        """Listens again, on the same port."""
        self._ask("restore")

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DraftwireError("the delay proxy ended")
        return dict(json.loads(line))

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # its word to end, also if this process is killed
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


async def _serve(upstream: str, shape: Shape) -> None:
    server = DelayServer(upstream, shape)
    await server.start()
    print(json.dumps({"port": server.port}), flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    restoring: asyncio.Task[None] | None = None
    while line := (await reader.readline()).decode().split():
        if line[0] in ("cut", "restore") and restoring is not None:
            restoring.cancel()
        if line[0] == "cut":
            server.cut()
            if float(line[1]) > 0:
                restoring = asyncio.create_task(_restore_later(server, float(line[1])))
        elif line[0] == "restore" and server._server is None:
            await server.restore()
        cpu_s = sum(os.times()[:2])
        print(json.dumps({"up_bytes": server.up_bytes, "down_bytes": server.down_bytes, "cpu_s": cpu_s}), flush=True)
    await server.stop()


async def _restore_later(server: DelayServer, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await server.restore()


def take_priority() -> None:
    """A network is not scheduled: on busy cores this process goes before others, where that is allowed."""
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not the device's core alone
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        except OSError:
            print("delay proxy: no priority here; delays grow on busy cores", file=sys.stderr)


def _precise_loop() -> asyncio.AbstractEventLoop:
    """epoll rounds timers up to whole milliseconds; select does not."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def main() -> None:
    """Serves until its standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.delay_proxy", description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT", help="where it leads")
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    args = parser.parse_args()
    take_priority()
    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    with asyncio.Runner(loop_factory=_precise_loop) as runner:
        runner.run(_serve(args.upstream, shape))


if __name__ == "__main__":
    main()
