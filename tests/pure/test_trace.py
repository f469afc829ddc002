"""The trace as Perfetto and chrome://tracing read it: well-formed spans, arrows with two ends, bounded, whole files."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from edge_client.trace import FORMAT, Trace, TraceSink
from edge_client.trace_file import read_trace
from shared.errors import ConfigError

TEXT = "def reverse ( text : str ) -> str : ↵ return text [ : : - 1 ] ↵ ↵ print ( reverse ( 'a < b & c' ) )"
WORDS = re.findall(r"\S+", TEXT)
DRAFT_S, STEP_S, UP_S = 0.008, 0.100, 0.025
"""Of the example: a draft step, a step of the target, a way through the network."""


def example(sink: TraceSink, tokens: int = 40, seed: int = 3, at_s: float = 17.0) -> None:
    """A generation as it would be with drafting ahead: a hint after each draft step, the target always at work."""
    draws = random.Random(seed)
    sink.state(at_s, "drafting")
    now_s, node, position, done, steps = at_s, 1, 100, 0, 0
    step_end_s = at_s + UP_S + 0.060 + STEP_S
    sent: list[tuple[float, int]] = []
    while done < tokens:
        while now_s + DRAFT_S < step_end_s + UP_S:
            size = draws.choice([2, 2, 3, 4])
            is_model = draws.random() < 0.8
            end_s = now_s + (DRAFT_S if is_model else 0.0006)
            sink.drafted(now_s, end_s, draws.randrange(8), size, "smollm2-135m" if is_model else "look-up")
            sink.hint_sent(end_s + 0.0002, node, size, 9 + 2 * size)
            node += size
            sent.append((end_s + 0.0002 + UP_S, node - 1))
            now_s = end_s + (0.0004 if draws.random() < 0.75 else 0.011)
        accepted = draws.choice([0, 2, 3, 4]) if steps else 0
        seen = max((last for arrival_s, last in sent if arrival_s <= step_end_s - STEP_S), default=0)
        ids = list(range(accepted + 1))
        text = " ".join(WORDS[(done + n) % len(WORDS)] for n in ids) + " "
        sink.commit_received(
            step_end_s + UP_S,
            position,
            ids,
            accepted,
            step_us=round(STEP_S * 1e6) if steps else 160_000,
            queue_us=3000 if steps else 400,
            round_trip_s=2 * UP_S,
            seen_node=seen,
            text=text.replace("↵ ", "\n"),
        )
        position, done, steps = position + len(ids), done + len(ids), steps + 1
        step_end_s += STEP_S + 0.003
    sink.state(step_end_s, "streaming", "drafting failed: <out of memory>")
    sink.state(step_end_s + 0.05, "drafting")


def recorded(**options: Any) -> Trace:
    trace = Trace(**options)
    example(trace)
    return trace


def events_of(trace: Trace) -> list[dict[str, Any]]:
    """As a reader finds them in the file."""
    events: list[dict[str, Any]] = json.loads(json.dumps(trace.document()))["traceEvents"]
    return events


def spans_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Start and end of the spans of each thread."""
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return spans


def commit(trace: TraceSink, at_s: float, **changes: Any) -> None:
    """One commit of one id, 50 ms after a step of 100 ms."""
    fields: dict[str, Any] = {"step_us": 100_000, "queue_us": 0, "round_trip_s": 0.1, "seen_node": 0} | changes
    trace.commit_received(at_s, 0, [7], 0, **fields)


def check_well_formed(events: list[dict[str, Any]]) -> None:
    """What Chrome's format asks of any trace."""
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert event["ph"] in "XsfM"
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    for spans in spans_of(events).values():
        assert all(start < end for start, end in spans)
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
    tails, heads = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert len(tails) + len(heads) == sum(event["ph"] in "sf" for event in events)
    assert tails.keys() == heads.keys()
    for arrow, tail in tails.items():
        assert tail["ts"] <= heads[arrow]["ts"]
        for end in (tail, heads[arrow]):  # both hold on to a span that is open then
            spans = spans_of(events)[end["pid"], end["tid"]]
            assert any(start <= end["ts"] < until for start, until in spans)


# ---------------------------------------------------------------- the format


def test_a_generation_gives_a_well_formed_chrome_trace() -> None:
    events = events_of(recorded())
    check_well_formed(events)
    assert {event["cat"] for event in events if event["ph"] == "X"} == {
        *("state", "draft", "hint", "commit", "step", "queue")
    }
    assert min(event["ts"] for event in events if event["ph"] != "M") == 0


def test_processes_and_threads_have_names() -> None:
    events = events_of(recorded())
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(processes.values()) == {"device", "verifier"}
    assert set(threads.values()) == {"state", "draft", "send", "commits", "steps", "queue"}
    assert set(spans_of(events)) == set(threads)


def test_the_step_of_a_commit_ended_half_a_round_trip_before_it_came() -> None:
    trace = Trace()
    trace.drafted(1.0, 1.008, 0, 2, "tiny")
    commit(trace, 2.0, queue_us=3000)
    found = {event["cat"]: (event["ts"], event["dur"]) for event in events_of(trace) if event["ph"] == "X"}
    assert found["step"] == (850_000, 100_000)
    assert found["queue"] == (847_000, 3000)
    assert found["commit"] == (1_000_000, 1)


