"""The link of the bench: bytes come out late, all of them, in order; it can be cut and restored."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.delay_line import DelayLine, Shape
from bench.delay_proxy import DelayProxy, DelayServer
from tests.rig import PATIENCE_S

# ---------------------------------------------------------------- the line, under a clock of the test's own


def drained(line: DelayLine) -> list[tuple[float, bytes]]:
    """All chunks with the times at which they come out."""
    out = []
    while (at := line.next_at) is not None:
        assert line.take(at - 1e-9) == []
        out += [(at, chunk) for chunk in line.take(at)]
    return out


def test_every_chunk_comes_out_the_delay_later_however_many_are_in_flight() -> None:
    line = DelayLine(0.05)
    for number in range(100):
        line.put(bytes([number]), number / 1000)
    assert drained(line) == [(pytest.approx(number / 1000 + 0.05), bytes([number])) for number in range(100)]


def test_without_a_delay_a_chunk_is_out_at_once() -> None:
    line = DelayLine(0.0)
    line.put(b"x", 3.0)
    assert line.take(3.0) == [b"x"]
    assert line.next_at is None


def test_jitter_keeps_the_order_and_the_least_delay_and_is_the_same_for_a_seed() -> None:
    def times(seed: int) -> list[float]:
        line = DelayLine(0.02, jitter_s=0.03, seed=seed)
        for number in range(200):
            line.put(bytes([number]), number / 1000)
        out = drained(line)
        assert [chunk[0] for _, chunk in out] == list(range(200))
        return [at for at, _ in out]

    first = times(1)
    assert first == sorted(first)
    assert all(0.02 <= at - number / 1000 <= 0.05 + 1e-9 for number, at in enumerate(first))
    assert max(at - number / 1000 for number, at in enumerate(first)) > 0.04
    assert first == times(1) != times(2)


def test_a_limited_line_lets_bytes_out_at_its_rate() -> None:
    line = DelayLine(0.1, bytes_per_s=1000)
    for _ in range(10):
        line.put(b"x" * 50, 0.0)
    line.put(b"y" * 50, 9.0)  # the line was free again
    times = [at for at, _ in drained(line)]
    assert times == pytest.approx([0.1 + 0.05 * (number + 1) for number in range(10)] + [9.15])


def test_the_end_of_a_stream_comes_out_last() -> None:
    line = DelayLine(0.1)
    line.put(b"x", 0.0)
    line.put(b"", 0.0)
    assert [chunk for _, chunk in drained(line)] == [b"x", b""]


# ---------------------------------------------------------------- the proxy, over sockets


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends back what comes, and the end too."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """An echo server's address."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def delaying(upstream: str, shape: Shape) -> AsyncIterator[DelayServer]:
    """A proxy in the test's own loop."""
    server = DelayServer(upstream, shape)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_all_bytes_arrive_in_order_and_are_counted_then_the_end() -> None:
    sent = random.Random(3).randbytes(3_000_000)
    shape = Shape(rtt_ms=4, jitter_ms=2, seed=5)
    async with echoing() as upstream, delaying(upstream, shape) as proxy, connected(proxy.port) as (reader, writer):

        async def send() -> None:
            for start in range(0, len(sent), 70_001):
                writer.write(sent[start : start + 70_001])
                await writer.drain()
            writer.write_eof()

        async with asyncio.timeout(PATIENCE_S):
            _, received = await asyncio.gather(send(), reader.read())
        assert received == sent
        assert (proxy.up_bytes, proxy.down_bytes) == (len(sent), len(sent))


async def test_a_byte_takes_at_least_a_round_trip_there_and_back() -> None:
    loop = asyncio.get_running_loop()
    async with (
        echoing() as upstream,
        delaying(upstream, Shape(rtt_ms=30)) as proxy,
        connected(proxy.port) as (reader, writer),
    ):
        for _ in range(3):
            began = loop.time()
            writer.write(b"x")
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.readexactly(1) == b"x"
            assert loop.time() - began >= 0.030


async def test_a_cut_resets_connections_and_refuses_new_ones_until_restored_on_the_same_port() -> None:
    async with echoing() as upstream, delaying(upstream, Shape(rtt_ms=1)) as proxy:
        port = proxy.port
        async with connected(port) as (reader, writer):
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            proxy.cut()
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(ConnectionResetError):
                    await reader.readexactly(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await proxy.restore()
        assert proxy.port == port
        async with connected(port) as (reader, writer):
            writer.write(b"y")
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.readexactly(1) == b"y"


async def test_what_is_in_flight_at_a_cut_is_lost() -> None:
    got: list[bytes] = []
    ended = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            got.append(await reader.read())
        except OSError:
            pass
        finally:
            writer.close()
            ended.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    upstream = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, delaying(upstream, Shape(rtt_ms=3_600_000)) as proxy, connected(proxy.port) as (_, writer):
        writer.write(b"x")
        async with asyncio.timeout(PATIENCE_S):
            while not proxy.up_bytes:  # noqa: ASYNC110 (the proxy tells nobody)
                await asyncio.sleep(0.001)
        proxy.cut()
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    assert b"".join(got) == b""


async def test_without_an_upstream_a_connection_is_reset() -> None:
    async with echoing() as upstream:
        pass
    async with delaying(upstream, Shape()) as proxy, connected(proxy.port) as (reader, _):
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)


async def test_in_a_process_of_its_own_it_delays_counts_cuts_and_restores() -> None:
    loop = asyncio.get_running_loop()

    async def ping(proxy: DelayProxy) -> float:
        began = loop.time()
        async with asyncio.timeout(PATIENCE_S), connected(int(proxy.address.split(":")[1])) as (reader, writer):
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
        return loop.time() - began

    async with echoing() as upstream:
        with DelayProxy(upstream, Shape(rtt_ms=10)) as proxy:
            assert await ping(proxy) >= 0.010
            assert proxy.counts() == (4, 4)
            assert proxy.cpu_s() > 0
            proxy.cut()
            with pytest.raises(ConnectionRefusedError):
                await ping(proxy)
            proxy.restore()
            assert await ping(proxy) >= 0.010
            proxy.cut(for_s=0.02)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        await ping(proxy)
                        break
                    except ConnectionRefusedError:  # it comes back by itself, in a process that tells nobody
                        await asyncio.sleep(0.005)
            assert proxy.counts() == (12, 12)
