"""The target on its device: ragged rows in, scores out; and the self-check that refuses what it cannot serve exactly.

Must not know: sessions, sampling, wire. Called by `worker.run_step`. Tensors of scores stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cloud_verifier.hf import CausalLm
from cloud_verifier.kv_pool import KvPool, KvSlot
from shared.errors import ModelLoadError


@dataclass(frozen=True)
class RowInput:
    """What one session feeds into a step: committed ids without keys yet, then hint nodes as a tree.

    `parents[i]` is the index in `ids` of the parent of `ids[i]`, -1 for the last kept row (or the start of the text).
    Parents stand before their children. `wanted` are the indices whose scores are asked for.
    """

    slot: KvSlot
    ids: Sequence[int]
    parents: Sequence[int]
    wanted: Sequence[int]


class TargetModel(Protocol):
    """What the worker needs of a target; formula models in tests implement it too."""

    context_size: int

    def new_slot(self) -> KvSlot:
        """An empty KV slot."""
        ...

    def release(self, slot: KvSlot) -> None:
        """Frees a slot."""
        ...

    def forward(self, rows: Sequence[RowInput]) -> list[torch.Tensor]:
        """One step over all rows; per row a (len(wanted), V) float32 tensor. Keys land behind each slot's length."""
        ...


class TorchTarget:
    """A transformers model as target. In this version the rows of a step run one after another."""

    def __init__(self, lm: CausalLm, context_size: int) -> None:
        self.lm = lm
        self.context_size = context_size
        self.pool = KvPool()
        self._device = lm.model.device
        self._dtype = lm.model.dtype

    def new_slot(self) -> KvSlot:
        """An empty KV slot."""
        return self.pool.new_slot()

    def release(self, slot: KvSlot) -> None:
        """Frees a slot."""
        self.pool.release(slot)

    def forward(self, rows: Sequence[RowInput]) -> list[torch.Tensor]:
        """See TargetModel."""
        return [self._forward_row(row) for row in rows]

    def _forward_row(self, row: RowInput) -> torch.Tensor:
        kept = row.slot.length
        depths = depths_of(row.parents)
        ids = torch.tensor([list(row.ids)], device=self._device)
        positions = torch.tensor([[kept + depth for depth in depths]], device=self._device)
        wanted = torch.tensor(list(row.wanted), device=self._device)
        masks = self._masks(kept, row.parents, positions[0])
        return self.lm.forward(ids, positions, masks, row.slot, wanted)

    def _masks(self, kept: int, parents: Sequence[int], positions: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = ancestors(parents).to(self._device)
        allowed = torch.cat([torch.ones(len(parents), kept, dtype=torch.bool, device=self._device), seen], dim=1)
        window = self.lm.sliding_window
        types = set(self.lm.layer_types) or {"sliding_attention" if window else "full_attention"}
        masks = {}
        for kind in sorted(types):
            mask = allowed
            if kind == "sliding_attention" and window:
                columns = torch.cat([torch.arange(kept, device=self._device), positions])
                mask = allowed & (positions[:, None] - columns[None, :] < window)
            masks[kind] = self._additive(mask)
        return masks

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~allowed, torch.finfo(self._dtype).min)[None, None]


def depths_of(parents: Sequence[int]) -> list[int]:
    """How far each fed id stands behind the last kept row: 0 for the first. Shapes: (n,)."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def ancestors(parents: Sequence[int]) -> torch.Tensor:
    """Which fed ids each fed id may see: its ancestors and itself. Shapes: (n, n) bool, row sees column."""
    count = len(parents)
    seen = torch.zeros(count, count, dtype=torch.bool)
    if all(parent == index - 1 for index, parent in enumerate(parents)):
        return seen.fill_(True).tril_()
    for index, parent in enumerate(parents):
        if parent >= 0:
            seen[index] = seen[parent]
        seen[index, index] = True
    return seen


def self_check(target: TorchTarget, tolerance: float) -> float:
    """Holds our masks, positions and cache to the model's own causal forward: a chain, and a tree path by path.

    Runs beyond the sliding window if there is one. Returns the largest relative difference.
    Raises: ModelLoadError if it is above `tolerance`: such a model would be silently wrong.
    """
    window = target.lm.sliding_window
    length = min(window + 9, target.context_size - 8) if window else 17
    generator = torch.Generator().manual_seed(7)
    vocabulary = int(target.lm.config.vocab_size)
    ids = torch.randint(0, vocabulary, (length + 5,), generator=generator).tolist()
    context, tail = ids[:length], ids[length:]
    worst = max(_check_chain(target, context), _check_tree(target, context, tail))
    if not worst <= tolerance:
        raise ModelLoadError(
            f"self-check failed: verifying with a KV cache and tree masks differs from the model's own forward "
            f"by {worst:.2g} of its scores' size (allowed {tolerance:.2g}); this architecture is not supported"
        )
    return worst


def _check_chain(target: TorchTarget, context: list[int]) -> float:
    slot = target.new_slot()
    half = len(context) // 2
    pieces = []
    for piece in (context[:half], context[half:]):
        pieces.append(target.forward([_chain(slot, piece)])[0])
        slot.keep(range(len(piece)))
    target.release(slot)
    return _difference(torch.cat(pieces), target.lm.own_causal_scores(context))


def _check_tree(target: TorchTarget, context: list[int], tail: list[int]) -> float:
    """The tree is a -> (b -> c, d), e: three paths from two roots."""
    parents = [-1, 0, 1, 0, -1]
    slot = target.new_slot()
    target.forward([_chain(slot, context)])
    slot.keep(range(len(context)))
    scores = target.forward([RowInput(slot, tail, parents, range(5))])[0]
    worst = 0.0
    for path in ([0, 1, 2], [0, 3], [4]):
        own = target.lm.own_causal_scores(context + [tail[node] for node in path])[len(context) :]
        worst = max(worst, _difference(scores[path], own))
    slot.keep([0, 3])
    after = target.forward([_chain(slot, [tail[4]])])[0]
    own = target.lm.own_causal_scores([*context, tail[0], tail[3], tail[4]])[-1:]
    target.release(slot)
    return max(worst, _difference(after, own))


def _chain(slot: KvSlot, ids: Sequence[int]) -> RowInput:
    return RowInput(slot, ids, range(-1, len(ids) - 1), range(len(ids)))


def _difference(ours: torch.Tensor, own: torch.Tensor) -> float:
    """Root mean square of the difference over that of the scores: a maximum drowns in bfloat16's own noise."""
    return float(((ours - own).square().mean() / own.square().mean()).sqrt())
