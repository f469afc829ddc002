"""Who may open a session now, who waits, who is sent away; and how many hint nodes a principal may send. Pure.

Must not know: sessions, wire, clocks (time is handed in, in seconds). Called by `torch_engine` on the worker's thread.
A principal is whose sessions belong together: a connection, until there are access tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

Ticket = TypeVar("Ticket")

LEAST_RETRY_MS, MOST_RETRY_MS = 250, 30_000
FIRST_GUESS_S = 1.0
"""How long a place is taken to stay occupied, until it is measured."""


@dataclass(frozen=True)
class AdmissionLimits:
    """How much one verifier takes on."""

    max_sessions: int = 64
    """Sessions held at once."""
    max_queue: int = 64
    """Opens that wait for a place; more are refused."""
    principal_sessions: int = 0
    """Sessions that one principal holds or waits for; 0: no limit of its own."""
    hint_nodes_per_second: int = 0
    """Hint nodes that one principal may send, with bursts of four seconds' worth; 0: no limit."""


class Entry(Enum):
    """What became of somebody who asked for a place. Refusals bear the names that the metrics count."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    QUEUE_FULL = "queue_full"
    PRINCIPAL_SESSIONS = "principal_sessions"


class Admission(Generic[Ticket]):
    """Places and the queue before them, first come first served."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self._held: Counter[str] = Counter()
        self._queue: deque[tuple[str, Ticket]] = deque()
        self._rates: dict[str, _Allowance] = {}
        self._last_left: float | None = None
        self._interval_s = FIRST_GUESS_S

    @property
    def held(self) -> int:
        """Places taken."""
        return self._held.total()

    @property
    def queued(self) -> int:
        """Opens that wait."""
        return len(self._queue)

    def has_place(self) -> bool:
        """True if the next to come would not have to wait."""
        return self.held < self.limits.max_sessions and not self._queue

    def has_share(self, principal: str) -> bool:
        """True if the principal may hold or wait for one session more."""
        most = self.limits.principal_sessions
        return not most or self._held[principal] + sum(1 for name, _ in self._queue if name == principal) < most

    def enter(self, principal: str, ticket: Ticket) -> Entry:
        """Takes a place, or queues the ticket, or does neither: the queue is full, or the principal has enough."""
        if not self.has_share(principal):
            return Entry.PRINCIPAL_SESSIONS
        if self.has_place():
            self._held[principal] += 1
            return Entry.ADMITTED
        if len(self._queue) >= self.limits.max_queue:
            return Entry.QUEUE_FULL
        self._queue.append((principal, ticket))
        return Entry.QUEUED

    def next_to_enter(self) -> Ticket | None:
        """Gives the place that is free away; None if there is none or nobody waits.

        It goes to the principal with the fewest places, to whoever of those has waited longest.
        """
        if not self._queue or self.held >= self.limits.max_sessions:
            return None
        place = min(range(len(self._queue)), key=lambda place: (self._held[self._queue[place][0]], place))
        principal, ticket = self._queue[place]
        del self._queue[place]
        self._held[principal] += 1
        return ticket

    def next_queued(self) -> Ticket | None:
        """Takes whoever has waited longest out of the queue, without a place; None if nobody waits."""
        return self._queue.popleft()[1] if self._queue else None

    def maybe_withdraw(self, ticket: Ticket) -> bool:
        """Takes a ticket out of the queue; False if it is not there (any more)."""
        for place, (_, waiting) in enumerate(self._queue):
            if waiting is ticket:
                del self._queue[place]
                return True
        return False

    def leave(self, principal: str, now: float) -> None:
        """A place is free again."""
        assert self._held[principal] > 0
        was_full = self.held >= self.limits.max_sessions
        self._held[principal] -= 1
        if not self._held[principal]:
            del self._held[principal]
        if self._last_left is not None and was_full:
            interval_s = min(now - self._last_left, MOST_RETRY_MS / 1000)
            self._interval_s = 0.8 * self._interval_s + 0.2 * interval_s
        self._last_left = now if was_full else None  # while places are free nobody's leaving says how long they last

    def move(self, old: str, new: str) -> None:
        """A session goes on under another principal: its device came back on another connection."""
        self._held[new] += 1
        self._held[old] -= 1
        if not self._held[old]:
            del self._held[old]

    def retry_after_ms(self) -> int:
        """When a place may be free for one who comes back: as places have been left lately, behind those who wait."""
        return int(min(MOST_RETRY_MS, max(LEAST_RETRY_MS, 1000 * self._interval_s * (self.queued + 1))))

    def may_send(self, principal: str, nodes: int, now: float) -> bool:
        """Counts hint nodes against a principal's rate; False: over it, these are not to be taken."""
        rate = self.limits.hint_nodes_per_second
        if not rate:
            return True
        if principal not in self._rates:
            self._rates = {name: kept for name, kept in self._rates.items() if not kept.is_full(now)}
            self._rates[principal] = _Allowance(rate, now)
        return self._rates[principal].may_take(nodes, now)


class _Allowance:
    """A token bucket of four seconds' worth. One that is not empty lets a larger amount through, and owes it."""

    BURST_S = 4

    def __init__(self, rate: int, now: float) -> None:
        self._rate, self._left, self._at = rate, float(rate * self.BURST_S), now

    def is_full(self, now: float) -> bool:
        """True if it is as good as new."""
        return self._left + (now - self._at) * self._rate >= self._rate * self.BURST_S

    def may_take(self, amount: int, now: float) -> bool:
        now = max(now, self._at)  # a frame that waited for room comes with an earlier time than others have had
        self._left = min(self._rate * self.BURST_S, self._left + (now - self._at) * self._rate)
        self._at = now
        if amount and self._left <= 0:
            return False
        self._left -= amount
        return True
