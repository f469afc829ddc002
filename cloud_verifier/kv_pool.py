"""Keys and values of sessions: one growing buffer per session and layer, rolled back by length, trees compacted.

Must not know: sessions, hints, models' names. Written by `target_model`, kept or rolled back by `worker`.
What a slot holds is a cache: `clear` and a new prefill give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

FIRST_ROWS = 128


class KvSlot:
    """One session's keys and values. Rows past `length` are scratch of the forward in progress.

    Invariant: after `keep` or `roll_back`, rows 0..length-1 are exactly those of the session's first `length` ids.
    """

    def __init__(self, pool: KvPool) -> None:
        self.length = 0
        self._pool = pool
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the rows of one forward behind the kept ones; returns kept and new together, as views.

        Shapes: keys, values (1, H, n, D); result (1, H, length + n, D).
        """
        end = self.length + keys.shape[2]
        self._reserve(layer, end, keys, values)
        for buffer, new in ((self._keys[layer], keys), (self._values[layer], values)):
            buffer[:, :, self.length : end] = new
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def _reserve(self, layer: int, rows: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        while layer >= len(self._keys):
            self._keys.append(keys.new_empty((*keys.shape[:2], 0, keys.shape[3])))
            self._values.append(values.new_empty((*values.shape[:2], 0, values.shape[3])))
        if rows <= self._keys[layer].shape[2]:
            return
        capacity = max(FIRST_ROWS, 1 << (rows - 1).bit_length())
        for buffers in (self._keys, self._values):
            old = buffers[layer]
            grown = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
            grown[:, :, : self.length] = old[:, :, : self.length]
            self._pool.bytes_used += grown.nbytes - old.nbytes
            buffers[layer] = grown

    @torch.inference_mode()
    def keep(self, offsets: Sequence[int]) -> None:
        """Keeps these rows of the last forward, in this order, right after the kept ones; the rest is gone.

        `offsets` count from `length` and rise strictly: an accepted path of a tree is compacted in place.
        """
        assert all(a < b for a, b in pairwise(offsets))
        count = len(offsets)
        if list(offsets) != list(range(count)):
            source = [self.length + offset for offset in offsets]
            for buffers in (self._keys, self._values):
                for buffer in buffers:
                    buffer[:, :, self.length : self.length + count] = buffer[:, :, source]
        self.length += count

    def roll_back(self, length: int) -> None:
        """Forgets rows from `length` on; costs nothing."""
        assert 0 <= length <= self.length
        self.length = length

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept keys and values of a layer, for tests. Shapes: (1, H, length, D) each."""
        return self._keys[layer][:, :, : self.length], self._values[layer][:, :, : self.length]

    @property
    def layers(self) -> int:
        """Layers written so far."""
        return len(self._keys)

    def clear(self) -> None:
        """Gives the memory back; the next forward starts from an empty cache."""
        self._pool.bytes_used -= sum(buffer.nbytes for buffer in (*self._keys, *self._values))
        self._keys, self._values, self.length = [], [], 0


class KvPool:
    """All slots of one model and what they take."""

    def __init__(self) -> None:
        self.bytes_used = 0
        self.slots = 0

    def new_slot(self) -> KvSlot:
        """An empty slot."""
        self.slots += 1
        return KvSlot(self)

    def release(self, slot: KvSlot) -> None:
        """The session is gone: its memory is free at once."""
        slot.clear()
        self.slots -= 1
