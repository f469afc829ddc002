"""How a generation looks in a terminal: colours for who wrote what, ghost text ahead, one line of figures, JSON fields.

Must not know: drafting, wire. Called by `cli` and the demo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO
from unicodedata import category, east_asian_width

from edge_client.events import Committed, FinishReason, Preview, Report, State, StateChanged

GREEN, YELLOW, DIM, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
DIM_ITALIC = "\x1b[2;3m"
SAVE_CURSOR, RESTORE_CURSOR = "\x1b7", "\x1b8"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
ERASE_LINE, ERASE_BELOW = "\x1b[K", "\x1b[J"
TAB_COLUMNS = 8
DEPTHS_SHOWN = 4
USUAL_SIZE = os.terminal_size((80, 24))


def has_colour(stream: TextIO) -> bool:
    """True on a terminal, unless NO_COLOR is set or the terminal is dumb."""
    return has_cursor(stream) and "NO_COLOR" not in os.environ


def has_cursor(stream: TextIO) -> bool:
    """True on a terminal where text can be taken back."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class TextPrinter:
    """Prints committed text as it comes: accepted ids green, the target's own ids yellow. On a terminal it can show
    what is not committed behind it: that is erased before anything else is printed, and is never in a file or a pipe.
    """

    def __init__(
        self, stream: TextIO, *, has_ghost: bool = False, size: Callable[[], os.terminal_size] | None = None
    ) -> None:
        """`has_ghost`: the draft's preview is shown. Unverified text is shown whenever it is told. `size`: of the
        terminal.
        """
        self.is_terminal = has_cursor(stream)
        self._stream, self._has_ghost = stream, has_ghost
        self._colour = has_colour(stream)
        self._size = size or (lambda: _size_of(stream))
        self._column = 0
        """Where the committed text ends; kept on a terminal only."""
        self._erase = self._ghost = ""
        """What erases the text that is shown behind it; and that text, if it is one line."""
        self._is_away = False

    def show(self, event: Committed) -> None:
        """Prints what one commit made final."""
        self.clear()
        if self._colour:
            for piece in event.pieces:
                colour = GREEN if piece.is_accepted else YELLOW
                self._stream.write(f"{colour}{piece.text}{PLAIN}" if piece.text else "")
        else:
            self._stream.write(event.text)
        if self.is_terminal:
            self._column = _column_after(event.text, self._column, self._size().columns)
        self._stream.flush()

    def preview(self, event: Preview) -> None:
        """Shows where the text probably goes, in place of what was shown before: dim, up to the end of the line. What
        the draft writes alone is dim and italic, as much of it as the terminal holds.
        """
        if not self.is_terminal:
            return
        if event.is_unverified:
            self.clear()
            self._show_block(event.text)
        elif self._has_ghost:
            self._show_ghost(event.text)
        self._stream.flush()

    def clear(self) -> None:
        """Erases what is shown behind the committed text."""
        self._stream.write(self._erase)
        self._erase = self._ghost = ""

    def _show_ghost(self, text: str) -> None:
        """The cursor stays where it is; the last column stays free, for a cursor behind it stands in no certain place.
        The terminal is told not to wrap: widths of characters are not the same in all of them.
        """
        room = self._size().columns - 1 - self._column
        line = _fitting(_harmless(text).split("\n")[0], room)
        if line == self._ghost:
            return
        self.clear()
        if line:
            self._stream.write(f"{SAVE_CURSOR}{NO_WRAP}{DIM}{line}{PLAIN}{WRAP}{RESTORE_CURSOR}")
            self._erase, self._ghost = ERASE_LINE, line

    def _show_block(self, text: str) -> None:
        """From the beginning of a line, the last rows of it; the cursor goes back by rows, since it may scroll."""
        columns, rows = self._size()
        lines = _rows(_harmless(text), max(1, columns - 1))
        most = max(1, rows - 2)
        lines = lines if len(lines) <= most else ["…", *lines[len(lines) - most + 1 :]]
        if any(lines):
            self._break_line()
            block, up = "\n".join(lines), f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
            self._stream.write(f"{DIM_ITALIC}{block}{PLAIN}\r{up}")
            self._erase = ERASE_BELOW

    # ------------------------------------------------------------ beside the text

    def state(self, event: StateChanged) -> None:
        """Tells of changes that a user should know of: the verifier is away, or back. Drafting as such is none."""
        was_away, self._is_away = self._is_away, event.state in (State.OFFLINE, State.UNVERIFIED)
        if event.state is State.UNVERIFIED:
            how = "what follows in italics is" if self.is_terminal else "not printed:"
            self.note(f"[unverified: {event.detail}; {how} the draft's own text, to be verified]")
        elif self._is_away:
            self.note(f"[{event.state.value}: {event.detail}]")
        elif was_away:
            self.note("[back at the verifier]")

    def note(self, words: str) -> None:
        """A line on standard error; where that is the terminal of the text, it gets a line of its own."""
        self.clear()
        if sys.stderr.isatty():
            self._break_line()
        self._stream.flush()
        print(f"{DIM}{words}{PLAIN}" if has_colour(sys.stderr) else words, file=sys.stderr, flush=True)

    def _break_line(self) -> None:
        if self.is_terminal and self._column:
            self._stream.write("\n")
            self._column = 0

    def end(self) -> None:
        """Ends the text's line."""
        self.clear()
        self._stream.write("\n")
        self._column = 0
        self._stream.flush()

    def leave(self) -> None:
        """Whatever comes next stands on a line of its own, if this is a terminal: the text was not finished."""
        self.clear()
        self._break_line()
        self._stream.flush()


