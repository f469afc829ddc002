"""Cut networks, verifiers that go away, devices that vanish: same text, nothing twice, nothing left behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cloud_verifier.loading import LoadedTarget
from cloud_verifier.target_model import RowInput, TorchTarget
from edge_client.client import SpeculativeClient
from edge_client.events import Committed, Done, FinishReason, OfflinePolicy, Preview, State, StateChanged
from edge_client.tokenizer import TextTokenizer
from edge_client.transport import GrpcTransport
from shared.errors import DeviceFailure, TransportError
from shared.randomness import ids_digest
from shared.sampling import GREEDY, SamplingParams
from shared.types import Commit, Draining, Epoch, Hint, Opened, Pace, PaceKind, Resume
from tests.oracle import PlainTarget
from tests.proxy import proxying
from tests.rig import PATIENCE_S, RawStream, client, open_frame, raw, serving
from tests.tiny_pair import TinyPair

PROMPT = [70, 71, 72]
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, top_k=50)
EPOCH = Epoch(0)


async def answers(device: SpeculativeClient) -> None:
    """Waits until the device's channel has a connection again."""
    assert device._transport is not None
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await device._transport.describe()
                return
            except TransportError:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("draft", ["same", "noisy", "none"])
async def test_connections_cut_at_random_bytes_cost_no_id_and_give_none_twice(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, draft: str
) -> None:
    """At least 8 cuts for each drafter, 24 in all, most of them in the middle of a frame, wherever the bytes fall."""
    # Once wrong: a Commit whose Pace cannot be sent is never told (tests/synthetic/test_generation.py shows it alone).
    rng, reconnects = random.Random(f"cuts {draft}"), 0
    async with (
        serving(loaded_tiny) as running,
        proxying(running.port) as proxy,
        client(f"127.0.0.1:{proxy.port}", tiny_pair, draft, hint_tokens=4, run_ahead=16) as device,
    ):
        for number in range(20):
            prompt, ids = [*PROMPT, number], list[int]()
            events = device.stream(
                prompt, max_new_tokens=80, sampling=PARAMS, seed=number, stop_ids=(), pace=PaceKind.WAIT
            )
            async with asyncio.timeout(60):
                async for event in events:
                    if isinstance(event, Committed):
                        ids += event.ids
                    if isinstance(event, Committed) and proxy.budget() is None:
                        proxy.budget = lambda: rng.randint(600, 3000)
                        proxy.cut_all()
                    if isinstance(event, Done):
                        assert event.reason is FinishReason.LENGTH
                        reconnects += event.report.reconnects
            assert ids == plain.ids(prompt, 80, PARAMS, number)
            proxy.budget = lambda: None  # a text is opened over a whole connection
            proxy.cut_all()
            await answers(device)
            if reconnects >= 8:  # a cut behind the last id costs none
                break
    assert reconnects >= 8


@pytest.mark.parametrize("draft", ["same", "none"])
async def test_a_text_goes_on_at_a_verifier_that_never_saw_it(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, tiny_tokenizer: TextTokenizer, draft: str
) -> None:
    """The first verifier is gone for good: NOT_FOUND, and the text is carried over. Twice in one text."""
    truth = plain.ids(PROMPT, 60, PARAMS, 9)
    async with serving(loaded_tiny) as first, serving(loaded_tiny) as second, proxying(first.port) as proxy:
        turns = [second.port, first.port]
        async with client(f"127.0.0.1:{proxy.port}", tiny_pair, draft, hint_tokens=3, run_ahead=6) as device:
            ids: list[int] = []
            states: list[State] = []
            async with asyncio.timeout(60):
                async for event in device.stream(
                    PROMPT, max_new_tokens=60, sampling=PARAMS, seed=9, stop_ids=(), pace=PaceKind.RUN_ON
                ):
                    if isinstance(event, Committed):
                        ids += event.ids
                    if isinstance(event, StateChanged):
                        states.append(event.state)
                    if isinstance(event, Done):
                        assert event.report.reconnects == 2
                        assert event.report.usage.generated_tokens == 60
                    if turns and len(ids) > 15 * (3 - len(turns)):
                        proxy.target_port = turns.pop(0)
                        proxy.cut_all()
    assert ids == truth
    assert states.count(State.OFFLINE) == 2
    assert states[0] is (State.VERIFIED if draft == "none" else State.DRAFTING)


