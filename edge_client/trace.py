"""Records what device and verifier do on one time line, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

Must not know: clocks (times are arguments, in seconds of one clock), the wire, drafting, how a timeline is drawn.
Called by the generation loop through `TraceSink`; `trace_file` reads what `write` leaves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shared.errors import ConfigError

FORMAT = "draftwire-trace"
FORMAT_VERSION = 1
MAX_EVENTS = 200_000
"""About 100 MB of memory and 30 MB of file: an hour of writing."""


class Track(Enum):
    """A line of the picture: process id, thread id, name, and the category of the events on it."""

    STATE = (1, 1, "state", "state")
    DRAFT = (1, 2, "draft", "draft")
    SEND = (1, 3, "send", "hint")
    COMMITS = (1, 4, "commits", "commit")
    STEPS = (2, 1, "steps", "step")
    QUEUE = (2, 2, "queue", "queue")

    def __init__(self, process: int, thread: int, thread_name: str, category: str) -> None:
        self.process, self.thread = process, thread
        self.thread_name, self.category = thread_name, category


PROCESSES = {1: "device", 2: "verifier"}


class TraceSink:
    """Where the generation loop tells what it does; this one records nothing, `Trace` all. All times are seconds of one
    clock; every call is cheap."""

    def drafted(self, start_s: float, end_s: float, path_length: int, nodes: int, drafter: str) -> None:
        """One draft step: `nodes` ids were proposed after a path of `path_length` ids past the committed ones."""

    def hint_sent(self, at_s: float, first_node: int, nodes: int, size_bytes: int) -> None:
        """One Hint went up: nodes numbered from `first_node`, in so many protobuf bytes."""

    def commit_received(
        self,
        at_s: float,
        start: int,
        ids: Sequence[int],
        accepted: int,
        *,
        step_us: int,
        queue_us: int,
        round_trip_s: float,
        seen_node: int,
        text: str = "",
    ) -> None:
        """One Commit came down. The verifier's clock is not known: its step is taken to have ended half a round trip
        ago. `step_us` 0: ids told again after a resume, no step. `text`: what the ids made final.
        """

    def state(self, at_s: float, state: str, detail: str = "") -> None:
        """Text comes in another way from now on (drafting, verified, offline, ...), until the next call."""


@dataclass(slots=True)
class _Event:
    """A span ("X"), or one end of an arrow ("s" to "f", `arrow` numbers it). Whole microseconds, so ends stay exact."""

    phase: str
    track: Track
    name: str
    start_us: int
    end_us: int
    args: dict[str, object]
    arrow: int = 0


class Trace(TraceSink):
    """A TraceSink that keeps everything up to `max_events`, then only counts. Calls for one track come in order, from
    one thread at a time; draft steps may come from another thread than the rest.

    What is a moment (a hint, a commit) is a span of 1 us, for arrows hold on to spans only. Spans of a track never
    overlap: one that would, because half a round trip is an estimate, begins where the one before it ends.
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._max_events = max_events
        self._events: list[_Event] = []
        self._dropped = self._arrows = 0
        self._busy_until_us: dict[Track, int] = {}
        self._state: _Event | None = None
        self._unseen: list[tuple[int, _Event]] = []  # hints that no step has seen, by their last node

    def drafted(self, start_s: float, end_s: float, path_length: int, nodes: int, drafter: str) -> None:
        """See TraceSink."""
        args: dict[str, object] = {"path_length": path_length, "nodes": nodes}
        self._keep([self._span(Track.DRAFT, drafter, _us(start_s), _us(end_s), args)])

    def hint_sent(self, at_s: float, first_node: int, nodes: int, size_bytes: int) -> None:
        """See TraceSink."""
        args: dict[str, object] = {"first_node": first_node, "nodes": nodes, "bytes": size_bytes}
        hint = self._span(Track.SEND, "hint", _us(at_s), _us(at_s), args)
        if self._unseen and self._unseen[-1][0] >= first_node:  # numbers begin anew: another epoch
            self._unseen.clear()
        if self._keep([hint]):
            self._unseen.append((first_node + nodes - 1, hint))

    def commit_received(
        self,
        at_s: float,
        start: int,
        ids: Sequence[int],
        accepted: int,
        *,
        step_us: int,
        queue_us: int,
        round_trip_s: float,
        seen_node: int,
        text: str = "",
    ) -> None:
        """See TraceSink."""
        at_us, down_us = _us(at_s), max(0, _us(round_trip_s / 2))
        events: list[_Event] = []
        seen = self._take_seen(seen_node)
        if step_us > 0:
            figures: dict[str, object] = {"committed": len(ids), "accepted": accepted, "step_us": step_us}
            name = "step" if accepted else "step, none accepted"
            step = self._span(Track.STEPS, name, at_us - down_us - step_us, at_us - down_us, figures)
            events += [step, *self._arrows_from_hints(seen, step)]
            if queue_us > 0:
                waited: dict[str, object] = {"queue_us": queue_us}
                events.append(self._span(Track.QUEUE, "queue", step.start_us - queue_us, step.start_us, waited))
        args: dict[str, object] = {"start": start, "ids": list(ids), "accepted": accepted, "text": text}
        args |= {"seen_node": seen_node, "step_us": step_us, "round_trip_us": 2 * down_us}
        commit = self._span(Track.COMMITS, "commit", at_us, at_us, args)
        events.append(commit)
        if step_us > 0:
            events += self._arrow("commit", step, step.end_us - 1, commit, commit.start_us)
        self._keep(events)

    def state(self, at_s: float, state: str, detail: str = "") -> None:
        """See TraceSink."""
        at_us = _us(at_s)
        if self._state is not None:
            self._state.end_us = max(at_us, self._state.start_us + 1)
            self._busy_until_us[Track.STATE] = self._state.end_us
        fresh = self._span(Track.STATE, state, at_us, at_us, {"detail": detail})
        self._state = fresh if self._keep([fresh]) else None

    def document(self) -> dict[str, object]:
        """The whole trace as the JSON object of Chrome's format; times are microseconds since the first event."""
        events = sorted(self._events, key=lambda event: event.start_us)  # stable: an arrow stays behind its spans
        origin_us = events[0].start_us if events else 0
        if self._state is not None:
            self._state.end_us = max(event.end_us for event in events)
        return {
            "displayTimeUnit": "ms",
            "otherData": {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "max_events": self._max_events,
                "dropped_events": self._dropped,
            },
            "traceEvents": [*_names(), *(_as_json(event, origin_us) for event in events)],
        }

    def write(self, path: Path) -> None:
        """Writes the document, one event a line; the file is whole or as it was before. Raises: ConfigError."""
        document = self.document()
        events = document.pop("traceEvents")
        assert isinstance(events, list)
        head = json.dumps(document)[:-1]
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        write_whole(path, f'{head}, "traceEvents": [\n{lines}\n]}}\n')

    # ------------------------------------------------------------ events

    def _keep(self, events: list[_Event]) -> bool:
        """All of them or none: no arrow loses an end."""
        if len(self._events) + len(events) > self._max_events:
            self._dropped += len(events)
            return False
        self._events += events
        return True

    def _span(self, track: Track, name: str, start_us: int, end_us: int, args: dict[str, object]) -> _Event:
        start_us = max(start_us, self._busy_until_us.get(track, start_us))
        end_us = max(end_us, start_us + 1)
        self._busy_until_us[track] = end_us
        return _Event("X", track, name, start_us, end_us, args)

    def _take_seen(self, seen_node: int) -> list[_Event]:
        """The hints that this step is the first to have seen whole."""
        count = sum(last_node <= seen_node for last_node, _ in self._unseen)  # they are in the order of their nodes
        seen = [hint for _, hint in self._unseen[:count]]
        del self._unseen[:count]
        return seen

    def _arrows_from_hints(self, hints: list[_Event], step: _Event) -> list[_Event]:
        arrows: list[_Event] = []
        for hint in hints:
            at_us = max(step.start_us, hint.start_us)
            if at_us < step.end_us:  # else half a round trip is so wrong that an arrow would lie
                arrows += self._arrow("hint", hint, hint.start_us, step, at_us)
        return arrows

    def _arrow(self, name: str, tail: _Event, tail_us: int, head: _Event, head_us: int) -> list[_Event]:
        self._arrows += 1
        ends = (("s", tail, tail_us), ("f", head, head_us))
        return [_Event(phase, span.track, name, at_us, at_us, {}, self._arrows) for phase, span, at_us in ends]


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is whole or as it was before. Raises: ConfigError that names it."""
    fresh = Path(f"{path}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        with suppress(OSError, ValueError):
            fresh.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}", field="out"
        ) from error


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _names() -> Iterator[dict[str, object]]:
    """Names and order of processes and threads."""
    for process, name in PROCESSES.items():
        yield _metadata("process_name", process, 0, {"name": name})
        yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for track in Track:
        yield _metadata("thread_name", track.process, track.thread, {"name": track.thread_name})
        yield _metadata("thread_sort_index", track.process, track.thread, {"sort_index": track.thread})


def _metadata(name: str, process: int, thread: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": args}


def _as_json(event: _Event, origin_us: int) -> dict[str, object]:
    row: dict[str, object] = {
        "ph": event.phase,
        "cat": event.track.category if event.phase == "X" else "arrow",
        "name": event.name,
        "pid": event.track.process,
        "tid": event.track.thread,
        "ts": event.start_us - origin_us,
    }
    if event.phase == "X":
        return row | {"dur": event.end_us - event.start_us, "args": event.args}
    return row | {"id": event.arrow} | ({"bp": "e"} if event.phase == "f" else {})
