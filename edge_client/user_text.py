"""What the user accepted in finished texts, as ids, kept on the device for drafting and in no other place.

Must not know: drafting, sessions, wire. Filled by whoever owns the user's texts; read by `retrieval`.
It is bounded: the oldest texts make room. A file of it, if there is one, is for this user's eyes only (mode 0600).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from edge_client.suffix_index import MAX_ID, Continuation, SuffixIndex
from shared.errors import ConfigError

DEFAULT_MAX_TOKENS = 65_536
GROUPS = (3, 6)
"""Group lengths of its index; see SuffixIndex."""
_BETWEEN = -1
"""Stands after each text: no match and no continuation goes over it."""
_MAGIC = b"draftwire user text\x00"
_FORMAT = 1
_HEADER = struct.Struct("<H32sI")
"""Format, SHA-256 of the vocabulary digest, number of texts; lengths and ids follow, uint32 little-endian, last SHA-256
of all before it."""
_CHECKSUM_BYTES = 32
MAX_FILE_BYTES = 64 * 2**20
"""A larger file is not read."""


class UserText:
    """Finished texts of one user in one vocabulary. May be used from many threads."""

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        """`max_tokens`: kept at most, about 16 bytes each, with one more for each text. Raises: ConfigError."""
        if max_tokens < 2:
            raise ConfigError(f"max_tokens must be at least 2, got {max_tokens}", field="max_tokens")
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._held = _Texts(max_tokens)

    def __len__(self) -> int:
        """Tokens held, with one more for each text."""
        with self._lock:
            return self._held.tokens

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        with self._lock:
            return self._held.index.size_bytes

    def texts(self) -> list[list[int]]:
        """All that is held, the oldest first."""
        with self._lock:
            return self._held.texts()

    def add(self, ids: Sequence[int]) -> None:
        """Takes one finished text. The oldest texts go if there is no room; of one that is too long the end is kept."""
        with self._lock:
            self._held.add(ids)

    def clear(self) -> None:
        """Forgets everything held; a saved file stays where it is."""
        empty = _Texts(self._max_tokens)
        with self._lock:
            self._held = empty

    def find(self, tail: Sequence[int], depth: int, shortest: int, most: int) -> list[Continuation]:
        """Up to `depth` ids that followed where the last ids of `tail` stood; see SuffixIndex.find."""
        with self._lock:
            return self._held.find(tail, depth, shortest, most)

    # ------------------------------------------------------------ the file

    def save(self, path: Path, vocabulary: bytes) -> None:
        """Writes all at once or not at all. `vocabulary`: digest of what the ids mean. Raises: ConfigError."""
        content = _encoded(self.texts(), vocabulary)
        with _failures_named(path), _staged(path) as (file, staged):
            with os.fdopen(file, "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            os.replace(staged, path)

    def load(self, path: Path, vocabulary: bytes) -> None:
        """Holds what was saved, in place of what it held. Raises: ConfigError if it was not saved by this version, for
        this vocabulary, or not whole; then nothing changes. A missing file is one too: ask `path.exists()`.
        """
        with _failures_named(path), path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        loaded = _Texts(self._max_tokens)
        for text in _decoded(content, vocabulary, path):
            loaded.add(text)
        with self._lock:
            self._held = loaded


class _Texts:
    """The texts one behind the other in an index. Not for several threads."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._starts: deque[int] = deque()
        self.index = SuffixIndex(GROUPS, _buckets(max_tokens))

    @property
    def tokens(self) -> int:
        return self.index.end - self.index.start

    def texts(self) -> list[list[int]]:
        return [self.index.ids(start, end - 1) for start, end in pairwise((*self._starts, self.index.end))]

    def add(self, ids: Sequence[int]) -> None:
        ids = ids[max(0, len(ids) - self._max_tokens + 1) :]
        if not ids:
            return
        while self._starts and self.tokens + len(ids) + 1 > self._max_tokens:
            self._starts.popleft()
            self.index.forget_before(self._starts[0] if self._starts else self.index.end)
        start = self.index.end
        self.index.extend([*ids, _BETWEEN])
        self._starts.append(start)

    def find(self, tail: Sequence[int], depth: int, shortest: int, most: int) -> list[Continuation]:
        found: list[Continuation] = []
        for place in self.index.find(tail, shortest, most):
            ids = self.index.ids(place.position, place.position + depth)
            if _BETWEEN in ids:
                del ids[ids.index(_BETWEEN) :]
            if ids:
                found.append(Continuation(place.length, tuple(ids)))
        return found


def _buckets(max_tokens: int) -> int:
    """As many as there may be groups, within reason; a power of two."""
    return 1 << min(20, max(8, (max_tokens - 1).bit_length()))


def _encoded(texts: list[list[int]], vocabulary: bytes) -> bytes:
    header = _HEADER.pack(_FORMAT, hashlib.sha256(vocabulary).digest(), len(texts))
    numbers = [*(len(text) for text in texts), *(token for text in texts for token in text)]
    content = _MAGIC + header + struct.pack(f"<{len(numbers)}I", *numbers)
    return content + hashlib.sha256(content).digest()


def _decoded(content: bytes, vocabulary: bytes, path: Path) -> Iterator[list[int]]:
    """Raises: ConfigError before the first text if anything is wrong."""
    if not content.startswith(_MAGIC):
        raise ConfigError(f"{path}: not a file of a user's text", field="path")
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes", field="path")
    start = len(_MAGIC) + _HEADER.size
    end = len(content) - _CHECKSUM_BYTES
    if end < start or (end - start) % 4 or hashlib.sha256(content[:end]).digest() != content[end:]:
        raise ConfigError(f"{path}: damaged", field="path")
    written, made_for, count = _HEADER.unpack_from(content, len(_MAGIC))
    if written != _FORMAT:
        raise ConfigError(f"{path}: of format {written}, this version reads {_FORMAT}", field="path")
    if made_for != hashlib.sha256(vocabulary).digest():
        raise ConfigError(f"{path}: of another vocabulary", field="path")
    numbers = struct.unpack_from(f"<{(end - start) // 4}I", content, start)
    lengths, ids = numbers[:count], numbers[count:]
    if len(lengths) != count or sum(lengths) != len(ids) or max(ids, default=0) > MAX_ID:
        raise ConfigError(f"{path}: damaged", field="path")
    return _cut(ids, lengths)


def _cut(ids: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[list[int]]:
    start = 0
    for length in lengths:
        yield list(ids[start : start + length])
        start += length


@contextmanager
def _staged(path: Path) -> Iterator[tuple[int, Path]]:
    """An open file beside `path` that only its owner may read (mode 0600); gone at the end if it is still there."""
    file, name = tempfile.mkstemp(prefix=f".{path.name}.tmp-", dir=path.parent)
    try:
        yield file, Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    """A file that cannot be read or written is a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field="path") from error
