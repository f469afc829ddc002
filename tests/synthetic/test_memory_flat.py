"""C32: a process that serves or drafts on and on does not grow."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

from cloud_verifier.kv_pool import KvSlot
from cloud_verifier.loading import LoadedTarget
from cloud_verifier.target_model import RowInput, TorchTarget
from edge_client.onnx_drafter import OnnxModel
from tests.tiny_pair import CONTEXT, TinyPair

STATM = Path("/proc/self/statm")
"""Linux, as README asks for."""
MOST_GROWTH = 8 << 20
IDS = 300


def resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_over_the_second_half(act: Callable[[], object], count: int) -> int:
    """Bytes by which this process has grown; caches and allocators have filled in the first half."""
    for _ in range(count // 2):
        act()
    before = resident_bytes()
    for _ in range(count - count // 2):
        act()
    return resident_bytes() - before


class Served:
    """Sessions at random on a real target: trees, compactions, roll-backs, shared prefixes, sessions that go."""

    MOST = 8

    def __init__(self, target: TorchTarget) -> None:
        self.target, self.rng = target, random.Random(32)
        self.held: list[tuple[KvSlot, list[int]]] = []
        self.prefix = self.ids(96)
        self.rows = self.compacted = self.rolled_back = self.released = self.adopted = 0

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(IDS) for _ in range(count)]

    def step(self) -> None:
        """One forward over 1 to 8 sessions, and what becomes of its rows."""
        rng, rows = self.rng, list[tuple[KvSlot, list[int], RowInput]]()
        while len(self.held) < self.MOST:
            slot = self.target.new_slot("somebody")
            self.adopted += slot.adopt(self.prefix)
            self.held.append((slot, self.prefix[: slot.length]))
        for slot, kept in rng.sample(self.held, rng.randint(1, self.MOST)):
            fed = rng.choice([1, 1, 1, rng.randint(2, 60)])
            nodes = rng.randint(0, 12)
            if slot.length + fed + nodes > 200 or not slot.try_reserve(fed + nodes):
                self.release((slot, kept))
                continue
            begin = self.prefix[slot.length : slot.length + fed] if slot.length < 96 else []
            ids = [*begin, *self.ids(fed + nodes - len(begin))]
            parents = [*range(-1, fed - 1), *(rng.randint(fed - 1, fed + n - 1) for n in range(nodes))]
            rows.append((slot, kept, RowInput(slot, ids, parents, range(fed - 1, fed + nodes))))
        if not rows:
            return
        scores = self.target.forward([row for _, _, row in rows])
        assert scores.shape[0] == sum(len(row.wanted) for _, _, row in rows)
        self.rows += len(rows)
        for slot, kept, row in rows:
            self.settle(slot, kept, row)

    def settle(self, slot: KvSlot, kept: list[int], row: RowInput) -> None:
        node, path = self.rng.randrange(row.wanted[0], len(row.ids)), list[int]()
        while node >= 0:
            path.insert(0, node)
            node = row.parents[node]
        self.compacted += path[-1] != len(path) - 1
        slot.keep(path, is_checked=self.rng.random() < 0.9)
        kept += [row.ids[place] for place in path]
        if self.rng.random() < 0.3:
            del kept[self.rng.randint(0, len(kept)) :]
            slot.roll_back(len(kept))
            self.rolled_back += 1
        slot.seal(kept)
        if self.rng.random() < 0.05:
            self.release((slot, kept))

    def release(self, one: tuple[KvSlot, list[int]]) -> None:
        self.held.remove(one)
        self.target.release(one[0])
        self.released += 1


def test_a_target_that_steps_on_and_on_does_not_grow(loaded_tiny: LoadedTarget) -> None:
    target = TorchTarget(loaded_tiny.model.lm, CONTEXT, 1 << 20)
    served = Served(target)
    growth = growth_over_the_second_half(served.step, 1500)
    assert served.rows > 5000
    assert min(served.compacted, served.rolled_back, served.released, served.adopted) > 100
    target.pool.check_integrity()
    while served.held:
        served.release(served.held[-1])
    assert (target.pool.table.used, target.pool.slots) == (0, 0)
    assert growth < MOST_GROWTH


def test_a_drafter_that_feeds_and_rewinds_on_and_on_does_not_grow(tiny_pair: TinyPair) -> None:
    model, rng, lengths = OnnxModel(tiny_pair.same_draft), random.Random(33), list[int]()

    def act() -> None:
        count = rng.choice([1, 1, 2, rng.randint(3, 70)])
        if model.length + count > model.context_size or rng.random() < 0.25:
            model.rewind(rng.randint(0, min(model.length, model.context_size - count)))
        if rng.random() < 0.01:
            model.rewind(0)
        assert model.feed([rng.randrange(IDS) for _ in range(count)]).shape == (model.vocabulary_rows,)
        lengths.append(model.length)

    assert growth_over_the_second_half(act, 6000) < MOST_GROWTH
    assert max(lengths) > 256, "the cache has grown once at least"
    assert len(lengths) == 6000
