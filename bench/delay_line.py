"""What a link does to the bytes of one direction: each comes out later, in order. Pure: time is an argument.

Must not know: sockets, clocks, asyncio. Called by `delay_proxy`.
Chunks overlap in flight, so a long round trip costs no throughput.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What a link does to bytes."""

    rtt_ms: float = 0.0
    """Half of it is added each way."""
    jitter_ms: float = 0.0
    """Up to so much more each way, drawn per chunk from `seed`; order is kept."""
    up_bytes_per_s: float = 0.0
    """0: no limit."""
    down_bytes_per_s: float = 0.0
    """0: no limit."""
    seed: int = 0


class DelayLine:
    """One direction: chunks with the times at which they come out, in seconds."""

    def __init__(self, delay_s: float, jitter_s: float = 0.0, bytes_per_s: float = 0.0, seed: int = 0) -> None:
        self._delay_s, self._jitter_s, self._bytes_per_s = delay_s, jitter_s, bytes_per_s
        self._random = random.Random(seed)
        self._queue: deque[tuple[float, bytes]] = deque()
        self._free_at = self._last_at = 0.0

    def put(self, chunk: bytes, now: float) -> None:
        """A chunk goes in; empty is the end of the stream."""
        if self._bytes_per_s:
            self._free_at = max(now, self._free_at) + len(chunk) / self._bytes_per_s
        jitter_s = self._random.uniform(0, self._jitter_s) if self._jitter_s else 0.0
        self._last_at = max(self._last_at, max(now, self._free_at) + self._delay_s + jitter_s)
        self._queue.append((self._last_at, chunk))

    def take(self, now: float) -> list[bytes]:
        """The chunks that are out by now, in order."""
        out = []
        while self._queue and self._queue[0][0] <= now:
            out.append(self._queue.popleft()[1])
        return out

    @property
    def next_at(self) -> float | None:
        """When the next chunk comes out; None if nothing is in flight."""
        return self._queue[0][0] if self._queue else None
