"""The frames of the wire as plain values, in the words of the glossary (docs/glossary.md).

Must not know: protobuf, grpc, models. Made and checked by `codec`; spoken by engine, service, transport and client.
A frame is what one side says once; ids are tuples of ints; positions count the whole sequence from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from shared.rejection import QRow
from shared.sampling import SamplingParams

SessionId = NewType("SessionId", bytes)
Epoch = NewType("Epoch", int)

PROTOCOL_VERSION = 1
DEFAULT_RUN_AHEAD = 256
SHARE_KEY_METADATA = "draftwire-share-bin"
"""Metadata of a Session call: 16 to 64 secret bytes, the same for all streams of a connection; see docs/wire.md."""


class Rule(Enum):
    """How an id is chosen; fixed for a session. Greedy is either rule at temperature 0."""

    AGREEMENT = "agreement"
    REJECTION = "rejection"


class PaceKind(Enum):
    """When the verifier may run a forward for a session."""

    AUTO = "auto"
    WAIT = "wait"
    RUN_ON = "run_on"


class Reason(Enum):
    """Why an epoch ended."""

    STOP_ID = "stop_id"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Limits:
    """What the verifier allows one session; told in Describe and Opened."""

    max_context_tokens: int = 8192
    max_new_tokens: int = 8192
    max_frame_nodes: int = 256
    max_held_nodes: int = 1024
    max_step_nodes: int = 64
    remembered_nodes: int = 4096
    max_row_ids: int = 64
    max_frame_bytes: int = 4 * 2**20
    max_wait_ms: int = 500
    lease_ms: int = 60_000


@dataclass(frozen=True)
class Open:
    """Opens a session; with ids already generated it is `continued`."""

    ids: tuple[int, ...]
    generated_from: int
    fingerprint: bytes
    sampling: SamplingParams
    max_new_tokens: int
    epoch: Epoch = Epoch(0)
    seed: int | None = None
    rule: Rule = Rule.AGREEMENT
    stop_ids: tuple[int, ...] = ()
    pace: PaceKind = PaceKind.AUTO
    run_ahead: int = DEFAULT_RUN_AHEAD
    target_id: bytes = b""
    logprobs: bool = False
    lowest_version: int = PROTOCOL_VERSION
    highest_version: int = PROTOCOL_VERSION

    @property
    def is_continued(self) -> bool:
        """True if some ids were generated before, elsewhere."""
        return self.generated_from < len(self.ids)

    @property
    def is_chain(self) -> bool:
        """True if hints are judged by the rejection rule: chains with their rows only."""
        return self.rule is Rule.REJECTION and not self.sampling.is_greedy


@dataclass(frozen=True)
class Resume:
    """Takes up a session after its stream was cut."""

    session_id: SessionId
    epoch: Epoch
    have: int
    digest: bytes


@dataclass(frozen=True)
class Opened:
    """Answers Open and Resume."""

    session_id: SessionId
    seed: int
    epoch: Epoch
    generated_from: int
    committed_length: int
    next_node: int
    target_id: bytes
    limits: Limits
    reused_tokens: int = 0
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Hint:
    """Ids proposed by the device: a chain, or a tree by parents.

    The base is node `base_node`, or (`base_node` 0) the committed position `base_position`.
    `parents` are backward deltas (0 = base), empty for a chain; `confidence` a probability per node given its parent,
    empty if not told; `rows` one quantised draft row per node under the rejection rule, else empty.
    """

    epoch: Epoch
    first_node: int
    ids: tuple[int, ...]
    ack: int
    base_node: int = 0
    base_position: int = 0
    base_digest: int | None = None
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    rows: tuple[QRow, ...] = ()


@dataclass(frozen=True)
class Commit:
    """Ids decided by the verifier from position `start`; the first `accepted` of them were foretold by hints."""

    epoch: Epoch
    start: int
    ids: tuple[int, ...]
    accepted: int
    seen_node: int = 0
    last_accepted_node: int = 0
    dropped_late: int = 0
    dropped_disagreeing: int = 0
    dropped_over_budget: int = 0
    queue_us: int = 0
    step_us: int = 0
    batch_size: int = 1
    logprobs: tuple[float, ...] = ()
    hint_wait_us: int | None = None
    """From when the verifier received the frame of node `seen_node` until the step was planned; None if no new node was
    seen by this plan, and in replayed commits. With it a device can tell the link's round trip: commit received, less
    that frame sent, less `hint_wait_us`, less `step_us`."""

    @property
    def end(self) -> int:
        """Committed length after this commit."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Edit:
    """Opens the next epoch on a kept part of the sequence."""

    epoch: Epoch
    keep: int
    append_ids: tuple[int, ...]
    seed: int | None = None
    sampling: SamplingParams | None = None


@dataclass(frozen=True)
class Score:
    """A tree of candidate continuations to be scored by the target."""

    request: int
    epoch: Epoch
    base_position: int
    ids: tuple[int, ...]
    parents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scores:
    """The target's log-probability of each node of a Score."""

    request: int
    epoch: Epoch
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Pace:
    """Changes pace and credit."""

    epoch: Epoch
    pace: PaceKind
    run_ahead: int
    ack: int


@dataclass(frozen=True)
class Close:
    """The end of a session, at the position the caller has delivered."""

    epoch: Epoch
    position: int


@dataclass(frozen=True)
class Usage:
    """What an epoch cost."""

    context_tokens: int = 0
    generated_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    dry_steps: int = 0
    hint_nodes: int = 0


@dataclass(frozen=True)
class Finished:
    """The epoch is closed; the session stays for an Edit."""

    epoch: Epoch
    reason: Reason
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class Fault:
    """A frame was refused, or the session failed; `answers` names the frame, "" the session as a whole."""

    answers: str
    error: str
    message: str
    field: str = ""
    retry: bool = False
    retry_after_ms: int = 0


@dataclass(frozen=True)
class Draining:
    """The verifier goes away soon: reopen elsewhere."""

    within_ms: int = 0


UpFrame = Open | Resume | Hint | Edit | Score | Pace | Close
DownFrame = Opened | Commit | Scores | Finished | Fault | Draining


@dataclass(frozen=True)
class ModelCard:
    """What a verifier serves; answers Describe."""

    model_name: str
    target_id: bytes
    fingerprint: bytes
    fingerprint_blocks: tuple[bytes, ...]
    vocabulary_size: int
    context_size: int
    limits: Limits
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    generation_defaults: SamplingParams = field(default_factory=SamplingParams)
    rules: tuple[Rule, ...] = (Rule.AGREEMENT, Rule.REJECTION)
    lowest_version: int = PROTOCOL_VERSION
    highest_version: int = PROTOCOL_VERSION