async def test_while_the_network_is_away_under_local_text_goes_on_unverified_and_the_target_decides_when_it_is_back(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, tiny_tokenizer: TextTokenizer
) -> None:
    truth = plain.ids(PROMPT, 60, PARAMS, 9)
    async with serving(loaded_tiny) as running, proxying(running.port) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        async with client(address, tiny_pair, "noisy", run_ahead=6) as device, asyncio.timeout(60):
            ids: list[int] = []
            text, foretold = "", ""
            states: list[State] = []
            unverified: list[Preview] = []
            async for event in device.stream(
                PROMPT,
                max_new_tokens=60,
                sampling=PARAMS,
                seed=9,
                stop_ids=(),
                previews=True,
                offline=OfflinePolicy.LOCAL,
            ):
                match event:
                    case Committed():
                        ids += event.ids
                        text += event.text
                        if len(ids) > 10 and not unverified and proxy.target_port == running.port:
                            proxy.target_port = 1  # nobody listens there
                            proxy.cut_all()
                    case Preview() if event.is_unverified:
                        unverified.append(event)
                        foretold = text + event.text
                        whole = tiny_tokenizer.decode([*ids, *event.ids])
                        assert whole.removeprefix(foretold) in ("", "\ufffd")  # an unfinished character is held back
                        if len(event.ids) >= 12:
                            proxy.target_port = running.port
                    case StateChanged():
                        states.append(event.state)
    assert ids == truth
    assert State.UNVERIFIED in states
    assert [len(preview.ids) for preview in unverified] == sorted(len(preview.ids) for preview in unverified)
    assert foretold
    assert text == tiny_tokenizer.decode(truth)


async def test_a_verifier_restarted_on_its_port_continues_the_text(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    truth = plain.ids(PROMPT, 60, PARAMS, 9)
    ids: list[int] = []
    async with serving(loaded_tiny) as first:
        port = first.port
        device = client(first, tiny_pair, "noisy", run_ahead=4)
        await device.connect()
        events = device.stream(PROMPT, max_new_tokens=60, sampling=PARAMS, seed=9, stop_ids=())
        async with asyncio.timeout(PATIENCE_S):
            while len(ids) < 20:
                event = await anext(events)
                ids += event.ids if isinstance(event, Committed) else ()
    async with serving(loaded_tiny, port=port), asyncio.timeout(60):
        async for event in events:
            ids += event.ids if isinstance(event, Committed) else ()
    await device.close()
    assert ids == truth


async def test_a_verifier_that_stays_away_is_an_error_that_says_so(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    async with serving(loaded_tiny) as running:
        device = client(running, tiny_pair, "same", reconnect_for_s=0.5, run_ahead=4)
        await device.connect()
        events = device.stream(PROMPT, max_new_tokens=400, sampling=GREEDY, stop_ids=())
        await anext(events)
    async with asyncio.timeout(60):
        with pytest.raises(TransportError):
            async for _ in events:
                pass
    await device.close()


async def test_a_verifier_that_stops_tells_twenty_live_streams_to_go_elsewhere(loaded_tiny: LoadedTarget) -> None:
    """C26: stopping with open streams ends, and every device gets a status that it may retry."""
    async with serving(loaded_tiny) as running, raw(running) as stub:
        streams = [RawStream(stub) for _ in range(20)]
        for stream in streams:
            await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=2))
        async with asyncio.timeout(PATIENCE_S):
            await running.server.stop(0.2, 1.0)
        for stream in streams:
            await stream.until(Draining)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stream.until(Opened)  # which never comes again
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_two_hundred_cancelled_streams_leave_nothing_behind(loaded_tiny: LoadedTarget) -> None:
    """C26: cancelled before the answer, after it, between commits, with hints on their way."""
    # Once wrong: see test_a_stream_cancelled_while_its_open_waits_for_the_device_is_freed.
    rng = random.Random(26)
    async with serving(loaded_tiny, lease_ms=1, max_sessions=1000) as running, raw(running) as stub:
        tasks = len(asyncio.all_tasks())
        for number in range(200):
            stream = RawStream(stub)
            await stream.send(open_frame(loaded_tiny, PROMPT, run_ahead=rng.choice([2, 1000]), max_new_tokens=100))
            if number % 4 > 0:
                assert await stream.receive()
            if number % 4 > 1:
                await stream.until(Commit)
                await stream.send(Hint(EPOCH, 1, (5, 6, 7), 3, base_position=3))
            stream.call.cancel()
        await running.settled(lambda: running.sessions == 0)
        await running.commands_done()
        assert running.model.pool.slots == 0
        assert running.model.pool.table.used == 0
        await running.settled(lambda: len(asyncio.all_tasks()) <= tasks + 2)
        last = RawStream(stub)
        await last.open(open_frame(loaded_tiny, PROMPT))
        assert len(await last.rest()) == 16


class GatedTarget(TorchTarget):
    """A target whose forward waits at a gate, as a slow device would."""

    def __init__(self, loaded: LoadedTarget) -> None:
        super().__init__(loaded.model.lm, loaded.model.context_size, 16 << 20)
        self.gate = threading.Event()
        self.is_waiting = threading.Event()
        self.failure: Exception | None = None

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        self.is_waiting.set()
        assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        return super().forward(rows)


