"""C42: what one connection does, another cannot see, guess or take: ids, prefixes, sessions, logs."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import Counter
from dataclasses import replace

import grpc
import pytest

from cloud_verifier.admission import AdmissionLimits
from cloud_verifier.loading import LoadedTarget
from cloud_verifier.logs import short_id
from shared.pb import verifier_pb2_grpc
from shared.randomness import ids_digest
from shared.sampling import GREEDY, SamplingParams
from shared.types import Close, Epoch, Fault, Finished, Opened, Pace, PaceKind, Resume, SessionId
from tests.oracle import PlainTarget
from tests.rig import RawStream, Running, open_frame, raw, serving

EPOCH = Epoch(0)
PROMPT = (70, 71, 72)
LONG = tuple(60 + (11 * n) % 200 for n in range(70))
FORBIDDEN = SamplingParams(logit_bias={token: float("-inf") for token in range(300)})


def resume(session_id: bytes, have: tuple[int, ...] = PROMPT) -> Resume:
    return Resume(SessionId(session_id), EPOCH, len(have), ids_digest(have))


async def refused(stub: verifier_pb2_grpc.VerifierStub, frame: Resume) -> tuple[Fault, grpc.StatusCode, str]:
    """How a resume is refused: all that its sender gets to see."""
    stream = RawStream(stub)
    await stream.send(frame)
    fault = await stream.fault()
    return fault, await stream.status(), await stream.call.details()


async def test_a_guessed_id_is_refused_like_any_unknown_one_and_its_owner_notices_nothing(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    async with (
        serving(loaded_tiny) as running,
        raw(running, is_alone=True) as owner,
        raw(running, is_alone=True) as other,
    ):
        stream, closed = RawStream(owner), RawStream(owner)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=2))
        gone = await closed.open(open_frame(loaded_tiny, PROMPT, run_ahead=2))
        await closed.send(Close(EPOCH, 3))
        await closed.until(Finished)
        await running.settled(lambda: running.sessions == 1)
        near = [bytes([*opened.session_id[:k], opened.session_id[k] ^ 1, *opened.session_id[k + 1 :]]) for k in (0, 15)]
        guesses = [bytes(16), b"\xff" * 16, *near, opened.session_id[::-1], gone.session_id]
        answers = [await refused(other, resume(guess)) for guess in guesses]
        assert len(set(answers)) == 1
        fault, status, _ = answers[0]
        assert (fault.error, fault.field, status) == ("SessionNotFound", "resume.session_id", grpc.StatusCode.NOT_FOUND)
        assert not any(guess.hex() in str(answers) for guess in guesses)
        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert await stream.rest() == plain.ids(PROMPT, 16, GREEDY)


@pytest.mark.parametrize("length", [0, 1, 15, 17, 4096])
async def test_an_id_of_another_length_is_refused_at_the_rim(loaded_tiny: LoadedTarget, length: int) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        await RawStream(stub).open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        fault, status, _ = await refused(stub, resume(b"x" * length))
        assert fault.field == "resume.session_id"
        assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert running.sessions == 1


async def reused_by(loaded: LoadedTarget, stub: verifier_pb2_grpc.VerifierStub, ids: tuple[int, ...]) -> int:
    """How much of a context was there already; the session writes an id and is closed."""
    stream = RawStream(stub)
    opened = await stream.open(open_frame(loaded, ids, max_new_tokens=1))
    await stream.until(Finished)
    await stream.send(Close(EPOCH, len(ids)))
    while await stream.receive() is not None:
        pass
    return opened.reused_tokens


async def test_a_prefix_is_found_again_on_its_own_connection_and_on_no_other(loaded_tiny: LoadedTarget) -> None:
    async with (
        serving(loaded_tiny) as running,
        raw(running, is_alone=True) as owner,
        raw(running, is_alone=True) as other,
    ):
        assert await reused_by(loaded_tiny, owner, LONG) == 0
        assert await reused_by(loaded_tiny, owner, LONG) == 64
        assert await reused_by(loaded_tiny, owner, (*LONG[:40], 9, 9)) == 32
        assert await reused_by(loaded_tiny, other, LONG) == 0
        assert await reused_by(loaded_tiny, other, LONG) == 64
        assert await reused_by(loaded_tiny, other, (*LONG[:64], 5)) == 64


async def test_a_prefix_in_use_is_shared_on_its_own_connection_only(loaded_tiny: LoadedTarget) -> None:
    async with (
        serving(loaded_tiny) as running,
        raw(running, is_alone=True) as owner,
        raw(running, is_alone=True) as other,
    ):
        table = running.model.pool.table
        first = RawStream(owner)
        await first.open(open_frame(loaded_tiny, LONG, run_ahead=1))
        session = next(iter(running.engine._sessions.values()))
        await running.settled(lambda: session.credit == 0)
        await running.commands_done()
        stranger, friend = RawStream(other), RawStream(owner)
        assert (await stranger.open(open_frame(loaded_tiny, LONG, run_ahead=0))).reused_tokens == 0
        assert table.shared == 0
        assert (await friend.open(open_frame(loaded_tiny, LONG, run_ahead=0))).reused_tokens == 64
        assert table.shared == 4


async def test_reuse_tells_nothing_of_a_context_that_another_connection_prefilled(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    """Texts are the same whether keys and values were found or computed."""
    async with (
        serving(loaded_tiny) as running,
        raw(running, is_alone=True) as owner,
        raw(running, is_alone=True) as other,
    ):
        for stub, reused in ((owner, 0), (other, 0), (owner, 64), (other, 64)):
            stream = RawStream(stub)
            opened = await stream.open(open_frame(loaded_tiny, LONG))
            assert opened.reused_tokens == reused
            assert await stream.rest() == plain.ids(LONG, 16, GREEDY)


async def test_a_device_that_comes_back_on_another_connection_goes_on_and_its_share_moves_with_it(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    options = {"admission": AdmissionLimits(principal_sessions=1)}
    async with (
        serving(loaded_tiny, engine_options=options) as running,
        raw(running, is_alone=True) as before,
        raw(running, is_alone=True) as after,
    ):
        stream, again = RawStream(before), RawStream(after)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        stream.call.cancel()
        resumed = await again.open(resume(opened.session_id))
        assert (resumed.session_id, resumed.seed) == (opened.session_id, opened.seed)
        full = RawStream(after)
        await full.send(open_frame(loaded_tiny, PROMPT))
        assert (await full.fault()).error == "Overloaded"
        free = RawStream(before)
        await free.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        await again.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert await again.rest() == plain.ids(PROMPT, 16, GREEDY)


async def test_session_ids_are_sixteen_random_bytes_and_never_the_same_twice(loaded_tiny: LoadedTarget) -> None:
    """A false alarm about one in ten million runs: each of 128 bits within 5.9 standard deviations over 1,000 ids."""
    options = {"admission": AdmissionLimits(max_sessions=2000)}
    async with serving(loaded_tiny, engine_options=options) as running, raw(running) as stub:

        async def some(count: int) -> list[Opened]:
            found = []
            for _ in range(count):
                stream = RawStream(stub)
                found.append(await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0, seed=None)))
                stream.call.cancel()
            return found

        found = [opened for batch in await asyncio.gather(*(some(100) for _ in range(10))) for opened in batch]
    ids = [opened.session_id for opened in found]
    assert {len(session_id) for session_id in ids} == {16}
    assert len(set(ids)) == 1000
    assert len({opened.seed for opened in found}) == 1000
    set_bits = Counter(bit for each in ids for bit in range(128) if int.from_bytes(each, "big") >> bit & 1)
    assert all(abs(set_bits[bit] - 500) < 5.9 * 250**0.5 for bit in range(128))


async def test_logs_name_sessions_by_their_short_ids_only(
    loaded_tiny: LoadedTarget, caplog: pytest.LogCaptureFixture
) -> None:
    """Opened, cut, resumed elsewhere, displaced, closed, failed, refused: all of it at the loudest level."""
    caplog.set_level(logging.DEBUG)
    ids: list[bytes] = []
    async with (
        serving(loaded_tiny) as running,
        raw(running, is_alone=True) as one,
        raw(running, is_alone=True) as other,
    ):
        stream = RawStream(one)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=2))
        newer = RawStream(other)
        await newer.open(resume(opened.session_id))
        await refused(one, replace(resume(opened.session_id), digest=bytes(16)))
        await refused(one, resume(bytes(16)))
        await newer.send(Close(EPOCH, 3))
        await newer.until(Finished)
        failing = RawStream(one)
        failed = await failing.open(open_frame(loaded_tiny, PROMPT, sampling=FORBIDDEN))
        await failing.fault()
        cut = RawStream(one)
        left = await cut.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        cut.call.cancel()
        await running.settled(lambda: "session_detached" in caplog.text)
        ids += [opened.session_id, failed.session_id, left.session_id]
    for session_id in ids:
        assert short_id(session_id) in caplog.text
        shown = (session_id.hex(), repr(session_id), str(list(session_id)), base64.b64encode(session_id).decode())
        for record in caplog.records:
            line = record.getMessage() + str(record.exc_info or "")
            assert not any(form in line for form in shown)
    for name in ("session_opened", "session_resumed", "session_ended", "session_failed", "session_detached"):
        assert name in caplog.text


# ---------------------------------------------------------------- share keys

KEY, OTHER_KEY = b"k" * 16, b"o" * 64
"""The shortest and the longest that count."""
NO_KEYS = [b"", b"k" * 15, b"k" * 65]


async def reused_under(
    loaded: LoadedTarget, running: Running, stub: verifier_pb2_grpc.VerifierStub, key: bytes, ids: tuple[int, ...]
) -> int:
    """How much of a context was there already for a session with this share key, which then ends and is forgotten."""
    stream = RawStream(stub, key)
    opened = await stream.open(open_frame(loaded, ids, max_new_tokens=1))
    await stream.until(Finished)
    await stream.send(Close(EPOCH, len(ids)))
    while await stream.receive() is not None:
        pass
    await running.settled(lambda: opened.session_id not in running.engine._sessions)
    return opened.reused_tokens


@pytest.mark.parametrize("key", NO_KEYS, ids=len)
async def test_without_a_key_of_a_valid_length_nothing_is_found_again_even_on_the_same_connection(
    loaded_tiny: LoadedTarget, key: bytes
) -> None:
    async with serving(loaded_tiny) as running, raw(running, is_alone=True) as stub:
        for _ in range(3):
            assert await reused_under(loaded_tiny, running, stub, key, LONG) == 0
        assert await reused_under(loaded_tiny, running, stub, KEY, LONG) == 0, "nor by one that has a key"


@pytest.mark.parametrize("key", [KEY, OTHER_KEY], ids=len)
async def test_what_one_key_has_computed_is_found_under_that_key_and_connection_only(
    loaded_tiny: LoadedTarget, key: bytes
) -> None:
    others = [other for other in (KEY, OTHER_KEY, b"o" * 63 + b"p", *NO_KEYS) if other != key]
    async with (
        serving(loaded_tiny) as running,
        raw(running, is_alone=True) as owner,
        raw(running, is_alone=True) as stranger,
    ):
        assert await reused_under(loaded_tiny, running, owner, key, LONG) == 0
        for other in others:
            assert await reused_under(loaded_tiny, running, owner, other, LONG) == 0
        assert await reused_under(loaded_tiny, running, stranger, key, LONG) == 0
        assert await reused_under(loaded_tiny, running, owner, key, LONG) == 64


async def test_keys_share_no_pages_while_their_sessions_are_at_work_either(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    async with serving(loaded_tiny) as running, raw(running, is_alone=True) as stub:
        streams = [RawStream(stub, key) for key in (KEY, OTHER_KEY, b"", b"", KEY)]
        reused = []
        for stream in streams:
            opened = await stream.open(open_frame(loaded_tiny, LONG, run_ahead=2))
            reused.append(opened.reused_tokens)
            session = running.engine._sessions[opened.session_id]
            await running.settled(lambda session=session: session.credit == 0)
            await running.commands_done()
        assert reused == [0, 0, 0, 0, 64]
        assert running.model.pool.table.shared == 4
        for stream in streams:
            await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, len(LONG)))
            assert await stream.rest() == plain.ids(LONG, 16, GREEDY)


async def refused_under(
    stub: verifier_pb2_grpc.VerifierStub, frame: Resume, key: bytes
) -> tuple[Fault, grpc.StatusCode, str]:
    """How a resume with this share key is refused: all that its sender gets to see."""
    stream = RawStream(stub, key)
    await stream.send(frame)
    fault = await stream.fault()
    return fault, await stream.status(), await stream.call.details()


@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "detached"])
@pytest.mark.parametrize(
    ("key", "wrong"),
    [(KEY, [b"", b"k" * 15, OTHER_KEY, b"k" * 17, b"k" * 15 + b"l"]), (b"", [KEY, OTHER_KEY])],
    ids=["a key", "no key"],
)
async def test_a_session_is_resumed_with_its_own_key_and_is_unknown_to_any_other(
    loaded_tiny: LoadedTarget, plain: PlainTarget, key: bytes, wrong: list[bytes], is_attached: bool
) -> None:
    async with (
        serving(loaded_tiny) as running,
        raw(running, is_alone=True) as owner,
        raw(running, is_alone=True) as other,
    ):
        stream = RawStream(owner, key)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        session = running.engine._sessions[opened.session_id]
        if not is_attached:
            stream.call.cancel()
            await running.settled(lambda: session.detached_at is not None)
        holder = session.sink
        for stub in (owner, other):
            unknown = await refused_under(stub, resume(bytes(16)), wrong[0])
            assert unknown[0].error == "SessionNotFound"
            for bad in wrong:
                assert await refused_under(stub, resume(opened.session_id), bad) == unknown
                # nor does a wrong key tell whether the ids would have been right
                assert await refused_under(stub, replace(resume(opened.session_id), digest=bytes(16)), bad) == unknown
        assert session.sink is holder, "whoever was refused took nothing from the owner"
        again = RawStream(other, key)
        resumed = await again.open(resume(opened.session_id))
        assert (resumed.session_id, resumed.seed) == (opened.session_id, opened.seed)
        await again.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
        assert await again.rest() == plain.ids(PROMPT, 16, GREEDY)
