"""The self-check: holds our masks, positions, pages and batches to the model's own causal forward, or refuses it.

Must not know: sessions, wire. Called by `loading` once per start. Every way that a step can go is walked here once,
beyond the sliding window if there is one: a chain in two pieces, a tree path by path, compaction, and a ragged batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cloud_verifier.kv_pool import KvSlot
from cloud_verifier.target_model import RowInput, TorchTarget
from shared.errors import ModelLoadError

CHAIN_TOKENS = 21
"""Context of the check without a sliding window: more than one page."""


def self_check(target: TorchTarget, tolerance: float) -> float:
    """Returns the largest relative difference found.

    Raises: ModelLoadError if it is above `tolerance`: such a model would be silently wrong.
    """
    window = target.lm.sliding_window
    length = min(window + 9 if window else CHAIN_TOKENS, target.context_size - 8)
    generator = torch.Generator().manual_seed(7)
    vocabulary = int(target.lm.config.vocab_size)
    ids = torch.randint(0, vocabulary, (length + 5,), generator=generator).tolist()
    context, tail = ids[:length], ids[length:]
    checks = (_check_chain(target, context), _check_tree(target, context, tail), _check_batch(target, context, tail))
    worst = max(checks)
    if not worst <= tolerance:
        raise ModelLoadError(
            f"self-check failed: verifying with a KV cache and tree masks differs from the model's own forward "
            f"by {worst:.2g} of its scores' size (allowed {tolerance:.2g}); this architecture is not supported"
        )
    return worst


TREE = (-1, 0, 1, 0, -1)
"""a -> (b -> c, d), e: two roots and three paths."""
PATHS = ((0, 1, 2), (0, 3), (4,))


def _check_chain(target: TorchTarget, context: list[int]) -> float:
    slot = target.new_slot()
    half = len(context) // 2
    pieces = []
    for piece in (context[:half], context[half:]):
        pieces.append(target.forward([_chain(slot, piece)]))
        slot.keep(range(len(piece)))
    target.release(slot)
    return _difference(torch.cat(pieces), target.lm.own_causal_scores(context))


def _check_tree(target: TorchTarget, context: list[int], tail: list[int]) -> float:
    slot = _filled(target, context)
    worst = _paths_difference(target, context, tail, target.forward([_tree(slot, tail)]))
    slot.keep([0, 3])
    after = target.forward([_chain(slot, [tail[4]])])
    own = target.lm.own_causal_scores([*context, tail[0], tail[3], tail[4]])[-1:]
    target.release(slot)
    return max(worst, _difference(after, own))


def _check_batch(target: TorchTarget, context: list[int], tail: list[int]) -> float:
    """A short context, a tree and a prefill in one forward; then the same rows the other way round."""
    short, first = context[:3], context[1:]
    slots = [_filled(target, short), _filled(target, context), target.new_slot()]
    rows = [_chain(slots[0], tail[:1]), _tree(slots[1], tail), _chain(slots[2], first)]
    worst = 0.0
    for order in ((0, 1, 2), (2, 1, 0)):
        for row in rows:
            assert row.slot.try_reserve(len(row.ids))
        scores = target.forward([rows[index] for index in order])
        parts = dict(zip(order, torch.split(scores, [len(rows[index].wanted) for index in order]), strict=True))
        worst = max(
            worst,
            _difference(parts[0], target.lm.own_causal_scores([*short, tail[0]])[-1:]),
            _paths_difference(target, context, tail, parts[1]),
            _difference(parts[2], target.lm.own_causal_scores(first)),
        )
    for slot in slots:
        target.release(slot)
    return worst


def _paths_difference(target: TorchTarget, context: list[int], tail: list[int], scores: torch.Tensor) -> float:
    differences = []
    for path in PATHS:
        own = target.lm.own_causal_scores(context + [tail[node] for node in path])[len(context) :]
        differences.append(_difference(scores[list(path)], own))
    return max(differences)


def _filled(target: TorchTarget, ids: Sequence[int]) -> KvSlot:
    slot = target.new_slot()
    target.forward([_chain(slot, ids)])
    slot.keep(range(len(ids)))
    return slot


def _chain(slot: KvSlot, ids: Sequence[int]) -> RowInput:
    return _reserved(RowInput(slot, ids, range(-1, len(ids) - 1), range(len(ids))))


def _tree(slot: KvSlot, ids: Sequence[int]) -> RowInput:
    return _reserved(RowInput(slot, ids, TREE, range(len(TREE))))


def _reserved(row: RowInput) -> RowInput:
    if not row.slot.try_reserve(len(row.ids)):
        raise ModelLoadError("self-check: the KV pool is too small for this model's window; raise kv_memory")
    return row


def _difference(ours: torch.Tensor, own: torch.Tensor) -> float:
    """Root mean square of the difference over that of the scores: a maximum drowns in bfloat16's own noise.

    Not a number counts as infinite: max() would lose it.
    """
    found = float(((ours - own).square().mean() / own.square().mean()).sqrt())
    return found if math.isfinite(found) else math.inf
