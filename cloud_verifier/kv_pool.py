"""Keys and values of all sessions in one pool of pages: reserved, written, gathered, compacted, shared, given back.

Must not know: sessions, hints, models' names. Pages are counted by `kv_pages`; written and gathered by `attention`,
kept or rolled back by `worker`. What a slot holds is a cache: `clear` and a new prefill give the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from cloud_verifier.kv_pages import PAGE_TOKENS, PageTable, page_key, root_key


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for one token."""

    heads: int
    key_size: int
    value_size: int

    @property
    def numbers(self) -> int:
        """Numbers a token takes in this layer."""
        return self.heads * (self.key_size + self.value_size)


def token_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes that one token takes over all layers."""
    return sum(shape.numbers for shape in shapes) * dtype.itemsize


class KvSlot:
    """One session's keys and values. Rows past `length` are scratch of the step in progress.

    Invariant: after `keep` or `roll_back`, rows 0..length-1 are exactly those of the session's first `length` ids.
    """

    def __init__(self, pool: KvPool, principal: str) -> None:
        self.length = 0
        self.pages: list[int] = []
        self._pool = pool
        self._root = root_key(principal)
        self._keys: list[bytes] = []
        self._is_checked = True

    def try_reserve(self, count: int) -> bool:
        """Makes room to write `count` rows behind the kept ones, in pages of its own; False if the pool is full.

        What was reserved before a False stays reserved: the caller frees pages elsewhere and asks again.
        """
        table = self._pool.table
        for index in range(self.length // PAGE_TOKENS, len(self.pages)):
            if not self._try_own(index):
                return False
        while len(self.pages) * PAGE_TOKENS < self.length + count:
            page = table.try_take()
            if page is None:
                return False
            self.pages.append(page)
        return True

    def _try_own(self, index: int) -> bool:
        """The page at `index` is about to be written: copied if others hold it, else no longer to be found."""
        table, page = self._pool.table, self.pages[index]
        if table.holders(page) > 1:
            copy = table.try_take()
            if copy is None:
                return False
            self._pool.copy_page(page, copy)
            table.give_back(page)
            self.pages[index] = copy
        else:
            table.forget_key(page)
        del self._keys[index:]
        return True

    def rows(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where rows start..stop-1 of this slot lie in the pool. Shapes: (stop - start,)."""
        places = np.arange(start, stop)
        pages = np.asarray(self.pages, dtype=np.int64)
        return np.asarray(pages[places // PAGE_TOKENS] * PAGE_TOKENS + places % PAGE_TOKENS, dtype=np.int64)

    def keep(self, offsets: Sequence[int], is_checked: bool = True) -> None:
        """Keeps these rows of the last forward, in this order, right after the kept ones; the rest is gone.

        `offsets` count from `length` and rise strictly: an accepted path of a tree is compacted in place.
        `is_checked`: scores of this forward, which saw all rows before them, were finite.
        """
        self._is_checked = is_checked
        assert all(a < b for a, b in pairwise(offsets))
        count = len(offsets)
        if count and offsets[-1] != count - 1:
            rows = self.rows(self.length, self.length + offsets[-1] + 1)
            first = next(place for place, offset in enumerate(offsets) if offset != place)
            self._pool.move(self, rows[list(offsets[first:])], rows[first:count])
        self.length += count
        self._trim()

    def roll_back(self, length: int) -> None:
        """Forgets rows from `length` on."""
        assert 0 <= length <= self.length
        self.length = length
        self._trim()

    def _trim(self) -> None:
        pages = -(-self.length // PAGE_TOKENS)
        if not self._is_checked and len(self.pages) > pages:
            self.scrub(pages * PAGE_TOKENS)
        for page in reversed(self.pages[pages:]):  # the end of a context is taken first: without its beginning
            self._pool.table.give_back(page)  # the rest could not be found
        del self.pages[pages:]
        del self._keys[self.length // PAGE_TOKENS :]

    def scrub(self, from_row: int) -> None:
        """Zeroes rows from `from_row` on in pages that nobody else holds: what a forward wrote may be not finite."""
        for index in range(from_row // PAGE_TOKENS, len(self.pages)):
            page = self.pages[index]
            if self._pool.table.holders(page) == 1:
                first = max(from_row, index * PAGE_TOKENS)
                self._pool.zero(self.rows(first, (index + 1) * PAGE_TOKENS))
            self._pool.table.forget_key(page)

    # ------------------------------------------------------------ sharing

    def seal(self, ids: Sequence[int]) -> None:
        """Makes full pages findable, and gives up copies of pages that are there already. `ids`: the session's.

        Rows that were not checked yet stay the session's own.
        """
        if not self._is_checked:
            return
        table = self._pool.table
        while (len(self._keys) + 1) * PAGE_TOKENS <= self.length:
            index = len(self._keys)
            key = page_key(
                self._keys[-1] if index else self._root, ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            )
            known, own = table.find(key), self.pages[index]
            if known is None:
                table.set_key(own, key)
            elif known != own:
                table.share(known)
                table.give_back(own)
                self.pages[index] = known
            self._keys.append(key)

    def adopt(self, ids: Sequence[int]) -> int:
        """Into an empty slot, takes the pages that hold a beginning of `ids`; at least one id is left to be fed.

        Returns how many rows are there now.
        """
        assert not self.pages
        before = self._root
        for start in range(0, len(ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
            before = page_key(before, ids[start : start + PAGE_TOKENS])
            page = self._pool.table.find(before)
            if page is None:
                break
            self._pool.table.share(page)
            self.pages.append(page)
            self._keys.append(before)
        self.length = max(0, min(len(self.pages) * PAGE_TOKENS, len(ids) - 1))
        return self.length

    def forget(self) -> None:
        """Gives all pages back, and nobody finds them any more: what they hold is not what they should."""
        for page in self.pages:
            self._pool.table.forget_key(page)
        self._is_checked = True
        self.clear()

    def clear(self) -> int:
        """Gives all pages back; the next forward starts from an empty cache. Returns how many pages it held."""
        held = len(self.pages)
        self.length = 0
        self._trim()
        self._is_checked = True
        return held


class KvPool:
    """The tensors behind all slots: per layer keys and values of `pages` pages.

    Layers of one shape lie in one tensor, so that a copy or a compaction is one operation over all of them.
    On CPU memory is taken from the system as pages are first used. Rows never hold NaN but between a forward and its
    judgement (see `scrub`): a gather reads whole pages, and a masked NaN is still a NaN.
    """

    def __init__(self, shapes: Sequence[LayerShape], pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.table = PageTable(pages)
        self.shapes, self.dtype, self.device = tuple(shapes), dtype, device
        self._slots: set[KvSlot] = set()
        self._moves: list[tuple[KvSlot, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self._stacks: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        rows = pages * PAGE_TOKENS
        stacks: dict[tuple[int, int], torch.Tensor] = {}
        wanted = [(s.heads, size) for s in shapes for size in (s.key_size, s.value_size)]
        for kind in dict.fromkeys(wanted):
            stacks[kind] = torch.zeros((wanted.count(kind), rows, *kind), dtype=dtype, device=device)
        self._stacks = list(stacks.values())
        views = {kind: iter(stack) for kind, stack in stacks.items()}
        for shape in shapes:
            self._keys.append(next(views[shape.heads, shape.key_size]))
            self._values.append(next(views[shape.heads, shape.value_size]))

    # ------------------------------------------------------------ slots

    def new_slot(self, principal: str = "") -> KvSlot:
        """An empty slot; it shares pages with slots of the same principal only."""
        slot = KvSlot(self, principal)
        self._slots.add(slot)
        return slot

    def room(self, slots: Iterable[KvSlot]) -> int:
        """Pages that would be free if these slots were cleared."""
        held = Counter(page for slot in slots for page in slot.pages)
        return self.table.free + sum(1 for page, times in held.items() if self.table.holders(page) == times)

    def release(self, slot: KvSlot) -> None:
        """The session is gone: its pages are free at once."""
        slot.clear()
        self._slots.discard(slot)

    @property
    def slots(self) -> int:
        """Slots handed out and not released."""
        return len(self._slots)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.table.total * PAGE_TOKENS

    # ------------------------------------------------------------ rows

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores one layer's new rows. Shapes: rows (N,) int64; keys, values (N, H, D)."""
        self._keys[layer].index_copy_(0, rows, keys)
        self._values[layer].index_copy_(0, rows, values)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole pages, row after row. Shapes: pages (B, P) int64; result (B, H, P * 16, D) each."""
        batch, count = pages.shape
        found = []
        for buffer in (self._keys[layer], self._values[layer]):
            paged = buffer.view(-1, PAGE_TOKENS, *buffer.shape[1:])
            taken = paged.index_select(0, pages.flatten())
            found.append(taken.view(batch, count * PAGE_TOKENS, *buffer.shape[1:]).transpose(1, 2))
        return found[0], found[1]

    def move(self, slot: KvSlot, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        """Copies a slot's rows within the pool, in all layers, before anything else reads or writes: see `settle`."""
        self._moves.append((slot, source, target))

    @torch.inference_mode()
    def settle(self) -> None:
        """Does the moves of a step at once: one copy of indices to the device, one read and one write per stack.

        No row is moved twice in one step, and sources are read before any target is written. If that fails (memory),
        the slots concerned are emptied: their rows are computed again.
        Raises: whatever the device raised.
        """
        if not self._moves:
            return
        moves, self._moves = self._moves, []
        rows = np.stack([np.concatenate([move[side] for move in moves]) for side in (1, 2)])
        try:
            at, to = torch.from_numpy(rows).to(self.device, non_blocking=True)
            for stack, moved in [(stack, stack.index_select(1, at)) for stack in self._stacks]:
                stack.index_copy_(1, to, moved)
        except BaseException:
            for slot in {move[0] for move in moves}:
                slot.forget()
            raise

    @torch.inference_mode()
    def zero(self, rows: npt.NDArray[np.int64]) -> None:
        """Zeroes rows, in all layers."""
        self.settle()
        for stack in self._stacks:
            stack.index_fill_(1, torch.from_numpy(rows).to(stack.device), 0)

    @torch.inference_mode()
    def copy_page(self, page: int, to: int) -> None:
        """Copies one page, in all layers."""
        self.settle()
        for stack in self._stacks:
            paged = stack.view(stack.shape[0], -1, PAGE_TOKENS, *stack.shape[2:])
            paged[:, to] = paged[:, page]

    def content(self, slot: KvSlot, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept keys and values of a slot, for checks. Shapes: (length, H, D) each."""
        self.settle()
        rows = torch.from_numpy(slot.rows(0, slot.length)).to(self._keys[layer].device)
        return self._keys[layer][rows], self._values[layer][rows]

    def check_integrity(self) -> None:
        """Asserts that every page is held by exactly the slots that list it, and that slots hold what they need."""
        self.table.check_integrity(slot.pages for slot in self._slots)
        for slot in self._slots:
            assert len(slot.pages) * PAGE_TOKENS >= slot.length
