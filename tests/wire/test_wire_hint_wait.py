"""What a real stream is told of how long its hints waited: enough to tell the link's time from the verifier's."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

from cloud_verifier.loading import LoadedTarget
from shared.randomness import ids_digest
from shared.sampling import GREEDY
from shared.types import Commit, Epoch, Hint, Pace, PaceKind, Resume
from tests.oracle import PlainTarget
from tests.rig import PATIENCE_S, RawStream, open_frame, raw, serving

EPOCH = Epoch(0)
PROMPT = (70, 71, 72)


async def test_waits_and_steps_of_hints_fit_into_the_time_between_hint_and_commit(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        opened = await stream.open(open_frame(loaded_tiny, PROMPT, max_new_tokens=60, run_ahead=4))
        began, waits = time.monotonic(), 0
        for node in range(1, 9):
            sent = time.monotonic()
            at = 3 + len(stream.ids)
            await stream.send(Hint(EPOCH, node, (5,), at, base_position=at))  # may be late: it is told all the same
            commit = await stream.until(Commit)
            while commit.seen_node < node:
                assert commit.hint_wait_us is None
                # credit, in case the verifier had spent it before the hint came
                await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 4, 3 + len(stream.ids)))
                commit = await stream.until(Commit)
            assert commit.hint_wait_us is not None
            waits += commit.hint_wait_us
            assert commit.hint_wait_us + commit.step_us <= (time.monotonic() - sent) * 1e6
        told = [frame for frame in stream.received if isinstance(frame, Commit) and frame.hint_wait_us is not None]
        assert [commit.seen_node for commit in told] == list(range(1, 9))
        assert sum(commit.hint_wait_us or 0 for commit in told) == waits <= (time.monotonic() - began) * 1e6
        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3 + len(stream.ids)))
        await stream.rest()
        again = RawStream(stub)
        await again.open(Resume(opened.session_id, EPOCH, 3, ids_digest(PROMPT)))
        assert await again.rest() == stream.ids
        assert all(frame.hint_wait_us is None for frame in again.received if isinstance(frame, Commit))


async def test_the_wait_begins_when_the_frame_arrives_however_late_the_worker_takes_it(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    now, ticks = [1000.0], itertools.count()
    options = {"clock": lambda: now[0] + 1e-9 * next(ticks)}
    is_busy, gate = threading.Event(), threading.Event()
    truth = plain.ids(PROMPT, 16, GREEDY)

    def be_busy() -> None:
        is_busy.set()
        gate.wait(PATIENCE_S)

    async with serving(loaded_tiny, engine_options=options, max_wait_ms=400) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.open(open_frame(loaded_tiny, PROMPT, pace=PaceKind.WAIT))
        first = await stream.until(Commit)
        assert (first.seen_node, first.hint_wait_us) == (0, None)
        running.engine.submit(be_busy)
        await asyncio.to_thread(is_busy.wait, PATIENCE_S)
        try:
            await stream.send(Hint(EPOCH, 1, tuple(truth[1:4]), 4, base_position=4))
            await running.settled(lambda: running.engine.worker._commands.qsize() > 0)
            now[0] += 0.25  # the step in progress takes so long
        finally:
            gate.set()
        second = await stream.until(Commit)
        assert second.seen_node == 3
        assert 250_000 <= second.hint_wait_us <= 250_100
        now[0] += 0.5
        third = await stream.until(Commit)
        assert (third.seen_node, third.hint_wait_us) == (3, None)
        assert stream.ids == truth[: len(stream.ids)]
