"""A KV slot after any history holds what a fresh prefill of the same ids gives, whoever shares its pages."""

from __future__ import annotations

import functools
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest
import torch
import transformers

from cloud_verifier.hf import CausalLm
from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.kv_pool import KvPool, KvSlot, LayerShape, token_bytes
from cloud_verifier.staging import depths_of
from cloud_verifier.target_model import KvUse, RowInput, TorchTarget

TOLERANCE = 1e-5
IDS = 320
LAYERS = 2
Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer. Shapes: (length, H, D) each."""


def tiny_llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=IDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    torch.manual_seed(20)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def lm(one_torch_thread: None) -> CausalLm:
    return CausalLm(tiny_llama())


def target_of(lm: CausalLm, pages: int) -> TorchTarget:
    return TorchTarget(lm, 512, pages * PAGE_TOKENS * token_bytes(lm.kv_shapes(), torch.float32))


@pytest.fixture
def target(lm: CausalLm) -> TorchTarget:
    return target_of(lm, 64)


def chain_row(slot: KvSlot, ids: Sequence[int]) -> RowInput:
    return RowInput(slot, ids, range(-1, len(ids) - 1), range(len(ids)))


def feed(target: TorchTarget, slot: KvSlot, ids: Sequence[int]) -> torch.Tensor:
    assert slot.try_reserve(len(ids))
    scores = target.forward([chain_row(slot, ids)])
    slot.keep(range(len(ids)))
    return scores


def fed_slot(target: TorchTarget, ids: Sequence[int], principal: str = "") -> KvSlot:
    """A new slot that computed `ids` itself and sealed them."""
    slot = target.new_slot(principal)
    feed(target, slot, ids)
    slot.seal(ids)
    return slot


def adopted_slot(target: TorchTarget, ids: Sequence[int], principal: str = "") -> KvSlot:
    slot = target.new_slot(principal)
    slot.adopt(ids)
    return slot


def content(pool: KvPool, slot: KvSlot) -> Rows:
    return [pool.content(slot, layer) for layer in range(len(pool.shapes))]


def same_bits(first: Rows, second: Rows) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def is_finite(pool: KvPool) -> bool:
    pages = torch.arange(pool.table.total)[None]
    return all(bool(part.isfinite().all()) for layer in range(len(pool.shapes)) for part in pool.gather(layer, pages))


def write_nan(pool: KvPool, slot: KvSlot, count: int) -> None:
    """What a forward that went wrong leaves in the scratch."""
    rows = torch.from_numpy(slot.rows(slot.length, slot.length + count))
    for layer, shape in enumerate(pool.shapes):
        sizes = (shape.key_size, shape.value_size)
        keys, values = (torch.full((count, shape.heads, size), float("nan")) for size in sizes)
        pool.write(layer, rows, keys, values)


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(IDS) for _ in range(count)]


def random_tree(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(-1, index - 1) for index in range(count)]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@dataclass
class Twin:
    """A session as a plain list of ids, the slot that it is compared with, and the text that it is writing."""

    principal: str
    slot: KvSlot
    ids: list[int]
    text: list[int]


Fed = tuple[Twin, list[int], list[int]]
"""A session, the ids it feeds, their parents."""


class Store(Protocol):
    """A pool, and something that writes rows into it."""

    pool: KvPool

    def step(self, fed: Sequence[Fed]) -> None:
        """Writes the rows behind each slot's length."""
        ...

    def assert_holds(self, slot: KvSlot, ids: Sequence[int]) -> None:
        """Compares with a fresh prefill of `ids`."""
        ...


