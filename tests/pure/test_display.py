"""What stands on a terminal, in a pipe, and in the line of figures: a small terminal of our own reads it back."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.counters import Counters
from edge_client.display import TextPrinter, report_fields, report_line
from edge_client.events import Committed, FinishReason, Piece, Preview, Report, State, StateChanged
from edge_client.transport import Traffic
from shared.types import Usage

COLUMNS, ROWS = 20, 6
TOKEN = re.compile(r"\x1b(7|8|\[[?0-9;]*[A-Za-z])|[^\x1b]", re.DOTALL)


class Terminal(io.StringIO):
    """Knows what the printer may send, and nothing else; characters are one column wide, wide ones two."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0
        self.saved = (0, 0)
        self.wraps = True
        self.style = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for match in TOKEN.finditer(text):
            self._take(match.group(0))
        return len(text)

    def _take(self, token: str) -> None:
        line = self.lines[self.row]
        if token == "\x1b7":
            self.saved = (self.row, self.column)
        elif token == "\x1b8":
            self.row, self.column = self.saved
        elif token in ("\x1b[?7l", "\x1b[?7h"):
            self.wraps = token.endswith("h")
        elif token.startswith("\x1b[") and token.endswith("m"):
            self.style = token[2:-1].strip("0")
        elif token == "\x1b[K":
            assert self.column < COLUMNS, "a terminal may erase the last character here"
            del line[self.column :]
        elif token == "\x1b[J":
            del line[self.column :]
            del self.lines[self.row + 1 :]
        elif token.startswith("\x1b[") and token.endswith("A"):
            self.row -= int(token[2:-1])
            assert self.row >= max(0, len(self.lines) - ROWS), "beyond the top of the screen"
        elif token == "\r":
            self.column = 0
        elif token == "\n":
            self._down()
        else:
            assert not token.startswith("\x1b"), f"what is {token!r}?"
            self._put(token)

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append([])

    def _put(self, character: str) -> None:
        width = 2 if character >= "\u1100" and character not in "…" else 1
        assert self.wraps or self.column + width < COLUMNS, "a cursor behind the last column stands in no certain place"
        if self.column + width > COLUMNS:
            assert self.wraps, "the printer relies on the terminal to cut"
            self._down()
        line = self.lines[self.row]
        line += [" "] * (self.column - len(line))
        styled = f"<{self.style}>{character}" if self.style in ("2", "2;3") else character
        line[self.column : self.column + width] = [styled, *[""] * (width - 1)]
        self.column += width

    def shown(self) -> str:
        """All lines; what is dim as <d>..</d>, dim italic as <i>..</i>."""
        text = "\n".join("".join(line) for line in self.lines)
        for code, name in (("2;3", "i"), ("2", "d")):
            text = re.sub(f"(?:<{code}>.)+", lambda m, n=name, c=code: f"<{n}>{m[0].replace(f'<{c}>', '')}</{n}>", text)
        return text


@pytest.fixture(autouse=True)
def usual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def printer(stream: io.StringIO, has_ghost: bool = True) -> TextPrinter:
    return TextPrinter(stream, has_ghost=has_ghost, size=lambda: os.terminal_size((COLUMNS, ROWS)))


def committed(text: str) -> Committed:
    return Committed(text, (1,), (Piece(text, 1, True),))


def preview(text: str, is_unverified: bool = False) -> Preview:
    return Preview(text, (1,), is_unverified)


# ---------------------------------------------------------------- the ghost


def test_a_preview_stands_dimly_behind_the_text_and_is_gone_before_text_is_printed() -> None:
    terminal = Terminal()
    shown = printer(terminal)
    shown.show(committed("The sky"))
    shown.preview(preview(" is blue"))
    assert terminal.shown() == "The sky<d> is blue</d>"
    shown.preview(preview(" was"))
    assert terminal.shown() == "The sky<d> was</d>"
    shown.show(committed(" is"))
    assert terminal.shown() == "The sky is"
    shown.preview(preview(" up"))
    shown.end()
    assert terminal.shown() == "The sky is\n"


