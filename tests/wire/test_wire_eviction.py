"""A pool for two sessions serves many: pages are given up and computed again, and no text shows it."""

from __future__ import annotations

import asyncio

import torch

from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.kv_pool import token_bytes
from cloud_verifier.loading import LoadedTarget
from shared.pb import verifier_pb2_grpc
from shared.randomness import ids_digest
from shared.sampling import GREEDY, SamplingParams
from shared.types import Close, Commit, Epoch, Finished, Pace, PaceKind, Resume
from tests.formula_model import Recorder
from tests.oracle import PlainTarget
from tests.rig import RawStream, Running, open_frame, raw, serving

EPOCH = Epoch(0)
COUNT = 40
PARAMS = (GREEDY, SamplingParams(temperature=0.9, top_k=40), SamplingParams(temperature=1.1, repetition_penalty=1.2))


def prompt(number: int, length: int = 70) -> tuple[int, ...]:
    """Prompts that begin differently: nothing of them can be shared."""
    return tuple(60 + (11 * n + 17 * number) % 200 for n in range(length))


def pool_bytes(loaded: LoadedTarget, pages: int) -> int:
    return pages * PAGE_TOKENS * token_bytes(loaded.model.lm.kv_shapes(), torch.float32)


async def begun(
    running: Running, loaded: LoadedTarget, stub: verifier_pb2_grpc.VerifierStub, number: int
) -> tuple[RawStream, bytes]:
    """A session that has written five ids and stands still for want of credit; its id."""
    stream = RawStream(stub)
    changes = {"run_ahead": 5, "max_new_tokens": COUNT, "seed": number, "sampling": PARAMS[number % len(PARAMS)]}
    opened = await stream.open(open_frame(loaded, prompt(number), **changes))
    while len(stream.ids) < 5:
        await stream.until(Commit)
    await running.settled(lambda: running.engine._sessions[opened.session_id].credit == 0)
    return stream, opened.session_id


async def written(loaded: LoadedTarget, stub: verifier_pb2_grpc.VerifierStub, number: int) -> list[int]:
    """The whole text of a session that runs on."""
    stream = RawStream(stub)
    changes = {"max_new_tokens": COUNT, "seed": number, "sampling": PARAMS[number % len(PARAMS)]}
    await stream.open(open_frame(loaded, prompt(number), **changes))
    return await stream.rest()


async def test_paused_and_absent_sessions_give_up_their_pages_and_all_texts_are_the_targets_own(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    observer = Recorder()
    async with (
        serving(loaded_tiny, kv_bytes=pool_bytes(loaded_tiny, 15), engine_options={"observer": observer}) as running,
        raw(running) as stub,
    ):
        texts = {number: plain.ids(prompt(number), COUNT, PARAMS[number % len(PARAMS)], number) for number in range(7)}
        paused, paused_id = await begun(running, loaded_tiny, stub, 0)
        absent, absent_id = await begun(running, loaded_tiny, stub, 1)
        sessions = [running.engine._sessions[session_id] for session_id in (paused_id, absent_id)]
        absent.call.cancel()
        await running.settled(lambda: sessions[1].detached_at is not None)
        await running.commands_done()
        assert all(session.slot.pages for session in sessions)
        assert sum(observer.evictions) == 0

        async with asyncio.TaskGroup() as tasks, running.standing_still(commands=5):
            writing = [tasks.create_task(written(loaded_tiny, stub, number)) for number in range(2, 7)]
        together = [task.result() for task in writing]
        assert together == [texts[number] for number in range(2, 7)]
        await running.commands_done()
        assert not any(session.slot.pages for session in sessions)
        assert sum(observer.evictions) > 0

        have = (*prompt(1), *absent.ids)
        again = RawStream(stub)
        resumed = await again.open(Resume(absent_id, EPOCH, len(have), ids_digest(have)))
        assert resumed.session_id == absent_id
        await asyncio.gather(
            again.send(Pace(EPOCH, PaceKind.RUN_ON, 256, len(have))),
            paused.send(Pace(EPOCH, PaceKind.RUN_ON, 256, len(prompt(0)) + 5)),
        )
        ended = await asyncio.gather(paused.rest(), again.rest())
        assert ended[0] == texts[0]
        assert absent.ids + ended[1] == texts[1]
        running.model.pool.check_integrity()


async def test_what_an_evicted_session_computes_again_is_fed_again_and_counted(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    observer = Recorder()
    async with (
        serving(loaded_tiny, kv_bytes=pool_bytes(loaded_tiny, 7), engine_options={"observer": observer}) as running,
        raw(running) as stub,
    ):
        paused, paused_id = await begun(running, loaded_tiny, stub, 0)
        assert await written(loaded_tiny, stub, 2) == plain.ids(prompt(2), COUNT, PARAMS[2], 2)
        await running.commands_done()
        assert not running.engine._sessions[paused_id].slot.pages
        before = fed(observer)
        await paused.send(Pace(EPOCH, PaceKind.RUN_ON, 256, len(prompt(0)) + 5))
        assert await paused.rest() == plain.ids(prompt(0), COUNT, PARAMS[0], 0)
        await running.commands_done()
        assert fed(observer) - before >= 74, "the other text took every page: nothing is found again"


async def test_many_more_sessions_than_fit_all_come_to_their_end(loaded_tiny: LoadedTarget, plain: PlainTarget) -> None:
    observer = Recorder()
    async with (
        serving(loaded_tiny, kv_bytes=pool_bytes(loaded_tiny, 15), engine_options={"observer": observer}) as running,
        raw(running) as stub,
        asyncio.TaskGroup() as tasks,
        running.standing_still(commands=12),
    ):
        writing = [tasks.create_task(written(loaded_tiny, stub, number)) for number in range(12)]
    texts = [task.result() for task in writing]
    assert texts == [plain.ids(prompt(number), COUNT, PARAMS[number % len(PARAMS)], number) for number in range(12)]
    assert sum(observer.evictions) > 0
    assert max(report.sessions for report in observer.steps) > 1


def fed(observer: Recorder) -> int:
    return sum(report.prefill_tokens for report in observer.steps)


async def test_a_prefix_that_is_found_again_is_not_fed_again(loaded_tiny: LoadedTarget, plain: PlainTarget) -> None:
    observer, sums, reused = Recorder(), [], []
    async with (
        serving(loaded_tiny, kv_bytes=pool_bytes(loaded_tiny, 15), engine_options={"observer": observer}) as running,
        raw(running) as stub,
    ):
        for end in ((), (5, 6)):
            before, stream, ids = fed(observer), RawStream(stub), (*prompt(0), *end)
            opened = await stream.open(open_frame(loaded_tiny, ids, max_new_tokens=8))
            await stream.until(Finished)
            assert stream.ids == plain.ids(ids, 8, GREEDY)
            await stream.send(Close(EPOCH, len(ids)))
            while await stream.receive() is not None:
                pass
            await running.commands_done()
            sums.append(fed(observer) - before - len(end))
            reused.append(opened.reused_tokens)
    assert reused == [0, 64]
    assert sums[0] >= 69
    assert sums[0] - sums[1] >= 64
