"""Structured logs: one event a line, as text (logfmt) or JSON, on stderr.

Must not know: what the events mean. Called wherever the verifier logs, set up by `cli`. Never in a log: texts, token
ids, session ids (bearer secrets: `short_id` stands for them), keys. Nothing in a value can begin another line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

Value = str | int | float | bool | None
"""What a field may hold. Anything else (ids, arrays, bytes) is named by its type and not shown."""

MOST_VALUE_CHARS = 500
OWN_KEYS = ("time", "level", "logger", "event", "message", "exception")
"""Keys of a JSON line that a field of the same name does not take: it gets a _ behind it."""


def short_id(session_id: bytes) -> str:
    """What stands for a session in logs: nobody can resume with it."""
    return hashlib.sha256(session_id).hexdigest()[:8]


def event(log: logging.Logger, level: int, name: str, /, **fields: Value) -> None:
    """Logs that `name` happened, with what belongs to it: event(log, INFO, "session_opened", session=short_id(id))."""
    if log.isEnabledFor(level):
        log.log(level, Event(name, fields), stacklevel=2)


class Event:
    """A log message made of fields; its text is logfmt, so that it reads well under any handler."""

    def __init__(self, name: str, fields: dict[str, Value]) -> None:
        self.name, self.fields = name, {key: _shown(value) for key, value in fields.items()}

    def __str__(self) -> str:
        return " ".join((escaped(self.name), *(f"{key}={_logfmt(value)}" for key, value in self.fields.items())))


def configure(verbose: bool, format: Literal["text", "json"] = "text", stream: TextIO | None = None) -> None:
    """Sets the root logger up: INFO and above if `verbose`, else WARNING, on stderr. A second call replaces the first.

    Units: times are UTC.
    """
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(logging.INFO if verbose else logging.WARNING)


class _Handler(logging.StreamHandler[TextIO]):
    """Known as ours by its class."""


class TextFormatter(logging.Formatter):
    """`2026-01-02T03:04:05.678Z INFO draftwire.engine session_opened session=ab12cd34`; tracebacks indented below."""

    def format(self, record: logging.LogRecord) -> str:
        """One record; only a traceback takes more than one line, and none of its lines looks like a record."""
        head = f"{_time_of(record)} {record.levelname} {record.name} {_message_of(record)}"
        return "\n".join((head, *(f"  | {escaped(line)}" for line in self._trace_of(record).splitlines())))

    def _trace_of(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n".join(part for part in (trace, record.stack_info) if part)


class JsonFormatter(TextFormatter):
    """One JSON object a line, whatever is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """Fields stand beside time, level, logger and event; other messages under `message`."""
        line: dict[str, Value] = {"time": _time_of(record), "level": record.levelname, "logger": record.name}
        if isinstance(record.msg, Event):
            line["event"] = record.msg.name
            line |= {f"{key}_" if key in OWN_KEYS else key: value for key, value in record.msg.fields.items()}
        else:
            line["message"] = record.getMessage()
        if trace := self._trace_of(record):
            line["exception"] = trace
        return json.dumps(line)


def escaped(text: str) -> str:
    """The text on one line: what does not print, line ends and escape sequences included, as a backslash code."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message_of(record: logging.LogRecord) -> str:
    return str(record.msg) if isinstance(record.msg, Event) else escaped(record.getMessage())


def _shown(value: object) -> Value:
    if isinstance(value, str):
        return value if len(value) <= MOST_VALUE_CHARS else f"{value[:MOST_VALUE_CHARS]}…"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return f"<{type(value).__name__}>"


def _logfmt(value: Value) -> str:
    """Quoted if it holds what separates: spaces, quotes, =, backslashes, or anything that does not print."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and text.isprintable() and not set(text) & set(' "=\\'):
        return text
    return '"' + escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
