"""How a generation looks in a terminal: colours for who wrote what, one line of figures, JSON fields.

Must not know: drafting, wire. Called by `cli` and the demo.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from edge_client.events import Committed, FinishReason, Report, State, StateChanged

GREEN, YELLOW, DIM, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


def has_colour(stream: TextIO) -> bool:
    """True on a terminal, unless NO_COLOR is set or the terminal is dumb."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class TextPrinter:
    """Prints committed text as it comes: accepted ids green, the target's own ids yellow."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._colour = has_colour(stream)

    def show(self, event: Committed) -> None:
        """Prints what one commit made final."""
        if self._colour:
            for piece in event.pieces:
                colour = GREEN if piece.is_accepted else YELLOW
                self._stream.write(f"{colour}{piece.text}{PLAIN}" if piece.text else "")
        else:
            self._stream.write(event.text)
        self._stream.flush()

    def state(self, event: StateChanged) -> None:
        """Prints a change that a user should know of; drafting as such is not one."""
        if event.state in (State.OFFLINE, State.UNVERIFIED) or event.detail:
            note = f"[{event.state.value}: {event.detail}]"
            print(f"{DIM}{note}{PLAIN}" if has_colour(sys.stderr) else note, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ends the text's line."""
        self._stream.write("\n")
        self._stream.flush()


def report_line(report: Report, seed: int | None = None) -> str:
    """The figures of one generation in a line, and the seed that would write a sampled text again."""
    usage = report.usage
    seeded = "" if seed is None else f", seed {seed}"
    return (
        f"[{usage.generated_tokens} tokens, {usage.accepted_tokens} accepted, "
        f"{report.forwards_per_token:.2f} forwards/token, {report.up_bytes_per_token:.1f} hint bytes/token, "
        f"{report.tokens_per_s:.1f} tokens/s{seeded}]"
    )


def report_fields(report: Report, reason: FinishReason) -> dict[str, Any]:
    """The figures of one generation for scripts."""
    usage, traffic = report.usage, report.traffic
    return {
        "finish_reason": reason.value,
        "context_tokens": usage.context_tokens,
        "tokens": usage.generated_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "steps": usage.steps,
        "dry_steps": usage.dry_steps,
        "forwards_per_token": round(report.forwards_per_token, 4),
        "hint_bytes": traffic.hint_bytes,
        "up_bytes": traffic.up_bytes,
        "down_bytes": traffic.down_bytes,
        "wall_s": round(report.wall_s, 4),
        "first_token_s": round(report.first_token_s, 4),
        "tokens_per_s": round(report.tokens_per_s, 2),
        "reconnects": report.reconnects,
    }
