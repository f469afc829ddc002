"""The page table against a slow twin under random acts, its order of taking by example, and whom a key can reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cloud_verifier.kv_pages import PAGE_TOKENS, PageTable, page_key, root_key

TOTAL = 7
SLOTS = 4
KEYS = [bytes([n]) * 16 for n in range(12)]


class PageTableTwin(RuleBasedStateMachine):
    """Slots that take, share and give back pages; lists say what the table has to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(TOTAL)
        self.slots: list[list[int]] = [[] for _ in range(SLOTS)]
        self.keys: dict[int, bytes] = {}
        self.blank: list[int] = []
        self.never_used = list(range(TOTAL))
        self.cached: list[int] = []
        self.taken_cached = 0

    def held(self) -> list[int]:
        return sorted({page for slot in self.slots for page in slot})

    @rule(slot=st.integers(0, SLOTS - 1))
    def take(self, slot: int) -> None:
        expected = None
        if self.blank:
            expected = self.blank.pop()
        elif self.never_used:
            expected = self.never_used.pop(0)
        elif self.cached:
            expected = self.cached.pop(0)
            del self.keys[expected]
            self.taken_cached += 1
        assert self.table.try_take() == expected
        if expected is not None:
            self.slots[slot].append(expected)

    @precondition(lambda self: self.held() or self.cached)
    @rule(slot=st.integers(0, SLOTS - 1), data=st.data())
    def share(self, slot: int, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held() + self.cached))
        self.table.share(page)
        self.slots[slot].append(page)
        if page in self.cached:
            self.cached.remove(page)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.slots if slot]))
        page = slot.pop(data.draw(st.integers(0, len(slot) - 1)))
        self.table.give_back(page)
        if page not in self.held():
            (self.cached if page in self.keys else self.blank).append(page)

    @precondition(lambda self: set(self.held()) - self.keys.keys())
    @rule(data=st.data())
    def set_key(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(set(self.held()) - self.keys.keys())))
        key = data.draw(st.sampled_from([key for key in KEYS if key not in self.keys.values()]))
        self.table.set_key(page, key)
        self.keys[page] = key

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def forget_key(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held()))
        self.table.forget_key(page)
        self.keys.pop(page, None)

    @invariant()
    def counts_and_keys_agree(self) -> None:
        self.table.check_integrity(self.slots)
        holders = Counter(page for slot in self.slots for page in slot)
        assert [self.table.holders(page) for page in range(TOTAL)] == [holders[page] for page in range(TOTAL)]
        assert (self.table.used, self.table.free) == (len(holders), TOTAL - len(holders))
        assert self.table.shared == sum(count > 1 for count in holders.values())
        assert (self.table.cached, self.table.taken_cached) == (len(self.cached), self.taken_cached)
        page_of = {key: page for page, key in self.keys.items()}
        assert [self.table.find(key) for key in KEYS] == [page_of.get(key) for key in KEYS]


def test_random_acts_equal_the_slow_twin() -> None:
    run_state_machine_as_test(
        PageTableTwin,
        settings=settings(derandomize=True, max_examples=60, stateful_step_count=50, deadline=None, database=None),
    )


# ---------------------------------------------------------------- the order of taking


def taken(table: PageTable, count: int) -> list[int | None]:
    return [table.try_take() for _ in range(count)]


def test_blank_pages_are_taken_first_then_new_ones_then_the_longest_unused() -> None:
    table = PageTable(6)
    assert taken(table, 4) == [0, 1, 2, 3]
    table.set_key(0, KEYS[0])
    table.set_key(2, KEYS[2])
    for page in (2, 1, 0, 3):
        table.give_back(page)
    assert taken(table, 7) == [3, 1, 4, 5, 2, 0, None]
    assert table.taken_cached == 2


def test_a_page_taken_for_others_is_not_found_any_more() -> None:
    table = PageTable(1)
    table.try_take()
    table.set_key(0, KEYS[0])
    table.give_back(0)
    assert table.find(KEYS[0]) == 0
    assert table.try_take() == 0
    assert table.find(KEYS[0]) is None
    table.give_back(0)
    assert table.cached == 0


def test_without_a_free_page_nothing_is_taken_and_nothing_changes() -> None:
    table = PageTable(2)
    taken(table, 2)
    table.set_key(0, KEYS[0])
    for _ in range(3):
        assert table.try_take() is None
    assert (table.used, table.free, table.taken_cached, table.find(KEYS[0])) == (2, 0, 0, 0)
    table.check_integrity([[0], [1]])