async def test_health_describe_and_cancel_are_answered_while_a_step_is_slow(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    """C28: the event loop never runs a forward. The step ends only after everything else was answered."""
    model = GatedTarget(loaded_tiny)
    async with (
        serving(loaded_tiny, model=model) as running,
        raw(running) as stub,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        stream, cancelled = RawStream(stub), RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=1000))
        await asyncio.to_thread(model.is_waiting.wait, PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(20):
                reply = await health.Check(health_pb2.HealthCheckRequest())
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            transport = GrpcTransport(running.address)
            assert (await transport.describe()).model_name == "tiny-target"
            await transport.close()
            await cancelled.send(open_frame(loaded_tiny, PROMPT))
            cancelled.call.cancel()
            assert await cancelled.call.code() is grpc.StatusCode.CANCELLED
        assert not model.gate.is_set()
        model.gate.set()
        assert await stream.rest() == plain.ids(PROMPT, 16, GREEDY)


async def test_a_stream_cancelled_while_its_open_waits_for_the_device_is_freed(loaded_tiny: LoadedTarget) -> None:
    # Once wrong: a stream that nobody waits for any more was dropped, its session attached for ever; later it was kept
    # for its lease, though nobody had been told its id.
    model = GatedTarget(loaded_tiny)
    async with serving(loaded_tiny, model=model) as running, raw(running) as stub:
        first, cancelled = RawStream(stub), RawStream(stub)
        await first.open(open_frame(loaded_tiny, PROMPT))
        await asyncio.to_thread(model.is_waiting.wait, PATIENCE_S)
        submitted = running.engine.worker._commands
        await cancelled.send(open_frame(loaded_tiny, PROMPT, run_ahead=1))
        await running.settled(lambda: submitted.qsize() > 0)
        cancelled.call.cancel()
        await cancelled.call.code()
        await asyncio.sleep(0.2)  # the verifier's side of the cancellation
        model.gate.set()
        await first.rest()
        await running.settled(lambda: running.sessions == 1)
        await running.commands_done()
        assert model.pool.slots == 1


async def test_a_device_failure_ends_every_stream_with_a_status_to_retry(loaded_tiny: LoadedTarget) -> None:
    model, failures = GatedTarget(loaded_tiny), []
    async with serving(loaded_tiny, model=model, on_failure=failures.append) as running, raw(running) as stub:
        streams = [RawStream(stub) for _ in range(3)]
        await streams[0].open(open_frame(loaded_tiny, PROMPT))
        await asyncio.to_thread(model.is_waiting.wait, PATIENCE_S)
        model.failure = RuntimeError("CUDA error: an illegal memory access")
        submitted = running.engine.worker._commands
        for stream in streams[1:]:
            await stream.send(open_frame(loaded_tiny, PROMPT))
        await running.settled(lambda: submitted.qsize() == 2)
        model.gate.set()
        fault = await streams[0].fault()
        assert (fault.error, fault.retry) == ("DeviceFailure", True)
        assert "illegal memory access" in fault.message
        assert await streams[0].status() is grpc.StatusCode.UNAVAILABLE
        assert len(failures) == 1
        assert isinstance(failures[0], DeviceFailure)
        late = RawStream(stub)
        await late.send(open_frame(loaded_tiny, PROMPT))
        assert (await late.fault()).error == "DeviceFailure"
        # Once wrong: opens that were queued behind the failing step are never answered.
        for stream in streams[1:]:
            assert (await stream.fault()).error == "DeviceFailure"


async def test_absent_sessions_cost_no_thread_each(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny, max_sessions=100) as running, raw(running) as stub:
        before = threading.active_count()
        for _ in range(30):
            stream = RawStream(stub)
            await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
            stream.call.cancel()
        await running.settled(lambda: all(session.sink is None for session in running.engine._sessions.values()))
        assert running.sessions == 30
        assert threading.active_count() < before + 10


async def test_a_session_that_finished_while_its_device_was_away_says_so_on_resume(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT))
        await stream.rest()
        stream.call.cancel()
        again = RawStream(stub)
        await again.open(Resume(opened.session_id, EPOCH, 3, ids_digest(PROMPT)))
        assert await again.rest() == plain.ids(PROMPT, 16, GREEDY)


async def test_a_lease_ends_and_the_session_with_it(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny, lease_ms=50) as running, raw(running) as stub:
        stream = RawStream(stub)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=3))
        await stream.until(Commit)
        stream.call.cancel()
        await running.settled(lambda: running.sessions == 0)
        again = RawStream(stub)
        await again.send(Resume(opened.session_id, EPOCH, 3, ids_digest(PROMPT)))
        assert (await again.fault()).error == "SessionNotFound"
        await running.commands_done()
        assert running.model.pool.slots == 0


async def test_frames_that_come_late_for_a_displaced_stream_change_nothing(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream, newer = RawStream(stub), RawStream(stub)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        old = next(iter(running.engine._sessions.values())).sink
        await newer.open(Resume(opened.session_id, EPOCH, 3, ids_digest(PROMPT)))
        session = next(iter(running.engine._sessions.values()))
        assert session.sink is not old
        running.engine.detach(session, old)  # type: ignore[arg-type]
        await newer.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert await newer.rest() == plain.ids(PROMPT, 16, GREEDY)
