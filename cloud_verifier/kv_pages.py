"""Which pages of the KV pool are taken, by how many slots, and which full pages can be shared. Pure accounting.

Must not know: tensors, sessions, time. Owned by `kv_pool`. A page whose last holder left keeps its key until somebody
needs the room: a principal that opens the same context again finds it. Keys begin at the principal, so nobody finds
another's pages.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

PAGE_TOKENS = 16


def root_key(principal: str) -> bytes:
    """Where a principal's keys begin."""
    return hashlib.blake2b(principal.encode(), digest_size=16, person=b"draftwire.kv").digest()


def page_key(before: bytes, ids: Sequence[int]) -> bytes:
    """The key of a full page: of the page before it and of its ids."""
    return hashlib.blake2b(before + np.asarray(ids, dtype="<u4").tobytes(), digest_size=16).digest()


class PageTable:
    """Pages 0..total-1, each free, or held by one or more slots.

    Free pages are taken in this order: without a key (last given back first), never used, longest unused with a key.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken_cached = 0
        """How often a page was taken that still had a key."""
        self._holders: Counter[int] = Counter()
        self._blank: list[int] = []
        self._never_used = self._shared = 0
        self._cached: dict[int, None] = {}
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    # ------------------------------------------------------------ counts

    @property
    def free(self) -> int:
        """Pages that may be taken now, those with a key included."""
        return self.total - len(self._holders)

    @property
    def used(self) -> int:
        """Pages with at least one holder."""
        return len(self._holders)

    @property
    def shared(self) -> int:
        """Pages with more than one holder."""
        return self._shared

    @property
    def cached(self) -> int:
        """Free pages that can still be found by key."""
        return len(self._cached)

    def holders(self, page: int) -> int:
        """How many slots hold a page."""
        return self._holders[page]

    # ------------------------------------------------------------ taking and giving back

    def try_take(self) -> int | None:
        """A page for one holder, its content to be written; None if every page is held."""
        if self._blank:
            page = self._blank.pop()
        elif self._never_used < self.total:
            page, self._never_used = self._never_used, self._never_used + 1
        elif self._cached:
            page = next(iter(self._cached))
            del self._cached[page]
            self.forget_key(page)
            self.taken_cached += 1
        else:
            return None
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held, or free with a key."""
        assert self._holders[page] > 0 or page in self._cached
        self._cached.pop(page, None)
        self._holders[page] += 1
        self._shared += self._holders[page] == 2

    def give_back(self, page: int) -> None:
        """One holder less."""
        assert self._holders[page] > 0
        self._holders[page] -= 1
        self._shared -= self._holders[page] == 1
        if self._holders[page] == 0:
            del self._holders[page]
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._blank.append(page)

    # ------------------------------------------------------------ keys

    def find(self, key: bytes) -> int | None:
        """The page that holds what the key says, if there is one."""
        return self._page_of.get(key)

    def set_key(self, page: int, key: bytes) -> None:
        """From now on a full page can be found; the caller has looked that no other page has the key."""
        assert key not in self._page_of
        assert page not in self._key_of
        self._page_of[key], self._key_of[page] = page, key

    def forget_key(self, page: int) -> None:
        """The page is about to be written: nobody finds it any more."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    # ------------------------------------------------------------ invariants

    def check_integrity(self, slots: Iterable[Sequence[int]]) -> None:
        """Asserts that holders are exactly the slots' pages, and that every page is in one place."""
        held = Counter(page for pages in slots for page in pages)
        assert held == self._holders
        assert self._shared == sum(1 for holders in held.values() if holders > 1)
        free = [*self._blank, *self._cached, *range(self._never_used, self.total)]
        assert len(free) == len(set(free)) == self.free
        assert not set(free) & held.keys()
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert all((page in self._key_of) for page in self._cached)
        assert not any(page in self._key_of for page in self._blank)
