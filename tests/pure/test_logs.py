"""Log lines: one event a line whatever is in it, readable back, and without what must not be told."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_verifier.logs import MOST_VALUE_CHARS, configure, event, short_id

log = logging.getLogger("draftwire.test")

HOSTILE = "ok\n2026-01-01T00:00:00.000Z ERROR draftwire.engine forged x=1\r\x1b[31m\u2028\x85\x00 \ud800"


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(*, format: str = "text", verbose: bool = True) -> io.StringIO:
    stream = io.StringIO()
    configure(verbose, format, stream)  # type: ignore[arg-type]
    return stream


def test_an_event_is_a_logfmt_line_with_its_session() -> None:
    out = logged()
    session = short_id(b"\x01" * 16)
    event(log, logging.INFO, "session_opened", session=session, principal="a b", context_tokens=12, is_new=True)
    stamp, rest = out.getvalue().split(" ", 1)
    assert stamp[10] == "T"
    assert stamp.endswith("Z")
    assert rest == (
        f'INFO draftwire.test session_opened session={session} principal="a b" context_tokens=12 is_new=true\n'
    )


def test_an_event_is_a_json_object_with_its_fields_beside_the_others() -> None:
    out = logged(format="json")
    event(
        log, logging.WARNING, "session_ended", session="ab12cd34", reason="lease", seconds=0.5, level="mine", gone=None
    )
    line = json.loads(out.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "WARNING",
        "logger": "draftwire.test",
        "event": "session_ended",
        "session": "ab12cd34",
        "reason": "lease",
        "seconds": 0.5,
        "level_": "mine",
        "gone": None,
    }


@pytest.mark.parametrize("format", ["text", "json"])
def test_nothing_in_a_value_a_message_or_an_error_begins_another_line(format: str) -> None:
    out = logged(format=format)
    event(log, logging.INFO, "refused", principal=HOSTILE)
    log.info("stream ends: %s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    lines = out.getvalue().splitlines()
    records = [line for line in lines if not line.startswith("  | ")]
    assert len(records) == 3
    assert all(line.isprintable() for line in lines)
    assert "forged" in out.getvalue()
    if format == "json":
        parsed = [json.loads(line) for line in lines]
        assert parsed[0]["principal"] == HOSTILE
        assert parsed[1]["message"] == f"stream ends: {HOSTILE}"
        assert "ValueError" in parsed[2]["exception"]
    else:
        assert records[0].count("ERROR") == 1
        assert len(lines) > 3


@given(value=st.text(max_size=60))
def test_a_text_value_reads_back_as_it_was(value: str) -> None:
    out = logged()
    event(log, logging.INFO, "happened", value=value, after=1)
    line = out.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    shown = line[:-1].split("value=", 1)[1].removesuffix(" after=1")
    if shown.startswith('"'):
        assert shown[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape") == value
    else:
        assert shown == value
        assert shown
        assert not set(shown) & set(' "=\\')


def test_ids_arrays_and_bytes_are_named_and_not_shown() -> None:
    out = logged()
    event(log, logging.INFO, "slip", ids=[17, 4711], key=b"secret", text="x" * 10_000)  # type: ignore[arg-type]
    line = out.getvalue()
    assert "ids=<list> key=<bytes>" in line
    assert "4711" not in line
    assert "secret" not in line
    assert len(line) < MOST_VALUE_CHARS + 200


def test_a_number_that_is_none_is_still_json() -> None:
    out = logged(format="json")
    event(log, logging.INFO, "measured", speed=float("nan"), most=float("inf"))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(out.getvalue(), parse_constant=refuse)["speed"] == "nan"


def test_a_session_in_a_log_cannot_be_resumed_with() -> None:
    session_id = bytes(range(16))
    assert short_id(session_id) == "be45cb26"
    assert short_id(session_id) not in session_id.hex()
    assert short_id(bytes(16)) != short_id(session_id)


def test_without_verbose_only_warnings_are_told_and_a_second_call_replaces_the_first() -> None:
    first = logged()
    second = logged(verbose=False)
    event(log, logging.INFO, "quiet")
    event(log, logging.WARNING, "loud", n=1)
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
    assert second.getvalue().endswith("WARNING draftwire.test loud n=1\n")


def test_an_event_nobody_listens_to_costs_no_formatting() -> None:
    logged(verbose=False)

    class Explosive(str):
        def __len__(self) -> int:
            raise AssertionError("formatted")

    event(log, logging.INFO, "quiet", value=Explosive("x"))
    with pytest.raises(AssertionError, match="formatted"):
        event(log, logging.WARNING, "loud", value=Explosive("x"))


def test_the_caller_is_the_one_who_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="draftwire.test"):
        event(log, logging.INFO, "happened", n=1)
    assert caplog.records[0].filename == "test_logs.py"
    assert caplog.records[0].getMessage() == "happened n=1"
