"""From ragged rows to the tensors of one forward: packed ids, positions, pages, masks. Built on the host, copied once.

Must not know: models, sessions. Called by `target_model`. On CUDA everything goes through one pinned buffer with one
copy that the host does not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from cloud_verifier.attention import Group, RaggedAttention
from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.kv_pool import KvPool, KvSlot

if TYPE_CHECKING:
    from cloud_verifier.target_model import RowInput

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

GROUP_OVERHEAD_CELLS = {"cpu": 8_192, "cuda": 4_000_000}
"""What one more group costs, in cells of the padded mask: a launch on a GPU costs more than much padding."""


@dataclass(frozen=True)
class Staged:
    """What one forward takes. Shapes: ids, positions (N,); wanted (R,), or one stand-in if nothing is wanted."""

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    wanted_count: int
    attention: RaggedAttention


@dataclass(frozen=True)
class _Row:
    """One session's part, on the host."""

    slot: KvSlot
    ids: Ints
    depths: Ints
    seen: Bools
    wanted: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def end(self) -> int:
        return self.slot.length + len(self.ids)


class Staging:
    """Stages the forwards of one model."""

    def __init__(self, pool: KvPool, layer_kinds: Sequence[str], window: int) -> None:
        self._pool, self._kinds, self._window = pool, tuple(layer_kinds), window
        self._device, self._dtype = pool.device, pool.dtype
        self._overhead = GROUP_OVERHEAD_CELLS[self._device.type]

    def stage(self, rows: Sequence[RowInput]) -> Staged:
        """The tensors of one forward; the packed order is that of the groups, the wanted order that of `rows`."""
        self._pool.settle()
        taken = [_taken(row) for row in rows]
        groups = group_rows([row.count for row in taken], [row.end for row in taken], self._overhead)
        order = [index for group in groups for index in group]
        starts = dict(zip(order, np.cumsum([0, *(taken[index].count for index in order)]), strict=False))
        packed = [taken[index] for index in order]
        arrays = [
            np.concatenate([row.ids for row in packed]),
            np.concatenate([row.depths + row.slot.length for row in packed]),
            np.concatenate([row.slot.rows(row.slot.length, row.end) for row in packed]),
            np.concatenate([np.asarray(row.wanted, np.int64) + starts[index] for index, row in enumerate(taken)]),
        ]
        count = len(arrays[3])
        if not count:
            arrays[3] = np.zeros(1, np.int64)
        layouts = [_Layout.of([taken[index] for index in group], self._window) for group in groups]
        arrays += [array for layout in layouts for array in layout.arrays()]
        ids, positions, write_rows, wanted, *rest = self._copied(arrays)
        tensors = iter(rest)
        ready, start = [], 0
        for layout in layouts:
            ready.append(self._group(layout, start, tensors))
            start += layout.count
        return Staged(ids, positions, wanted, count, RaggedAttention(self._pool, write_rows, ready, self._kinds))

    def _copied(self, arrays: Sequence[Ints | Bools]) -> list[torch.Tensor]:
        """The arrays on the device: one buffer, one copy."""
        flat = [array.reshape(-1).view(np.uint8) for array in arrays]
        offsets = np.cumsum([0, *(-(-len(part) // 8) * 8 for part in flat)])
        buffer = torch.empty(int(offsets[-1]), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        host = buffer.numpy()
        for part, offset in zip(flat, offsets, strict=False):
            host[offset : offset + len(part)] = part
        there = buffer.to(self._device, non_blocking=True)
        found = []
        for array, part, offset in zip(arrays, flat, offsets, strict=False):
            raw = there[offset : offset + len(part)]
            found.append(raw.view(torch.bool if array.dtype == np.bool_ else torch.int64).view(array.shape))
        return found

    def _group(self, layout: _Layout, start: int, tensors: Iterator[torch.Tensor]) -> Group:
        pages = next(tensors)
        masks = {"full_attention": self._additive(next(tensors))}
        if layout.near is not None:
            masks["sliding_attention"] = self._additive(next(tensors))
        pad = unpad = None
        if layout.pad is not None:
            pad, unpad = next(tensors), next(tensors)
        return Group(start, start + layout.count, pages, masks, pad, unpad)

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~allowed, torch.finfo(self._dtype).min)[:, None]


@dataclass(frozen=True)
class _Layout:
    """One group on the host. Shapes: pages (B, P); allowed, near (B, n, P * 16); pad (B * n,); unpad (count,)."""

    count: int
    pages: Ints
    allowed: Bools
    near: Bools | None
    pad: Ints | None
    unpad: Ints | None

    @staticmethod
    def of(rows: Sequence[_Row], window: int) -> _Layout:
        most, pages = max(row.count for row in rows), max(-(-row.end // PAGE_TOKENS) for row in rows)
        table = np.zeros((len(rows), pages), np.int64)
        allowed = np.zeros((len(rows), most, pages * PAGE_TOKENS), np.bool_)
        near = np.ones_like(allowed) if window else None
        for index, row in enumerate(rows):
            own = -(-row.end // PAGE_TOKENS)
            table[index] = row.slot.pages[0]
            table[index, :own] = row.slot.pages[:own]
            allowed[index, : row.count, : row.slot.length] = True
            allowed[index, : row.count, row.slot.length : row.end] = row.seen
            allowed[index, row.count :, 0] = True  # padding sees something, so that it stays finite
            if near is not None:
                positions = row.depths + row.slot.length
                columns = np.concatenate([np.arange(row.slot.length), positions])
                near[index, : row.count, : row.end] = positions[:, None] - columns[None, :] < window
        if near is not None:
            near &= allowed
        counts = [row.count for row in rows]
        if min(counts) == most:
            return _Layout(sum(counts), table, allowed, near, None, None)
        starts = np.cumsum([0, *counts])
        places = np.arange(most)[None, :]
        pad = np.where(places < np.array(counts)[:, None], starts[:-1, None] + places, 0).reshape(-1)
        unpad = np.concatenate([np.arange(count) + index * most for index, count in enumerate(counts)])
        return _Layout(sum(counts), table, allowed, near, pad, unpad)

    def arrays(self) -> list[Ints | Bools]:
        """What travels, in the order that `Staging._group` takes it."""
        return [part for part in (self.pages, self.allowed, self.near, self.pad, self.unpad) if part is not None]


def group_rows(counts: Sequence[int], ends: Sequence[int], overhead: int) -> list[list[int]]:
    """Which rows attend together: rows of like length join while padding costs less than one more group.

    `counts`: tokens a row brings; `ends`: columns it reads. Cost is in cells of the padded mask. Rows are taken
    longest first; indices of `counts`.
    """
    groups: list[list[int]] = []
    n = length = used = 0
    for index in sorted(range(len(counts)), key=lambda index: (-counts[index], -ends[index], index)):
        own = counts[index] * ends[index]
        wider = n * max(length, ends[index]) * (len(groups[-1]) + 1) if groups else 0
        if groups and wider - (used + own) <= overhead:
            groups[-1].append(index)
            length, used = max(length, ends[index]), wider
        else:
            groups.append([index])
            n, length, used = counts[index], ends[index], own
    return groups


def _taken(row: RowInput) -> _Row:
    assert isinstance(row.slot, KvSlot)
    depths = depths_of(row.parents)
    return _Row(row.slot, np.asarray(row.ids, np.int64), depths, ancestors(row.parents), row.wanted)


def depths_of(parents: Sequence[int]) -> Ints:
    """How far each fed id stands behind the last kept row: 0 for the first. Shapes: (n,)."""
    if _is_chain(parents):
        return np.arange(len(parents))
    depths = np.zeros(len(parents), np.int64)
    for index, parent in enumerate(parents):
        depths[index] = 0 if parent < 0 else depths[parent] + 1
    return depths


def ancestors(parents: Sequence[int]) -> Bools:
    """Which fed ids each fed id may see: its ancestors and itself. Shapes: (n, n) bool, row sees column."""
    count = len(parents)
    if _is_chain(parents):
        return np.tri(count, dtype=np.bool_)
    seen = np.eye(count, dtype=np.bool_)
    for index, parent in enumerate(parents):
        if parent >= 0:
            seen[index] |= seen[parent]
    return seen


def _is_chain(parents: Sequence[int]) -> bool:
    return all(parent == index - 1 for index, parent in enumerate(parents))