def test_an_arrow_leads_from_each_hint_to_the_first_step_that_saw_all_of_it() -> None:
    trace = Trace()
    for at_s, first_node in ((1.0, 1), (1.1, 4), (1.2, 7)):
        trace.hint_sent(at_s, first_node, 3, 10)
    commit(trace, 1.5, seen_node=5)
    commit(trace, 1.7, seen_node=6)
    events = events_of(trace)
    check_well_formed(events)
    arrows = [(event["ph"], event["ts"]) for event in events if event["name"] == "hint" and event["ph"] in "sf"]
    assert arrows == [("s", 0), ("s", 100_000), ("f", 350_000), ("f", 550_000)]


def test_node_numbers_that_begin_anew_leave_the_old_hints_without_an_arrow() -> None:
    trace = Trace()
    trace.hint_sent(1.0, 40, 3, 10)
    trace.hint_sent(1.1, 1, 3, 10)
    commit(trace, 1.5, seen_node=50)
    assert sum(event["ph"] == "s" and event["name"] == "hint" for event in events_of(trace)) == 1


def test_ids_told_again_after_a_resume_are_no_step() -> None:
    trace = Trace()
    trace.hint_sent(1.0, 1, 3, 10)
    commit(trace, 1.5, step_us=0, seen_node=3)
    events = events_of(trace)
    check_well_formed(events)
    assert {event["cat"] for event in events if event["ph"] != "M"} == {"hint", "commit"}


@pytest.mark.parametrize("seed", range(20))
def test_spans_never_overlap_however_wrong_the_times_are(seed: int) -> None:
    draws, trace = random.Random(seed), Trace()
    for number in range(1, 60):
        at_s = draws.uniform(0, 2)
        trace.drafted(at_s, at_s + draws.uniform(-0.1, 0.1), 0, 1, "tiny")
        trace.hint_sent(draws.uniform(0, 2), number, 1, 9)
        times = {"step_us": draws.randrange(200_000), "queue_us": draws.randrange(50_000)}
        commit(trace, draws.uniform(0, 2), **times, round_trip_s=draws.uniform(-0.1, 0.4), seen_node=number)
        trace.state(draws.uniform(0, 2), "drafting")
    check_well_formed(events_of(trace))


def test_a_state_lasts_until_the_next_and_the_last_one_to_the_end() -> None:
    trace = Trace()
    trace.state(1.0, "drafting")
    trace.state(1.5, "stalled", "no room")
    trace.drafted(1.6, 1.7, 0, 1, "tiny")
    for _ in range(2):  # looking changes nothing
        states = [(e["name"], e["ts"], e["dur"]) for e in events_of(trace) if e.get("cat") == "state"]
        assert states == [("drafting", 0, 500_000), ("stalled", 500_000, 200_000)]


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("max_events", [0, 1, 7, 100, 103])
def test_past_its_bound_a_trace_only_counts_and_says_so(max_events: int) -> None:
    trace, whole = recorded(max_events=max_events), recorded()
    document: Any = trace.document()
    kept = [event for event in events_of(trace) if event["ph"] != "M"]
    check_well_formed(kept)
    assert len(kept) <= max_events
    assert document["otherData"]["max_events"] == max_events
    in_whole = sum(event["ph"] != "M" for event in events_of(whole))
    lost_arrows = in_whole - len(kept) - document["otherData"]["dropped_events"]
    assert 0 <= lost_arrows < in_whole / 2  # arrows of dropped hints are never made
    assert document["otherData"]["dropped_events"] > 0


def test_a_trace_with_room_says_that_nothing_is_missing() -> None:
    document: Any = recorded().document()
    assert document["otherData"]["dropped_events"] == 0
    assert document["otherData"]["format"] == FORMAT


def test_no_trace_takes_the_same_calls() -> None:
    sink = TraceSink()
    example(sink)
    assert not vars(sink)


# ---------------------------------------------------------------- files


def test_what_is_written_is_what_was_recorded(tmp_path: Path) -> None:
    trace, path = recorded(), tmp_path / "trace.json"
    trace.write(path)
    assert json.loads(path.read_bytes()) == json.loads(json.dumps(trace.document()))
    assert [child.name for child in tmp_path.iterdir()] == ["trace.json"]
    assert read_trace(path).tokens >= 40


def test_an_empty_trace_is_a_file_too(tmp_path: Path) -> None:
    Trace().write(tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json").spans == []


def test_text_that_utf8_cannot_hold_is_written_and_read_all_the_same(tmp_path: Path) -> None:
    trace = Trace()
    commit(trace, 1.0, text='\ud800 "\x00 你')
    trace.write(tmp_path / "trace.json")
    (read,) = read_trace(tmp_path / "trace.json").commits
    assert read.text == '\ud800 "\x00 你'


@pytest.mark.parametrize("name", ["missing/trace.json", "folder", "a\0b"])
def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be written") as raised:
        recorded().write(tmp_path / name)
    assert str(tmp_path / name) in raised.value.message
    assert [child.name for child in tmp_path.iterdir()] == ["folder"]


def test_writing_again_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    recorded().write(path)
    assert read_trace(path).dropped_events == 0