@pytest.mark.parametrize(
    "before", ["", "a", "0123456789", "x" * 18, "x" * 19, "x" * 20, "x" * 21, "你好" * 4, "ab\ncd"]
)
@pytest.mark.parametrize(
    "ghost", ["g" * 40, "你好" * 20, "one\ntwo", "\ntwo", "é" * 40, "t\tab" * 9, "a\x1b[2Jb\x07\x9bc"]
)
def test_a_preview_never_leaves_its_line_nor_moves_the_text(before: str, ghost: str) -> None:
    terminal, plain = Terminal(), Terminal()
    shown, alone = printer(terminal), printer(plain)
    for text in (before, "more text that fills the line", "\n你好"):
        shown.show(committed(text))
        alone.show(committed(text))
        shown.preview(preview(ghost))
        assert len(terminal.lines) == len(plain.lines)
        assert (terminal.row, terminal.column) == (plain.row, plain.column)
        shown.clear()
        assert terminal.shown() == plain.shown()


@pytest.mark.parametrize(
    ("text", "last"), [("x" * 18 + "你好", "好"), ("x" * 19 + "你好", "你好"), ("x" * 47, "x" * 7)]
)
def test_text_that_the_terminal_has_wrapped_has_its_ghost_on_the_last_line(text: str, last: str) -> None:
    terminal = Terminal()
    shown = printer(terminal)
    shown.show(committed(text))
    shown.preview(preview("ghost"))
    assert terminal.shown().split("\n")[-1] == f"{last}<d>ghost</d>"


def test_an_empty_preview_takes_the_ghost_away() -> None:
    terminal = Terminal()
    shown = printer(terminal)
    shown.preview(preview("maybe"))
    shown.preview(preview(""))
    assert terminal.shown() == ""


