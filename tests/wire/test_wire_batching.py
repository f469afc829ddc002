"""C18, C20, C37: many devices at once over real gRPC share steps, and each text is the target's own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.gpu_models import FreeTokens
from cloud_verifier.admission import AdmissionLimits
from cloud_verifier.loading import LoadedTarget
from cloud_verifier.logs import Event
from edge_client.drafter import Budget, HintTree
from shared.pb import verifier_pb2_grpc
from shared.sampling import GREEDY, SamplingParams
from shared.types import Commit, Epoch, Finished, Hint, Pace, PaceKind
from tests.formula_model import Recorder
from tests.oracle import PlainTarget
from tests.rig import RandomDrafter, RawStream, ScriptedDrafter, client, open_frame, raw, serving
from tests.tiny_pair import TinyPair

EPOCH = Epoch(0)
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4, min_p=0.01),
)


class HalfRightDrafter(ScriptedDrafter):
    """Knows the text, and is wrong now and then, or offers a wrong id beside the right one."""

    def __init__(self, truth: Sequence[int], seed: int) -> None:
        super().__init__(truth)
        self._rng = random.Random(seed)

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        tree = super().propose(budget)
        if self._rng.random() < 0.5 or not tree.ids:
            return tree
        ids = list(tree.ids)
        ids[self._rng.randrange(len(ids))] = self._rng.randrange(300)
        if self._rng.random() < 0.5:
            return HintTree(tuple(ids), tree.parents, tree.confidence)
        own = tree.ids[: max(1, len(ids) - 1)]
        wrong = (own[0] + 1) % 300
        return HintTree((wrong, *own), (-1, -1, *range(1, len(own))), (0.4, *[0.9] * len(own)))


@pytest.mark.usefixtures("always_drafts")
async def test_twelve_devices_that_come_and_go_each_get_the_targets_own_text(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    """The first texts of all of them are opened before the first step."""
    observer, accepted = Recorder(), Counter[str]()
    options = {"observer": observer, "cost": FreeTokens()}
    async with serving(loaded_tiny, max_wait_ms=60_000, engine_options=options) as running:

        async def one(number: int) -> None:
            rng = random.Random(number)
            prompt = [50 + number, *(rng.randrange(300) for _ in range(rng.choice([0, 1, 20, 60])))]
            kind = ("scripted", "half right", "random")[number % 3]
            for turn in range(2):
                params, count = PARAMS[(number + turn) % len(PARAMS)], rng.randint(16, 40)
                truth = plain.ids(prompt, count, params, number)
                drafters = {
                    "scripted": ScriptedDrafter([*prompt, *truth]),
                    "half right": HalfRightDrafter([*prompt, *truth], number),
                    "random": RandomDrafter(tiny_pair.vocabulary_size),
                }
                await asyncio.sleep(rng.uniform(0, 0.05))
                pace = (PaceKind.WAIT, PaceKind.RUN_ON, PaceKind.AUTO)[(number + turn) // 3 % 3]
                async with client(running, tiny_pair, drafter=drafters[kind]) as device:
                    result = await device.generate(
                        prompt, max_new_tokens=count, sampling=params, seed=number, stop_ids=(), pace=pace
                    )
                assert list(result.ids) == truth
                accepted[kind] += result.report.usage.accepted_tokens

        async with asyncio.TaskGroup() as tasks, running.standing_still(commands=12):
            for number in range(12):
                tasks.create_task(one(number))
        await running.settled(lambda: running.sessions == 0)
        await running.commands_done()
        assert (running.model.pool.slots, running.model.pool.table.used) == (0, 0)
        running.model.pool.check_integrity()
    assert sum(report.sessions > 1 for report in observer.steps) > 10
    assert max(report.sessions for report in observer.steps) >= 3
    assert accepted["scripted"] > 0  # some of them are waited for
    assert accepted["half right"] > 0
    assert observer.ended.total() == len(observer.opened) == 24


async def test_sessions_that_are_ready_at_once_share_one_step_with_all_their_hints(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    """Chains right and half right, trees, no hints; contexts of one page and of two; each text its own."""
    observer, count = Recorder(), 20
    prompts = [tuple(60 + (7 * n + k) % 200 for k in range(3 + 9 * (n % 4))) for n in range(12)]
    samplings = [PARAMS[number % len(PARAMS)] for number in range(12)]
    truths = [plain.ids(p, count, s, 5) for p, s in zip(prompts, samplings, strict=True)]
    async with serving(loaded_tiny, engine_options={"observer": observer}) as running, raw(running) as stub:
        streams = [RawStream(stub) for _ in prompts]
        for stream, prompt, sampling in zip(streams, prompts, samplings, strict=True):
            await stream.open(open_frame(loaded_tiny, prompt, sampling=sampling, max_new_tokens=count, run_ahead=0))
        async with running.standing_still(commands=20):  # 8 hints, 12 paces
            for number, stream in enumerate(streams):
                ids, length = truths[number][:6], len(prompts[number])
                if number % 3 == 1:
                    ids[2:] = [(token + 1) % 300 for token in ids[2:]]
                tree: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
                if number % 2:
                    ids, tree = [(ids[0] + 1) % 300, *ids], ((0, 0, 1, 1, 1, 1, 1), (0.2, *[0.9] * 6))
                if number % 3 < 2:
                    await stream.send(Hint(EPOCH, 1, tuple(ids), 0, 0, length, None, *tree))
                await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, length))
        for stream, truth in zip(streams, truths, strict=True):
            assert await stream.rest() == truth
    first = observer.steps[0]
    assert (first.sessions, first.judged_rows) == (12, 12)
    assert first.nodes > 8 * 3
    assert first.accepted > 8 * 2
    batches = [frame.batch_size for stream in streams for frame in stream.received if isinstance(frame, Commit)]
    assert batches.count(12) >= 12


async def test_a_request_gets_the_same_ids_whoever_shares_its_steps(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    """C20, in float32: alone, then with 1, 3, 7 and 15 neighbours, greedy and sampled.

    Once all begin at the same moment, once whatever the neighbours are at.
    """
    prompt = tuple(range(60, 93))
    for params in (GREEDY, PARAMS[1]):
        truth = plain.ids(prompt, 20, params, 5)
        async with serving(loaded_tiny, lease_ms=1) as running, raw(running) as stub:
            for company in (0, 1, 3, 7, 15):
                neighbours, probe, again = [RawStream(stub) for _ in range(company)], RawStream(stub), RawStream(stub)
                for number, stream in enumerate(neighbours):
                    context = tuple(100 + (number * 13 + k) % 150 for k in range(1 + 5 * number))
                    await stream.open(
                        open_frame(loaded_tiny, context, max_new_tokens=400, run_ahead=0, sampling=PARAMS[number % 4])
                    )
                asked = open_frame(loaded_tiny, prompt, sampling=params, max_new_tokens=20)
                await probe.open(replace(asked, run_ahead=0))
                async with running.standing_still(commands=company + 1):
                    for stream in (*neighbours, probe):
                        await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 1000, 1))
                assert await probe.rest() == truth
                sizes = [frame.batch_size for frame in probe.received if isinstance(frame, Commit)]
                assert max(sizes) == company + 1
                await again.open(asked)
                assert await again.rest() == truth
                for stream in (*neighbours, probe, again):
                    stream.call.cancel()
                await running.settled(lambda: running.sessions == 0)


# ---------------------------------------------------------------- devices that vanish


async def test_a_hundred_devices_that_close_their_socket_after_the_first_commit_leave_nothing_behind(
    loaded_tiny: LoadedTarget, plain: PlainTarget, caplog: pytest.LogCaptureFixture
) -> None:
    """C37: nobody generates to the end, slots and pages come back, each is counted and logged once."""
    caplog.set_level(logging.INFO, "draftwire.engine")
    observer = Recorder()
    options = {"observer": observer, "admission": AdmissionLimits(max_sessions=200)}
    async with serving(loaded_tiny, engine_options=options, lease_ms=1) as running:

        async def vanishing(number: int) -> None:
            async with raw(running, is_alone=True) as stub:
                stream = RawStream(stub)
                await stream.open(
                    open_frame(loaded_tiny, range(60, 61 + number % 40), max_new_tokens=400, run_ahead=1000)
                )
                await stream.until(Commit)

        for start in range(0, 100, 10):
            await asyncio.gather(*(vanishing(start + n) for n in range(10)))
        await running.settled(lambda: running.sessions == 0)
        await running.commands_done()
        pool = running.model.pool
        pool.check_integrity()
        assert (pool.slots, pool.table.used) == (0, 0)
        assert len(observer.opened) == 100
        assert observer.ended == {"lease": 100}
        async with raw(running) as stub:
            last = RawStream(stub)
            await last.open(open_frame(loaded_tiny, (70, 71, 72)))
            assert await last.rest() == plain.ids((70, 71, 72), 16, GREEDY)
    events = [record.msg for record in caplog.records if isinstance(record.msg, Event)]
    names = Counter(event.name for event in events)
    assert names["session_detached"] in (100, 101)
    assert (names["session_opened"], names["session_ended"]) == (101, 100)
    told = {name: {event.fields["session"]: event.fields for event in events if event.name == name} for name in names}
    for session, ended in told["session_ended"].items():  # nothing was written for a device that was gone
        length = told["session_opened"][session]["context_tokens"] + ended["generated_tokens"]
        assert length == told["session_detached"][session]["committed"]


# ---------------------------------------------------------------- floods


async def dropped_over_budget(
    loaded: LoadedTarget, stub: verifier_pb2_grpc.VerifierStub, frames: int, truth: list[int]
) -> tuple[int, int]:
    """Sends so many hints of 8 nodes to a session that stands still, then lets it run; what was dropped, accepted."""
    stream = RawStream(stub)
    await stream.open(open_frame(loaded, (70, 71, 72), run_ahead=0, max_new_tokens=24))
    for number in range(frames):
        ids = [(token + number) % 300 for token in truth[:8]]
        await stream.send(Hint(EPOCH, 1 + 8 * number, tuple(ids), 3, base_position=3))
    await stream.send(Pace(EPOCH, PaceKind.RUN_ON, 256, 3))
    await stream.until(Finished)
    assert stream.ids == truth
    commits = [frame for frame in stream.received if isinstance(frame, Commit)]
    return sum(commit.dropped_over_budget for commit in commits), sum(commit.accepted for commit in commits)


async def test_a_flood_of_hints_is_dropped_over_budget_and_the_text_stays_right(
    loaded_tiny: LoadedTarget, plain: PlainTarget
) -> None:
    truth, ticks = plain.ids((70, 71, 72), 24, GREEDY), itertools.count()
    options = {
        "admission": AdmissionLimits(hint_nodes_per_second=10),
        "clock": lambda: 1000 + 1e-9 * next(ticks),  # no allowance is earned while the flood lasts
    }
    async with (
        serving(loaded_tiny, engine_options=options) as running,
        raw(running, is_alone=True) as flooding,
        raw(running, is_alone=True) as other,
    ):
        dropped, accepted = await dropped_over_budget(loaded_tiny, flooding, 100, truth)
        assert dropped == 8 * 94  # a burst of 40 nodes is five frames, and one more on credit
        assert accepted > 0
        assert await dropped_over_budget(loaded_tiny, flooding, 1, truth) == (8, 0)
        dropped, accepted = await dropped_over_budget(loaded_tiny, other, 1, truth)
        assert dropped == 0
        assert accepted > 0