def test_sharing_a_free_page_with_a_key_revives_it() -> None:
    table = PageTable(1)
    table.try_take()
    table.set_key(0, KEYS[0])
    table.give_back(0)
    table.share(0)
    assert (table.used, table.cached, table.find(KEYS[0])) == (1, 0, 0)
    assert table.try_take() is None


def test_a_page_used_again_is_no_longer_the_longest_unused() -> None:
    table = PageTable(2)
    taken(table, 2)
    for page in (0, 1):
        table.set_key(page, KEYS[page])
        table.give_back(page)
    table.share(0)
    table.give_back(0)
    assert taken(table, 2) == [1, 0]


# ---------------------------------------------------------------- misuse is seen


MISUSE: dict[str, Callable[[PageTable], None]] = {
    "sharing a blank page": lambda table: table.share(1),
    "sharing a page that was never used": lambda table: table.share(3),
    "giving back a free page": lambda table: table.give_back(1),
    "a second page with one key": lambda table: table.set_key(2, KEYS[0]),
    "a second key for one page": lambda table: table.set_key(0, KEYS[1]),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_refused(what: str) -> None:
    table = PageTable(4)
    assert taken(table, 3) == [0, 1, 2]
    table.set_key(0, KEYS[0])
    table.give_back(1)
    with pytest.raises(AssertionError):
        MISUSE[what](table)


@pytest.mark.parametrize("slots", [[], [[0]], [[0, 1], [1]], [[0, 1, 2]], [[0], [2]]])
def test_slots_that_are_not_the_holders_are_noticed(slots: list[list[int]]) -> None:
    table = PageTable(3)
    taken(table, 2)
    table.check_integrity([[0], [1]])
    with pytest.raises(AssertionError):
        table.check_integrity(slots)


SABOTAGE: dict[str, Callable[[PageTable], object]] = {
    "a held page is free too": lambda table: table._blank.append(0),
    "a page is free twice": lambda table: table._blank.append(1),
    "a page is lost": lambda table: table._blank.clear(),
    "a blank page has a key": lambda table: table.set_key(1, KEYS[1]),
    "a free page lost its key": lambda table: table.forget_key(2),
    "a key leads to another page": lambda table: table._page_of.update({KEYS[2]: 0}),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_a_table_that_contradicts_itself_is_noticed(what: str) -> None:
    table = PageTable(4)
    taken(table, 3)
    table.set_key(2, KEYS[2])
    table.give_back(1)
    table.give_back(2)
    table.check_integrity([[0]])
    SABOTAGE[what](table)
    with pytest.raises(AssertionError):
        table.check_integrity([[0]])


# ---------------------------------------------------------------- keys


def chain(principal: str, pages: Sequence[Sequence[int]]) -> list[bytes]:
    """The keys of a context's full pages, as a slot makes them."""
    keys = [root_key(principal)]
    for page in pages:
        keys.append(page_key(keys[-1], page))
    return keys[1:]


few_ids = st.lists(st.lists(st.integers(0, 2), min_size=PAGE_TOKENS, max_size=PAGE_TOKENS), min_size=1, max_size=4)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(pages=few_ids, first=st.text(max_size=8), second=st.text(max_size=8))
def test_two_principals_with_the_same_ids_never_share_a_key(pages: list[list[int]], first: str, second: str) -> None:
    shared = set(chain(first, pages)) & set(chain(second, pages))
    assert shared == (set(chain(first, pages)) if first == second else set())


@settings(derandomize=True, max_examples=80, deadline=None)
@given(first=few_ids, second=few_ids)
def test_two_contexts_share_exactly_the_keys_of_their_common_beginning(
    first: list[list[int]], second: list[list[int]]
) -> None:
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    keys = chain("anna", first)
    assert len(set(keys)) == len(first)
    assert set(keys) & set(chain("anna", second)) == set(keys[:common])


def test_a_page_of_the_same_ids_has_another_key_behind_other_ids() -> None:
    page, other = [5] * PAGE_TOKENS, [6] * PAGE_TOKENS
    assert chain("anna", [page, page])[1] != chain("anna", [other, page])[1]
    assert page_key(root_key("anna"), page) != root_key("anna")


def test_a_key_does_not_depend_on_how_ids_are_held() -> None:
    ids = list(range(2**32 - PAGE_TOKENS, 2**32))
    held = [ids, tuple(ids), np.array(ids), np.array(ids, np.uint32), np.array(ids, ">u4")]
    assert len({page_key(b"before", one) for one in held}) == 1