class ModelStore:
    """Rows are what a model computes, all sessions of a step in one forward."""

    def __init__(self, lm: CausalLm, pages: int) -> None:
        self._target = target_of(lm, pages)
        self._fresh_target = target_of(lm, 16)
        self._fresh = functools.lru_cache(200)(self._computed)
        self.pool = self._target.pool

    def step(self, fed: Sequence[Fed]) -> None:
        self._target.forward([RowInput(twin.slot, ids, parents, []) for twin, ids, parents in fed])

    def assert_holds(self, slot: KvSlot, ids: Sequence[int]) -> None:
        assert slot.length == len(ids)
        if not ids:
            return
        for ours, own in zip(content(self.pool, slot), self._fresh(tuple(ids)), strict=True):
            for our_part, own_part in zip(ours, own, strict=True):
                assert our_part.shape == own_part.shape
                assert float((our_part - own_part).abs().max()) <= TOLERANCE * float(own_part.abs().max())

    def _computed(self, ids: tuple[int, ...]) -> Rows:
        slot = self._fresh_target.new_slot()
        feed(self._fresh_target, slot, ids)
        rows = content(self._fresh_target.pool, slot)
        self._fresh_target.release(slot)
        return rows


class FormulaStore:
    """A row is a hash of all ids up to it: exact, and fast enough for long histories. Layers differ in shape."""

    SHAPES = (LayerShape(2, 3, 5), LayerShape(1, 4, 4), LayerShape(2, 3, 5), LayerShape(2, 3, 3))

    def __init__(self, pages: int) -> None:
        self.pool = KvPool(self.SHAPES, pages, torch.float32, torch.device("cpu"))

    def step(self, fed: Sequence[Fed]) -> None:
        for twin, ids, parents in fed:
            before, hashes = self._hashes(twin.ids)[-1], []
            for token, parent in zip(ids, parents, strict=True):
                hashes.append(self._next(hashes[parent] if parent >= 0 else before, token))
            rows = torch.from_numpy(twin.slot.rows(twin.slot.length, twin.slot.length + len(ids)))
            for layer, (keys, values) in enumerate(self._rows(hashes)):
                self.pool.write(layer, rows, keys, values)

    def assert_holds(self, slot: KvSlot, ids: Sequence[int]) -> None:
        assert slot.length == len(ids)
        assert same_bits(content(self.pool, slot), self._rows(self._hashes(ids)[1:]))

    @staticmethod
    def _next(before: bytes, token: int) -> bytes:
        return hashlib.blake2b(before + token.to_bytes(4, "little")).digest()

    def _hashes(self, ids: Sequence[int]) -> list[bytes]:
        hashes = [b""]
        for token in ids:
            hashes.append(self._next(hashes[-1], token))
        return hashes

    def _rows(self, hashes: Sequence[bytes]) -> Rows:
        numbers = torch.from_numpy(np.frombuffer(b"".join(hashes), np.uint8).astype(np.float32)).view(-1, 64)
        rows, start = [], 0
        for shape in self.SHAPES:
            parts = []
            for size in (shape.key_size, shape.value_size):
                parts.append(numbers[:, start : start + shape.heads * size].reshape(-1, shape.heads, size))
                start += shape.heads * size
            rows.append((parts[0], parts[1]))
        assert start <= 64
        return rows


