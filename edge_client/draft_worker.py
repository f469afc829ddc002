"""Runs one draft step at a time on a worker thread and hands its result back to the loop.

Must not know: frames, text. Used by `generate`. A step can be interrupted between chunks of a long prompt only, so
whoever leaves waits for it to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from edge_client.drafter import Drafter, DraftTask, HintTree, LongDrafter
from edge_client.edge_engine import DraftJob, EdgeEngine


@dataclass(frozen=True)
class FinishedDraft:
    """What came of a job, and when the thread was at it. Times in seconds of the clock given."""

    job: DraftJob
    tree: HintTree
    started_at: float
    ended_at: float
    error: Exception | None = None


class DraftWorker:
    """At most one job under way; None as drafter: never any."""

    def __init__(self, drafter: Drafter | None, executor: Executor, clock: Callable[[], float]) -> None:
        self._drafter, self._executor, self._clock = drafter, executor, clock
        self.running: asyncio.Future[FinishedDraft | None] | None = None
        self.busy_s = 0.0
        self._task: DraftTask | None = None

    def begin(self, task: DraftTask) -> None:
        """What is drafted from now on is for this; the drafter is told on its own thread."""
        self._task = task

    def prepare(self, ids: Sequence[int]) -> None:
        """Begins to take in a prompt while the verifier is still being asked."""
        if isinstance(self._drafter, LongDrafter):
            loop = asyncio.get_running_loop()
            self.running = loop.run_in_executor(self._executor, self._take_in, self._drafter, list(ids))

    def _take_in(self, drafter: LongDrafter, ids: list[int]) -> None:
        """(worker thread) What fails here fails again, and is told, when something is to be proposed."""
        with suppress(Exception):
            drafter.prepare(ids)

    def start(self, engine: EdgeEngine, ids: Sequence[int], now: float) -> None:
        """Begins the engine's next job, if there is one and none is under way."""
        if self._drafter is None or self.running is not None:
            return
        job = engine.next_job(now)
        if job is not None:
            prefix = list(ids[: job.length])
            loop = asyncio.get_running_loop()
            self.running = loop.run_in_executor(self._executor, self._work, self._drafter, prefix, job)

    def _work(self, drafter: Drafter, prefix: list[int], job: DraftJob) -> FinishedDraft:
        """(worker thread)"""
        started = self._clock()
        try:
            task, self._task = self._task, None
            if task is not None:
                drafter.begin(task)
            drafter.sync(prefix)
            tree = drafter.propose(job.budget)
        except Exception as error:
            return FinishedDraft(job, HintTree(), started, self._clock(), error)
        return FinishedDraft(job, tree, started, self._clock())

    def take(self) -> FinishedDraft | None:
        """The result of a job that has ended."""
        if self.running is None or not self.running.done():
            return None
        finished, self.running = self.running.result(), None
        if finished is not None:
            self.busy_s += finished.ended_at - finished.started_at
        return finished

    def interrupt(self) -> None:
        """A long prompt under way is given up soon, what was taken in so far is kept; `ended` is to follow."""
        if isinstance(self._drafter, LongDrafter):
            self._drafter.interrupt()

    async def ended(self, engine: EdgeEngine) -> None:
        """Waits for a job under way, however often the caller is cancelled, and drops what came of it."""
        cancelled: asyncio.CancelledError | None = None
        while self.running is not None and not self.running.done():
            try:
                await asyncio.wait({self.running})
            except asyncio.CancelledError as error:
                cancelled = error
        if isinstance(self._drafter, LongDrafter):
            self._drafter.resume()
        finished = self.take()
        if finished is not None:
            engine.failed(finished.job)
        if cancelled is not None:
            raise cancelled
