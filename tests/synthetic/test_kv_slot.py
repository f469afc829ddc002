"""A KV slot after any history holds what a fresh prefill of the same ids gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cloud_verifier.kv_pool import KvPool, KvSlot
from cloud_verifier.loading import LoadedTarget
from cloud_verifier.staging import depths_of
from cloud_verifier.target_model import RowInput, TorchTarget
from tests.oracle import PlainTarget

TOLERANCE = 1e-5


@pytest.fixture
def target(loaded_tiny: LoadedTarget) -> TorchTarget:
    return TorchTarget(loaded_tiny.model.lm, loaded_tiny.model.context_size, 16 << 20)


def feed(target: TorchTarget, slot: KvSlot, ids: list[int]) -> torch.Tensor:
    scores = target.forward([RowInput(slot, ids, range(-1, len(ids) - 1), range(len(ids)))])[0]
    slot.keep(range(len(ids)))
    return scores


def assert_like_fresh(target: TorchTarget, slot: KvSlot, ids: list[int]) -> None:
    fresh = target.new_slot()
    feed(target, fresh, ids)
    assert slot.length == fresh.length == len(ids)
    assert slot.layers == fresh.layers == 2
    for layer in range(2):
        for ours, own in zip(slot.rows(layer), fresh.rows(layer), strict=True):
            assert ours.shape == own.shape
            assert float((ours - own).abs().max()) <= TOLERANCE * float(own.abs().max())
    target.release(fresh)


@pytest.mark.parametrize("seed", range(4))
def test_keeping_and_rolling_back_at_random_equals_a_fresh_prefill(target: TorchTarget, seed: int) -> None:
    rng, slot = random.Random(seed), target.new_slot()
    held: list[int] = []
    for _ in range(25):
        if held and rng.random() < 0.4:
            length = rng.randint(0, len(held))
            slot.roll_back(length)
            del held[length:]
        ids = [rng.randrange(300) for _ in range(rng.choice([1, 2, 9, 40]))]
        kept = rng.randint(0, len(ids))
        target.forward([RowInput(slot, ids, range(-1, len(ids) - 1), range(len(ids)))])
        slot.keep(range(kept))
        held += ids[:kept]
    feed(target, slot, [7, 8, 9])
    slot.roll_back(len(held) + 1)
    assert_like_fresh(target, slot, [*held, 7])


@pytest.mark.parametrize("seed", range(6))
def test_an_accepted_path_of_a_tree_is_compacted_to_a_chain(target: TorchTarget, seed: int) -> None:
    rng, slot = random.Random(seed), target.new_slot()
    context = [rng.randrange(300) for _ in range(rng.choice([1, 20, 125]))]  # 125: the buffer grows in the tree
    feed(target, slot, context)
    ids = [rng.randrange(300) for _ in range(12)]
    parents = [rng.randint(-1, index - 1) for index in range(12)]
    scores = target.forward([RowInput(slot, ids, parents, range(12))])[0]
    node, path = rng.choice([n for n in range(12) if depths_of(parents)[n] == max(depths_of(parents))]), []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    slot.keep(path)
    assert_like_fresh(target, slot, [*context, *(ids[node] for node in path)])
    alone = target.new_slot()
    feed(target, alone, context)
    chain_scores = feed(target, alone, [ids[node] for node in path])
    assert torch.allclose(scores[path], chain_scores, atol=1e-4, rtol=0)


def test_scores_are_the_models_own(target: TorchTarget, plain: PlainTarget) -> None:
    rng, slot = random.Random(3), target.new_slot()
    ids = [rng.randrange(300) for _ in range(90)]
    rows = np.concatenate([feed(target, slot, ids[start : start + 7]).numpy() for start in range(0, 90, 7)])
    assert np.abs(rows - plain.rows(ids)).max() < 1e-4


def test_wanted_rows_alone_are_scored(target: TorchTarget) -> None:
    ids = [5, 6, 7, 8]
    first, second = target.new_slot(), target.new_slot()
    everything = feed(target, first, ids)
    some = target.forward([RowInput(second, ids, range(-1, 3), [1, 3])])[0]
    assert some.shape == (2, 320)
    assert torch.allclose(some, everything[[1, 3]], atol=1e-5)


def test_a_cleared_slot_gives_its_bytes_back(target: TorchTarget) -> None:
    pool = target.pool
    assert (pool.bytes_used, pool.slots) == (0, 0)
    slots = [target.new_slot() for _ in range(3)]
    for slot in slots:
        feed(target, slot, list(range(140)))
    assert pool.bytes_used == 3 * 2 * 2 * 2 * 256 * 16 * 4  # slots, K and V, layers, heads, rows, head size, float32
    for slot in slots:
        target.release(slot)
    assert (pool.bytes_used, pool.slots) == (0, 0)


def test_offsets_must_rise() -> None:
    slot = KvPool().new_slot()
    with pytest.raises(AssertionError):
        slot.keep([1, 0])
    with pytest.raises(AssertionError):
        slot.roll_back(1)