class History:
    """Random sessions in a small pool, each beside its slow twin; everything is compared after each act."""

    MOST = 5

    def __init__(self, store: Store, principals: Sequence[str], rng: random.Random) -> None:
        self.store, self.pool, self.principals, self.rng = store, store.pool, principals, rng
        self.twins: list[Twin] = []
        self.seen: Counter[str] = Counter()
        base = random_ids(rng, 96)
        self.texts = [base, base[:40] + random_ids(rng, 50), base[:64] + random_ids(rng, 10)]
        self._acts: dict[Callable[[], None], int] = {
            self.open: 6,
            self.step: 12,
            self.seal: 5,
            self.roll_back: 4,
            self.clear: 1,
            self.poison: 1,
            self.fail: 1,
            self.close: 2,
        }

    def run(self, acts: int) -> None:
        for _ in range(acts):
            self.rng.choices(list(self._acts), list(self._acts.values()))[0]()
            self.check()
        while self.twins:
            self.close()
        assert (self.pool.table.used, self.pool.slots) == (0, 0)
        self.seen["a cached page was taken"] += self.pool.table.taken_cached

    def check(self) -> None:
        self.pool.check_integrity()
        for twin in self.twins:
            self.store.assert_holds(twin.slot, twin.ids)
        pages = {name: {page for twin in self.twins if twin.principal == name for page in twin.slot.pages}
                 for name in self.principals}  # fmt: skip
        assert sum(map(len, pages.values())) == self.pool.table.used
        assert is_finite(self.pool)
        self.seen["pages were shared"] += self.pool.table.shared

    def open(self) -> None:
        if len(self.twins) == self.MOST:
            return
        principal, text = self.rng.choice(self.principals), self.rng.choice(self.texts)
        twin = Twin(principal, self.pool.new_slot(principal), [], text)
        self.twins.append(twin)
        self._adopt(twin)

    def step(self) -> None:
        fed: list[Fed] = []
        for twin in self.rng.sample(self.twins, self.rng.randint(0, len(self.twins))):
            ids, parents = self._wanted(twin)
            if self._reserved(twin, len(ids), [one[0] for one in fed]):
                fed.append((twin, ids, parents))
        if not fed:
            return
        self.store.step(fed)
        for twin, ids, parents in fed:
            kept = self._kept(parents)
            self.seen["a path was compacted"] += bool(kept) and kept[-1] != len(kept) - 1
            twin.slot.keep(kept)
            twin.ids += [ids[index] for index in kept]

    def seal(self) -> None:
        if self.twins:
            twin = self.rng.choice(self.twins)
            twin.slot.seal([*twin.ids, 7])

    def roll_back(self) -> None:
        if self.twins:
            twin = self.rng.choice(self.twins)
            length = self.rng.choice([self.rng.randint(0, len(twin.ids)), common(twin.ids, twin.text)])
            twin.slot.roll_back(length)
            del twin.ids[length:]

    def clear(self) -> None:
        if self.twins:
            twin = self.rng.choice(self.twins)
            self._cleared(twin)
            if self.rng.random() < 0.5:
                self._adopt(twin)

    def poison(self) -> None:
        """A step whose scores were not finite, and whose session goes on."""
        if self.twins:
            twin, count = self.rng.choice(self.twins), self.rng.randint(1, 20)
            if self._reserved(twin, count, [twin]):
                write_nan(self.pool, twin.slot, count)
                twin.slot.scrub(twin.slot.length)
            twin.slot.roll_back(twin.slot.length)

    def fail(self) -> None:
        """A step whose scores were not finite, and which ended its session."""
        if self.twins:
            twin, count = self.rng.choice(self.twins), self.rng.randint(1, 20)
            if twin.slot.try_reserve(count):
                write_nan(self.pool, twin.slot, count)
            twin.slot.scrub(0)
            self._closed(twin)

    def close(self) -> None:
        if self.twins:
            self._closed(self.rng.choice(self.twins))

    def _wanted(self, twin: Twin) -> tuple[list[int], list[int]]:
        """Mostly what its text says next, so that others compute it too; else a tree."""
        count = self.rng.choice([1, 3, 9, 17, 40])
        ahead = twin.text[len(twin.ids) : len(twin.ids) + count]
        if ahead and twin.ids == twin.text[: len(twin.ids)] and self.rng.random() < 0.8:
            return ahead, list(range(-1, len(ahead) - 1))
        count = self.rng.randint(1, 8)
        return random_ids(self.rng, count), random_tree(self.rng, count)

    def _kept(self, parents: list[int]) -> list[int]:
        if parents == list(range(-1, len(parents) - 1)):
            return list(range(self.rng.choice([len(parents), self.rng.randint(0, len(parents))])))
        return path_to(parents, self.rng.randrange(-1, len(parents)))

    def _reserved(self, twin: Twin, count: int, fixed: Sequence[Twin]) -> bool:
        """Room for `count` rows; if there is none, another gives up its own, or the step goes without this session."""
        if len(twin.ids) + count > 100:
            return False
        if twin.slot.try_reserve(count):
            return True
        self.seen["no room"] += 1
        self.check()
        others = [other for other in self.twins if other is not twin and all(other is not one for one in fixed)]
        if others and self.rng.random() < 0.5:
            self._cleared(self.rng.choice(others))
            if twin.slot.try_reserve(count):
                return True
        if self.rng.random() < 0.5:
            twin.slot.roll_back(twin.slot.length)
        return False

    def _adopt(self, twin: Twin) -> None:
        text = twin.text[: self.rng.choice([16, 32, 48, self.rng.randint(1, len(twin.text))])]
        rows = twin.slot.adopt(text)
        assert rows < len(text)
        assert rows % PAGE_TOKENS == 0 or rows == len(text) - 1
        twin.ids = text[:rows]
        self.seen["a context was adopted"] += rows > 0

    def _cleared(self, twin: Twin) -> None:
        held = len(twin.slot.pages)
        assert twin.slot.clear() == held
        twin.ids = []

    def _closed(self, twin: Twin) -> None:
        self.pool.release(twin.slot)
        self.twins = [other for other in self.twins if other is not twin]


