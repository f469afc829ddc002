"""An index over a growing list of ids: where else did it stand as it stands now, and what followed there.

Must not know: drafting, sessions, whose ids they are. Called by `retrieval` for a session and by `user_text`.
The structure is that of LZ77 compressors: the places after equal groups of ids are chained, the newest first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

SESSION_GROUPS = (2, 4, 8)
"""Lengths of the groups that are chained: the shortest is the shortest match found."""
BUCKETS = 1 << 14
"""Chains for each group length. Groups may share one: each place is compared before it counts."""
MAX_MATCH = 32
"""Places that agree for so many ids back are equally good."""
MAX_HOPS = 64
"""Places looked at in one chain."""
MAX_ID = 2**31 - 1
_NONE = -1


@dataclass(frozen=True)
class Place:
    """A position with an id at it; the `length` ids before it are the last of the tail that was asked for."""

    position: int
    length: int


@dataclass(frozen=True)
class Continuation:
    """What followed at a place whose match has this length."""

    length: int
    ids: tuple[int, ...]


class SuffixIndex:
    """Ids by position, of which the oldest may be forgotten and the newest taken back.

    Memory: 4 bytes an id and group length, 4 more an id, and the buckets.
    """

    def __init__(self, groups: tuple[int, ...] = SESSION_GROUPS, buckets: int = BUCKETS) -> None:
        """`groups`: lengths from short to long; `buckets`: a power of two."""
        assert groups == tuple(sorted({group for group in groups if group > 0}))
        assert buckets & (buckets - 1) == 0
        self._mask = buckets - 1
        self._ids = array("i")
        self._start = 0
        self._chains = tuple(_Chain(group, array("i", [_NONE]) * buckets, array("i")) for group in groups)

    @property
    def start(self) -> int:
        """The first position that is not forgotten."""
        return self._start

    @property
    def end(self) -> int:
        """One past the last position; without forgetting, the number of ids."""
        return self._start + len(self._ids)

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        arrays = [self._ids, *(held for chain in self._chains for held in (chain.newest, chain.older))]
        return sum(held.itemsize * len(held) for held in arrays)

    def ids(self, start: int, stop: int) -> list[int]:
        """Ids at the positions from `start`, which is not forgotten, to `stop` or the end."""
        assert start >= self._start
        return self._ids[start - self._start : max(0, stop - self._start)].tolist()

    def common_length(self, ids: Sequence[int]) -> int:
        """How many of these ids stand here too, from the first position that is not forgotten."""
        most = min(len(ids), len(self._ids))
        held, wanted = self._ids[:most].tolist(), list(ids[:most])
        if held == wanted:
            return most
        return next(index for index in range(most) if held[index] != wanted[index])

    # ------------------------------------------------------------ changes

    def extend(self, ids: Sequence[int] | array[int]) -> None:
        """Appends ids, 0 to MAX_ID or a negative mark. A place is known once an id stands at it."""
        first = len(self._ids)
        self._ids.extend(array("i", ids))  # whole or not at all
        known, mask = self._ids, self._mask
        for chain in self._chains:
            group, newest, older = chain.group, chain.newest, chain.older
            for index in range(first, len(known)):
                if index < group:
                    older.append(_NONE)
                    continue
                bucket = hash(tuple(known[index - group : index])) & mask
                older.append(newest[bucket])
                newest[bucket] = self._start + index

    def truncate(self, end: int) -> None:
        """Takes back the ids from position `end` on."""
        keep = max(0, end - self._start)
        if self._start > 0 and keep < self._chains[-1].group:  # groups that are half forgotten have no bucket any more
            self._restart(self._ids[:keep])
            return
        for chain in self._chains:
            for index in range(len(self._ids) - 1, max(keep, chain.group) - 1, -1):
                bucket = hash(tuple(self._ids[index - chain.group : index])) & self._mask
                chain.newest[bucket] = chain.older[index]
            del chain.older[keep:]
        del self._ids[keep:]

    def _restart(self, ids: array[int]) -> None:
        del self._ids[:]
        for chain in self._chains:
            chain.newest[:] = array("i", [_NONE]) * len(chain.newest)
            del chain.older[:]
        self.extend(ids)

    def forget_before(self, position: int) -> None:
        """Gives up the ids before a position; the others keep theirs. Chains end where they lead there."""
        count = min(max(0, position - self._start), len(self._ids))
        del self._ids[:count]
        for chain in self._chains:
            del chain.older[:count]
        self._start += count

    # ------------------------------------------------------------ look-up

    def find(self, tail: Sequence[int], shortest: int, most: int) -> list[Place]:
        """Places before which the last ids of `tail` stand, at least `shortest` of them, longest match first.

        At most `most`: those found by the longest groups, of these the newest. Equal matches: the newest first.
        """
        ids = list(tail[-MAX_MATCH:])
        lengths: dict[int, int] = {}
        for chain in reversed(self._chains):
            if chain.group <= len(ids):
                self._walk(chain, ids, max(shortest, chain.group), most, lengths)
        places = [Place(position, length) for position, length in lengths.items()]
        places.sort(key=lambda place: (-place.length, -place.position))
        return places

    def _walk(self, chain: _Chain, tail: list[int], shortest: int, most: int, lengths: dict[int, int]) -> None:
        position = chain.newest[hash(tuple(tail[-chain.group :])) & self._mask]
        for _ in range(MAX_HOPS):
            if position < self._start or len(lengths) >= most:
                return
            index = position - self._start
            if position not in lengths and (length := self._match(tail, index)) >= shortest:
                lengths[position] = length
            position = chain.older[index]

    def _match(self, tail: list[int], index: int) -> int:
        """How many ids before `index` are the last of the tail."""
        most = min(len(tail), index)
        before = self._ids[index - most : index]
        for back in range(1, most + 1):
            if before[-back] != tail[-back]:
                return back - 1
        return most


@dataclass(frozen=True)
class _Chain:
    """For groups of one length: the newest place by bucket, and by index of a place the next older one (or _NONE)."""

    group: int
    newest: array[int]
    older: array[int]