# ---------------------------------------------------------------- columns


def _size_of(stream: TextIO) -> os.terminal_size:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # ValueError: a stream that is closed, or no file
        return USUAL_SIZE
    return size if size.columns and size.lines else USUAL_SIZE


def _width(character: str) -> int:
    if category(character)[0] in "CM":  # controls, joiners, marks upon the letter before
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def _column_after(text: str, column: int, columns: int) -> int:
    """Where a cursor stands after a text; `columns` when the line is just full."""
    for character in text:
        if character in "\r\n":
            column = 0
        elif character == "\t":
            column = min(columns - 1, column - column % TAB_COLUMNS + TAB_COLUMNS)
        else:
            width = _width(character)
            column = width if column + width > columns else column + width
    return column


def _harmless(text: str) -> str:
    """Text that moves no cursor but by its width and its ends of lines."""
    plain = text.replace("\r\n", "\n").replace("\t", "    ")
    plain = "".join("\n" if character in "\r\v\f\x85\u2028\u2029" else character for character in plain)
    return "".join(character for character in plain if character == "\n" or category(character)[0] != "C")


def _fitting(line: str, room: int) -> str:
    """As much of a line as fits."""
    for index, character in enumerate(line):
        room -= _width(character)
        if room < 0:
            return line[:index]
    return line


def _rows(text: str, columns: int) -> list[str]:
    """The lines of a text, each cut where the terminal would."""
    rows: list[str] = []
    for line in text.split("\n"):
        rest = line
        while len(row := _fitting(rest, columns)) < len(rest) and row:
            rows.append(row)
            rest = rest[len(row) :]
        rows.append(row)
    return rows


# ---------------------------------------------------------------- figures


def report_line(report: Report, seed: int | None = None, trace: Path | None = None) -> str:
    """The figures of one generation in a line, the seed that would write a sampled text again, and where its trace is.

    What was not measured is left out.
    """
    usage, engine, traffic = report.usage, report.engine, report.traffic
    accepted = f"{usage.accepted_tokens} accepted"
    if engine.judged_by_depth:
        shares = " ".join(f"{share:.2f}" for share in report.acceptance_by_depth[:DEPTHS_SHOWN])
        accepted += f" (by depth {shares})"
    parts = [
        f"{usage.generated_tokens} tokens, {accepted}, {report.forwards_per_token:.2f} forwards/token, "
        f"{report.dry_steps_per_token:.2f} dry, {report.tokens_per_s:.1f} tokens/s"
    ]
    if engine.draft_steps:
        each = "" if report.draft_step_s is None else f" of {_ms(report.draft_step_s)}"
        parts.append(f"{_many(engine.draft_steps, 'draft step')}{each}, {engine.late_drafts} late")
    if engine.rests:
        parts.append(_many(engine.rests, "rest"))
    if report.round_trip_s is not None:
        step = "" if report.step_s is None else f", step {_ms(report.step_s)}"
        parts.append(f"link {_ms(report.round_trip_s)}{step}")
    bytes_up = f"{traffic.up_bytes} bytes up ({report.up_bytes_per_token:.1f} hint bytes/token)"
    parts.append(f"{bytes_up}, {traffic.down_bytes} down")
    if report.reconnects:
        parts.append(_many(report.reconnects, "reconnect"))
    if seed is not None:
        parts.append(f"seed {seed}")
    if trace is not None:
        parts.append(f"trace in {trace}")
    return f"[{'; '.join(parts)}]"


def report_fields(report: Report, reason: FinishReason) -> dict[str, Any]:
    """The figures of one generation for scripts; null is what was not measured."""
    usage, traffic, engine = report.usage, report.traffic, report.engine
    return {
        "finish_reason": reason.value,
        "context_tokens": usage.context_tokens,
        "tokens": usage.generated_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "steps": usage.steps,
        "dry_steps": usage.dry_steps,
        "forwards_per_token": round(report.forwards_per_token, 4),
        "dry_steps_per_token": round(report.dry_steps_per_token, 4),
        "judged_by_depth": list(engine.judged_by_depth),
        "right_by_depth": list(engine.right_by_depth),
        "acceptance_by_depth": [round(share, 4) for share in report.acceptance_by_depth],
        "hints": report.hints,
        "hint_nodes": engine.hint_nodes,
        "hint_bytes": traffic.hint_bytes,
        "hint_bytes_per_token": round(report.up_bytes_per_token, 2),
        "up_bytes": traffic.up_bytes,
        "down_bytes": traffic.down_bytes,
        "up_frames": traffic.up_frames,
        "down_frames": traffic.down_frames,
        "draft_steps": engine.draft_steps,
        "late_drafts": engine.late_drafts,
        "rebases": engine.rebases,
        "rests": engine.rests,
        "draft_s": round(report.draft_s, 4),
        "draft_step_ms": _rounded_ms(report.draft_step_s),
        "round_trip_ms": _rounded_ms(report.round_trip_s),
        "step_ms": _rounded_ms(report.step_s),
        "wall_s": round(report.wall_s, 4),
        "first_token_s": round(report.first_token_s, 4),
        "tokens_per_s": round(report.tokens_per_s, 2),
        "decode_tokens_per_s": round(report.decode_tokens_per_s, 2),
        "reconnects": report.reconnects,
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _rounded_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