# ---------------------------------------------------------------- any history equals a fresh prefill


@pytest.mark.parametrize("principals", [["anna"], ["anna", "bert"]], ids=["one principal", "two principals"])
def test_random_histories_over_a_small_pool_equal_the_slow_twin(
    principals: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        store = FormulaStore(pages=9)
        copy = store.pool.copy_page
        monkeypatch.setattr(
            store.pool, "copy_page", lambda page, to, copy=copy: (seen.update(["copied"]), copy(page, to))
        )
        history = History(store, principals, random.Random(seed))
        history.run(200)
        seen.update(history.seen)
    expected = {"copied", "no room", "pages were shared", "a context was adopted", "a path was compacted"}
    assert all(seen[what] > 10 for what in expected | {"a cached page was taken"}), seen


@pytest.mark.parametrize("principals", [["anna"], ["anna", "bert"]], ids=["one principal", "two principals"])
def test_random_histories_of_a_model_equal_a_fresh_prefill(lm: CausalLm, principals: list[str]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        history = History(ModelStore(lm, pages=9), principals, random.Random(seed))
        history.run(80)
        seen.update(history.seen)
    assert all(seen[what] > 3 for what in ("no room", "pages were shared", "a context was adopted")), seen


@pytest.mark.parametrize("seed", range(6))
def test_an_accepted_path_of_a_tree_is_compacted_to_a_chain(target: TorchTarget, lm: CausalLm, seed: int) -> None:
    rng, slot = random.Random(seed), target.new_slot()
    context = random_ids(rng, rng.choice([1, 20, 125]))  # 20 and 125: the tree goes over the end of a page
    feed(target, slot, context)
    ids, parents = random_ids(rng, 12), random_tree(rng, 12)
    assert slot.try_reserve(12)
    scores = target.forward([RowInput(slot, ids, parents, range(12))])
    depths = depths_of(parents)
    path = path_to(parents, rng.choice([n for n in range(12) if depths[n] == max(depths)]))
    slot.keep(path)
    alone = target.new_slot()
    feed(target, alone, context)
    chain_scores = feed(target, alone, [ids[node] for node in path])
    assert slot.length == alone.length == len(context) + len(path)
    for ours, own in zip(content(target.pool, slot), content(target.pool, alone), strict=True):
        torch.testing.assert_close(ours, own, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(scores[path], chain_scores, atol=1e-4, rtol=0)


def test_scores_are_the_models_own(target: TorchTarget) -> None:
    rng, slot = random.Random(3), target.new_slot()
    ids = random_ids(rng, 90)
    scores = torch.cat([feed(target, slot, ids[start : start + 7]) for start in range(0, 90, 7)])
    with torch.inference_mode():
        own = tiny_llama()(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(scores, own, atol=1e-4, rtol=0)


def test_wanted_rows_alone_are_scored(target: TorchTarget) -> None:
    ids = [5, 6, 7, 8]
    everything = feed(target, target.new_slot(), ids)
    second = target.new_slot()
    assert second.try_reserve(4)
    some = target.forward([RowInput(second, ids, range(-1, 3), [1, 3])])
    assert some.shape == (2, IDS)
    torch.testing.assert_close(some, everything[[1, 3]], atol=1e-5, rtol=0)


def test_offsets_must_rise_and_nothing_is_rolled_forward(target: TorchTarget) -> None:
    slot = target.new_slot()
    assert slot.try_reserve(2)
    for offsets in ([1, 0], [0, 0]):
        with pytest.raises(AssertionError):
            slot.keep(offsets)
    with pytest.raises(AssertionError):
        slot.roll_back(1)


# ---------------------------------------------------------------- pages are shared, and copied before they are written

TEXT = random_ids(random.Random(11), 80)


def test_adopting_shares_pages_and_leaves_at_least_one_id_to_feed(target: TorchTarget) -> None:
    first = fed_slot(target, TEXT[:50])
    for count, rows in ((0, 0), (1, 0), (15, 0), (16, 15), (17, 16), (40, 32), (48, 47), (80, 48)):
        slot = target.new_slot()
        assert slot.adopt(TEXT[:count]) == slot.length == rows
        assert slot.pages == first.pages[: -(-rows // PAGE_TOKENS)]
        assert target.pool.table.shared == len(slot.pages)
        target.pool.check_integrity()
        target.release(slot)
    assert target.kv_use() == KvUse(total=64, used=4, shared=0, cached=0)


def test_what_was_adopted_is_what_a_prefill_gives(target: TorchTarget) -> None:
    fed_slot(target, TEXT[:48])
    slot = adopted_slot(target, TEXT)
    assert slot.length == 48
    scores = feed(target, slot, TEXT[48:])
    own = feed(target, target.new_slot(), TEXT)
    torch.testing.assert_close(scores, own[48:], atol=1e-4, rtol=0)


def test_another_text_adopts_the_common_pages_only(target: TorchTarget) -> None:
    first = fed_slot(target, TEXT[:64])
    slot = adopted_slot(target, [*TEXT[:40], *TEXT[:40]])
    assert (slot.length, slot.pages) == (32, first.pages[:2])
    assert adopted_slot(target, [TEXT[0] + 1, *TEXT[1:]]).length == 0


def test_another_principal_adopts_nothing(target: TorchTarget) -> None:
    fed_slot(target, TEXT[:48], "anna")
    for principal in ("bert", "", "anna "):
        slot = target.new_slot(principal)
        assert slot.adopt(TEXT) == 0
        assert not slot.pages
    other = fed_slot(target, TEXT[:48], "bert")
    assert (target.pool.table.used, target.pool.table.shared) == (6, 0)
    assert adopted_slot(target, TEXT, "bert").pages == other.pages


def test_pages_that_are_not_full_or_not_sealed_are_not_adopted(target: TorchTarget) -> None:
    slot = target.new_slot()
    feed(target, slot, TEXT[:40])
    assert adopted_slot(target, TEXT).length == 0
    slot.seal(TEXT)
    assert adopted_slot(target, TEXT).length == 32


@pytest.mark.parametrize("length", [17, 20, 31])
def test_going_on_inside_a_shared_page_leaves_the_other_as_it_was(target: TorchTarget, length: int) -> None:
    first = fed_slot(target, TEXT[:32])
    before = content(target.pool, first)
    second = adopted_slot(target, TEXT)
    second.roll_back(length)
    assert second.pages == first.pages
    other = [TEXT[length] + 1, 3, 4, 5]
    feed(target, second, other)
    second.seal([*TEXT[:length], *other])
    assert same_bits(content(target.pool, first), before)
    assert second.pages[0] == first.pages[0]
    assert second.pages[1] != first.pages[1]
    assert target.pool.table.shared == 1
    fresh = target.new_slot()
    feed(target, fresh, [*TEXT[:length], *other])
    for ours, own in zip(content(target.pool, second), content(target.pool, fresh), strict=True):
        torch.testing.assert_close(ours, own, atol=TOLERANCE, rtol=TOLERANCE)
    assert adopted_slot(target, TEXT[:33]).pages == first.pages
    target.pool.check_integrity()


def test_going_on_inside_a_page_that_nobody_else_holds_copies_nothing_and_hides_it(target: TorchTarget) -> None:
    target.release(fed_slot(target, TEXT[:32]))
    slot = adopted_slot(target, TEXT[:32])
    pages = list(slot.pages)
    feed(target, slot, [TEXT[31] + 1])
    assert slot.pages == pages
    assert adopted_slot(target, TEXT).length == 16
    slot.roll_back(31)
    feed(target, slot, TEXT[31:32])
    assert adopted_slot(target, TEXT).length == 16
    slot.seal(TEXT)
    assert adopted_slot(target, TEXT).length == 32
    target.pool.check_integrity()


@pytest.mark.parametrize("length", [16, 20, 31, 32])
def test_what_follows_a_changed_page_is_found_behind_the_new_ids_and_not_behind_the_old(
    target: TorchTarget, length: int
) -> None:
    other, slot = fed_slot(target, TEXT[:48]), adopted_slot(target, TEXT)
    slot.roll_back(length)
    new = [*TEXT[:length], TEXT[length] + 1, *TEXT[length + 1 : 48], *range(16)]
    feed(target, slot, new[length:])
    slot.seal(new)
    assert adopted_slot(target, [*new, 1]).pages == slot.pages
    assert adopted_slot(target, [*TEXT[:48], *range(16), 1]).pages == other.pages
    target.pool.check_integrity()


def test_what_follows_another_last_id_than_was_adopted_is_not_found_behind_the_adopted_ones(
    target: TorchTarget,
) -> None:
    fed_slot(target, TEXT[:32])
    slot = adopted_slot(target, TEXT[:32])
    new = [*TEXT[:31], TEXT[31] + 1, *range(16)]
    feed(target, slot, new[31:])
    slot.seal(new)
    assert adopted_slot(target, [*new, 1]).pages == slot.pages
    assert adopted_slot(target, [*TEXT[:32], *range(16), 1]).length == 32


def test_two_slots_that_computed_the_same_apart_hold_one_copy_after_seal(target: TorchTarget) -> None:
    slots = [target.new_slot() for _ in range(2)]
    for slot, tail in zip(slots, (TEXT[48:50], [1, 2]), strict=True):
        feed(target, slot, [*TEXT[:48], *tail])
    assert (target.pool.table.used, target.pool.table.shared) == (8, 0)
    for slot in slots:
        slot.seal(TEXT[:48])
    assert (target.pool.table.used, target.pool.table.shared) == (5, 3)
    assert slots[0].pages[:3] == slots[1].pages[:3]
    target.pool.check_integrity()
    own = feed(target, target.new_slot(), [*TEXT[:48], 1, 2, 3])
    torch.testing.assert_close(feed(target, slots[1], [3]), own[-1:], atol=1e-4, rtol=0)


def test_a_context_whose_holders_all_left_is_found_again_until_others_need_the_room(lm: CausalLm) -> None:
    target = target_of(lm, 5)
    target.release(fed_slot(target, TEXT[:48], "anna"))
    assert target.kv_use() == KvUse(total=5, used=0, shared=0, cached=3)
    again = adopted_slot(target, TEXT, "anna")
    assert again.length == 48
    target.release(again)
    other = target.new_slot("bert")
    feed(target, other, TEXT[:32])
    assert target.pool.table.taken_cached == 0
    again = adopted_slot(target, TEXT, "anna")
    assert again.length == 48
    target.release(again)
    feed(target, other, TEXT[32:])
    assert target.pool.table.taken_cached == 3
    assert adopted_slot(target, TEXT, "anna").length == 0
    target.pool.check_integrity()


def test_of_a_context_that_nobody_holds_the_end_goes_first(lm: CausalLm) -> None:
    """Without its beginning the rest could not be found, and would fill the pool for nothing."""
    target = target_of(lm, 4)
    target.release(fed_slot(target, TEXT[:64], "anna"))
    feed(target, target.new_slot("bert"), [1, 2, 3])
    assert adopted_slot(target, TEXT, "anna").length == 48


# ---------------------------------------------------------------- room


def test_a_reserve_that_finds_no_room_leaves_everything_as_it_was(lm: CausalLm) -> None:
    target = target_of(lm, 4)
    first = fed_slot(target, TEXT[:20])
    second = target.new_slot()
    feed(target, second, TEXT[40:50])
    before = [content(target.pool, slot) for slot in (first, second)]
    for _ in range(2):
        assert not second.try_reserve(30)
        target.pool.check_integrity()
    assert target.pool.table.free == 0
    second.roll_back(second.length)
    assert target.pool.table.free == 1
    assert all(same_bits(content(target.pool, slot), old) for slot, old in zip((first, second), before, strict=True))
    scores = feed(target, second, TEXT[50:72])
    torch.testing.assert_close(scores, lm.own_causal_scores(TEXT[40:72])[10:], atol=1e-4, rtol=0)


def test_a_copy_that_finds_no_room_is_refused_and_made_when_the_other_left(lm: CausalLm) -> None:
    target = target_of(lm, 2)
    first = fed_slot(target, TEXT[:32])
    second = adopted_slot(target, TEXT[:32])
    before, pages = content(target.pool, second), list(second.pages)
    assert not second.try_reserve(1)
    assert (second.length, second.pages) == (31, pages)
    target.pool.check_integrity()
    assert same_bits(content(target.pool, second), before)
    target.release(first)
    scores = feed(target, second, TEXT[31:32])
    assert second.pages == pages
    torch.testing.assert_close(scores, lm.own_causal_scores(TEXT[:32])[-1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17])
def test_room_is_as_much_as_asked_for_in_whole_pages(length: int) -> None:
    pool = KvPool([LayerShape(1, 2, 2)], 10, torch.float32, torch.device("cpu"))
    slot = pool.new_slot()
    assert slot.try_reserve(length)
    slot.keep(range(length))
    for count in (0, 1, 15, 16, 17, 33):
        assert slot.try_reserve(count)
        assert len(slot.pages) == -(-(length + count) // PAGE_TOKENS)
        slot.roll_back(length)
        assert len(slot.pages) == -(-length // PAGE_TOKENS)
    assert not slot.try_reserve(161 - length)
    assert slot.try_reserve(160 - length)


def test_a_cleared_slot_gives_its_pages_back(target: TorchTarget) -> None:
    slots = [target.new_slot(str(n)) for n in range(3)]
    for slot in slots:
        feed(target, slot, range(140))
    assert target.kv_use() == KvUse(total=64, used=27, shared=0, cached=0)
    assert slots[0].clear() == 9
    assert slots[0].clear() == 0
    assert (target.pool.table.used, target.pool.slots) == (18, 3)
    for slot in slots:
        target.release(slot)
    assert (target.pool.table.used, target.pool.slots) == (0, 0)
    target.pool.check_integrity()


def test_a_thousand_short_sessions_bring_the_pool_back_to_empty(lm: CausalLm) -> None:
    target, rng = target_of(lm, 40), random.Random(14)
    for _ in range(50):
        slots = [target.new_slot(rng.choice("abc")) for _ in range(20)]
        prompts = [TEXT[: rng.randint(1, 30)] if rng.random() < 0.5 else random_ids(rng, 20) for _ in slots]
        for slot, prompt in zip(slots, prompts, strict=True):
            slot.adopt(prompt)
        fed = [prompt[slot.length :] for slot, prompt in zip(slots, prompts, strict=True)]
        assert all(slot.try_reserve(len(ids)) for slot, ids in zip(slots, fed, strict=True))
        target.forward([RowInput(slot, ids, range(-1, len(ids) - 1), []) for slot, ids in zip(slots, fed, strict=True)])
        for slot, ids, prompt in zip(slots, fed, prompts, strict=True):
            slot.keep(range(rng.randint(0, len(ids))))
            slot.seal(prompt)
            target.release(slot)
        target.pool.check_integrity()
        assert (target.pool.table.used, target.pool.slots) == (0, 0)
    assert target.pool.table.free == 40


# ---------------------------------------------------------------- what is not finite


def test_scrubbed_rows_are_finite_and_what_was_kept_stands(target: TorchTarget) -> None:
    slot = target.new_slot()
    feed(target, slot, TEXT[:20])
    before = content(target.pool, slot)
    assert slot.try_reserve(30)
    write_nan(target.pool, slot, 30)
    assert not is_finite(target.pool)
    slot.scrub(20)
    assert is_finite(target.pool)
    assert same_bits(content(target.pool, slot), before)


def test_scrub_does_not_touch_a_page_that_another_holds(target: TorchTarget) -> None:
    first = fed_slot(target, TEXT[:32])
    before = content(target.pool, first)
    second = adopted_slot(target, TEXT)
    feed(target, second, TEXT[32:40])
    assert second.try_reserve(10)
    write_nan(target.pool, second, 10)
    second.scrub(0)
    assert is_finite(target.pool)
    assert same_bits(content(target.pool, first), before)
    assert not any(part[32:].any() for layer in content(target.pool, second) for part in layer)
    target.release(second)
    assert adopted_slot(target, TEXT).length == 0, "what a failed session read is not handed to others"
    target.pool.check_integrity()


@pytest.mark.parametrize("is_scrubbed", [True, False], ids=["scrubbed", "without a scrub it would"])
def test_not_finite_scratch_does_not_leak_into_the_next_session(lm: CausalLm, is_scrubbed: bool) -> None:
    target = target_of(lm, 2)
    slot = target.new_slot("anna")
    feed(target, slot, TEXT[:10])
    assert slot.try_reserve(20)
    write_nan(target.pool, slot, 20)
    if is_scrubbed:
        slot.scrub(slot.length)
    slot.roll_back(slot.length)
    target.release(slot)
    later = target.new_slot("bert")
    scores = feed(target, later, TEXT[20:25])
    feed(target, later, TEXT[25:40])
    assert len(later.pages) == 2
    assert bool(scores.isfinite().all()) == is_scrubbed
    if is_scrubbed:
        torch.testing.assert_close(scores, lm.own_causal_scores(TEXT[20:25]), atol=1e-4, rtol=0)


def test_rows_that_nobody_checked_leave_nothing_that_is_not_finite(target: TorchTarget) -> None:
    # Once wrong: a prefill chunk that was never judged gave its pages back as they were, to whoever came next.
    slot = target.new_slot("first")
    assert slot.try_reserve(40)
    write_nan(target.pool, slot, 40)
    slot.keep(range(40), is_checked=False)
    slot.seal(list(range(40)))
    pages = list(slot.pages)
    target.release(slot)
    assert target.new_slot("first").adopt(list(range(40))) == 0
    second = target.new_slot("second")
    assert second.try_reserve(48)
    assert set(second.pages) == set(pages)
    for layer in range(LAYERS):
        second.length = 48
        assert all(bool(part.isfinite().all()) for part in target.pool.content(second, layer))


def test_a_compaction_without_memory_empties_the_slots_it_was_for(
    target: TorchTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Once wrong: the moves were forgotten, and the slot went on with rows of refused hints.
    slot, other = fed_slot(target, TEXT[:20]), fed_slot(target, TEXT[40:60])
    before = content(target.pool, other)
    assert slot.try_reserve(4)
    target.forward([RowInput(slot, TEXT[20:24], (-1, -1, 1, 2), range(4))])
    slot.keep([1, 2, 3])
    slot.seal([*TEXT[:20], *TEXT[21:24]])

    def no_memory(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            target.pool.settle()
    assert (slot.length, len(slot.pages)) == (0, 0)
    assert target.new_slot().adopt(TEXT[:40]) == 0, "nobody finds what was not finished"
    assert same_bits(content(target.pool, other), before)
    target.pool.check_integrity()


def test_compactions_wait_for_each_other_and_for_whoever_reads(target: TorchTarget) -> None:
    """Two slots accept paths in one step; one is sealed and shared, the other rolled back, before anything moves."""
    slots = [fed_slot(target, TEXT[:29]), fed_slot(target, TEXT[60:77])]
    for slot in slots:
        assert slot.try_reserve(6)
    target.forward([RowInput(slot, TEXT[50:56], (-1, -1, 1, 1, 3, 4), range(6)) for slot in slots])
    for slot in slots:
        slot.keep([1, 3, 4, 5])
    path = [TEXT[51], *TEXT[53:56]]
    texts = [[*TEXT[:29], *path], [*TEXT[60:77], *path]]
    slots[0].seal(texts[0])
    shared = target.new_slot()
    assert shared.adopt([*texts[0], 7]) == 32
    slots[1].roll_back(19)
    feed(target, slots[1], [5, 6])
    for slot, ids in ((slots[0], texts[0]), (shared, texts[0][:32]), (slots[1], [*texts[1][:19], 5, 6])):
        fresh = fed_slot(target, ids)
        for ours, own in zip(content(target.pool, slot), content(target.pool, fresh), strict=True):
            for a, b in zip(ours, own, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        target.release(fresh)
