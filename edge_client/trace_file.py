"""Reads a trace file back: what was drafted, sent, verified and committed, and the totals of it all.

Must not know: how a trace is recorded beyond its format, how a timeline looks. Called by `timeline_cli`.
A file is input: whatever is wrong with it is a ConfigError that names the file and the event.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_client.trace import FORMAT, FORMAT_VERSION, Track
from shared.errors import ConfigError

LARGEST = 2.0**53
"""Numbers from here on are not exact, and never meant."""


@dataclass(frozen=True)
class Span:
    """Something that took a while, or (1 us long) a moment. Milliseconds since the trace's first event."""

    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class StateSpan(Span):
    """How text came meanwhile."""

    state: str
    detail: str


@dataclass(frozen=True)
class DraftStep(Span):
    """One draft step on the device."""

    drafter: str
    path_length: int
    nodes: int


@dataclass(frozen=True)
class HintSent(Span):
    """A hint as it left the device."""

    first_node: int
    nodes: int
    size_bytes: int


@dataclass(frozen=True)
class StepSpan(Span):
    """One forward pass of the target, as its commit told of it."""

    committed: int
    accepted: int
    step_us: int


@dataclass(frozen=True)
class QueueSpan(Span):
    """How long the session stood ready before a step, or waited for a hint."""

    queue_us: int


@dataclass(frozen=True)
class CommitReceived(Span):
    """A commit as it reached the device. `step_us` is 0 if the ids were told again after a resume."""

    start: int
    ids: tuple[int, ...]
    accepted: int
    text: str
    seen_node: int
    step_us: int
    round_trip_us: int


@dataclass(frozen=True)
class Recording:
    """What a trace file tells, each kind in the order of time."""

    states: list[StateSpan] = field(default_factory=list)
    drafts: list[DraftStep] = field(default_factory=list)
    hints: list[HintSent] = field(default_factory=list)
    steps: list[StepSpan] = field(default_factory=list)
    queues: list[QueueSpan] = field(default_factory=list)
    commits: list[CommitReceived] = field(default_factory=list)
    dropped_events: int = 0
    """Events that did not fit in: totals are too low by them."""

    @property
    def spans(self) -> list[Span]:
        """All but the states."""
        return [*self.drafts, *self.hints, *self.steps, *self.queues, *self.commits]

    @property
    def start_ms(self) -> float:
        """When the first of both sides did something. 0 without any."""
        return min((span.start_ms for span in self.spans), default=0.0)

    @property
    def end_ms(self) -> float:
        """When the last of it was over."""
        return max((span.end_ms for span in [*self.spans, *self.states]), default=0.0)

    @property
    def tokens(self) -> int:
        """Committed ids; those told again count once."""
        count = held = 0
        for commit in self.commits:
            end = commit.start + len(commit.ids)
            count += len(commit.ids) if commit.step_us else max(0, end - max(commit.start, held))
            held = end
        return count


def read_trace(path: Path) -> Recording:
    """Reads and checks a file that `Trace.write` left. Raises: ConfigError that names it and what is wrong."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", field="file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a trace: no JSON in it ({error})", field="file") from error
    try:
        return parse_trace(document)
    except ConfigError as error:
        raise ConfigError(f"{path} is not a trace: {error.message}", field="file") from error


def parse_trace(document: object) -> Recording:
    """The recording in a parsed document. Raises: ConfigError that says what is wrong."""
    events = document.get("traceEvents") if isinstance(document, dict) else None
    about = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ConfigError("it has no list traceEvents")
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ConfigError(f'it was not recorded by edge-client (otherData.format is not "{FORMAT}")')
    if about.get("format_version") != FORMAT_VERSION:
        raise ConfigError(f"format_version {about.get('format_version')!r} is not known here, {FORMAT_VERSION} is")
    recording = Recording(dropped_events=_Row(about, "otherData").whole("dropped_events"))
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise ConfigError(f"traceEvents[{index}] is not an object")
        if event.get("ph") == "X":
            _add(recording, _Row(event, f"traceEvents[{index}]"))
    for kind in (
        recording.states,
        recording.drafts,
        recording.hints,
        recording.steps,
        recording.queues,
        recording.commits,
    ):
        kind.sort(key=lambda span: span.start_ms)
    return recording


def _add(recording: Recording, row: _Row) -> None:
    category, args, name = row.text("cat"), row.row("args"), row.text("name")
    start_ms = row.number("ts") / 1000
    at = (start_ms, start_ms + row.number("dur") / 1000)
    if category == Track.STATE.category:
        recording.states.append(StateSpan(*at, name, args.text("detail")))
    elif category == Track.DRAFT.category:
        recording.drafts.append(DraftStep(*at, name, args.whole("path_length"), args.whole("nodes")))
    elif category == Track.SEND.category:
        recording.hints.append(HintSent(*at, *args.wholes("first_node", "nodes", "bytes")))
    elif category == Track.STEPS.category:
        recording.steps.append(StepSpan(*at, *args.wholes("committed", "accepted", "step_us")))
    elif category == Track.QUEUE.category:
        recording.queues.append(QueueSpan(*at, args.whole("queue_us")))
    elif category == Track.COMMITS.category:
        told = args.wholes("seen_node", "step_us", "round_trip_us")
        ids, text = args.whole_list("ids"), args.text("text")
        recording.commits.append(CommitReceived(*at, args.whole("start"), ids, args.whole("accepted"), text, *told))
    else:
        raise ConfigError(f"{row.where}.cat {category[:40]!r} is not known")


@dataclass(frozen=True)
class _Row:
    """A JSON object with checked values; `where` it stands in the file."""

    values: Mapping[str, object]
    where: str

    def _refuse(self, name: str, wanted: str) -> ConfigError:
        found = repr(self.values[name])[:40] if name in self.values else "missing"
        return ConfigError(f"{self.where}.{name} must be {wanted}, is {found}")

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self._refuse(name, "text")
        return value

    def row(self, name: str) -> _Row:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self._refuse(name, "an object")
        return _Row(value, f"{self.where}.{name}")

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not _is_number(value):
            raise self._refuse(name, "a number from 0")
        assert isinstance(value, int | float)
        return float(value)

    def whole(self, name: str) -> int:
        value = self.values.get(name)
        if not (isinstance(value, int) and _is_number(value)):
            raise self._refuse(name, "a whole number from 0")
        return value

    def wholes(self, *names: str) -> tuple[int, ...]:
        return tuple(self.whole(name) for name in names)

    def whole_list(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        if not (isinstance(value, list) and all(isinstance(item, int) and _is_number(item) for item in value)):
            raise self._refuse(name, "a list of whole numbers from 0")
        return tuple(value)


def _is_number(value: object) -> bool:
    """True for 0 and above, within what a float holds exactly. Not for booleans, NaN or infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= LARGEST and math.isfinite(value)
