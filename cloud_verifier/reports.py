"""What the worker and the engine tell an observer: one report a step, and the events of sessions and pages.

Must not know: prometheus, torch, asyncio. Called by `worker` and `engine`; `metrics` is the observer that counts.
An observer looks on: nothing it does or fails at may reach a session (`GuardedObserver`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger("draftwire.reports")


@dataclass(frozen=True)
class StepReport:
    """One step that committed, as it was."""

    sessions: int
    """Rows in the batch, prefill rows included."""
    prefill_tokens: int
    """Committed ids fed beyond the last one of each judged row, and all those of rows that were not judged."""
    nodes: int
    """Hint nodes verified."""
    committed: int
    """Ids committed."""
    accepted: int
    """Of these, how many a hint had foretold; the others are corrections and bonuses."""
    dry_rows: int
    """Judged rows without a usable hint."""
    offered_by_depth: tuple[int, ...]
    """Index d: judged rows whose way went on to a hint node at depth d + 1, accepted or not."""
    accepted_by_depth: tuple[int, ...]
    """Of these, how many were accepted."""
    plan_s: float
    """Choosing sessions, ids and nodes."""
    stage_s: float
    """Reserving pages, building and uploading the inputs."""
    forward_s: float
    """The forward pass, `gather_s` included."""
    gather_s: float
    """Of the forward: collecting keys and values out of their pages."""
    judge_s: float
    """Deciding ids, reading the scores back included."""
    commit_s: float
    """Keeping or rolling back rows, committing ids, emitting frames."""
    judged_rows: int
    """Rows that decided ids."""

    @property
    def whole_s(self) -> float:
        """The whole step; `gather_s` lies within `forward_s` and is not counted twice."""
        return self.plan_s + self.stage_s + self.forward_s + self.judge_s + self.commit_s


@dataclass(frozen=True)
class Gauges:
    """How things stand now. Told again whenever they may have changed."""

    sessions_attached: int
    """Sessions with a device on the line whose epoch goes on."""
    sessions_absent: int
    """Sessions kept for a device that is away."""
    queue_length: int
    """Opens that wait for room."""
    kv_pages_used: int
    """Pages that at least one session holds."""
    kv_pages_shared: int
    """Of these, pages that more than one session holds."""
    kv_pages_total: int
    """Pages of the pool; those neither used nor cached are free."""
    kv_pages_cached: int
    """Pages that no session holds, kept for reuse until they are wanted."""
    sessions_finished: int = 0
    """Attached sessions whose epoch is closed."""


class Observer(Protocol):
    """Is told what happens. Any thread may call; calls return at once and have no effect on what they report."""

    def step(self, report: StepReport) -> None:
        """A step has committed."""
        ...

    def session_opened(self, context_tokens: int, reused_tokens: int) -> None:
        """A session began; `reused_tokens` of its context had keys and values already."""
        ...

    def session_ended(self, reason: str) -> None:
        """A session is gone: finished, cancelled, lease, failed, displaced. A word from the code, never from a peer."""
        ...

    def refused(self, reason: str) -> None:
        """An open was refused: queue_full, queue_timeout, principal_sessions, streams, draining, context."""
        ...

    def hints(self, nodes: int, fresh: int) -> None:
        """A hint came with so many nodes, `fresh` of them new."""
        ...

    def dropped(self, late: int, disagreeing: int, over_budget: int) -> None:
        """Hint nodes were dropped unverified or refuted."""
        ...

    def evicted(self, pages: int) -> None:
        """A session gave up so many pages for others."""
        ...

    def out_of_memory(self) -> None:
        """The device had no memory for a step."""
        ...

    def gauges(self, g: Gauges) -> None:
        """How things stand now."""
        ...


class NoObserver:
    """Nobody looks on. A base for observers that want some of the calls only."""

    def step(self, report: StepReport) -> None:
        """See Observer."""

    def session_opened(self, context_tokens: int, reused_tokens: int) -> None:
        """See Observer."""

    def session_ended(self, reason: str) -> None:
        """See Observer."""

    def refused(self, reason: str) -> None:
        """See Observer."""

    def hints(self, nodes: int, fresh: int) -> None:
        """See Observer."""

    def dropped(self, late: int, disagreeing: int, over_budget: int) -> None:
        """See Observer."""

    def evicted(self, pages: int) -> None:
        """See Observer."""

    def out_of_memory(self) -> None:
        """See Observer."""

    def gauges(self, g: Gauges) -> None:
        """See Observer."""


class GuardedObserver:
    """Stands before observers that may fail: what they raise is logged once per method and goes no further."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self._failed: set[str] = set()

    def step(self, report: StepReport) -> None:
        """See Observer."""
        self._tell("step", report)

    def session_opened(self, context_tokens: int, reused_tokens: int) -> None:
        """See Observer."""
        self._tell("session_opened", context_tokens, reused_tokens)

    def session_ended(self, reason: str) -> None:
        """See Observer."""
        self._tell("session_ended", reason)

    def refused(self, reason: str) -> None:
        """See Observer."""
        self._tell("refused", reason)

    def hints(self, nodes: int, fresh: int) -> None:
        """See Observer."""
        self._tell("hints", nodes, fresh)

    def dropped(self, late: int, disagreeing: int, over_budget: int) -> None:
        """See Observer."""
        self._tell("dropped", late, disagreeing, over_budget)

    def evicted(self, pages: int) -> None:
        """See Observer."""
        self._tell("evicted", pages)

    def out_of_memory(self) -> None:
        """See Observer."""
        self._tell("out_of_memory")

    def gauges(self, g: Gauges) -> None:
        """See Observer."""
        self._tell("gauges", g)

    def _tell(self, name: str, *told: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, name)(*told)
            except Exception:  # whatever it is: a figure is lost, no session is
                if name not in self._failed:
                    self._failed.add(name)
                    log.exception("the observer failed in %s; what more fails there is not logged", name)
