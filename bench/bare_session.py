"""One session by frames and nothing else: what a text is (`Job`), what it cost (`Outcome`), and the stream between.

Must not know: drafting policies, text. Called by `baselines`. No cut is bridged and nothing is sent unasked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from edge_client.drafter import HintTree
from edge_client.transport import Connection, Traffic, Transport
from shared.codec import error_of
from shared.errors import TransportError
from shared.randomness import short_digest
from shared.sampling import SamplingParams
from shared.types import (
    DEFAULT_RUN_AHEAD,
    Close,
    Commit,
    Epoch,
    Fault,
    Finished,
    Hint,
    ModelCard,
    Open,
    Opened,
    Pace,
    PaceKind,
    Usage,
)

EPOCH = Epoch(0)
MOST_TOKENS = DEFAULT_RUN_AHEAD // 2
"""Of a text: within the credit that an Open gives, so that nobody sends acks for want of it."""


@dataclass(frozen=True)
class Job:
    """One text to be written."""

    prompt: tuple[int, ...]
    tokens: int
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What one text cost. Times in seconds, from the first frame sent."""

    ids: tuple[int, ...]
    wall_s: float
    first_s: float
    """Until the first ids came."""
    usage: Usage = field(default_factory=Usage)
    traffic: Traffic = field(default_factory=Traffic)
    measured: tuple[float, float, float] | None = None
    """Round trip, step and draft step as the device measured them."""

    @property
    def decode_s(self) -> float:
        """From the first ids to the end."""
        return self.wall_s - self.first_s


class BareSession:
    """One session by frames. What comes is read by a task of its own; `until` waits for it to make a condition true."""

    def __init__(self, connection: Connection, traffic: Traffic, job: Job, began: float) -> None:
        self.ids = list(job.prompt)
        self.opened: Opened | None = None
        self._connection, self._traffic, self._job = connection, traffic, job
        self._finished: Finished | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._began, self._first_at, self._ended_at = began, 0.0, 0.0
        self._next_node = 1
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls, transport: Transport, card: ModelCard, job: Job, pace: PaceKind, run_ahead: int = DEFAULT_RUN_AHEAD
    ) -> Self:
        """Opens and waits for Opened. Raises: DraftwireError."""
        began, traffic = time.perf_counter(), Traffic()
        session = cls(await transport.connect(traffic), traffic, job, began)
        frame = Open(
            ids=job.prompt,
            generated_from=len(job.prompt),
            fingerprint=card.fingerprint,
            sampling=job.sampling,
            max_new_tokens=job.tokens,
            seed=job.seed,
            stop_ids=card.stop_ids,
            pace=pace,
            run_ahead=run_ahead,
        )
        try:
            await session._connection.send(frame)
            await session.until(lambda: session.opened is not None)
        except BaseException:
            await session.abandon()
            raise
        return session

    @property
    def is_over(self) -> bool:
        """True once Finished came."""
        return self._finished is not None

    @property
    def room(self) -> int:
        """How many ids may still come."""
        return len(self._job.prompt) + self._job.tokens - len(self.ids)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds or the session is over. Raises: DraftwireError."""
        while not (condition() or self.is_over):
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()

    async def send_hint(self, base: int, tree: HintTree) -> None:
        """One Hint that stands at position `base`."""
        is_chain = tree.is_chain
        hint = Hint(
            epoch=EPOCH,
            first_node=self._next_node,
            ids=tree.ids,
            ack=len(self.ids),
            base_position=base,
            base_digest=short_digest(self.ids[:base]) if self._next_node == 1 else None,
            parents=() if is_chain else tuple(n - p if p >= 0 else 0 for n, p in enumerate(tree.parents)),
            confidence=() if is_chain else tree.confidence,
        )
        self._next_node += len(tree.ids)
        await self._connection.send(hint)

    async def send_pace(self, pace: PaceKind, run_ahead: int) -> None:
        """Credit up to `run_ahead` ids past what is held."""
        await self._connection.send(Pace(EPOCH, pace, run_ahead, len(self.ids)))

    async def end(self) -> Outcome:
        """Waits for Finished, closes, hears the verifier out. Raises: DraftwireError."""
        try:
            await self.until(lambda: False)
            await self._connection.send(Close(EPOCH, len(self.ids)))
            await self._reading
        finally:
            await self.abandon()
        assert self._finished is not None
        return Outcome(
            tuple(self.ids[len(self._job.prompt) :]),
            self._ended_at - self._began,
            (self._first_at or self._ended_at) - self._began,
            self._finished.usage,
            self._traffic,
        )

    async def abandon(self) -> None:
        """Ends the stream, whatever it is at."""
        self._reading.cancel()
        await asyncio.wait({self._reading})
        await self._connection.close()

    async def _read(self) -> None:
        try:
            while (frame := await self._connection.receive()) is not None:
                match frame:
                    case Opened():
                        self.opened = frame
                    case Commit():
                        self._first_at = self._first_at or time.perf_counter()
                        self.ids += frame.ids[len(self.ids) - frame.start :]
                    case Finished():
                        self._finished, self._ended_at = frame, time.perf_counter()
                    case Fault():
                        raise error_of(frame)
                self._news.set()
            if not self.is_over:
                raise TransportError("the verifier ended the stream")
        except Exception as error:  # told to whoever waits
            self._error = error
            self._news.set()
