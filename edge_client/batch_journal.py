"""A batch's journal: the texts that are done, kept beside the output until all are.

Must not know: the client, the wire, clocks. Called by `batch`. The first row says what decides the texts, each other
row holds one. Rows are flushed as they come, so a killed run leaves at most its last row torn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from edge_client.batch_files import Line, Settings, failures_named, json_line, listed, short
from shared.errors import ConfigError

FORMAT = 1
START = b'{"draftwire_batch"'
RESULT_FIELDS = frozenset({"text", "finish_reason", "context_tokens", "generated_tokens"})


class Journal:
    """The texts that are done, each written as it comes. Held by one process at a time."""

    def __init__(self, path: Path, settings: Settings, lines: Sequence[Line], now: datetime, *, anew: bool) -> None:
        """Takes up the journal at `path`, or begins it at the time `now`; `anew` forgets what it holds.

        Raises: ConfigError when it is another run's (naming what differs), damaged, or held by another process.
        """
        self.path = path
        self.began = now
        """What the run takes for the time, however often it is taken up: templates may ask for the date."""
        self.results: dict[int, dict[str, Any]] = {}
        self._described = settings.described()
        with failures_named(path):
            self._file = path.open("a+b")
        try:
            with failures_named(path):
                _lock(self._file, path)
                self._file.seek(0)
                content = self._file.read()
                _check_is_journal(content, path)
                if anew:
                    self._file.truncate(0)
                self._take_up(b"" if anew else content, lines)
        except BaseException:
            self.close()
            raise

    def _take_up(self, content: bytes, lines: Sequence[Line]) -> None:
        rows, length = whole_rows(content, self.path)
        self._file.truncate(length)
        if not rows:
            header = {"draftwire_batch": FORMAT, "began": self.began.isoformat(), "settings": self._described}
            self._append(header)
            return
        self.began = _checked_header(rows[0], self._described, self.path)
        for place, row in enumerate(rows[1:], start=2):
            index, result = row.get("index"), row.get("result")
            if not isinstance(index, int) or not isinstance(result, dict) or result.keys() != RESULT_FIELDS:
                raise _damaged(self.path, place)
            if not 0 <= index < len(lines) or row.get("digest") != self._digest(lines[index]):
                where = f"line {lines[index].number}" if 0 <= index < len(lines) else f"prompt {index}"
                raise ConfigError(
                    f"{self.path} was written for another input: {where} has changed; --restart begins anew", field="in"
                )
            self.results[index] = result

    def add(self, line: Line, result: Mapping[str, Any]) -> None:
        """One text is done. Raises: ConfigError if it cannot be written."""
        with failures_named(self.path):
            self._append({"index": line.index, "digest": self._digest(line), "result": dict(result)})
        self.results[line.index] = dict(result)

    def remove(self) -> None:
        """The output is written."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the file, for another process to take up."""
        self._file.close()

    def _append(self, row: Mapping[str, Any]) -> None:
        self._file.write(json_line(row))
        self._file.flush()

    def _digest(self, line: Line) -> str:
        """Of what decides one text."""
        decisive = json.dumps([self._described, line.index], sort_keys=True).encode() + b"\n" + line.source
        return hashlib.sha256(decisive).hexdigest()[:32]


def whole_rows(content: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """A journal's rows, and how many bytes they take: a last row that a kill has torn is not among them."""
    *ended, _ = content.split(b"\n")
    rows: list[dict[str, Any]] = []
    for place, line in enumerate(ended, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif place < len(ended):
            raise _damaged(path, place)
    return rows, sum(len(line) + 1 for line in ended[: len(rows)])


def _checked_header(header: Mapping[str, Any], described: Mapping[str, Any], path: Path) -> datetime:
    then, began = header.get("settings"), header.get("began")
    if header.get("draftwire_batch") != FORMAT or not isinstance(then, dict) or not isinstance(began, str):
        raise ConfigError(f"{path} is not of this version; --restart begins anew", field="out")
    names = [*described, *(name for name in then if name not in described)]
    differing = [name for name in names if then.get(name) != described.get(name)]
    if differing:
        told = [f"{name} was {short(then.get(name))}, is {short(described.get(name))}" for name in differing]
        raise ConfigError(
            f"{path} was written with other settings: {listed(told)}; --restart begins anew", field=differing[0]
        )
    try:
        return datetime.fromisoformat(began)
    except ValueError as error:
        raise _damaged(path, 1) from error


def _damaged(path: Path, place: int) -> ConfigError:
    return ConfigError(f"{path}: line {place} is damaged; --restart begins anew", field="out")


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{path}: another batch is writing it", field="out") from error


def _check_is_journal(content: bytes, path: Path) -> None:
    """Whatever else has that name is not touched. Raises: ConfigError."""
    if content[: len(START)] != START[: len(content)]:
        raise ConfigError(f"{path} is no journal of a batch: move it away", field="out")
