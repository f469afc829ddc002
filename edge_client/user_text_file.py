"""A file of the user's own text, for this user's eyes only (mode 0600): whole or as it was, whoever else writes it.

Must not know: clients, drafting. Called by programs and by the command line, which fill `UserText` from it.
It holds text, not ids, so it outlives a change of models: a line of JSON with the SHA-256 of the rest, then one JSON
string a text, the oldest first. An empty file is one without texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from shared.errors import ConfigError

MAX_FILE_BYTES = 64 * 2**20
"""A larger file is not read, and none is written."""
LOCK_WAIT_S = 5
"""So long another process may keep the file locked; a write takes some milliseconds."""
_LOCK_POLL_S = 0.01
_FORMAT = 1
_BEGINNING = b'{"draftwire user text": '


class Encoder(Protocol):
    """What tells how much room a text takes; see TextTokenizer."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of ids."""
        ...


class UserTextFile:
    """Not for several threads at once; other processes may use the same file meanwhile, and lose nothing."""

    def __init__(self, path: Path, option: str = "") -> None:
        """`option`: what the user named the file with, for messages. A link is followed. Raises: ConfigError."""
        self._field = option or "path"
        self._called = f"{option} {path}".strip()
        self._lengths: dict[str, int] = {}
        """Ids of each text that was written."""
        with self._failures_named():
            self.path = Path(os.path.realpath(path))

    def exists(self) -> bool:
        """Whether there is a file. Raises: ConfigError if that cannot be told."""
        with self._failures_named():
            try:
                self.path.stat()
            except FileNotFoundError:
                return False
            return True

    def texts(self) -> list[str]:
        """What is remembered, the oldest first; nothing if there is no file.

        Raises: ConfigError if it cannot be read, is no such file, of another version, too large, or damaged.
        """
        with self._failures_named():
            try:
                self._check_regular(self.path.stat())
                with self.path.open("rb") as file:
                    content = file.read(MAX_FILE_BYTES + 1)
            except FileNotFoundError:
                return []
            return self._decoded(content)

    def add(self, texts: Sequence[str], tokenizer: Encoder, max_tokens: int) -> None:
        """Adds finished texts to what the file holds by now. A text that is there already becomes the newest.

        Kept are the newest that take `max_tokens` by this tokenizer, one more counted for each text; of a text that is
        larger than that, the end. Always with the same tokenizer.
        Waits LOCK_WAIT_S at most for other processes.
        Raises: ConfigError as `texts`, or if it cannot be written; then it is as it was.
        """
        with self._failures_named(), self._locked():
            held = dict.fromkeys(self.texts())
            for text in texts:
                clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
                held.pop(clean, None)
                held[clean] = None
            kept = self._newest([text for text in held if text], tokenizer, max_tokens)
            self._write(_encoded(kept))

    def clear(self) -> None:
        """Forgets everything: the file is gone, a damaged one too.

        Raises: ConfigError if there is none, or what is there is no such file; that is left alone.
        """
        with self._failures_named():
            if not self.exists():
                self._refuse("there is no such file")
            with self._locked():
                with self.path.open("rb") as file:
                    if file.read(len(_BEGINNING)) not in (b"", _BEGINNING):
                        self._refuse("not a file of a user's text: it is left alone")
                self._staged.unlink(missing_ok=True)
                self.path.unlink()

    def check_usable(self) -> None:
        """Passes a file that can be read and written, or made. Raises: ConfigError."""
        with self._failures_named():
            self.texts()
            if not self.path.parent.is_dir():
                self._refuse(f"there is no folder {self.path.parent}")
            if not os.access(self.path.parent, os.W_OK) or (self.path.exists() and not os.access(self.path, os.W_OK)):
                self._refuse("it cannot be written")

    # ------------------------------------------------------------ bounds

    def _newest(self, texts: Sequence[str], tokenizer: Encoder, max_tokens: int) -> list[str]:
        lengths: dict[str, int] = {}
        tokens, size_bytes = 0, len(_encoded([]))
        for text in reversed(texts):
            if not lengths:
                text = _ending(text, tokenizer, max_tokens - 1)
            if not text:
                continue
            length = self._lengths[text] if text in self._lengths else len(tokenizer.encode(text))
            tokens += length + 1
            size_bytes += len(_line(text))
            if tokens > max_tokens or size_bytes > MAX_FILE_BYTES:
                break
            lengths[text] = length
        self._lengths = lengths
        return list(lengths)[::-1]

    # ------------------------------------------------------------ the file

    @property
    def _staged(self) -> Path:
        return self.path.with_name(f".{self.path.name}.new")

    def _write(self, content: bytes) -> None:
        """(locked) Writes all at once or not at all."""
        self._staged.unlink(missing_ok=True)  # of a process that died
        try:
            descriptor = os.open(self._staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            os.replace(self._staged, self.path)
        finally:
            self._staged.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other processes out, by a lock on the file itself, which is made empty if it is not there.

        A file that another process has replaced or removed while this one waited is not the file any more: once more.
        """
        try:
            import fcntl
        except ImportError:
            self._refuse("files of a user's text can be locked on Linux and macOS only")
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            descriptor, is_made = self._opened()
            try:
                self._check_regular(os.fstat(descriptor))
                is_held = False
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_held = _is_still(descriptor, self.path)
                if is_held:
                    try:
                        yield
                    finally:
                        if is_made and _is_still(descriptor, self.path):
                            self.path.unlink()  # nothing came of it
                    return
            finally:
                os.close(descriptor)
            if time.monotonic() > until:
                self._refuse(f"another process has kept it locked for {LOCK_WAIT_S} seconds")
            time.sleep(_LOCK_POLL_S)

    def _opened(self) -> tuple[int, bool]:
        """A descriptor of the file, and whether that made it."""
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), False

    def _decoded(self, content: bytes) -> list[str]:
        if not content:
            return []
        if not content.startswith(_BEGINNING):
            self._refuse("not a file of a user's text")
        if len(content) > MAX_FILE_BYTES:
            self._refuse(f"larger than {MAX_FILE_BYTES} bytes")
        first, _, rest = content.partition(b"\n")
        try:
            head = json.loads(first)
            written, digest = head["draftwire user text"], head["sha256"]
        except (ValueError, KeyError, TypeError, RecursionError):
            self._refuse_damaged()
        if written != _FORMAT:
            self._refuse(f"of format {written}, this version reads {_FORMAT}")
        if hashlib.sha256(rest).hexdigest() != digest:
            self._refuse_damaged()
        try:
            return [str(json.loads(line)) for line in rest.splitlines()]
        except (ValueError, RecursionError):  # whole, but not of our making
            self._refuse_damaged()

    # ------------------------------------------------------------ errors

    def _check_regular(self, found: os.stat_result) -> None:
        """A device or a pipe would be replaced by a file, or read for ever."""
        if not stat.S_ISREG(found.st_mode):
            self._refuse("a folder, not a file" if stat.S_ISDIR(found.st_mode) else "not a file that can be replaced")

    def _refuse_damaged(self) -> NoReturn:
        self._refuse(f"damaged; it is left as it is, `edge-client user-text clear {self.path}` removes it")

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self._called}: {reason}", field=self._field)

    @contextlib.contextmanager
    def _failures_named(self) -> Iterator[None]:
        """A file that cannot be read or written is a ConfigError that names it."""
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise ConfigError(
                f"{self._called}: {getattr(error, 'strerror', None) or error}", field=self._field
            ) from error


def _ending(text: str, tokenizer: Encoder, most: int) -> str:
    """The text, or its last `most` ids' worth without a character that the cut went through."""
    room = most
    while len(ids := tokenizer.encode(text)) > most:
        tail = tokenizer.decode(ids[len(ids) - room :], skip_special=False)
        text = tail if text.endswith(tail) else tail.lstrip("\ufffd")
        room -= 1  # what is left may take more ids than it did within the whole
    return text


def _line(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode() + b"\n"


def _encoded(texts: Sequence[str]) -> bytes:
    rest = b"".join(map(_line, texts))
    head = b'%s%d, "sha256": "%s"}\n' % (_BEGINNING, _FORMAT, hashlib.sha256(rest).hexdigest().encode())
    return head + rest


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
