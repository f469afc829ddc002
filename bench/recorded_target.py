"""A verifier's target under a virtual clock: its ids are recorded, and a forward only takes time.

Must not know: devices, links. Used by `virtual`; scheduler, sessions and step around it are the product's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.traces import Trace
from cloud_verifier.judge import Judge, Tested, Verdict
from cloud_verifier.scheduler import PlannedRow
from cloud_verifier.slot import Slot
from cloud_verifier.target_model import KvUse, RowInput, Timing
from shared.errors import DraftwireError
from shared.hint_trie import Node
from shared.types import DownFrame

UNLIMITED = 1e12


@dataclass(frozen=True)
class Times:
    """How long things take, in seconds."""

    step_s: float
    round_trip_s: float
    draft_s: float
    node_cost: float = 0.003
    """What a hint node adds to a step, as a share of it."""
    costs: Callable[[int], float] | None = None
    """Seconds of a step over so many tokens; overrides `step_s` and `node_cost`."""
    refeed: float = 1 / 3
    """What each further id in one draft step costs, as a share of a draft step."""
    jitter: float = 0.0
    """Standard deviation of link and step times, as a share of them."""
    loss: float = 0.0
    """Share of messages that are lost and come a round trip later, all behind them waiting."""
    up_bytes_per_s: float = UNLIMITED
    commit_s: float = 0.0
    """The verifier's own time between two steps."""

    def step(self, tokens: int) -> float:
        """One session's step over so many tokens."""
        return self.costs(tokens) if self.costs else self.step_s * (1 + self.node_cost * (tokens - 1))


class SimSlot:
    """A Slot that only counts."""

    pages: tuple[int, ...] = ()

    def __init__(self, length: int = 0) -> None:
        self.length = length

    def try_reserve(self, count: int) -> bool:
        """See Slot."""
        return True

    def keep(self, offsets: Sequence[int], is_checked: bool = True) -> None:
        """See Slot."""
        self.length += len(offsets)

    def roll_back(self, length: int) -> None:
        """See Slot."""
        self.length = min(self.length, length)

    def seal(self, ids: Sequence[int]) -> None:
        """See Slot."""

    def adopt(self, ids: Sequence[int]) -> int:
        """See Slot."""
        return self.length

    def scrub(self, from_row: int) -> None:
        """See Slot."""

    def clear(self) -> int:
        """See Slot."""
        return 0


class RecordedTarget:
    """A TargetModel that takes time and gives nothing; `RecordedJudge` knows the ids."""

    context_size = 1 << 20

    def __init__(self, times: Times, clock: VerifierClock, noise: random.Random) -> None:
        self._times, self._clock, self._noise = times, clock, noise
        self._forward_s = 0.0

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        seconds = self._times.step(sum(len(row.ids) for row in rows))
        self._forward_s = seconds * scatter(self._noise, self._times.jitter)
        self._clock.now += self._forward_s
        return torch.zeros(0)

    def settle(self) -> None:
        """See TargetModel."""

    def timing(self) -> Timing:
        """See TargetModel."""
        return Timing(stage_s=0.0, forward_s=self._forward_s, gather_s=0.0)

    def recover(self) -> None:
        """See TargetModel."""

    def new_slot(self, principal: str) -> SimSlot:
        """See TargetModel."""
        return SimSlot()

    def release(self, slot: Slot) -> None:
        """See TargetModel."""

    def kv_use(self) -> KvUse:
        """See TargetModel."""
        return KvUse()

    def kv_room(self, slots: Sequence[Slot]) -> int:
        """See TargetModel."""
        return 1 << 20


class RecordedJudge(Judge):
    """Judges by what the target wrote."""

    def __init__(self, trace: Trace) -> None:
        self._text = [*trace.prompt, *trace.ids]

    def judge(self, rows: Sequence[PlannedRow], scores: torch.Tensor) -> list[Verdict | DraftwireError | None]:
        """See Judge."""
        return [self._verdict(row) for row in rows]

    def _verdict(self, row: PlannedRow) -> Verdict:
        verdict, at = Verdict(), row.session.length
        planned = {id(node) for node in row.nodes}
        children: list[Node] = list(row.session.trie.children.values())
        while at < len(self._text):
            token = self._text[at]
            here = [node for node in children if id(node) in planned]
            depth = at - row.session.length + 1
            for rank, node in enumerate(here):
                verdict.tested.append(Tested(depth, rank, node.probability, node.token == token))
            verdict.tokens.append(token)
            found = next((node for node in here if node.token == token), None)
            at += 1
            if found is None:
                break
            verdict.accepted.append(found)
            children = list(found.children.values())
        verdict.logprobs = [0.0] * len(verdict.tokens)
        return verdict


@dataclass
class VerifierClock:
    """The verifier's time; a forward moves it on."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Frames:
    """A Sink that keeps frames with the time at which they left."""

    def __init__(self, clock: VerifierClock) -> None:
        self._clock = clock
        self.sent: list[tuple[float, DownFrame]] = []

    def send(self, frame: DownFrame) -> None:
        """See Sink."""
        self.sent.append((self._clock.now, frame))

    def end(self, error: Exception | None) -> None:
        """See Sink."""


def scatter(noise: random.Random, jitter: float) -> float:
    return max(0.2, noise.gauss(1.0, jitter)) if jitter > 0 else 1.0
