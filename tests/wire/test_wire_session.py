"""A session frame by frame over real gRPC: what is refused, what is ignored, who is displaced, and what is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cloud_verifier.loading import LoadedTarget
from cloud_verifier.server import SERVICE_NAME
from edge_client.transport import GrpcTransport, Traffic
from shared import codec
from shared.errors import PrefixMismatch, VerifierUnavailable
from shared.pb import verifier_pb2 as pb
from shared.randomness import ids_digest
from shared.sampling import GREEDY, SamplingParams
from shared.types import (
    Close,
    Commit,
    Edit,
    Epoch,
    Fault,
    Finished,
    Hint,
    Pace,
    PaceKind,
    Reason,
    Resume,
    Score,
    SessionId,
)
from tests.oracle import PlainTarget
from tests.rig import PATIENCE_S, RawStream, client, open_frame, raw, serving
from tests.tiny_pair import CONTEXT, STOP_ID, TinyPair

EPOCH = Epoch(0)
PROMPT = (70, 71, 72)


async def test_describe_tells_what_is_served(loaded_tiny: LoadedTarget, tiny_pair: TinyPair) -> None:
    async with serving(loaded_tiny, max_wait_ms=20) as running:
        transport = GrpcTransport(running.address)
        card = await transport.describe()
        await transport.close()
    assert card == replace(loaded_tiny.card, limits=replace(loaded_tiny.card.limits, max_wait_ms=20))
    assert (card.vocabulary_size, card.context_size) == (tiny_pair.vocabulary_size, CONTEXT)
    assert (card.stop_ids, card.model_name) == ((STOP_ID,), "tiny-target")
    assert "<|assistant|>" in card.chat_template
    assert card.special_tokens["eos_token"] == "<|end|>"
    assert card.generation_defaults == GREEDY


async def test_nobody_at_the_address_is_said_plainly(tiny_pair: TinyPair) -> None:
    with pytest.raises(VerifierUnavailable, match=r"127\.0\.0\.1:1; start one"):
        async with client("127.0.0.1:1", tiny_pair):
            pass


async def test_health_says_serving_and_reflection_lists_the_service(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, grpc.aio.insecure_channel(running.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        names = [service.name async for reply in call for service in reply.list_services_response.service]
        assert SERVICE_NAME == "draftwire.v1.Verifier"
        assert SERVICE_NAME in names
        await running.server.set_serving(False)
        reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_frame_whose_sender_was_cancelled_is_sent_and_counted_all_the_same(loaded_tiny: LoadedTarget) -> None:
    # Once wrong: it was sent and not counted, as any hint that was on its way when the text ended.
    async with serving(loaded_tiny) as running:
        transport, traffic = GrpcTransport(running.address), Traffic()
        device = await transport.connect(traffic)
        await device.send(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await device.receive()
        sending = asyncio.ensure_future(device.send(Hint(EPOCH, 1, (5,), 3, base_position=3)))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await device.send(Close(EPOCH, 3))
        finished = await device.receive()
        assert isinstance(finished, Finished)
        assert finished.usage.hint_nodes == 1
        assert traffic.kinds == {"open": 1, "opened": 1, "hint": 1, "close": 1, "finished": 1}
        await transport.close()


# ---------------------------------------------------------------- bad input


def bad_sampling(**values: Any) -> pb.Sampling:
    return pb.Sampling(**values)


def opening(loaded: LoadedTarget, **changes: Any) -> pb.Up:
    message = codec.encode_up(open_frame(loaded, PROMPT))
    for name, value in changes.items():
        target = getattr(message.open, name)
        if isinstance(value, list):
            del target[:]
            target.extend(value)
        elif hasattr(target, "CopyFrom"):
            target.CopyFrom(value)
        else:
            setattr(message.open, name, value)
    return message


BAD_OPENS: dict[str, dict[str, Any]] = {
    "open.ids": {"ids": [70, 305]},
    "open.ids ": {"ids": []},
    "open.ids  ": {"ids": [70] * (CONTEXT + 5), "generated_from": 1},
    "open.stop_ids": {"stop_ids": [319]},
    "open.generated_from": {"generated_from": 4},
    "open.generated_from ": {"generated_from": 0},
    "open.max_new_tokens": {"max_new_tokens": 0},
    "open.fingerprint": {"fingerprint": b"short"},
    "open.fingerprint ": {"fingerprint": bytes(32)},
    "open.target_id": {"target_id": b"x"},
    "open.target_id ": {"target_id": bytes(32), "generated_from": 2},
    "open.lowest_version": {"lowest_version": 2, "highest_version": 3},
    "open.rule": {"rule": 9},
    "open.pace": {"pace": 9},
    "sampling.temperature": {"sampling": bad_sampling(temperature=-1.0)},
    "sampling.temperature ": {"sampling": bad_sampling(temperature=float("nan"))},
    "sampling.top_p": {"sampling": bad_sampling(top_p=1.5)},
    "sampling.min_p": {"sampling": bad_sampling(min_p=-0.5)},
    "sampling.repetition_penalty": {"sampling": bad_sampling(repetition_penalty=0.0)},
    "sampling.frequency_penalty": {"sampling": bad_sampling(frequency_penalty=float("inf"))},
    "sampling.presence_penalty": {"sampling": bad_sampling(presence_penalty=-200.0)},
    "sampling.logit_bias": {"sampling": bad_sampling(logit_bias={3: 2000.0})},
    "sampling.logit_bias ": {"sampling": bad_sampling(logit_bias={100_000: 5.0})},
}


@pytest.mark.parametrize("case", BAD_OPENS, ids=repr)
async def test_a_bad_open_is_a_fault_that_names_the_field(loaded_tiny: LoadedTarget, case: str) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        neighbour = RawStream(stub)
        await neighbour.open(open_frame(loaded_tiny, PROMPT))
        stream = RawStream(stub)
        await stream.send(opening(loaded_tiny, **BAD_OPENS[case]))
        fault = await stream.receive()
        assert isinstance(fault, Fault), fault
        assert fault.field == case.strip()
        assert fault.answers == "open"
        assert not fault.retry
        assert await stream.status() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
        assert len(await neighbour.rest()) == 16
        assert running.sessions == 1


def hint(**values: Any) -> pb.Up:
    return pb.Up(hint=pb.Hint(**{"first_node": 1, "base_position": 3, "ids": [5], "ack": 3, **values}))


BAD_FRAMES: dict[str, tuple[str, pb.Up]] = {
    "empty": ("frame", pb.Up()),
    "id out of range": ("hint.ids", hint(ids=[300])),
    "too many nodes": ("hint.ids", hint(ids=[5] * 257)),
    "node 0": ("hint.first_node", hint(first_node=0)),
    "two bases": ("hint.base_node", hint(first_node=9, base_node=2)),
    "base ahead": ("hint.base_node", hint(base_node=4, base_position=0)),
    "parents missing": ("hint.parents", hint(ids=[5, 6], parents=[0])),
    "parent before the first": ("hint.parents", hint(ids=[5, 6], parents=[0, 2])),
    "confidence missing": ("hint.confidence", hint(ids=[5, 6], confidence=b"1")),
    "rows that do not sum": ("hint.rows.weights", hint(rows=[pb.QRow(ids=[5], weights=[1])])),
    "rows without the id": ("hint.rows", hint(rows=[pb.QRow(ids=[6], weights=[65535])])),
    "rows under agreement": ("hint.rows", hint(rows=[pb.QRow(ids=[5], weights=[65535])])),
    "ack ahead": ("hint.ack", hint(ack=4000)),
    "other ids before the base": ("hint.base_digest", hint(base_digest=1)),
    "pace ahead": ("pace.ack", pb.Up(pace=pb.Pace(pace=2, run_ahead=9, ack=4000))),
    "unknown pace": ("pace.pace", pb.Up(pace=pb.Pace(pace=7))),
    "edit with a bad id": ("edit.append_ids", pb.Up(edit=pb.Edit(epoch=1, keep=1, append_ids=[999]))),
    "score with a bad id": ("score.ids", pb.Up(score=pb.Score(ids=[999]))),
    "resume on an open stream": (
        "frame",
        codec.encode_up(Resume(SessionId(bytes(16)), EPOCH, 3, bytes(16))),
    ),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
async def test_a_bad_frame_is_a_fault_and_the_session_and_its_neighbour_go_on(
    loaded_tiny: LoadedTarget, plain: PlainTarget, case: str
) -> None:
    field, message = BAD_FRAMES[case]
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream, neighbour = RawStream(stub), RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await neighbour.open(open_frame(loaded_tiny, (9, 9), run_ahead=0))
        await stream.send(message)
        fault = await stream.fault()
        assert fault.field == field
        assert fault.answers == (message.WhichOneof("frame") or "frame")
        for one in (stream, neighbour):
            await one.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 0))
        assert await stream.rest() == plain.ids(PROMPT, 16, GREEDY)
        assert await neighbour.rest() == plain.ids((9, 9), 16, GREEDY)


@pytest.mark.parametrize(
    ("frame", "answers"),
    [(Edit(Epoch(1), 2, (5,)), "edit"), (Score(1, EPOCH, 3, (5, 6)), "score")],
    ids=["edit", "score"],
)
async def test_edit_and_score_are_said_to_be_missing(
    loaded_tiny: LoadedTarget, plain: PlainTarget, frame: Edit | Score, answers: str
) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await stream.send(frame)
        fault = await stream.fault()
        assert (fault.error, fault.answers) == ("Unimplemented", answers)
        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert await stream.rest() == plain.ids(PROMPT, 16, GREEDY)


@pytest.mark.parametrize("first", [hint(), pb.Up(), pb.Up(close=pb.Close())], ids=["hint", "empty", "close"])
async def test_a_stream_begins_with_open_or_resume(loaded_tiny: LoadedTarget, first: pb.Up) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.send(first)
        assert (await stream.fault()).field == "frame"
        assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_frame_over_the_limit_hurts_nobody_else(loaded_tiny: LoadedTarget) -> None:
    """C27."""
    async with serving(loaded_tiny, max_frame_bytes=100_000) as running, raw(running) as stub, raw(running) as other:
        neighbour, stream = RawStream(other), RawStream(stub)
        await neighbour.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await stream.send(opening(loaded_tiny, ids=[70] * 200_000))
        assert await stream.status() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await neighbour.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert len(await neighbour.rest()) == 16


async def test_a_session_without_finite_scores_ends_and_its_neighbour_goes_on(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    forbidden = SamplingParams(logit_bias={token: float("-inf") for token in range(300)})
    async with serving(loaded_tiny, lease_ms=10) as running, raw(running) as stub:
        neighbour, stream = RawStream(stub), RawStream(stub)
        await neighbour.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await stream.open(open_frame(loaded_tiny, PROMPT, sampling=forbidden))
        fault = await stream.fault()
        assert (fault.error, fault.answers) == ("NumericalError", "")
        assert await stream.status() is grpc.StatusCode.INTERNAL
        await neighbour.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert await neighbour.rest() == plain.ids(PROMPT, 16, GREEDY)
        await running.settled(lambda: running.sessions == 1)
        await running.commands_done()
        # Once wrong: the slot is released when the session ends with an error, and again when its lease ends.
        assert running.model.pool.slots == 1


# ---------------------------------------------------------------- credit, close, resume


async def test_a_client_that_never_acks_gets_exactly_run_ahead_ids(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=7, max_new_tokens=40))
        while len(stream.ids) < 7:
            await stream.until(Commit)
        (session,) = running.engine.worker.scheduler.sessions()
        await running.settled(lambda: session.credit == 0)
        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 7, 3 + 5))
        while len(stream.ids) < 12:
            await stream.until(Commit)
        await stream.send(Score(1, EPOCH, 3, (5,)))
        await stream.fault()  # what was on its way has come
        assert stream.ids == plain.ids(PROMPT, 12, GREEDY)
        await stream.send(Hint(EPOCH, 1, (), 15, base_position=15))
        await stream.until(Commit)
        assert len(stream.ids) >= 13


async def test_close_ends_the_text_and_frees_everything(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=2))
        await stream.send(Close(EPOCH, 3))
        finished = await stream.until(Finished)
        assert finished.reason is Reason.CANCELLED
        assert await stream.receive() is None
        assert await stream.status() is grpc.StatusCode.OK
        await running.commands_done()
        assert (running.sessions, running.model.pool.slots, running.model.pool.table.used) == (0, 0, 0)
        again = RawStream(stub)
        await again.send(Resume(opened.session_id, EPOCH, 3, ids_digest(PROMPT)))
        assert (await again.fault()).error == "SessionNotFound"
        assert await again.status() is grpc.StatusCode.NOT_FOUND


async def test_resume_after_a_cut_tells_every_id_once(loaded_tiny: LoadedTarget, plain: PlainTarget) -> None:
    """C29: whatever was under way when the stream was cut."""
    truth = plain.ids(PROMPT, 40, GREEDY)
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, max_new_tokens=40, run_ahead=1000))
        held: list[int] = []
        for cut in (1, 6, 13, 14, 30):
            while len(held) + len(stream.ids) < cut:
                await stream.receive()
            held += stream.ids
            stream.call.cancel()
            stream = RawStream(stub)
            have = [*PROMPT, *held]
            again = await stream.open(Resume(opened.session_id, EPOCH, len(have), ids_digest(have)))
            assert again.committed_length >= len(have)
            assert (again.session_id, again.seed) == (opened.session_id, opened.seed)
        held += await stream.rest()
        assert held == truth
        late = RawStream(stub)
        await late.open(Resume(opened.session_id, EPOCH, 10, ids_digest([*PROMPT, *truth[:7]])))
        assert await late.rest() == truth[7:]


@pytest.mark.parametrize(
    ("changes", "error", "status"),
    [
        ({"session_id": SessionId(b"x" * 16)}, "SessionNotFound", grpc.StatusCode.NOT_FOUND),
        ({"digest": bytes(16)}, "PrefixMismatch", grpc.StatusCode.ABORTED),
        ({"have": 4000}, "PrefixMismatch", grpc.StatusCode.ABORTED),
        ({"epoch": Epoch(4)}, "PrefixMismatch", grpc.StatusCode.ABORTED),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
async def test_a_resume_that_does_not_fit_is_refused_and_displaces_nobody(
    loaded_tiny: LoadedTarget, changes: dict[str, Any], error: str, status: grpc.StatusCode
) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        frame = replace(Resume(opened.session_id, EPOCH, 3, ids_digest(PROMPT)), **changes)
        other = RawStream(stub)
        await other.send(frame)
        assert (await other.fault()).error == error
        assert await other.status() is status
        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert len(await stream.rest()) == 16


async def test_resume_displaces_the_older_stream(loaded_tiny: LoadedTarget, plain: PlainTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream, newer = RawStream(stub), RawStream(stub)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await newer.open(Resume(opened.session_id, EPOCH, 3, ids_digest(PROMPT)))
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.receive()
        assert await stream.status() is grpc.StatusCode.ABORTED
        await newer.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert await newer.rest() == plain.ids(PROMPT, 16, GREEDY)
        await running.settled(lambda: running.sessions == 1)


@pytest.mark.parametrize("way", ["receive", "send"])
async def test_a_displaced_device_learns_it_whether_it_reads_or_writes(loaded_tiny: LoadedTarget, way: str) -> None:
    """It must not take the session back: two devices would displace each other for ever."""
    # Once wrong: a write to a stream that ended with ABORTED is told as a cut of the network, so it is resumed.
    async with serving(loaded_tiny) as running, raw(running) as stub:
        transport = GrpcTransport(running.address)
        device = await transport.connect(Traffic())
        await device.send(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        opened = await device.receive()
        ((_, share_key),) = transport._metadata
        newer = RawStream(stub, share_key)
        await newer.open(Resume(opened.session_id, EPOCH, 3, ids_digest(PROMPT)))  # type: ignore[union-attr]
        async with asyncio.timeout(PATIENCE_S):
            await device._call.code()
        with pytest.raises(PrefixMismatch):
            await (device.receive() if way == "receive" else device.send(Hint(EPOCH, 1, (5,), 3, base_position=3)))
        await transport.close()


async def test_a_full_verifier_says_when_to_come_again(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny, max_sessions=2) as running, raw(running) as stub:
        streams = [RawStream(stub) for _ in range(3)]
        for stream in streams[:2]:
            await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await streams[2].send(open_frame(loaded_tiny, PROMPT))
        fault = await streams[2].fault()
        assert (fault.error, fault.retry) == ("Overloaded", True)
        assert fault.retry_after_ms > 0
        assert await streams[2].status() is grpc.StatusCode.RESOURCE_EXHAUSTED
        streams[0].call.cancel()  # an absent session makes room
        engine = running.engine
        await running.settled(lambda: any(session.sink is None for session in engine._sessions.values()))
        last = RawStream(stub)
        await last.open(open_frame(loaded_tiny, PROMPT))
        assert len(await last.rest()) == 16
        assert running.sessions == 2


async def test_hints_of_other_epochs_and_after_the_end_are_ignored(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await stream.send(Hint(Epoch(7), 1, (5, 6), 99, base_position=3))
        await stream.send(Pace(Epoch(7), PaceKind.WAIT, 0, 99))
        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        finished = await stream.until(Finished)
        assert finished.usage.hint_nodes == 0
        await stream.send(Hint(EPOCH, 1, (5, 6), 3, base_position=3))
        await stream.send(Score(1, EPOCH, 3, (5,)))
        assert (await stream.fault()).answers == "score"  # nothing came in between
        assert stream.received[-2] == finished
