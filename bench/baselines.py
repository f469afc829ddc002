"""What Draftwire is measured against: the target or the draft alone, a round trip per token, and propose-and-wait.

Must not know: how Draftwire's own loop works (`edge_client.generate`). Called by `link`. Built on frames and a drafter:
one session at a time, and never a hint sent before the one before it is judged.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.bare_session import EPOCH, BareSession, Job, Outcome
from edge_client.client import SpeculativeClient
from edge_client.drafter import Budget, Drafter, DraftTask, HintTree
from edge_client.events import Result
from edge_client.transport import Transport
from shared.types import ModelCard, PaceKind, Rule

TREES = (Budget(depth=4, width=2), Budget(depth=8, width=2))
"""Static trees: as many nodes as the longest chain, and as many as Draftwire's steps verify."""


@dataclass(frozen=True)
class Device:
    """What a baseline runs with."""

    transport: Transport
    card: ModelCard
    drafter: Drafter
    executor: Executor
    """One thread, the drafter's."""

    async def propose(self, ids: list[int], budget: Budget) -> HintTree:
        """A proposal after these ids, drafted on the drafter's thread."""

        def work() -> HintTree:
            self.drafter.sync(ids)
            return self.drafter.propose(budget)

        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


# ---------------------------------------------------------------- the ways to write a text


async def cloud_streaming(client: SpeculativeClient, job: Job) -> Outcome:
    """The target alone, through the product's client: nothing is drafted."""
    return of_result(await client.generate(**options(job), pace=PaceKind.RUN_ON, hint_tokens=0))


async def one_rpc_per_token(device: Device, job: Job) -> Outcome:
    """The target alone, each id asked for once the one before it came."""
    session = await BareSession.open(device.transport, device.card, job, PaceKind.RUN_ON, run_ahead=1)
    try:
        while not session.is_over:
            held = len(session.ids)
            await session.until(partial(_is_longer, session.ids, held))
            if not session.is_over and session.room > 0:
                await session.send_pace(PaceKind.RUN_ON, 1)
    except BaseException:
        await session.abandon()
        raise
    return await session.end()


async def propose_and_wait(device: Device, job: Job, budget: Budget) -> Outcome:
    """Drafts, sends, waits until all of it is judged; again. A chain by `Budget(length)`, a tree by its width."""
    session = await BareSession.open(device.transport, device.card, job, PaceKind.WAIT)
    device.drafter.begin(task_of(job, device.card))
    try:
        while not session.is_over:
            base, depth = len(session.ids), min(budget.depth, session.room)
            if depth < 1 or (base > len(job.prompt) and session.ids[-1] in device.card.stop_ids):
                break
            tree = await device.propose(list(session.ids), Budget(depth, budget.width))
            paths = paths_of(tree)
            if is_judged(paths, session.ids, base):  # the first id came meanwhile, and another one
                continue
            await session.send_hint(base, tree)
            await session.until(partial(is_judged, paths, session.ids, base))
    except BaseException:
        await session.abandon()
        raise
    return await session.end()


async def draft_only(device: Device, job: Job) -> Outcome:
    """The draft model alone, on the device; its ids are its own. `first_s` is the time of the prompt and one id."""
    task = task_of(job, device.card)
    device.drafter.begin(DraftTask(task.sampling, task.seed, task.rule, EPOCH, task.generated_from))
    began = time.perf_counter()
    await device.propose(list(job.prompt), Budget(1))
    first_s = time.perf_counter() - began
    tree = await device.propose(list(job.prompt), Budget(job.tokens))
    return Outcome(tree.ids, time.perf_counter() - began, first_s)


# ---------------------------------------------------------------- what they share


def options(job: Job) -> dict[str, Any]:
    """A job as arguments of `SpeculativeClient.generate`."""
    return {"prompt": job.prompt, "max_new_tokens": job.tokens, "sampling": job.sampling, "seed": job.seed}


def task_of(job: Job, card: ModelCard) -> DraftTask:
    """A job as a drafter sees it."""
    return DraftTask(job.sampling, job.seed, Rule.AGREEMENT, EPOCH, len(job.prompt), frozenset(card.stop_ids))


def of_result(result: Result) -> Outcome:
    """What the client's report says."""
    report = result.report
    measured = (report.round_trip_s or 0.0, report.step_s or 0.0, report.draft_step_s or 0.0)
    return Outcome(result.ids, report.wall_s, report.first_token_s, report.usage, report.traffic, measured)


def paths_of(tree: HintTree) -> set[tuple[int, ...]]:
    """Every node as the ids that lead to it."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.ids, tree.parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return set(paths)


def is_judged(paths: set[tuple[int, ...]], ids: list[int], base: int) -> bool:
    """True once the ids committed since `base` have left the hint or passed it."""
    walked = tuple(ids[base:])
    return not any(len(path) > len(walked) and path[: len(walked)] == walked for path in paths)


def _is_longer(ids: list[int], length: int) -> bool:
    return len(ids) > length
