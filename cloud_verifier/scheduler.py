"""What runs next: which sessions, which of their ids and hint nodes. Pure: time is an argument, nothing waits.

Must not know: models, wire, threads. Called by `worker`. In this version a step holds one session; the plan is a list
all the same. Fair: of the runnable sessions the one that has waited longest goes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloud_verifier.hint_choice import choose_nodes
from cloud_verifier.sessions import Session
from shared.hint_trie import Node
from shared.types import PaceKind


@dataclass(frozen=True)
class PlannedRow:
    """One session's part of a step: feed `feed` committed ids, then verify `nodes` (none: a plain step).

    A row that does not reach the last committed id is prefill: nothing is judged.
    """

    session: Session
    feed: tuple[int, ...]
    nodes: tuple[Node, ...]
    seen_node: int
    queue_us: int

    @property
    def is_judged(self) -> bool:
        """True if this row decides ids."""
        return self.session.slot.length + len(self.feed) == self.session.length


@dataclass(frozen=True)
class StepPlan:
    """One forward pass."""

    rows: tuple[PlannedRow, ...]


class Scheduler:
    """Chooses the next step. Holds no clock and no thread."""

    def __init__(self, max_sessions_per_step: int = 1, prefill_tokens: int = 256) -> None:
        """`prefill_tokens` committed ids are fed at most per row and step."""
        self._sessions: dict[bytes, Session] = {}
        self._max_sessions = max_sessions_per_step
        self._prefill_tokens = prefill_tokens

    def add(self, session: Session) -> None:
        """A session to be served from now on."""
        self._sessions[session.id] = session

    def maybe_remove(self, session: Session) -> bool:
        """Not served any more; False if it was not before."""
        return self._sessions.pop(session.id, None) is not None

    def sessions(self) -> Iterable[Session]:
        """All sessions served."""
        return self._sessions.values()

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing is runnable now. `now` in seconds."""
        waiting = []
        for session in self._sessions.values():
            session.note_credit(now)
            if self._is_runnable(session, now):
                session.runnable_since = now if session.runnable_since is None else session.runnable_since
                waiting.append(session)
            else:
                session.runnable_since = None
        waiting.sort(key=lambda session: now if session.runnable_since is None else session.runnable_since)
        rows = tuple(self._row(session, now) for session in waiting[: self._max_sessions])
        return StepPlan(rows) if rows else None

    def wake_at(self, now: float) -> float | None:
        """When a session that is not runnable now becomes so by time alone; None if none will."""
        times = [
            session.idle_since + session.limits.max_wait_ms / 1000
            for session in self._sessions.values()
            if session.sink is not None and session.finished is None and session.credit > 0
        ]
        return max(now, min(times)) if times else None

    def _is_runnable(self, session: Session, now: float) -> bool:
        if session.finished is not None or session.sink is None or session.credit == 0:
            return False
        if session.unfed > 1 or session.trie.children or self._runs_on(session):
            return True
        return now >= session.idle_since + session.limits.max_wait_ms / 1000

    def _runs_on(self, session: Session) -> bool:
        """`auto` runs on while this is the only session at work, and waits for hints when others want the device."""
        if session.pace is not PaceKind.AUTO:
            return session.pace is PaceKind.RUN_ON
        return not any(
            other is not session and other.sink is not None and other.finished is None and other.credit > 0
            for other in self._sessions.values()
        )

    def _row(self, session: Session, now: float) -> PlannedRow:
        feed = tuple(session.ids[session.slot.length : session.slot.length + self._prefill_tokens])
        reaches_end = session.slot.length + len(feed) == session.length
        most = session.limits.max_step_nodes
        nodes = choose_nodes(session.trie, most, session.credit) if reaches_end else []
        waited = now - (session.runnable_since if session.runnable_since is not None else now)
        return PlannedRow(session, feed, tuple(nodes), session.trie.highest_number, int(waited * 1e6))
