"""The picture of a trace: the part shown, what stands where, hostile text, files that are no traces, the command."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from edge_client.cli import main
from edge_client.picture import TICK_PX, Picture, cut_line, text_px, tick_step, visible
from edge_client.timeline import LEFT_PX, LONGEST_TEXT, RIGHT_PX, TEXT_ROWS, Window, choose_window, lay_out
from edge_client.timeline_svg import draw
from edge_client.trace import MAX_EVENTS, Trace
from edge_client.trace_file import Recording, parse_trace, read_trace
from shared.errors import ConfigError
from tests.pure.test_trace import commit, example

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert(1)</script>&amp;\"'\x00\x1b\ud800\uffff]]>\n你"


def recording_of(trace: Trace) -> Recording:
    return parse_trace(json.loads(json.dumps(trace.document())))


def example_recording(tokens: int = 40, max_events: int = MAX_EVENTS) -> Recording:
    trace = Trace(max_events)
    example(trace, tokens)
    return recording_of(trace)


def picture_of(recording: Recording, from_ms: float | None = None, to_ms: float | None = None) -> Picture:
    return lay_out(recording, choose_window(recording, from_ms, to_ms))


def words_of(picture: Picture) -> list[str]:
    return [label.text for label in picture.labels]


def two_commits(**changes: Any) -> Recording:
    """A draft at 0 to 8 ms, its hint at 8 ms, a step from 50 to 150 ms, its commit at 200 ms, another 150 ms later."""
    trace = Trace()
    trace.drafted(1.0, 1.008, 0, 3, "tiny")
    trace.hint_sent(1.008, 1, 3, 15)
    trace.commit_received(
        1.2, 5, [1, 2, 3], 2, **{"step_us": 100_000, "queue_us": 0, "round_trip_s": 0.1, "seen_node": 3} | changes
    )
    commit(trace, 1.35, seen_node=3)
    return recording_of(trace)


# ---------------------------------------------------------------- the window


def test_the_first_two_seconds_of_activity_are_shown() -> None:
    trace = Trace()
    trace.state(1.0, "drafting")
    trace.drafted(4.0, 4.008, 0, 1, "tiny")
    commit(trace, 9.0)
    assert choose_window(recording_of(trace)) == Window(3000.0, 5000.0)


def test_a_short_trace_is_shown_whole() -> None:
    recording = example_recording()
    assert choose_window(recording) == Window(0.0, recording.end_ms)


@pytest.mark.parametrize(
    ("from_ms", "to_ms", "window"),
    [
        (300, None, (300, 2300)),
        (None, 100, (0, 100)),
        (300, 700, (300, 700)),
        (6900, None, (6900, 7000)),
        (6900, 9000, (6900, 7000)),
    ],
)
def test_what_is_asked_for_is_shown(from_ms: float | None, to_ms: float | None, window: tuple[float, float]) -> None:
    trace = Trace()
    trace.state(1.0, "drafting")
    trace.drafted(1.2, 8.0, 0, 1, "tiny")
    assert choose_window(recording_of(trace), from_ms, to_ms) == Window(*window)


@pytest.mark.parametrize(
    ("from_ms", "to_ms", "argument"),
    [
        (-1, None, "--from"),
        (math.nan, None, "--from"),
        (math.inf, None, "--from"),
        (None, -1, "--to"),
        (None, math.nan, "--to"),
        (None, 0, "--to"),
        (200, 200, "--to"),
        (1e9, None, "--from"),
    ],
)
def test_a_window_that_is_none_is_refused_by_the_name_of_the_argument(
    from_ms: float | None, to_ms: float | None, argument: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{argument} ") as raised:
        choose_window(example_recording(), from_ms, to_ms)
    assert raised.value.field == argument


def test_an_empty_trace_makes_a_picture_that_says_so() -> None:
    picture = picture_of(Recording())
    assert words_of(picture)[0].startswith("0 tokens in 0 steps of the target: no forwards per token; 0 hints")
    ET.fromstring(draw(picture, "nothing"))


# ---------------------------------------------------------------- the layout


def test_the_title_tells_the_totals_of_the_whole_trace() -> None:
    title, shown = words_of(picture_of(two_commits(), 0, 100))[:2]
    assert title == "4 tokens in 2 steps of the target: 0.50 forwards per token; 1 hint, 15 bytes up"
    assert shown == "showing 0 to 100 ms of 350 ms; the totals above are of the whole trace"


def test_ids_told_again_after_a_resume_count_once_and_are_no_step() -> None:
    trace = Trace()
    for start, step_us in ((5, 1000), (5, 0), (4, 0), (8, 1000)):
        figures = {"queue_us": 0, "round_trip_s": 0.01, "seen_node": 0}
        trace.commit_received(start, start, [1, 2, 3], 0, step_us=step_us, **figures)  # type: ignore[arg-type]
    recording = recording_of(trace)
    assert (recording.tokens, len(recording.steps)) == (6, 2)


def test_a_trace_that_did_not_hold_all_says_so_in_the_picture() -> None:
    assert "lacks" in words_of(picture_of(example_recording(max_events=50)))[1]


def test_each_thing_stands_at_its_time() -> None:
    recording = two_commits()
    picture = picture_of(recording)
    px_per_ms = (picture.width - LEFT_PX - RIGHT_PX) / recording.end_ms

    def at(x: float) -> float:
        return round((x - LEFT_PX) / px_per_ms, 1)

    steps = [box for box in picture.boxes if box.tip.startswith("100.0 ms")]
    assert [(box.kind, at(box.x), at(box.x + box.width), box.label) for box in steps] == [
        ("step-accepted", 50.0, 150.0, "3 ids"),
        ("step-none", 200.0, 300.0, "1 id"),
    ]
    (draft,) = [box for box in picture.boxes if box.tip.startswith("tiny")]
    assert (at(draft.x), at(draft.x + draft.width)) == (0.0, 8.0)
    slanted = [(line.kind, at(line.x1), at(line.x2)) for line in picture.lines if line.tip]
    assert slanted == [("hint", 8.0, 58.0), ("commit", 150.0, 200.0), ("commit", 300.0, 350.0)]
    up, down, _ = [line for line in picture.lines if line.tip]
    assert up.y1 < up.y2
    assert down.y1 > down.y2


def test_a_hint_that_no_step_saw_whole_is_drawn_as_such() -> None:
    assert {line.kind for line in picture_of(two_commits()).lines if line.tip.startswith("hint")} == {"hint"}
    trace = Trace()
    trace.hint_sent(1.0, 1, 3, 15)
    trace.hint_sent(1.1, 4, 3, 15)
    commit(trace, 1.5, seen_node=5)
    kinds = [line.kind for line in picture_of(recording_of(trace)).lines if line.tip.startswith("hint")]
    assert kinds == ["hint", "hint-unseen"]


def test_a_hint_of_an_epoch_that_is_over_was_not_seen_by_the_steps_of_the_next() -> None:
    trace = Trace()
    trace.hint_sent(1.0, 40, 3, 15)
    for at_s, seen_node in ((1.5, 39), (2.0, 3), (2.5, 60)):
        commit(trace, at_s, seen_node=seen_node)
    kinds = [line.kind for line in picture_of(recording_of(trace)).lines if line.tip.startswith("hint")]
    assert kinds == ["hint-unseen"]


def test_drafters_have_colours_of_their_own_and_a_place_in_the_legend() -> None:
    picture = picture_of(example_recording())
    assert {box.kind for box in picture.boxes if box.kind.startswith("draft-")} == {"draft-0", "draft-1"}
    assert {"draft step of smollm2-135m", "draft step of look-up"} <= set(words_of(picture))


@pytest.mark.parametrize(("from_ms", "to_ms"), [(None, None), (250, 420), (0, 1), (1500, 9000)])
def test_nothing_is_drawn_outside_the_window(from_ms: float | None, to_ms: float | None) -> None:
    picture = picture_of(example_recording(), from_ms, to_ms)
    right = picture.width - RIGHT_PX
    shapes = [box for box in picture.boxes if box.tip] + [box for box in picture.boxes if box.kind == "network"]
    for box in shapes:
        assert LEFT_PX <= box.x <= box.x + box.width <= right + 1.3
    for line in picture.lines:
        if line.tip or line.kind == "grid":
            assert LEFT_PX <= line.x1 <= line.x2 <= right + 0.01
    for label in picture.labels:
        assert 0 < label.y < picture.height


def test_texts_do_not_lie_upon_each_other_and_stay_in_the_picture() -> None:
    trace = Trace()
    for number in range(40):
        at_s = 1 + number * 0.03
        trace.commit_received(
            at_s, number, [1], 0, step_us=100, queue_us=0, round_trip_s=0.0, seen_node=0, text="想" * number
        )
    picture = picture_of(recording_of(trace))
    texts = [label for label in picture.labels if label.kind == "text"]
    assert len({label.y for label in texts}) == TEXT_ROWS
    for row in {label.y for label in texts}:
        ends = [(label.x, label.x + text_px(label.text)) for label in texts if label.y == row]
        assert all(first[1] < second[0] for first, second in pairwise(ends))
    assert all(label.x + text_px(label.text) < picture.width for label in texts)
    assert all(len(label.text) <= LONGEST_TEXT for label in texts)


@pytest.mark.parametrize("length_ms", [0.001, 0.7, 3, 99, 100, 2000, 12_345, 7e6])
def test_ticks_are_round_and_neither_crowded_nor_rare(length_ms: float) -> None:
    step_ms = tick_step(length_ms, 1000)
    assert TICK_PX * 0.999 <= step_ms / length_ms * 1000 <= TICK_PX * 2.51
    digits = f"{step_ms:e}"
    assert digits[0] in "125"
    assert set(digits[2:8]) == {"0"}


def test_a_line_is_cut_where_it_leaves_the_window() -> None:
    assert cut_line((0, 0), (100, 50), 20, 60) == ((20, 10), (60, 30))
    assert cut_line((0, 0), (10, 50), 20, 60) is None
    assert cut_line((70, 0), (80, 50), 20, 60) is None
    assert cut_line((30, 50), (30, 0), 20, 60) == ((30, 50), (30, 0))


def test_ends_of_lines_are_shown_as_signs() -> None:
    assert visible("a\r\nb\nc\td\r") == "a↵b↵c→d↵"


# ---------------------------------------------------------------- the document


def test_hostile_text_is_shown_and_never_obeyed() -> None:
    trace = Trace()
    trace.state(1.0, HOSTILE, HOSTILE)
    trace.drafted(1.0, 1.3, 0, 1, HOSTILE)
    trace.commit_received(1.2, 0, [1], 0, step_us=9000, queue_us=0, round_trip_s=0.1, seen_node=0, text=HOSTILE)
    document = draw(picture_of(recording_of(trace)), HOSTILE)
    root = ET.fromstring(document.encode("utf-8"))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "rect", "line", "text"}
    texts = [
        element.text
        for element in root.iter(f"{SVG}text")
        if element.get("{http://www.w3.org/XML/1998/namespace}space")
    ]
    assert "</text><script>alert(1)</script>&amp;\"'\ufffd\ufffd\ufffd\ufffd]]>↵" in "\n".join(t or "" for t in texts)


def test_the_document_shows_all_that_the_layout_placed() -> None:
    picture = picture_of(example_recording())
    root = ET.fromstring(draw(picture, "an example"))
    count = {tag: sum(1 for _ in root.iter(f"{SVG}{tag}")) for tag in ("rect", "line", "text")}
    labelled = sum(bool(box.label) for box in picture.boxes)
    assert count == {
        "rect": len(picture.boxes) + 1,
        "line": len(picture.lines),
        "text": len(picture.labels) + labelled,
    }
    assert root.findtext(f"{SVG}title") == "an example"


# ---------------------------------------------------------------- files that are no traces


def change(path: tuple[str | int, ...], value: object) -> Callable[[Any], None]:
    """Sets one value in a document."""

    def apply(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return apply


def first(document: Any, category: str) -> Any:
    return next(event for event in document["traceEvents"] if event.get("cat") == category)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (change(("traceEvents",), None), "no list traceEvents"),
        (change(("otherData",), None), "not recorded by edge-client"),
        (change(("otherData", "format"), "catapult"), "not recorded by edge-client"),
        (change(("otherData", "format_version"), 2), "format_version 2 is not known"),
        (change(("otherData", "dropped_events"), -1), "otherData.dropped_events must be a whole number from 0, is -1"),
        (change(("traceEvents", 3), 7), r"traceEvents\[3\] is not an object"),
        (lambda d: first(d, "draft").pop("ts"), r"\]\.ts must be a number from 0, is missing"),
        (lambda d: first(d, "step").update(ts=math.nan), r"\]\.ts must be a number from 0, is nan"),
        (lambda d: first(d, "step").update(dur=math.inf), r"\]\.dur must be a number from 0, is inf"),
        (lambda d: first(d, "step").update(dur=10**300), r"\]\.dur must be a number from 0, is 1000"),
        (lambda d: first(d, "hint").update(dur=True), r"\]\.dur must be a number from 0, is True"),
        (lambda d: first(d, "hint").update(cat="love"), r"\]\.cat 'love' is not known"),
        (lambda d: first(d, "hint").update(args=[]), r"\]\.args must be an object"),
        (lambda d: first(d, "hint")["args"].update(nodes=1.5), r"args\.nodes must be a whole number"),
        (lambda d: first(d, "commit")["args"].update(ids=[1, "2"]), r"args\.ids must be a list of whole numbers"),
        (lambda d: first(d, "commit")["args"].update(text=None), r"args\.text must be text"),
        (lambda d: first(d, "state").update(name=3), r"\]\.name must be text"),
    ],
)
def test_what_is_wrong_in_a_trace_is_said_with_the_name_of_the_file(
    tmp_path: Path, spoil: Callable[[Any], object], says: str
) -> None:
    trace, path = Trace(), tmp_path / "spoilt.json"
    example(trace)
    document = json.loads(json.dumps(trace.document()))
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=says) as raised:
        read_trace(path)
    assert raised.value.message.startswith(f"{path} is not a trace: ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\xff",
        b"[" * 100_000,
        b"[]",
        b"7",
        b'"traceEvents"',
        b'{"traceEvents": 9' + b"9" * 5000 + b"}",
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a trace") as raised:
        read_trace(path)
    assert raised.value.message.startswith(str(path))


def test_events_that_other_tools_added_without_a_span_are_passed_over() -> None:
    trace = Trace()
    example(trace)
    document: Any = json.loads(json.dumps(trace.document()))
    document["traceEvents"].append({"ph": "C", "name": "memory"})
    assert parse_trace(document) == recording_of(trace)


# ---------------------------------------------------------------- the command


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    trace = Trace()
    example(trace)
    trace.write(tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_the_command_draws_beside_the_trace_and_prints_where(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(trace_file)]) == 0
    out = trace_file.with_suffix(".svg")
    assert capsys.readouterr().out == f"{out}\n"
    assert ET.parse(out).getroot().tag == f"{SVG}svg"


def test_the_command_draws_the_part_and_the_file_it_is_told(trace_file: Path) -> None:
    out = trace_file.with_name("part.svg")
    assert main(["timeline", str(trace_file), "--from", "100", "--to", "400.5", "--out", str(out)]) == 0
    assert "showing 100 to 400 ms" in out.read_text(encoding="utf-8")
    assert not trace_file.with_suffix(".svg").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{dir}/none.json"], "none.json cannot be read: No such file"),
        (["{dir}"], "cannot be read: Is a directory"),
        (["{file}", "--from", "900000"], "--from 900000 is past the end"),
        (["{file}", "--from", "nan"], "--from must be a number of milliseconds"),
        (["{file}", "--from", "50", "--to", "50"], "--to 50 must be larger than --from 50"),
        (["{file}", "--out", "{file}"], "is the trace itself"),
        (["{file}", "--out", "{dir}/no/where.svg"], "where.svg cannot be written: No such file"),
        (["{file}", "--out", "{dir}"], "cannot be written"),
    ],
)
def test_a_wrong_argument_or_file_is_told_in_a_line(
    trace_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    before = trace_file.read_bytes()
    given = [argument.format(dir=trace_file.parent, file=trace_file) for argument in arguments]
    assert main(["timeline", *given]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("edge-client: ")
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert [path.name for path in trace_file.parent.iterdir()] == ["trace.json"]
    assert trace_file.read_bytes() == before


def test_a_window_that_is_no_number_is_a_usage_error(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["timeline", str(trace_file), "--from", "soon"])
    assert exited.value.code == 2
    assert "--from" in capsys.readouterr().err