@pytest.mark.parametrize("is_unverified", [False, True])
def test_a_pipe_never_gets_a_preview(is_unverified: bool, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = io.StringIO()
    shown = printer(pipe)
    shown.show(committed("a"))
    shown.preview(preview("ghost", is_unverified))
    shown.state(StateChanged(State.UNVERIFIED, "cut"))
    shown.preview(preview("ghost", True))
    shown.show(committed("b"))
    shown.leave()
    shown.end()
    assert pipe.getvalue() == "ab\n"
    assert "unverified: cut; not printed" in capsys.readouterr().err


def test_a_terminal_that_takes_nothing_back_gets_no_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    shown = printer(terminal)
    shown.preview(preview("ghost"))
    assert terminal.shown() == ""


def test_without_the_ghost_only_unverified_text_is_shown() -> None:
    terminal = Terminal()
    shown = printer(terminal, has_ghost=False)
    shown.preview(preview("ghost"))
    assert terminal.shown() == ""
    shown.preview(preview("alone", is_unverified=True))
    assert terminal.shown() == "<i>alone</i>"


# ---------------------------------------------------------------- unverified text


def test_unverified_text_is_in_italics_on_lines_of_its_own_and_gone_when_the_verifier_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, notes = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", notes)
    shown = printer(terminal)
    shown.show(committed("Sure:"))
    shown.state(StateChanged(State.UNVERIFIED, "no answer"))
    shown.preview(preview("one line that is longer\nand one more", is_unverified=True))
    assert terminal.shown() == "Sure:\n<i>one line that is lo</i>\n<i>nger</i>\n<i>and one more</i>"
    shown.preview(preview("one", is_unverified=True))
    assert terminal.shown() == "Sure:\n<i>one</i>"
    shown.state(StateChanged(State.DRAFTING, "begins"))
    shown.show(committed(" yes"))
    assert terminal.shown() == "Sure:\n yes"
    told = notes.getvalue().splitlines()
    assert told == [
        "[unverified: no answer; what follows in italics is the draft's own text, to be verified]",
        "[back at the verifier]",
    ]


def test_more_unverified_text_than_the_screen_holds_shows_its_end() -> None:
    terminal = Terminal()
    shown = printer(terminal)
    for count in range(1, 40):
        shown.preview(preview("\n".join(f"line {number}" for number in range(count)), is_unverified=True))
    lines = terminal.shown().split("\n")
    assert len(lines) <= ROWS - 2
    assert lines[0] == "<i>…</i>"
    assert lines[-1] == "<i>line 38</i>"
    shown.clear()
    assert terminal.shown() == ""


def test_changes_between_drafting_and_streaming_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printer(io.StringIO())
    for state in (State.DRAFTING, State.VERIFIED, State.DRAFTING):
        shown.state(StateChanged(state, "expected gain 0.98"))
    assert capsys.readouterr().err == ""
    shown.state(StateChanged(State.OFFLINE, "no room"))
    assert capsys.readouterr().err == "[offline: no room]\n"


def test_a_note_on_the_same_terminal_gets_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    shown = printer(terminal)
    shown.show(committed("text"))
    shown.preview(preview(" ghost"))
    shown.note("[note]")
    shown.show(committed(" goes on"))
    assert terminal.shown() == "text\n[note]\n goes on"


def test_an_unfinished_text_leaves_a_fresh_line_on_a_terminal() -> None:
    terminal = Terminal()
    shown = printer(terminal)
    shown.show(committed("half"))
    shown.preview(preview(" ghost"))
    shown.leave()
    shown.leave()
    assert terminal.shown() == "half\n"


# ---------------------------------------------------------------- figures

REPORT = Report(
    usage=Usage(context_tokens=9, generated_tokens=20, accepted_tokens=14, steps=6, dry_steps=2),
    traffic=Traffic(up_bytes=400, down_bytes=300, hint_bytes=200, up_frames=9, down_frames=8),
    wall_s=2.0,
    first_token_s=0.1,
    draft_s=0.5,
    hints=7,
    reconnects=1,
    engine=Counters(
        draft_steps=30, late_drafts=3, hints=7, hint_nodes=41, rebases=1, rests=2,
        judged_by_depth=(8, 4, 2, 1, 1), right_by_depth=(6, 3, 1, 1, 0),
    ),
    round_trip_s=0.0204,
    step_s=0.1,
    draft_step_s=0.008,
)  # fmt: skip


def test_the_line_of_figures_is_one_line_with_all_that_was_measured() -> None:
    line = report_line(REPORT, seed=7, trace=Path("t.json"))
    assert line == (
        "[20 tokens, 14 accepted (by depth 0.75 0.75 0.50 1.00), 0.30 forwards/token, 0.10 dry, 10.0 tokens/s; "
        "30 draft steps of 8.0 ms, 3 late; 2 rests; link 20.4 ms, step 100.0 ms; "
        "400 bytes up (10.0 hint bytes/token), 300 down; 1 reconnect; seed 7; trace in t.json]"
    )


def test_what_was_not_measured_is_left_out_of_the_line_and_null_in_json() -> None:
    bare = replace(REPORT, engine=Counters(), round_trip_s=None, step_s=None, draft_step_s=None, reconnects=0)
    line = report_line(bare)
    for word in ("depth", "draft", "link", "rest", "reconnect", "seed", "trace"):
        assert word not in line
    fields = report_fields(bare, FinishReason.STOP)
    assert (fields["round_trip_ms"], fields["draft_step_ms"], fields["acceptance_by_depth"]) == (None, None, [])


def test_the_json_fields_hold_every_count_of_the_report() -> None:
    fields = json.loads(json.dumps(report_fields(REPORT, FinishReason.LENGTH)))
    for name in ("draft_steps", "late_drafts", "hints", "hint_nodes", "rebases", "rests"):
        assert fields[name] == getattr(REPORT.engine, name)
    assert fields["judged_by_depth"] == [8, 4, 2, 1, 1]
    assert fields["right_by_depth"] == [6, 3, 1, 1, 0]
    assert fields["acceptance_by_depth"] == [0.75, 0.75, 0.5, 1.0, 0.0]
    assert (fields["round_trip_ms"], fields["step_ms"], fields["draft_step_ms"]) == (20.4, 100.0, 8.0)
    assert (fields["up_bytes"], fields["down_bytes"], fields["hint_bytes"]) == (400, 300, 200)
