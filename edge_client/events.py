"""What a caller sees of a generation: committed text as it comes, its state, and at the end the report.

Must not know: wire, drafting. Made by `generate`, passed on by `client`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from edge_client.counters import Counters
from edge_client.transport import Traffic
from shared.types import Usage


class FinishReason(Enum):
    """Why a text ended."""

    STOP = "stop"
    """A stop id or stop string."""
    LENGTH = "length"
    """max_new_tokens reached."""
    CONTEXT_FULL = "context_full"
    """The target's context is full."""
    CANCELLED = "cancelled"
    """The caller or the verifier ended it early."""


class State(Enum):
    """How text comes at the moment, and whether it can be relied on."""

    VERIFIED = "verified"
    """No hints: the verifier streams alone, and all text shown is committed."""
    DRAFTING = "drafting"
    """Hints go up, commits come down; a preview may run ahead of the committed text."""
    UNVERIFIED = "unverified"
    """The network is gone and the draft goes on alone: its text is a preview, to be verified and replaced where the
    target differs."""
    OFFLINE = "offline"
    """The network is gone, or the verifier has no room: nothing comes; committed text stands."""


class OfflinePolicy(Enum):
    """What to do while the verifier cannot be reached."""

    LOCAL = "local"
    """Go on with the draft alone, marked as unverified; verify it when the verifier is back."""
    WAIT = "wait"
    """Stand still until the verifier is back."""
    FAIL = "fail"
    """Raise at once."""


@dataclass(frozen=True)
class Piece:
    """The text that one committed id made final, and whether a hint had foretold the id."""

    text: str
    token: int
    is_accepted: bool


@dataclass(frozen=True)
class Committed:
    """New committed ids. `text` is whole characters only, so it may lag behind the ids."""

    text: str
    ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Preview:
    """Where the text probably goes behind what is committed. Replaces the preview before it; empty: there is none."""

    text: str
    ids: tuple[int, ...]
    is_unverified: bool
    """True while the draft writes alone, for want of a network."""


@dataclass(frozen=True)
class StateChanged:
    """Text comes in another way from now on."""

    state: State
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """What a generation cost. Times in seconds, measured on the device."""

    usage: Usage
    traffic: Traffic
    wall_s: float
    first_token_s: float
    draft_s: float
    hints: int
    reconnects: int
    engine: Counters = field(default_factory=Counters)
    round_trip_s: float | None = None
    """The link there and back, as last measured; None if it never was."""
    step_s: float | None = None
    """A step of the verifier."""
    draft_step_s: float | None = None
    """One draft step."""

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """Share of commits whose first, second, ... id was hinted rightly, of those that had a hint there."""
        pairs = zip(self.engine.right_by_depth, self.engine.judged_by_depth, strict=True)
        return tuple(right / judged if judged else 0.0 for right, judged in pairs)

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens over the whole time, prefill included."""
        return self.usage.generated_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Committed tokens after the first, over the time after it: prefill not included."""
        rest = self.wall_s - self.first_token_s
        return (self.usage.generated_tokens - 1) / rest if rest > 0 else 0.0

    @property
    def forwards_per_token(self) -> float:
        """Steps of the target per committed token."""
        return self.usage.steps / self.usage.generated_tokens if self.usage.generated_tokens else 0.0

    @property
    def dry_steps_per_token(self) -> float:
        """Steps that found no usable hint, per committed token."""
        return self.usage.dry_steps / self.usage.generated_tokens if self.usage.generated_tokens else 0.0

    @property
    def up_bytes_per_token(self) -> float:
        """Protobuf bytes of hints per committed token."""
        return self.traffic.hint_bytes / self.usage.generated_tokens if self.usage.generated_tokens else 0.0


@dataclass(frozen=True)
class Done:
    """The end of a generation; no event follows."""

    reason: FinishReason
    report: Report
    stop: str | None = None
    """The stop string that ended it, if one did."""


Event = Committed | Preview | StateChanged | Done


@dataclass(frozen=True)
class Result:
    """A whole generation at once."""

    text: str
    ids: tuple[int, ...]
    reason: FinishReason
    report: Report
    seed: int
    pieces: tuple[Piece, ...] = ()
    logprobs: tuple[float, ...] = ()
    stop: str | None = None
