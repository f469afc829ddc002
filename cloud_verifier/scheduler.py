"""What runs next: which sessions, which of their ids and hint nodes. Pure: time is an argument, nothing waits.

Must not know: models, wire, threads. Called by `worker`. Of the runnable sessions the one that has waited longest goes
first, so while the KV pool has room for all none of n waits more than n - 1 steps that serve others. Prefill chunks,
hint nodes and plain decodes share one step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from cloud_verifier.hint_choice import COMMON_DECAY, TRY_AGAIN_STEPS, Acceptance, Candidate, choose_nodes
from cloud_verifier.sessions import Session
from cloud_verifier.step_cost import StepCost
from shared.hint_trie import Node
from shared.types import PaceKind

LINGER_SHARE = 0.25
LINGER_MOST_S = 0.040
"""A step may begin so much later, of a step's time, if hints of sessions just served are about to come."""
FADING = 0.9


@dataclass(frozen=True)
class StepBudget:
    """How much one step may hold."""

    sessions: int = 64
    """Sessions served in one step."""
    prefill_tokens: int = 256
    """Committed ids fed for all those sessions together that have more than one to feed."""
    nodes: int = 256
    """Hint nodes verified for all sessions together."""


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
    is_judged: bool
    """True if the feed reaches the last committed id: the row decides ids."""
    at: int
    """Rows that the session's slot held when this was planned."""
    hint_wait_us: int | None = None
    """How long the frame of `seen_node` had waited for this plan; None if a commit has told that."""

    @property
    def is_current(self) -> bool:
        """False if the slot was emptied since: the row would feed ids to the wrong place."""
        return self.session.slot.length == self.at

    @property
    def tokens(self) -> int:
        """Tokens that the row feeds."""
        return len(self.feed) + len(self.nodes)

    def without_nodes(self) -> PlannedRow:
        """The same row as a plain step."""
        return replace(self, nodes=())

    def halved(self) -> PlannedRow:
        """The first half of what the row feeds, as prefill; a plain step if that is one id."""
        half = len(self.feed) // 2
        return replace(self, feed=self.feed[:half], nodes=(), is_judged=False) if half else self.without_nodes()


@dataclass(frozen=True)
class StepPlan:
    """One forward pass."""

    rows: tuple[PlannedRow, ...]


