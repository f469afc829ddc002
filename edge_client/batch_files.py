"""A batch's files: prompts in, what decides their texts, and the texts out in the order of the prompts.

Must not know: the wire, clocks, how texts are written. Called by `batch` and `batch_journal`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.chat_template import ChatTemplate
from edge_client.request_checks import MAX_STOPS
from shared.errors import ConfigError
from shared.sampling import SamplingParams

MAX_LISTED = 10
"""Bad lines named at most, and differing settings."""
SAMPLING_FIELDS = tuple(each.name for each in dataclasses.fields(SamplingParams))
PROMPT_FIELDS = ("prompt", "messages", "turns")
ID_FIELDS = ("id", "task_id", "question_id")
"""The last two as HumanEval and Spec-Bench name it."""

_SHAPE_OF_MESSAGES = ChatTemplate("", {})
"""Renders nothing, and refuses what no template could render."""


@dataclass(frozen=True)
class Line:
    """One prompt, and what its line says about its own text."""

    index: int
    """Among the prompts, from 0."""
    number: int
    """Of the line in the file, from 1: blank lines count."""
    source: bytes
    id: str | int
    prompt: str | list[dict[str, Any]]
    sampling: dict[str, Any] = field(default_factory=dict)
    """The sampling parameters that the line gives; the others are the run's."""
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Settings:
    """What decides all texts of a run, beside their lines. Drafts are not in it: they change no text."""

    target: str
    target_id: str
    chat_template: str
    """A digest of it and of its special tokens."""
    stop_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    seed: int
    rule: str
    stop: tuple[str, ...] = ()
    system: str = ""
    raw: bool = False

    def described(self) -> dict[str, Any]:
        """By name, as JSON gives it back."""
        named = dataclasses.asdict(self)
        named |= named.pop("sampling")
        return dict(json.loads(json.dumps(named)))

    def seed_of(self, line: Line) -> int:
        """The line's own, or one that depends on the run's seed and the line's index alone."""
        if line.seed is not None:
            return line.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{line.index}".encode()).digest()[:8])

    def sampling_of(self, line: Line) -> SamplingParams:
        """The run's parameters, with what the line says instead."""
        return dataclasses.replace(self.sampling, **line.sampling)


# ---------------------------------------------------------------- prompts in


def read_lines(path: Path, *, is_raw: bool = False) -> list[Line]:
    """The prompts of a file. Raises: ConfigError that lists every bad line, if it is not too many."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="in") from error
    try:
        return parse_lines(content, is_raw=is_raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", field=error.field) from error


def parse_lines(content: bytes, *, is_raw: bool = False) -> list[Line]:
    """JSON lines as prompts; blank lines are passed over. `is_raw`: chats are refused. Raises: ConfigError."""
    lines: list[Line] = []
    problems: list[str] = []
    for number, row in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if source := row.strip():
            try:
                lines.append(_parsed(source, len(lines), number, is_raw))
            except ConfigError as error:
                problems.append(f"line {number}: {error.message}")
    if problems:
        raise ConfigError(listed(problems), field="in")
    if not lines:
        raise ConfigError("there is no prompt in it", field="in")
    return lines


def _parsed(source: bytes, index: int, number: int, is_raw: bool) -> Line:
    try:
        content = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("must be a JSON object")
    given = {name: value for name, value in content.items() if value is not None}
    if "max_tokens" in given:
        raise ConfigError("max_tokens: the field is max_new_tokens", field="max_tokens")
    return Line(
        index,
        number,
        source,
        _id_of(given, index),
        _prompt_of(given, is_raw),
        _sampling_of(given),
        _whole(given, "max_new_tokens", 1, 2**31 - 1),
        _whole(given, "seed", 0, 2**64 - 1),
        _stops_of(given),
    )


def _id_of(given: Mapping[str, Any], index: int) -> str | int:
    name = next((name for name in ID_FIELDS if name in given), "")
    value = given.get(name, index)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{name} must be a string or a whole number, got {short(value)}", field=name)
    return value


def _prompt_of(given: Mapping[str, Any], is_raw: bool) -> str | list[dict[str, Any]]:
    named = [name for name in PROMPT_FIELDS if name in given] or [name for name in ("question",) if name in given]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are given: which is the prompt?", field=named[1])
    if not named:
        raise ConfigError("prompt is missing (or messages, turns, question)", field="prompt")
    (name,) = named
    value = given[name]
    if name == "messages":
        if is_raw:
            raise ConfigError("messages need the chat template: leave out --raw", field=name)
        _SHAPE_OF_MESSAGES.render(value)
        return list(value)
    if name == "turns":
        if not isinstance(value, list) or not value:
            raise ConfigError(f"turns must be a list of strings, got {short(value)}", field=name)
        name, value = "turns[0]", value[0]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a string that is not empty, got {short(value)}", field=name)
    return value


def _sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    biases = sampling.get("logit_bias")
    if isinstance(biases, dict):  # the keys of a JSON object are strings
        sampling["logit_bias"] = {int(key) if key.isdecimal() else key: bias for key, bias in biases.items()}
    SamplingParams(**sampling)
    return sampling


def _whole(given: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = given.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        return value
    raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {short(value)}", field=name)


def _stops_of(given: Mapping[str, Any]) -> tuple[str, ...] | None:
    value = given.get("stop")
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    is_good = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not is_good or len(stops) > MAX_STOPS:
        raise ConfigError(f"stop must be at most {MAX_STOPS} strings that are not empty, got {short(value)}")
    return tuple(stops)


# ---------------------------------------------------------------- texts out


def check_output(path: Path, source: Path, *, is_forced: bool) -> None:
    """Raises: ConfigError if the output cannot be written there, or is there already and not to be replaced."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}", field="out")
    if not path.exists():
        return
    if not path.is_file() or path.samefile(source):
        raise ConfigError(f"{path}: the texts cannot go there", field="out")
    if not is_forced:
        raise ConfigError(f"{path} is there already; --force replaces it", field="out")


def write_output(path: Path, lines: Iterable[Line], results: Mapping[int, Mapping[str, Any]]) -> None:
    """All results in the order of the prompts; the file is whole or not there. Raises: ConfigError."""
    fresh = path.with_name(f"{path.name}.new")
    with failures_named(path):
        with fresh.open("wb") as file:
            for line in lines:
                file.write(json_line({"id": line.id, **results[line.index]}))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line of UTF-8; a lone surrogate, which UTF-8 cannot hold, as JSON escapes it."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


@contextmanager
def failures_named(path: Path) -> Iterator[None]:
    """A file that cannot be read or written is a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field="out") from error


def listed(items: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return "; ".join(items[:MAX_LISTED]) + more


def short(value: object) -> str:
    """A JSON value, for an error of one line."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."
