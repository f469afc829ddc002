"""Devices that mean ill, or vanish at a bad moment: neighbours go on, nothing piles up, nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from cloud_verifier.loading import LoadedTarget
from cloud_verifier.torch_stream import MAX_UNREAD_FRAMES
from shared.types import Commit, Edit, Epoch, Finished, Hint, Pace, PaceKind, Reason
from tests.rig import RawStream, open_frame, raw, serving

EPOCH = Epoch(0)
PROMPT = (70, 71, 72)


async def test_a_flood_of_hints_does_not_keep_a_neighbour_from_its_text(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny, max_wait_ms=5) as running, raw(running) as stub:
        flooding = RawStream(stub)
        await flooding.open(open_frame(loaded_tiny, tuple(range(60, 160)), run_ahead=0))

        async def flood() -> None:
            while True:
                await flooding.send(Hint(EPOCH, 1, (5,), 3, base_position=90, base_digest=1))

        attack = asyncio.create_task(flood())
        neighbour = RawStream(stub)
        await neighbour.open(open_frame(loaded_tiny, PROMPT, max_new_tokens=40))
        assert len(await neighbour.rest()) == 40
        assert running.engine.worker._commands.qsize() < 1000
        attack.cancel()
        flooding.call.cancel()


async def test_faults_that_nobody_reads_do_not_pile_up_for_ever(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        sink: Any = next(iter(running.engine._sessions.values())).sink
        put, sizes = sink.queue.put_nowait, []

        def noted(item: object) -> None:
            put(item)
            sizes.append(sink.queue.qsize())

        def flood() -> None:
            for _ in range(3 * MAX_UNREAD_FRAMES):
                sink.send(Commit(EPOCH, 3, (1,), 0))

        sink.queue.put_nowait = noted
        running.engine.submit(flood)
        await running.settled(lambda: len(sizes) > MAX_UNREAD_FRAMES)
        assert max(sizes) == MAX_UNREAD_FRAMES + 1
        stream.call.cancel()


async def test_a_session_whose_device_left_while_the_worker_was_busy_is_dropped_all_the_same(
    loaded_tiny: LoadedTarget,
) -> None:
    async with serving(loaded_tiny, lease_ms=100) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=0))
        blocked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def block() -> None:
            loop.call_soon_threadsafe(blocked.set)
            asyncio.run(asyncio.sleep(0.4))

        running.engine.submit(block)
        await blocked.wait()
        stream.call.cancel()
        await running.settled(lambda: running.sessions == 0)
        await running.commands_done()
        assert running.model.pool.slots == 0


async def test_a_text_that_filled_the_context_is_finished_elsewhere_after_a_cut(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        ids = tuple(60 + n % 100 for n in range(running.engine.describe().context_size))
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, ids, generated_from=10, max_new_tokens=len(ids)))
        finished = await stream.until(Finished)
        assert finished.reason in (Reason.CONTEXT_FULL, Reason.STOP_ID)


async def test_a_refused_pace_changes_nothing(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, run_ahead=2))
        await stream.until(Commit)
        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 50, ack=4000))
        await stream.send(Edit(Epoch(1), 1, ()))  # its fault says that what came before was handled
        await stream.fault()
        await stream.fault()
        session = next(iter(running.engine._sessions.values()))
        await running.settled(lambda: session.credit == 0)
        await running.commands_done()
        assert (session.run_ahead, session.length) == (2, 5)


async def test_a_device_that_only_reads_gets_its_text_and_a_stream_that_ends(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, max_new_tokens=12))
        await stream.call.done_writing()
        assert len(await stream.rest()) == 12
        assert (await stream.status()).name == "OK"
