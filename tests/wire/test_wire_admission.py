"""Who gets a place over real gRPC: the queue, its bounds, shares of a connection, streams, start and drain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cloud_verifier.admission import AdmissionLimits
from cloud_verifier.loading import LoadedTarget
from cloud_verifier.reports import GuardedObserver
from cloud_verifier.server import Server
from cloud_verifier.service import StreamLimits
from cloud_verifier.target_model import RowInput, TorchTarget
from edge_client.session_stream import SessionStream
from edge_client.transport import GrpcConnection, GrpcTransport, Traffic
from shared.errors import Overloaded
from shared.pb import verifier_pb2 as pb
from shared.pb import verifier_pb2_grpc
from shared.sampling import GREEDY
from shared.types import Close, Commit, DownFrame, Draining, Epoch, Fault, Finished, Opened, Pace, PaceKind, UpFrame
from tests.formula_model import Recorder
from tests.oracle import PlainTarget
from tests.rig import PATIENCE_S, RawStream, Running, open_frame, raw, serving

EPOCH = Epoch(0)
PROMPT = (70, 71, 72)
COUNT = 16


def prompt(number: int) -> tuple[int, ...]:
    return (*PROMPT, 80 + number)


def with_limits(observer: Recorder | None = None, max_queue_ms: int = 600_000, **limits: int) -> dict[str, Any]:
    """Engine options for a verifier with such limits."""
    return {
        "admission": AdmissionLimits(**limits),
        "observer": GuardedObserver(observer or Recorder()),
        "max_queue_ms": max_queue_ms,
    }


async def queue_holds(running: Running, count: int) -> None:
    await running.settled(lambda: running.engine._admission.queued == count)
    await running.commands_done()


async def asked(loaded: LoadedTarget, stub: verifier_pb2_grpc.VerifierStub, **changes: Any) -> RawStream:
    """A stream that has sent its Open and waits for the answer."""
    stream = RawStream(stub)
    await stream.send(open_frame(loaded, **{"ids": PROMPT, **changes}))
    return stream


async def close(stream: RawStream) -> None:
    await stream.send(Close(EPOCH, 0))
    while await stream.receive() is not None:
        pass


async def test_of_ten_opens_at_once_four_are_served_three_wait_and_three_are_told_when_to_come_again(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    observer = Recorder()
    options = with_limits(observer, max_sessions=4, max_queue=3)
    async with serving(loaded_tiny, engine_options=options) as running, raw(running) as stub:
        streams = [await asked(loaded_tiny, stub, ids=prompt(number)) for number in range(10)]
        answers: list[asyncio.Task[DownFrame | None]] = [asyncio.create_task(each.receive()) for each in streams]
        await running.settled(lambda: sum(answer.done() for answer in answers) == 7)
        await queue_holds(running, 3)
        by_kind: dict[type[object], list[int]] = {Opened: [], Fault: []}
        for number, answer in enumerate(answers):
            if answer.done():
                by_kind[type(answer.result())].append(number)
        waiting = [number for number, answer in enumerate(answers) if not answer.done()]
        assert (len(by_kind[Opened]), len(by_kind[Fault]), len(waiting)) == (4, 3, 3)
        for number in by_kind[Fault]:
            fault = answers[number].result()
            assert isinstance(fault, Fault)
            assert (fault.error, fault.retry, fault.answers) == ("Overloaded", True, "open")
            assert fault.retry_after_ms > 0
            assert await streams[number].status() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for number in by_kind[Opened]:
            assert await streams[number].rest() == plain.ids(prompt(number), COUNT, GREEDY)
        assert [number for number in waiting if answers[number].done()] == []  # a finished text keeps its place
        for number in by_kind[Opened]:
            await close(streams[number])
        for number in waiting:
            assert isinstance(await answers[number], Opened)
            assert await streams[number].rest() == plain.ids(prompt(number), COUNT, GREEDY)
        assert running.sessions == 3
        assert observer.refusals == {"queue_full": 3}
        assert len(observer.opened) == 7


async def test_those_who_wait_are_served_in_the_order_in_which_they_came(loaded_tiny: LoadedTarget) -> None:
    options = with_limits(max_sessions=1, max_queue=9)
    async with serving(loaded_tiny, engine_options=options) as running, raw(running) as stub:
        serving_now = RawStream(stub)
        await serving_now.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        waiting: list[RawStream] = []
        for number in range(4):
            waiting.append(await asked(loaded_tiny, stub, run_ahead=0))
            await queue_holds(running, number + 1)
        answers = [asyncio.create_task(stream.receive()) for stream in waiting]
        for number, stream in enumerate(waiting):
            await close(serving_now)
            assert isinstance(await answers[number], Opened)
            assert [answer.done() for answer in answers].count(True) == number + 1
            serving_now = stream


async def test_an_open_waits_for_a_place_only_so_long(loaded_tiny: LoadedTarget) -> None:
    observer = Recorder()
    options = with_limits(observer, max_queue_ms=50, max_sessions=1, max_queue=5)
    async with serving(loaded_tiny, engine_options=options) as running, raw(running) as stub:
        first = RawStream(stub)
        await first.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        late = await asked(loaded_tiny, stub)
        fault = await late.fault()
        assert (fault.error, fault.retry) == ("Overloaded", True)
        assert fault.retry_after_ms > 0
        assert await late.status() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await queue_holds(running, 0)
        assert observer.refusals == {"queue_timeout": 1}
        await close(first)
        assert running.sessions == 0  # the place is nobody's: who gave up does not get it


async def test_a_client_that_leaves_the_queue_is_passed_over(loaded_tiny: LoadedTarget) -> None:
    options = with_limits(max_sessions=1, max_queue=5)
    async with serving(loaded_tiny, engine_options=options) as running, raw(running) as stub:
        first = RawStream(stub)
        await first.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        leaving = await asked(loaded_tiny, stub)
        await queue_holds(running, 1)
        staying = await asked(loaded_tiny, stub)
        await queue_holds(running, 2)
        leaving.call.cancel()
        await queue_holds(running, 1)
        await close(first)
        assert isinstance(await staying.receive(), Opened)
        assert len(await staying.rest()) == COUNT
        assert running.sessions == 1


async def test_a_connection_gets_no_more_sessions_than_its_share(loaded_tiny: LoadedTarget) -> None:
    observer = Recorder()
    options = with_limits(observer, max_sessions=8, principal_sessions=2)
    async with (
        serving(loaded_tiny, engine_options=options) as running,
        raw(running, is_alone=True) as one,
        raw(running, is_alone=True) as other,
    ):
        held = [RawStream(one) for _ in range(2)]
        for stream in held:
            await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        refused = await asked(loaded_tiny, one)
        fault = await refused.fault()
        assert fault.error == "Overloaded"
        assert "this connection has its 2 sessions already" in fault.message
        assert await refused.status() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert observer.refusals == {"principal_sessions": 1}
        assert len(await (await asked(loaded_tiny, other)).rest()) == COUNT
        await close(held[0])
        assert len(await (await asked(loaded_tiny, one)).rest()) == COUNT


async def test_whoever_has_its_share_already_takes_no_place_from_an_absent_session(loaded_tiny: LoadedTarget) -> None:
    # Once wrong: every refused open of a full connection made an absent session of somebody else give up its place.
    options = with_limits(max_sessions=2, principal_sessions=1)
    async with (
        serving(loaded_tiny, engine_options=options) as running,
        raw(running, is_alone=True) as one,
        raw(running, is_alone=True) as other,
    ):
        absent, greedy = RawStream(one), RawStream(other)
        await absent.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await greedy.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        absent.call.cancel()
        engine = running.engine
        await running.settled(lambda: any(session.sink is None for session in engine._sessions.values()))
        for _ in range(3):
            refused = await asked(loaded_tiny, other)
            assert "this connection has its 1 sessions" in (await refused.fault()).message
        assert running.sessions == 2


async def test_a_session_whose_device_leaves_makes_room_for_those_who_wait_already(loaded_tiny: LoadedTarget) -> None:
    # Once wrong: only a newcomer displaced absent sessions; whoever was in the queue waited until its time was up.
    options = with_limits(max_sessions=1, max_queue=5)
    async with serving(loaded_tiny, engine_options=options) as running, raw(running) as stub:
        first = RawStream(stub)
        await first.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        waiting = await asked(loaded_tiny, stub)
        await queue_holds(running, 1)
        first.call.cancel()
        assert isinstance(await waiting.receive(), Opened)
        assert len(await waiting.rest()) == COUNT
        assert running.sessions == 1


async def test_a_session_that_is_left_while_another_one_is_swept_is_swept_too(loaded_tiny: LoadedTarget) -> None:
    # Once wrong: a device that left between the timer and the sweep itself found the timer still set, and set none.
    async with serving(loaded_tiny, lease_ms=1) as running, raw(running) as stub:
        streams = [RawStream(stub) for _ in range(2)]
        for stream in streams:
            await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        blocked, gate, engine = threading.Event(), threading.Event(), running.engine
        streams[0].call.cancel()
        await running.settled(lambda: any(session.sink is None for session in engine._sessions.values()))

        def block() -> None:
            blocked.set()
            gate.wait(PATIENCE_S)

        engine.submit(block)
        await asyncio.to_thread(blocked.wait, PATIENCE_S)
        commands = engine.worker._commands
        await running.settled(lambda: commands.qsize() >= 1)  # the sweep waits behind the gate
        streams[1].call.cancel()
        await running.settled(lambda: commands.qsize() >= 2)
        gate.set()
        await running.settled(lambda: running.sessions == 0)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(
    ("limits", "text"),
    [(StreamLimits(all_streams=2), "2 in all"), (StreamLimits(principal_streams=2), "2 of this connection")],
    ids=["in all", "of one connection"],
)
async def test_a_stream_too_many_is_refused_before_it_has_said_a_word(
    loaded_tiny: LoadedTarget, limits: StreamLimits, text: str
) -> None:
    observer = Recorder()
    options = {"observer": observer}
    async with (
        serving(loaded_tiny, engine_options=options, streams=limits) as running,
        raw(running, is_alone=True) as one,
        raw(running, is_alone=True) as other,
    ):
        held = [RawStream(one) for _ in range(2)]
        for stream in held:
            await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        silent = RawStream(one)
        fault = await silent.receive()  # nothing was sent
        assert isinstance(fault, Fault)
        assert (fault.error, fault.retry) == ("Overloaded", True)
        assert fault.message == f"too many streams are open: {text}"
        assert fault.retry_after_ms > 0
        assert await silent.status() is grpc.StatusCode.RESOURCE_EXHAUSTED
        elsewhere = RawStream(other)
        if limits.principal_streams:
            await elsewhere.open(open_frame(loaded_tiny, PROMPT))
            assert len(await elsewhere.rest()) == COUNT
        else:
            assert (await elsewhere.fault()).error == "Overloaded"
        await running.settled(lambda: observer.refusals["streams"] == (1 if limits.principal_streams else 2))
        await close(held[0])
        streams = running.server._service._streams
        await running.settled(lambda: max(streams.values()) == 1)
        again = await asked(loaded_tiny, one)
        assert len(await again.rest()) == COUNT


class Late(GrpcTransport):
    """Its frames leave when something has come from the verifier."""

    async def connect(self, traffic: Traffic) -> GrpcConnection:
        """See Transport."""
        connection = await super().connect(traffic)
        send = connection.send

        async def late(frame: UpFrame) -> None:
            await connection._call.initial_metadata()
            await send(frame)

        connection.send = late  # type: ignore[method-assign]
        return connection


async def test_a_device_that_is_refused_before_its_first_frame_has_left_learns_why(loaded_tiny: LoadedTarget) -> None:
    # Once wrong: a write to a stream that had ended hid what was there to read, and a full verifier looked like a cut.
    async with serving(loaded_tiny, streams=StreamLimits(all_streams=1)) as running, raw(running) as stub:
        await RawStream(stub).open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        transport = Late(running.address)
        for _ in range(10):
            device = SessionStream(transport, open_frame(loaded_tiny, PROMPT))
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(Overloaded, match="too many streams are open: 1 in all") as refused:
                    await device.open()
            assert refused.value.retry_after_ms > 0
            await device.say_goodbye()
        await transport.close()


async def test_streams_that_end_in_any_way_are_counted_down(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny, streams=StreamLimits(all_streams=3)) as running, raw(running) as stub:
        for number in range(12):
            stream = RawStream(stub)
            if number % 4 == 0:
                await stream.send(pb.Up())
                await stream.fault()
            elif number % 4 == 1:
                await stream.call.done_writing()
                assert await stream.receive() is None
            else:
                await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
                stream.call.cancel() if number % 4 == 2 else await close(stream)
            await stream.status()
            await running.settled(lambda: not running.server._service._streams)


# ---------------------------------------------------------------- start and drain


@asynccontextmanager
async def starting(loaded: LoadedTarget) -> AsyncIterator[tuple[Server, str]]:
    """A server that listens and has no engine yet."""
    server = Server()
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0, 0.2)


async def test_before_the_model_is_loaded_health_says_so_and_calls_may_be_retried(loaded_tiny: LoadedTarget) -> None:
    from cloud_verifier.judge import Judge
    from cloud_verifier.torch_engine import TorchEngine

    async with starting(loaded_tiny) as (server, address), grpc.aio.insecure_channel(address) as channel:
        health, stub = health_pb2_grpc.HealthStub(channel), verifier_pb2_grpc.VerifierStub(channel)
        async with asyncio.timeout(PATIENCE_S):
            reply = await health.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Describe(pb.DescribeRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "loading" in str(refused.value.details())
        early = RawStream(stub)
        fault = await early.fault()  # nothing was sent
        assert (fault.error, fault.retry) == ("VerifierUnavailable", True)
        assert await early.status() is grpc.StatusCode.UNAVAILABLE
        model = TorchTarget(loaded_tiny.model.lm, loaded_tiny.model.context_size, 16 << 20)
        engine = TorchEngine(model, Judge(loaded_tiny.valid_ids), loaded_tiny.card)
        engine.start()
        await server.begin(engine, loaded_tiny.valid_ids)
        async with asyncio.timeout(PATIENCE_S):
            reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert len(await (await asked(loaded_tiny, stub)).rest()) == COUNT
        await server.stop(0, 0.2)
        await asyncio.to_thread(engine.stop)


async def unavailable(stream: RawStream) -> None:
    """The rest of a stream is an error that may be retried."""
    with pytest.raises(grpc.aio.AioRpcError):
        await stream.until(Opened)  # which does not come again
    assert await stream.status() is grpc.StatusCode.UNAVAILABLE


async def test_a_drain_refuses_newcomers_and_lets_a_running_text_end(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    observer = Recorder()
    options = with_limits(observer, max_sessions=1, max_queue=5)
    async with serving(loaded_tiny, engine_options=options) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, max_new_tokens=40, run_ahead=2))
        waiting = await asked(loaded_tiny, stub)
        await queue_holds(running, 1)
        stopping = asyncio.create_task(running.server.stop(PATIENCE_S))
        assert (await stream.until(Draining)).within_ms == PATIENCE_S * 1000
        assert (await waiting.fault()).error == "VerifierUnavailable"
        assert await waiting.status() is grpc.StatusCode.UNAVAILABLE
        late = await asked(loaded_tiny, stub)
        fault = await late.fault()
        assert (fault.error, fault.retry) == ("VerifierUnavailable", True)
        assert await late.status() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        await stream.until(Finished)
        assert stream.ids == plain.ids(PROMPT, 40, GREEDY)
        await unavailable(stream)
        async with asyncio.timeout(PATIENCE_S):
            await stopping
        assert observer.refusals == {"draining": 2}


async def test_a_paused_text_is_cut_when_the_drain_is_over(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=2))
        while len(stream.ids) < 2:
            await stream.until(Commit)
        await running.server.stop(0.2)
        await unavailable(stream)
        assert any(isinstance(frame, Draining) for frame in stream.received)
        assert not any(isinstance(frame, Finished) for frame in stream.received)
        assert len(stream.ids) == 2


class FailingTarget(TorchTarget):
    """A target whose device fails when it is told to."""

    is_broken = False

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        if self.is_broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return super().forward(rows)


async def test_those_who_wait_learn_of_a_device_failure_at_once(loaded_tiny: LoadedTarget) -> None:
    # Once wrong: they waited until their time was up, and were told that there was no room.
    model = FailingTarget(loaded_tiny.model.lm, loaded_tiny.model.context_size, 16 << 20)
    options = with_limits(max_sessions=1, max_queue=5)
    async with serving(loaded_tiny, model=model, engine_options=options) as running, raw(running) as stub:
        first = RawStream(stub)
        await first.open(open_frame(loaded_tiny, PROMPT, run_ahead=2))
        waiting = [await asked(loaded_tiny, stub) for _ in range(3)]
        await queue_holds(running, 3)
        model.is_broken = True
        await first.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        for stream in (first, *waiting):
            assert (await stream.fault()).error == "DeviceFailure"
            assert await stream.status() is grpc.StatusCode.UNAVAILABLE
