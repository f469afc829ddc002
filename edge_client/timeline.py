"""Lays a recording out as a picture: lanes, bars, slanted lines, text, all in pixels. Pure.

Must not know: files, SVG, colours (each shape names its kind; `timeline_svg` knows what a kind looks like).
Called by `timeline_cli` with what `trace_file` read.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from edge_client.picture import Box, Label, Line, Picture, cut_line, text_px, tick_step, visible
from edge_client.trace_file import CommitReceived, Recording
from shared.errors import ConfigError

DEFAULT_WINDOW_MS = 2000.0
PX_PER_MS = 0.66
PLOT_PX = (900.0, 6000.0)
"""How wide the time axis is at least and at most."""
LEFT_PX, RIGHT_PX = 120.0, 24.0
DRAFTER_KINDS = 4
TEXT_ROWS, TEXT_ROW_PX = 6, 17.0
LONGEST_TEXT = 48

LEGEND_Y, LEGEND_ROW = 68.0, 18.0
AXIS_Y = LEGEND_Y + 2 * LEGEND_ROW + 28
STATE_Y = AXIS_Y + 11
DRAFT_Y = STATE_Y + 42
SEND_Y = DRAFT_Y + 32
COMMITS_Y = SEND_Y + 20
NETWORK_Y = COMMITS_Y + 12
STEPS_Y = NETWORK_Y + 120
QUEUE_Y = STEPS_Y + 34
TEXT_Y = QUEUE_Y + 38


@dataclass(frozen=True)
class Window:
    """The part of the trace that is shown, in ms since its first event."""

    start_ms: float
    end_ms: float


def choose_window(recording: Recording, from_ms: float | None = None, to_ms: float | None = None) -> Window:
    """What was asked for, else the first 2,000 ms of activity. Raises: ConfigError that names the argument at fault."""
    for name, value in (("--from", from_ms), ("--to", to_ms)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be a number of milliseconds from 0, got {value:g}", field=name)
    end_ms = recording.end_ms
    start_ms = from_ms if from_ms is not None else recording.start_ms
    if from_ms is None and to_ms is not None and to_ms <= start_ms:
        start_ms = 0.0
    if from_ms is not None and from_ms >= end_ms:
        raise ConfigError(f"--from {from_ms:g} is past the end of the trace, {end_ms:.0f} ms", field="--from")
    if to_ms is not None and to_ms <= start_ms:
        raise ConfigError(f"--to {to_ms:g} must be larger than --from {start_ms:g}", field="--to")
    end_ms = min(end_ms, start_ms + DEFAULT_WINDOW_MS if to_ms is None else to_ms)
    return Window(start_ms, max(end_ms, start_ms + 0.001))


def lay_out(recording: Recording, window: Window) -> Picture:
    """The whole picture of what lies in the window; the totals in its title are of the whole trace."""
    layout = _Layout(recording, window)
    layout.head()
    layout.states()
    layout.device()
    layout.network()
    layout.verifier()
    layout.text()
    layout.frame()
    return layout.picture


class _Layout:
    """Places the lanes of one picture, each method one of them."""

    def __init__(self, recording: Recording, window: Window) -> None:
        self._recording, self._window = recording, window
        least, most = PLOT_PX
        self._length_ms = window.end_ms - window.start_ms
        self._plot_px = min(most, max(least, self._length_ms * PX_PER_MS))
        self.picture = Picture(LEFT_PX + self._plot_px + RIGHT_PX)
        self._right = LEFT_PX + self._plot_px
        names = dict.fromkeys(draft.drafter for draft in recording.drafts)
        self._drafters = {name: f"draft-{index % DRAFTER_KINDS}" for index, name in enumerate(names)}
        self._commit_starts = [commit.start_ms for commit in recording.commits]

    # ------------------------------------------------------------ head

    def head(self) -> None:
        """Title with the totals, and the legend."""
        trace, window = self._recording, self._window
        tokens, steps = trace.tokens, len(trace.steps)
        each = f"{steps / tokens:.2f}" if tokens else "no"
        sent = sum(hint.size_bytes for hint in trace.hints)
        title = f"{_many(tokens, 'token')} in {_many(steps, 'step')} of the target: {each} forwards per token; "
        title += f"{_many(len(trace.hints), 'hint')}, {_many(sent, 'byte')} up"
        shown = f"showing {window.start_ms:,.0f} to {window.end_ms:,.0f} ms of {trace.end_ms:,.0f} ms"
        shown += "; the totals above are of the whole trace"
        if trace.dropped_events:
            shown += f", which lacks {trace.dropped_events:,} events that did not fit in"
        self.picture.labels += [Label("title", 16, 26, title), Label("subtitle", 16, 45, shown)]
        self._legend()

    def _legend(self) -> None:
        drafts = [(kind, f"draft step of {_cut(name, 16)}") for name, kind in self._drafters.items()][:DRAFTER_KINDS]
        frames = [("hint", "hint: ids proposed"), ("hint-unseen", "hint that no step has seen")]
        frames += [("commit", "commit: ids decided, never taken back")]
        steps = [("step-accepted", "step: hinted ids accepted"), ("step-none", "step: none accepted")]
        steps += [("queue", "session waits to run")]
        y = LEGEND_Y
        for row in filter(None, (drafts, frames, steps)):
            x = 16.0
            for kind, words in row:
                if kind in ("hint", "hint-unseen", "commit"):
                    self.picture.lines.append(Line(kind, x, y + 4, x + 18, y - 8))
                else:
                    self.picture.boxes.append(Box(kind, x, y - 9, 18, 12))
                self.picture.labels.append(Label("legend", x + 24, y + 1, words))
                x += 24 + text_px(words) + 18
            y += LEGEND_ROW

    # ------------------------------------------------------------ lanes

    def states(self) -> None:
        """How text came, as a band."""
        for span in self._recording.states:
            tip = f"{span.state}: {span.detail}" if span.detail else span.state
            self._box(f"state-{span.state}", span.start_ms, span.end_ms, STATE_Y, 18, (tip, span.state), tip)

    def device(self) -> None:
        """Draft steps, and a mark for each hint and commit."""
        for draft in self._recording.drafts:
            after = f" after {_many(draft.path_length, 'drafted id')}" if draft.path_length else ""
            tip = f"{draft.drafter}: {draft.end_ms - draft.start_ms:.1f} ms, {_many(draft.nodes, 'id')}{after}"
            self._box(self._drafters[draft.drafter], draft.start_ms, draft.end_ms, DRAFT_Y, 20, (), tip)
        for hint in self._recording.hints:
            self._mark("hint-mark", hint.start_ms, SEND_Y)
        for commit in self._recording.commits:
            self._mark("commit-mark", commit.start_ms, COMMITS_Y)

    def verifier(self) -> None:
        """The target's steps, and how long the session waited for each."""
        for step in self._recording.steps:
            kind = "step-accepted" if step.accepted else "step-none"
            tip = f"{step.step_us / 1000:.1f} ms: {_many(step.committed, 'id')}, {step.accepted} of hints"
            labels = (_many(step.committed, "id"), str(step.committed))
            self._box(kind, step.start_ms, step.end_ms, STEPS_Y, 26, labels, tip)
        for wait in self._recording.queues:
            self._box("queue", wait.start_ms, wait.end_ms, QUEUE_Y, 12, (), f"waited {wait.queue_us / 1000:.1f} ms")

    def network(self) -> None:
        """Hints on their way up (half of the round trip that the next commit tells), commits on their way down."""
        seen_until = self._seen_from_here()
        for hint in self._recording.hints:
            index = bisect_left(self._commit_starts, hint.start_ms)
            up_ms = self._round_trip_ms(index) / 2
            is_seen = hint.first_node + hint.nodes - 1 <= seen_until[index]
            tip = f"hint: {_many(hint.nodes, 'id')}, {_many(hint.size_bytes, 'byte')}"
            ends = ((hint.start_ms, SEND_Y), (hint.start_ms + up_ms, STEPS_Y))
            self._line("hint" if is_seen else "hint-unseen", *ends, tip)
        for commit in self._recording.commits:
            left_ms = commit.start_ms - commit.round_trip_us / 2000
            accepted = f", {commit.accepted} of hints" if commit.step_us else ", told again"
            tip = f"commit: {_many(len(commit.ids), 'id')}{accepted}"
            self._line("commit", (left_ms, STEPS_Y), (commit.start_ms, COMMITS_Y), tip)

    def text(self) -> None:
        """The text that each commit made final, at the time at which it came; sets the height of the picture."""
        free_from: list[float] = []
        for commit in self._recording.commits:
            if not commit.text or not self._window.start_ms <= commit.start_ms < self._window.end_ms:
                continue
            words = _cut(visible(commit.text), LONGEST_TEXT)
            x, width = self._x(commit.start_ms), text_px(words) + 10
            left = x if x + width <= self._right else x + 2 - width  # at the right edge it stands before its mark
            row = next((row for row, end in enumerate(free_from) if end <= left), len(free_from))
            if row == TEXT_ROWS:  # no room: a smaller window has more
                continue
            free_from[row : row + 1] = [left + width]
            y = TEXT_Y + 6 + row * TEXT_ROW_PX
            self.picture.boxes.append(Box("text-accepted" if commit.accepted else "text-none", x, y, 2, 14))
            self.picture.labels.append(Label("text", left + 5, y + 11, words))
        self.picture.height = TEXT_Y + max(1, len(free_from)) * TEXT_ROW_PX + 20

    def frame(self) -> None:
        """Grid and times behind the lanes, from top to bottom; the names of the lanes at the left."""
        step_ms = tick_step(self._length_ms, self._plot_px)
        for index in range(math.ceil(self._window.start_ms / step_ms), int(self._window.end_ms // step_ms) + 1):
            x = self._x(index * step_ms)
            self.picture.lines.append(Line("grid", x, AXIS_Y + 5, x, self.picture.height - 8))
            self.picture.labels.append(Label("tick", x, AXIS_Y, f"{index * step_ms:,.10g}"))
        lanes = (
            ("lane", STATE_Y + 13, "state"),
            ("side", DRAFT_Y - 6, "DEVICE"),
            ("lane", DRAFT_Y + 14, "draft model"),
            ("lane", SEND_Y + 4, "hints sent"),
            ("lane", COMMITS_Y + 4, "commits come"),
            ("axis", (NETWORK_Y + STEPS_Y) / 2 - 14, "network:"),
            ("axis", (NETWORK_Y + STEPS_Y) / 2 + 1, "half a round"),
            ("axis", (NETWORK_Y + STEPS_Y) / 2 + 16, "trip each way"),
            ("side", STEPS_Y - 5, "VERIFIER"),
            ("lane", STEPS_Y + 17, "target's steps"),
            ("lane", QUEUE_Y + 10, "waits to run"),
            ("side", TEXT_Y + 1, "TEXT"),
            ("lane", TEXT_Y + 18, "committed"),
        )
        self.picture.labels += [Label(kind, LEFT_PX - 12, y, name) for kind, y, name in lanes]
        self.picture.labels.append(Label("axis", LEFT_PX - 30, AXIS_Y, "time in ms"))
        self.picture.boxes.append(Box("network", LEFT_PX, NETWORK_Y, self._plot_px, STEPS_Y - NETWORK_Y - 2))

    # ------------------------------------------------------------ places

    def _x(self, at_ms: float) -> float:
        return LEFT_PX + (at_ms - self._window.start_ms) / self._length_ms * self._plot_px

    def _box(
        self, kind: str, start_ms: float, end_ms: float, y: float, height: float, labels: tuple[str, ...], tip: str
    ) -> None:
        """The part of a bar that is in the window, with the first label that fits."""
        left, right = max(LEFT_PX, self._x(start_ms)), min(self._right, self._x(end_ms))
        if left >= self._right or right <= LEFT_PX:
            return
        width = max(right - left, 1.2)
        label = next((label for label in labels if text_px(label) + 6 <= width), "")
        self.picture.boxes.append(Box(kind, left, y, width, height, label, tip))

    def _mark(self, kind: str, at_ms: float, y: float) -> None:
        if self._window.start_ms <= at_ms < self._window.end_ms:
            self.picture.boxes.append(Box(kind, self._x(at_ms) - 1.5, y - 4, 3, 8))

    def _line(self, kind: str, tail: tuple[float, float], head: tuple[float, float], tip: str) -> None:
        """The part of a slanted line that is in the window."""
        ends = cut_line((self._x(tail[0]), tail[1]), (self._x(head[0]), head[1]), LEFT_PX, self._right)
        if ends is not None:
            self.picture.lines.append(Line(kind, *ends[0], *ends[1], tip))

    def _round_trip_ms(self, index: int) -> float:
        """What the commit at this place tells; the last one stands for those that never came."""
        commits = self._recording.commits
        return commits[min(index, len(commits) - 1)].round_trip_us / 1000 if commits else 0.0

    def _seen_from_here(self) -> list[int]:
        """For each place among the commits: the highest node that it or a later one has seen, until numbers restart."""
        commits: list[CommitReceived] = self._recording.commits
        seen = [-1] * (len(commits) + 1)
        for index in range(len(commits) - 1, -1, -1):
            is_restart = seen[index + 1] >= 0 and commits[index].seen_node > commits[index + 1].seen_node
            seen[index] = commits[index].seen_node if is_restart else max(commits[index].seen_node, seen[index + 1])
        return seen


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
