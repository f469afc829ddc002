"""What a caller sees of a generation: committed text as it comes, its state, and at the end the report.

Must not know: wire, drafting. Made by `generate`, passed on by `client`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    """How text comes at the moment."""

    DRAFTING = "drafting"
    """Hints go up, commits come down."""
    STREAMING = "streaming"
    """No hints: the verifier streams alone."""
    RECONNECTING = "reconnecting"
    """The stream was cut; committed text stands."""


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


Event = Committed | StateChanged | Done


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
