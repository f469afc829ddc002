"""What the user accepted in finished texts, as ids, kept on the device for drafting and in no other place.

Must not know: drafting, sessions, wire, files (`user_text_file`). Filled by whoever owns the user's texts; read by
`retrieval`. It is bounded: the oldest texts make room.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from edge_client.suffix_index import Continuation, SuffixIndex
from shared.errors import ConfigError

DEFAULT_MAX_TOKENS = 65_536
GROUPS = (3, 6)
"""Group lengths of its index; see SuffixIndex."""
_BETWEEN = -1
"""Stands after each text: no match and no continuation goes over it."""


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
        """Forgets everything held."""
        empty = _Texts(self._max_tokens)
        with self._lock:
            self._held = empty

    def find(self, tail: Sequence[int], depth: int, shortest: int, most: int) -> list[Continuation]:
        """Up to `depth` ids that followed where the last ids of `tail` stood; see SuffixIndex.find."""
        with self._lock:
            return self._held.find(tail, depth, shortest, most)


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