class Scheduler:
    """Chooses the next step. Holds no clock and no thread."""

    def __init__(self, budget: StepBudget | None = None, cost: StepCost | None = None) -> None:
        self.budget = budget or StepBudget()
        self.cost = cost or StepCost()
        self._sessions: dict[bytes, Session] = {}
        self._last_planned = 0.0
        self._last_step_end: float | None = None
        self._row_tokens = 1.0
        self._acceptance = Acceptance(decay=COMMON_DECAY)
        self._room = 1.0
        self._is_tight = False
        self._passed_over: dict[bytes, float] = {}

    # ------------------------------------------------------------ sessions

    def add(self, session: Session) -> None:
        """A session to be served from now on. Until its own hints were judged, it goes by those of all others."""
        session.acceptance.common = self._acceptance
        self._sessions[session.id] = session

    def maybe_remove(self, session: Session) -> bool:
        """Not served any more; False if it was not before."""
        self._passed_over.pop(session.id, None)
        return self._sessions.pop(session.id, None) is not None

    def sessions(self) -> Iterable[Session]:
        """All sessions served, in the order they were opened."""
        return self._sessions.values()

    # ------------------------------------------------------------ what happened

    def note_step(self, tokens: int, sessions: int, seconds: float, now: float) -> None:
        """A step over so many tokens of so many sessions has ended."""
        self.cost.note(tokens, seconds)
        self._row_tokens = FADING * self._row_tokens + (1 - FADING) * tokens / sessions
        self._last_step_end, self._is_tight = now, False
        self._room = min(1.0, self._room * 1.05)

    def note_out_of_memory(self) -> None:
        """A step did not fit: the next ones are half as large, and grow again slowly."""
        self._room = max(0.01, self._room / 2)

    def note_no_room(self, without: Iterable[Session], now: float, is_whole_plan: bool) -> None:
        """These sessions of the plan found no room in the KV pool: they go to the end of the line.

        If that was the whole plan, the next one takes the sessions in the order in which they were opened.
        """
        self._passed_over |= {session.id: now for session in without}
        self._is_tight = is_whole_plan

    # ------------------------------------------------------------ planning

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing is to run now. `now` in seconds."""
        waiting = []
        at_work = sum(1 for session in self._sessions.values() if session.is_at_work)
        for session in self._sessions.values():
            session.note_credit(now)
            if now >= self._runs_at(session, at_work):
                session.runnable_since = now if session.runnable_since is None else session.runnable_since
                waiting.append(session)
            else:
                session.runnable_since = None
        if not waiting or self._linger_until(now, waiting) is not None:
            return None
        if not self._is_tight:
            waiting.sort(key=self._in_line_since)
        self._last_planned = now
        fed = list(self._feeds(waiting))
        return StepPlan(tuple(self._rows(fed, now)))

    def _in_line_since(self, session: Session) -> float:
        return max(session.runnable_since or 0.0, self._passed_over.get(session.id, 0.0))

    def wake_at(self, now: float) -> float | None:
        """When a step may be due by time alone, after `plan` gave none; None if only a command can change that."""
        at_work = sum(1 for session in self._sessions.values() if session.is_at_work)
        times = [self._runs_at(session, at_work) for session in self._sessions.values()]
        runnable = [session for session, time in zip(self._sessions.values(), times, strict=True) if time <= now]
        linger = self._linger_until(now, runnable) if runnable else None
        if linger is not None:
            return linger
        later = [time for time in times if time < float("inf")]
        return max(now, min(later)) if later else None

    def _runs_at(self, session: Session, at_work: int) -> float:
        """From when on a session may run: at once with hints or ids to prefill, else as its pace says."""
        if not session.is_at_work:
            return float("inf")
        if session.unfed > 1 or session.trie.children:
            return float("-inf")
        return session.idle_since + self._patience_s(session, at_work)

    def _patience_s(self, session: Session, at_work: int) -> float:
        """How long a session stands still for want of hints.

        `auto` is run_on up to half of what a step holds, and turns to wait as the verifier fills.
        """
        if session.pace is PaceKind.RUN_ON:
            return 0.0
        most = session.limits.max_wait_ms / 1000
        if session.pace is PaceKind.WAIT:
            return most
        load = (at_work - 1) / self.budget.sessions
        return most * min(1.0, max(0.0, 2 * load - 1))

    def _linger_until(self, now: float, runnable: list[Session]) -> float | None:
        """Until when to wait for hints that are about to come; None to begin at once.

        Devices answer the last step's commits within a moment of each other: without this the first to answer would
        get a step of its own, and the others wait for it. It is done only where the larger step serves more sessions
        for its time, the wait included.
        """
        if self._last_step_end is None:
            return None
        until = self._last_step_end + min(LINGER_MOST_S, LINGER_SHARE * self.cost.mean_s)
        if now >= until or len(runnable) >= self.budget.sessions:
            return None
        here = {id(session) for session in runnable}
        others = (session for session in self._sessions.values() if session.is_at_work and id(session) not in here)
        times = sorted(s.hint_expected_at or now for s in others if self._is_about_to_hint(s, until))
        count = len(runnable)
        rate_now = count / self._expected_s(count)
        rates = [
            (count + more) / (max(0.0, time - now) + self._expected_s(count + more))
            for more, time in enumerate(times, start=1)
        ]
        return until if any(rate > rate_now for rate in rates) else None

    def _expected_s(self, sessions: int) -> float:
        """What a step over so many sessions should take."""
        return self.cost.seconds(round(sessions * self._row_tokens))

    def _is_about_to_hint(self, session: Session, until: float) -> bool:
        """A hint that was due during an earlier step is not waited for: devices stop drafting without a word."""
        time, ended = session.hint_expected_at, self._last_step_end or 0.0
        return time is not None and time <= until and (time >= ended or session.idle_since >= self._last_planned)

    def _feeds(self, waiting: Iterable[Session]) -> Iterator[tuple[Session, tuple[int, ...]]]:
        """The sessions of the step and the committed ids that each feeds."""
        room = max(1, int(self.budget.prefill_tokens * self._room))
        places = max(1, int(self.budget.sessions * self._room))
        for session in waiting:
            if not places:
                return
            session.take_shared()
            count = min(session.unfed, room) if session.unfed > 1 else 1
            if not count:
                continue
            room -= count if session.unfed > 1 else 0
            places -= 1
            at = session.slot.length
            yield session, tuple(session.ids[at : at + count])

    def _rows(self, fed: list[tuple[Session, tuple[int, ...]]], now: float) -> Iterator[PlannedRow]:
        reaches = [session.unfed == len(feed) for session, feed in fed]
        candidates = [
            Candidate(
                session.trie,
                session.acceptance,
                session.credit if reached else 0,
                session.limits.max_step_nodes,
                session.is_chain,
                is_tried=session.untried_steps >= TRY_AGAIN_STEPS,
            )
            for (session, _), reached in zip(fed, reaches, strict=True)
        ]
        tokens = sum(len(feed) for _, feed in fed)
        most = int(self.budget.nodes * self._room)
        nodes = choose_nodes(candidates, most, float(sum(reaches)), tokens, self.cost.seconds)
        for (session, feed), reached, chosen in zip(fed, reaches, nodes, strict=True):
            if reached and session.trie.children:
                session.untried_steps = 0 if chosen else session.untried_steps + 1
            since = session.runnable_since if session.runnable_since is not None else now
            queue_us = int((now - since) * 1e6)
            yield PlannedRow(
                session,
                feed,
                tuple(chosen),
                session.trie.highest_number,
                queue_us,
                reached,
                session.slot.length,
                session.hint_wait_us(now),
            )

    # ------------------------------------------------------------ room in the KV pool

    def oldest_first(self, rows: Iterable[PlannedRow]) -> list[PlannedRow]:
        """Rows in the order in which their sessions were opened."""
        order = {id(session): index for index, session in enumerate(self._sessions.values())}
        return sorted(rows, key=lambda row: order[id(row.session)])

    def victims(self, needing: Session, fixed: Collection[int]) -> list[Session]:
        """Whose pages may be taken so that `needing` can run, in this order. `fixed`: id() of those not to touch.

        Idle sessions first (over, absent, or without credit), the longest idle before others; then sessions at work
        that were opened after this one: those that wait for hints, then the youngest. So the oldest always gets on, and
        nobody at work is undone by somebody younger.
        """
        order = {id(session): index for index, session in enumerate(self._sessions.values())}
        holding = [s for s in self._sessions.values() if s.slot.pages and s is not needing and id(s) not in fixed]
        idle = [session for session in holding if not session.is_at_work]
        younger = [s for s in holding if s.is_at_work and order[id(s)] > order[id(needing)]]
        idle.sort(key=lambda session: session.idle_since)
        younger.sort(key=lambda session: (session.runnable_since is not None, -order[id(session)]))
        return idle + younger
