"""The target on its device: ragged rows in, scores out. All rows of a step go through one forward.

Must not know: sessions, sampling, wire. Called by `worker.run_step`; checked at load by `self_check`. Scores stay on
the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from cloud_verifier.hf import CausalLm
from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.kv_pool import KvPool, KvSlot, token_bytes
from cloud_verifier.slot import Slot
from cloud_verifier.staging import Staging
from shared.errors import ConfigError


@dataclass(frozen=True)
class RowInput:
    """What one session feeds into a step: committed ids without keys yet, then hint nodes as a tree.

    `parents[i]` is the index in `ids` of the parent of `ids[i]`, -1 for the last kept row (or the start of the text).
    Parents stand before their children. `wanted` are the indices whose scores are asked for.
    """

    slot: Slot
    ids: Sequence[int]
    parents: Sequence[int]
    wanted: Sequence[int]


@dataclass(frozen=True)
class KvUse:
    """How full the pool is, in pages."""

    total: int = 0
    used: int = 0
    shared: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Timing:
    """Where the last forward's time went, in seconds."""

    stage_s: float = 0.0
    """On the host, to prepare."""
    forward_s: float = 0.0
    """On the device."""
    gather_s: float = 0.0
    """Of the forward, to gather pages; 0 where that is not measured (CUDA)."""


class TargetModel(Protocol):
    """What the worker needs of a target; formula models in tests implement it too."""

    context_size: int

    def new_slot(self, principal: str) -> Slot:
        """An empty KV slot; it shares with slots of the same principal only."""
        ...

    def release(self, slot: Slot) -> None:
        """Frees a slot."""
        ...

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """One step over all rows: (R, V) float32, the wanted scores of row after row.

        Keys land behind each slot's length, in room that was reserved.
        Raises: torch.OutOfMemoryError, or RuntimeError for a device that failed.
        """
        ...

    def settle(self) -> None:
        """Finishes what the last step left to do with keys and values. Raises: as `forward`."""
        ...

    def timing(self) -> Timing:
        """Where the last forward's time went. To be asked when its scores have been fetched."""
        ...

    def recover(self) -> None:
        """After an out-of-memory: gives unused device memory back."""
        ...

    def kv_use(self) -> KvUse:
        """How full the pool is."""
        ...

    def kv_room(self, slots: Sequence[Slot]) -> int:
        """Pages that would be free if these slots were cleared."""
        ...


class TorchTarget:
    """A transformers model as target."""

    def __init__(self, lm: CausalLm, context_size: int, kv_bytes: int) -> None:
        """Raises: ConfigError if `kv_bytes` holds not even one page."""
        shapes = lm.kv_shapes()
        pages = kv_bytes // (token_bytes(shapes, lm.model.dtype) * PAGE_TOKENS)
        if pages < 1:
            raise ConfigError(f"kv_memory: {kv_bytes} bytes hold no page of this model", field="kv_memory")
        self.lm = lm
        try:
            self.pool = KvPool(shapes, pages, lm.model.dtype, lm.model.device)
        except (RuntimeError, MemoryError) as error:
            text = f"kv_memory: the device does not have {kv_bytes} bytes for keys and values"
            raise ConfigError(text, field="kv_memory") from error
        self.context_size = min(context_size, self.pool.capacity_tokens)
        self._marks = _marks(lm.model.device)
        self._stage_s = self._gather_s = 0.0
        self._staging = Staging(self.pool, [lm.layer_kind(layer) for layer in range(len(shapes))], lm.sliding_window)

    def new_slot(self, principal: str = "") -> KvSlot:
        """See TargetModel."""
        return self.pool.new_slot(principal)

    def release(self, slot: Slot) -> None:
        """See TargetModel."""
        assert isinstance(slot, KvSlot)
        self.pool.release(slot)

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        started = time.perf_counter()
        staged = self._staging.stage(rows)
        self._stage_s = time.perf_counter() - started
        with self._on_device():
            self._marks.begin()
            scores = self.lm.forward(staged.ids, staged.positions, staged.attention, staged.wanted)
            self._marks.end()
        self._gather_s = staged.attention.gather_s
        return scores[: staged.wanted_count]

    def _on_device(self) -> AbstractContextManager[object]:
        """Events and launches belong to the current device of a thread: cuda:1 is not what a new thread begins with."""
        device = self.lm.model.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def settle(self) -> None:
        """See TargetModel."""
        self.pool.settle()

    def timing(self) -> Timing:
        """See TargetModel."""
        return Timing(self._stage_s, self._marks.seconds(), self._gather_s)

    def recover(self) -> None:
        """See TargetModel."""
        if self.lm.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def kv_use(self) -> KvUse:
        """See TargetModel."""
        table = self.pool.table
        return KvUse(table.total, table.used, table.shared, table.cached)

    def kv_room(self, slots: Sequence[Slot]) -> int:
        """See TargetModel."""
        return self.pool.room(slot for slot in slots if isinstance(slot, KvSlot))


class _HostMarks:
    """Begin and end of a forward by the host's clock."""

    def begin(self) -> None:
        self._from = time.perf_counter()

    def end(self) -> None:
        self._to = time.perf_counter()

    def seconds(self) -> float:
        return self._to - self._from


class _DeviceMarks:
    """Begin and end of a forward by the device's clock: the host does not wait for it."""

    def __init__(self) -> None:
        self._from, self._to = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._from.record()

    def end(self) -> None:
        self._to.record()

    def seconds(self) -> float:
        self._to.synchronize()
        return float(self._from.elapsed_time(self._to)) / 1000


def _marks(device: torch.device) -> _HostMarks | _DeviceMarks:
    return _DeviceMarks() if device.type == "cuda" else _HostMarks()
