"""The hint trie: each rule of naming and dropping by example, then random lossy delivery against a slow twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from shared.hint_trie import MAX_ALIASES, Drop, HintTrie
from shared.rejection import QRow
from shared.types import Epoch, Hint

COMMITTED = [100, 101, 102]


def chain(first_node: int, *ids: int, position: int = 3, node: int = 0) -> Hint:
    return Hint(Epoch(0), first_node, ids, 0, base_node=node, base_position=0 if node else position)


def tree(first_node: int, ids: Sequence[int], parents: Sequence[int], position: int = 3, node: int = 0) -> Hint:
    return replace(chain(first_node, *ids, position=position, node=node), parents=tuple(parents))


def paths(trie: HintTrie) -> set[tuple[int, ...]]:
    return {tuple(node.path()) for node in trie.nodes()}


class Bench:
    """A trie together with the committed ids that it is told of; integrity is checked after each act."""

    def __init__(self, max_held: int = 100, remembered: int = 100, is_chain: bool = False) -> None:
        self.committed = list(COMMITTED)
        self.trie = HintTrie(len(self.committed), max_held, remembered, is_chain)

    def hint(self, hint: Hint) -> int:
        new = self.trie.insert(hint, self.committed)
        self.trie.check_integrity()
        return new

    def commit(self, *ids: int) -> None:
        self.committed.extend(ids)
        self.trie.advance(ids)
        self.trie.check_integrity()

    def dropped(self) -> tuple[int, int, int]:
        """Late, disagreeing, over budget since the last call."""
        counts = self.trie.take_dropped()
        return counts[Drop.LATE], counts[Drop.DISAGREEING], counts[Drop.OVER_BUDGET]


# ---------------------------------------------------------------- hints in


def test_a_chain_stands_id_below_id_from_its_base() -> None:
    bench = Bench()
    assert bench.hint(chain(1, 7, 8, 9)) == 3
    assert paths(bench.trie) == {(7,), (7, 8), (7, 8, 9)}
    assert [(n.token, n.position, n.numbers) for n in bench.trie.nodes()] == [(7, 3, [1]), (8, 4, [2]), (9, 5, [3])]
    assert bench.trie.held == 3
    assert bench.trie.highest_number == 3
    assert bench.dropped() == (0, 0, 0)


def test_a_tree_stands_by_backward_deltas_and_0_is_the_base() -> None:
    bench = Bench()
    assert bench.hint(tree(1, [7, 8, 9, 5, 6], [0, 0, 2, 2, 1])) == 5
    # node 3 hangs on 1, node 4 on 2, node 5 on 4
    assert paths(bench.trie) == {(7,), (8,), (7, 9), (8, 5), (8, 5, 6)}


def test_parents_reach_into_earlier_frames() -> None:
    bench = Bench()
    bench.hint(chain(1, 7, 8))
    bench.hint(tree(5, [9, 6], [3, 5]))  # node 5 on 2, node 6 on 1; numbers 3 and 4 were never sent
    assert paths(bench.trie) == {(7,), (7, 8), (7, 8, 9), (7, 6)}
    assert bench.dropped() == (0, 0, 0)


def test_a_node_is_a_base_for_the_next_frame() -> None:
    bench = Bench()
    bench.hint(chain(1, 7, 8))
    assert bench.hint(chain(3, 9, node=2)) == 1
    assert bench.hint(tree(4, [5, 6], [0, 0], node=1)) == 2
    assert paths(bench.trie) == {(7,), (7, 8), (7, 8, 9), (7, 5), (7, 6)}


def test_a_known_path_under_a_new_number_is_an_alias() -> None:
    bench = Bench()
    bench.hint(chain(1, 7, 8))
    assert bench.hint(chain(10, 7, 8, 9)) == 1
    assert [n.numbers for n in bench.trie.nodes()] == [[1, 10], [2, 11], [12]]
    assert bench.hint(chain(20, 6, node=10)) == bench.hint(chain(21, 5, node=1)) == 1
    assert {(7, 6), (7, 5)} < paths(bench.trie)
    assert bench.dropped() == (0, 0, 0)


def test_an_alias_keeps_what_the_first_hint_said_of_the_node() -> None:
    first, second = QRow((7,), (65535,)), QRow((7, 8), (65534, 1))
    bench = Bench(is_chain=True)
    bench.hint(replace(chain(1, 7), rows=(first,), confidence=(0.5,)))
    bench.hint(replace(chain(2, 7), rows=(second,), confidence=(0.25,)))
    [node] = bench.trie.nodes()
    assert (node.row, node.probability, node.numbers) == (first, 0.5, [1, 2])


def test_aliases_of_one_node_are_limited_and_the_rest_is_over_budget() -> None:
    bench = Bench()
    for number in range(1, MAX_ALIASES + 4):
        bench.hint(chain(number, 7))
    [node] = bench.trie.nodes()
    assert node.numbers == list(range(1, MAX_ALIASES + 1))
    assert bench.dropped() == (0, 0, 3)


def test_a_duplicate_is_a_no_op() -> None:
    bench = Bench()
    hint = tree(1, [7, 8, 9], [0, 0, 1])
    bench.hint(hint)
    before = [(n.token, n.position, list(n.numbers)) for n in bench.trie.nodes()]
    for again in (hint, chain(1, 7), hint):
        assert bench.hint(again) == 0
    assert [(n.token, n.position, list(n.numbers)) for n in bench.trie.nodes()] == before
    assert bench.dropped() == (0, 0, 0)


def test_the_highest_number_seen_does_not_fall_when_frames_come_out_of_order() -> None:
    bench = Bench()
    bench.hint(chain(10, 7, 8))
    bench.hint(chain(1, 5))
    assert bench.trie.highest_number == 11


def test_an_empty_hint_changes_nothing() -> None:
    bench = Bench()
    assert bench.hint(chain(9)) == 0
    assert bench.trie.held == bench.trie.highest_number == 0


def test_nodes_on_unknown_parents_are_dropped_and_counted_and_so_are_theirs() -> None:
    bench = Bench()
    assert bench.hint(chain(5, 7, 8, node=4)) == 0
    assert bench.hint(tree(10, [7, 8, 9], [0, 3, 1])) == 1  # node 11 hangs on 8, never sent; node 12 on 11
    assert paths(bench.trie) == {(7,)}
    assert bench.dropped() == (0, 4, 0)
    assert bench.trie.highest_number == 12


def test_a_base_beyond_the_committed_ids_is_dropped_and_counted() -> None:
    bench = Bench()
    assert bench.hint(chain(1, 7, 8, position=4)) == 0
    assert bench.dropped() == (0, 2, 0)


# ---------------------------------------------------------------- what has been committed meanwhile


def test_ids_that_came_late_are_skipped_and_the_rest_is_kept() -> None:
    bench = Bench()
    bench.commit(7, 8)
    assert bench.hint(chain(1, 7, 8, 9)) == 1
    assert [(n.token, n.position) for n in bench.trie.nodes()] == [(9, 5)]
    assert bench.dropped() == (2, 0, 0)


def test_ids_that_disagree_with_committed_ones_are_dropped_with_all_below() -> None:
    bench = Bench()
    bench.commit(7, 8)
    assert bench.hint(tree(1, [7, 9, 5, 8, 6], [0, 1, 1, 3, 1])) == 1
    assert paths(bench.trie) == {(6,)}
    assert bench.dropped() == (2, 2, 0)


def test_a_position_in_the_context_is_a_base_too() -> None:
    bench = Bench()
    assert bench.hint(chain(1, 101, 102, 7, position=1)) == 1
    assert bench.hint(chain(4, 100, 101, 102, 8, position=0)) == 1
    assert paths(bench.trie) == {(7,), (8,)}


def test_a_committed_node_stands_for_its_position() -> None:
    bench = Bench()
    bench.hint(chain(1, 7, 8))
    bench.commit(7, 8, 9)
    assert bench.hint(chain(3, 9, 5, node=2)) == 1  # 9 is late, 5 is next
    assert bench.hint(chain(5, 6, node=2)) == 0  # the target said 9 there
    assert bench.hint(chain(6, 8, 9, 4, node=1)) == 1
    assert paths(bench.trie) == {(5,), (4,)}
    assert bench.dropped() == (3, 1, 0)


def test_a_node_that_came_late_stands_for_its_position_too() -> None:
    bench = Bench()
    bench.commit(7)
    bench.hint(chain(1, 7))
    assert bench.hint(chain(2, 8, node=1)) == 1
    assert bench.hint(chain(1, 7)) == 0
    assert bench.dropped() == (1, 0, 0)  # the duplicate is not counted


def test_every_alias_of_a_committed_node_stands_for_its_position() -> None:
    bench = Bench()
    bench.hint(chain(1, 7))
    bench.hint(chain(2, 7))
    bench.commit(7)
    assert bench.hint(chain(3, 8, node=1)) == bench.hint(chain(4, 9, node=2)) == 1


def test_names_of_committed_nodes_are_forgotten_beyond_the_limit_oldest_first() -> None:
    bench = Bench(remembered=2)
    bench.hint(chain(1, 5, 6, 7))
    bench.commit(5, 6, 7)
    assert bench.hint(chain(4, 9, node=1)) == 0
    assert bench.dropped() == (0, 1, 0)
    assert bench.hint(chain(5, 7, 9, node=2)) == 1
    assert bench.dropped() == (1, 0, 0)  # and node 5, late, took the place of node 2
    assert bench.hint(chain(7, 8, node=2)) == 0
    assert bench.hint(chain(8, 8, node=3)) == 1
    assert bench.dropped() == (0, 1, 0)


def test_nothing_need_be_remembered() -> None:
    bench = Bench(remembered=0)
    bench.hint(chain(1, 5, 6))
    bench.commit(5)
    assert paths(bench.trie) == {(6,)}
    assert bench.hint(chain(3, 7, node=2)) == 1
    assert bench.hint(chain(4, 7, node=1)) == 0


# ---------------------------------------------------------------- budget


def test_nodes_over_budget_are_dropped_with_all_below_and_may_be_resent() -> None:
    bench = Bench(max_held=3)
    assert bench.hint(chain(1, 5, 6, 7, 8, 9)) == 3
    assert bench.dropped() == (0, 0, 2)
    assert bench.hint(chain(6, 4, node=5)) == 0  # hangs on a node that fell over budget
    assert bench.dropped() == (0, 0, 1)
    bench.commit(5, 6)
    assert bench.hint(chain(4, 8, 9, node=3)) == 2
    assert bench.hint(chain(6, 4, node=5)) == 0
    assert paths(bench.trie) == {(7,), (7, 8), (7, 8, 9)}
    assert bench.dropped() == (0, 0, 1)


def test_a_full_trie_still_takes_aliases_and_late_ids() -> None:
    bench = Bench(max_held=1)
    bench.commit(5)
    bench.hint(chain(1, 6, position=4))
    assert bench.hint(chain(10, 5, 6)) == 0
    assert bench.dropped() == (1, 0, 0)
    assert [n.numbers for n in bench.trie.nodes()] == [[1, 11]]


def test_memory_is_bounded_whatever_is_sent() -> None:
    bench = Bench(max_held=5, remembered=7)
    for number in range(1, 3000):
        bench.hint(chain(number, number % 11, number % 3))
        if number % 100 == 0:
            bench.commit(number % 11)
    assert bench.trie.held <= 5
    assert len(bench.trie._names) <= 5 * MAX_ALIASES + 7
    assert len(bench.trie._dropped_names) <= 7


# ---------------------------------------------------------------- commits


def test_advance_keeps_what_agrees_and_prunes_and_counts_what_does_not() -> None:
    bench = Bench()
    bench.hint(tree(1, [7, 8, 9, 5, 6], [0, 0, 2, 2, 1]))
    bench.commit(8)
    assert paths(bench.trie) == {(5,), (5, 6)}
    assert [(n.token, n.position, n.parent is None) for n in bench.trie.nodes()] == [(5, 4, True), (6, 5, False)]
    assert bench.trie.held == 2
    assert bench.dropped() == (0, 2, 0)
    bench.commit(5, 6, 1)
    assert bench.trie.held == 0
    assert bench.dropped() == (0, 0, 0)
    assert bench.trie.committed_length == 7


def test_a_commit_that_no_hint_foretold_empties_the_trie() -> None:
    bench = Bench()
    bench.hint(tree(1, [7, 8, 9], [0, 1, 3]))
    bench.commit(1)
    assert paths(bench.trie) == set()
    assert bench.dropped() == (0, 3, 0)
    assert bench.hint(chain(4, 5, node=2)) == 0  # a pruned name is no base
    assert bench.dropped() == (0, 1, 0)


def test_committing_nothing_changes_nothing() -> None:
    bench = Bench()
    bench.hint(chain(1, 7, 8))
    bench.commit()
    assert paths(bench.trie) == {(7,), (7, 8)}


def test_counts_are_taken_once() -> None:
    bench = Bench()
    bench.hint(chain(1, 7, position=9))
    assert bench.dropped() == (0, 1, 0)
    assert bench.dropped() == (0, 0, 0)


def test_a_path_is_told_from_the_root_that_commits_have_moved() -> None:
    bench = Bench()
    bench.hint(chain(1, 7, 8, 9))
    bench.commit(7)
    assert [n.path() for n in bench.trie.nodes()] == [[8], [8, 9]]


# ---------------------------------------------------------------- chains (rejection rule)


def test_under_a_chain_the_first_hint_at_a_place_wins() -> None:
    bench = Bench(is_chain=True)
    assert bench.hint(chain(1, 7, 8)) == 2
    assert bench.hint(chain(3, 6, 5)) == 0
    assert bench.hint(chain(5, 9, node=1)) == 0
    assert bench.dropped() == (0, 3, 0)
    assert bench.hint(chain(6, 9, node=2)) == 1
    assert paths(bench.trie) == {(7,), (7, 8), (7, 8, 9)}
    bench.commit(7, 8)
    assert bench.hint(chain(8, 4)) == 0
    assert paths(bench.trie) == {(9,)}


def test_a_tree_sent_where_only_a_chain_may_be_leaves_a_chain() -> None:
    bench = Bench(is_chain=True)
    assert bench.hint(tree(1, [7, 8, 9], [0, 0, 2])) == 2
    assert paths(bench.trie) == {(7,), (7, 9)}


# ---------------------------------------------------------------- integrity tells


def test_the_integrity_check_sees_each_kind_of_damage() -> None:
    def damaged() -> tuple[HintTrie, Any]:
        bench = Bench()
        bench.hint(chain(1, 7, 8))
        return bench.trie, next(bench.trie.nodes())

    for damage in ("held", "position", "name", "dangling", "committed"):
        trie, node = damaged()
        match damage:
            case "held":
                trie.held += 1
            case "position":
                node.position += 1
            case "name":
                del trie._names[1]
            case "dangling":
                node.children.clear()
                trie.held -= 1
            case "committed":
                trie._names[9] = 2
        with pytest.raises((AssertionError, KeyError)):
            trie.check_integrity()


# ---------------------------------------------------------------- the slow twin

Path = tuple[int, ...]
"""All ids from position 0: a node is the path that ends in it, whether it is committed or not."""


@dataclass
class SlowTrie:
    """What a trie must do, said with whole paths and no pointers: rebuilt from scratch at each commit."""

    committed: Path
    max_held: int
    is_chain: bool
    held: dict[Path, Hint | None] = field(default_factory=dict)
    names: dict[int, Path] = field(default_factory=dict)
    why: dict[int, Drop] = field(default_factory=dict)
    dropped: dict[Drop, int] = field(default_factory=lambda: dict.fromkeys(Drop, 0))
    proposed: set[Path] = field(default_factory=set)

    def insert(self, hint: Hint) -> int:
        before = len(self.held)
        for index, token in enumerate(hint.ids):
            number = hint.first_node + index
            if number in self.names:
                continue
            parent = self.parent_of(hint, index)
            reason = parent if isinstance(parent, Drop) else self.place(number, (*parent, token))
            if reason is not None:
                self.dropped[reason] += 1
                if reason is not Drop.LATE:
                    self.why[number] = reason
        return len(self.held) - before

    def parent_of(self, hint: Hint, index: int) -> Path | Drop:
        delta = hint.parents[index] if hint.parents else min(index, 1)
        name = hint.first_node + index - delta if delta else hint.base_node
        if name:
            return self.names.get(name) or self.why.get(name, Drop.DISAGREEING)
        if hint.base_position > len(self.committed):
            return Drop.DISAGREEING
        return self.committed[: hint.base_position]

    def place(self, number: int, path: Path) -> Drop | None:
        self.proposed.add(path)
        if path == self.committed[: len(path)]:
            self.names[number] = path
            return Drop.LATE
        if path[:-1] not in self.held and path[:-1] != self.committed:
            return Drop.DISAGREEING
        if path in self.held:
            if sum(named == path for named in self.names.values()) >= MAX_ALIASES:
                return Drop.OVER_BUDGET
        elif self.is_chain and any(other[:-1] == path[:-1] for other in self.held):
            return Drop.DISAGREEING
        elif len(self.held) >= self.max_held:
            return Drop.OVER_BUDGET
        self.held.setdefault(path, None)
        self.names[number] = path
        return None

    def advance(self, ids: Sequence[int]) -> None:
        self.committed += tuple(ids)
        length = len(self.committed)
        self.held = {p: None for p in self.held if len(p) > length and p[:length] == self.committed}
        for number, path in list(self.names.items()):
            if path not in self.held and path != self.committed[: len(path)]:
                del self.names[number]
                self.dropped[Drop.DISAGREEING] += 1
                self.why[number] = Drop.DISAGREEING


def assert_equal(trie: HintTrie, twin: SlowTrie) -> None:
    trie.check_integrity()
    live = {twin.committed + tuple(node.path()): node for node in trie.nodes()}
    assert live.keys() == twin.held.keys()
    assert trie.committed_length == len(twin.committed)
    assert trie.held == len(twin.held)
    assert trie.dropped == twin.dropped
    numbers = {number: path for path, node in live.items() for number in node.numbers}
    assert numbers == {number: path for number, path in twin.names.items() if path in twin.held}
    assert live.keys() <= twin.proposed  # nothing that no hint ever said in full


class Device:
    """Proposes a growing tree in numbered frames, often along the text that will be committed."""

    def __init__(self, rng: np.random.Generator, text: Path, is_chain: bool) -> None:
        self.rng, self.text, self.is_chain = rng, text, is_chain
        self.next_number = 1
        self.sent: dict[int, int] = {}
        """Node number → its position, as the device sees it."""

    def frame(self, committed_length: int) -> Hint:
        rng, count = self.rng, int(self.rng.integers(0, 7))
        first = self.next_number + int(rng.integers(3) if rng.random() < 0.1 else 0)
        base_node, position = 0, max(0, committed_length + int(rng.choice([-3, -1, 0, 0, 0, 0, 1])))
        if self.sent and rng.random() < 0.6:
            base_node = int(rng.choice(list(self.sent)[-8:]))
        if rng.random() < 0.05 and self.sent:
            first = int(rng.choice(list(self.sent)))  # numbers used again for something else
            base_node = min(base_node, first - 1)
        is_tree = rng.random() < (0.2 if self.is_chain else 0.6)
        ids, parents = list[int](), list[int]()
        for n in range(count):
            number = first + n
            parents.append(int(rng.integers(0, min(number, 6))) if is_tree else min(n, 1))
            above = self.sent.get(number - parents[n] if parents[n] else base_node, position - 1)
            ids.append(self.likely(above + 1))
            self.sent[number] = above + 1
        self.next_number = max(self.next_number, first + count)
        return Hint(
            epoch=Epoch(0),
            first_node=first,
            ids=tuple(ids),
            ack=0,
            base_node=base_node,
            base_position=0 if base_node else position,
            parents=tuple(parents) if is_tree else (),
        )

    def likely(self, position: int) -> int:
        if self.rng.random() < 0.7:
            return self.text[position % len(self.text)]
        return int(self.rng.integers(3))


def delivered(rng: np.random.Generator, frames: list[Hint]) -> list[Hint]:
    """The frames as a bad network brings them: some lost, some twice, some out of order."""
    kept = [frame for frame in frames for _ in range(int(rng.choice([0, 1, 1, 1, 2])))]
    if rng.random() < 0.4:
        kept = [kept[n] for n in rng.permutation(len(kept))]
    return kept


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_under_lossy_delivery_the_trie_equals_its_slow_twin(seed: int, is_chain: bool) -> None:
    rng = np.random.default_rng([seed, is_chain])
    text = tuple(int(token) for token in rng.integers(3, size=40))
    length = int(rng.integers(0, 5))
    max_held = int(rng.choice([0, 2, 6, 15, 200]))
    trie, twin = HintTrie(length, max_held, 10**6, is_chain), SlowTrie(text[:length], max_held, is_chain)
    device, late_frames = Device(rng, text, is_chain), list[Hint]()
    for _ in range(25):
        frames = [device.frame(length) for _ in range(int(rng.integers(1, 4)))]
        for frame in delivered(rng, frames + late_frames):
            assert trie.insert(frame, list(twin.committed)) == twin.insert(frame)
            assert_equal(trie, twin)
        late_frames = frames[-1:] if rng.random() < 0.3 else []
        truthful = text[length : length + int(rng.integers(0, 4))]
        ids = tuple(token if rng.random() < 0.9 else int(rng.integers(3)) for token in truthful)
        trie.advance(ids)
        twin.advance(ids)
        length += len(ids)
        assert_equal(trie, twin)
        if rng.random() < 0.3:
            assert trie.take_dropped() == twin.dropped
            twin.dropped = dict.fromkeys(Drop, 0)


def test_the_random_runs_above_meet_every_kind_of_drop_and_long_survivors() -> None:
    seen, survivors = dict.fromkeys(Drop, 0), 0
    for seed in range(20):
        rng = np.random.default_rng([seed, 0])
        text = tuple(int(token) for token in rng.integers(3, size=40))
        twin, device, length = SlowTrie((), 8, False), Device(rng, text, False), 0
        for _ in range(25):
            for frame in delivered(rng, [device.frame(length) for _ in range(2)]):
                twin.insert(frame)
            ids = text[length : length + int(rng.integers(0, 3))]
            twin.advance(ids)
            length += len(ids)
            survivors += len(twin.held)
        for why, count in twin.dropped.items():
            seen[why] += count
    assert min(seen.values()) > 50
    assert survivors > 500


@pytest.mark.parametrize("seed", range(40))
def test_however_little_is_remembered_only_continuations_of_the_committed_ids_are_held(seed: int) -> None:
    rng = np.random.default_rng([seed, 2])
    text = tuple(int(token) for token in rng.integers(3, size=40))
    remembered, is_chain = int(rng.choice([0, 1, 3, 8])), bool(rng.integers(2))
    trie, twin = HintTrie(0, 10, remembered, is_chain), SlowTrie((), 10, is_chain)
    device, committed = Device(rng, text, is_chain), list[int]()
    for _ in range(40):
        for frame in delivered(rng, [device.frame(len(committed)) for _ in range(2)]):
            trie.insert(frame, committed)
            twin.insert(frame)
            trie.check_integrity()
        ids = text[len(committed) : len(committed) + int(rng.integers(0, 3))]
        trie.advance(ids)
        twin.advance(ids)
        committed += ids
        trie.check_integrity()
        assert len(trie._committed_names) <= remembered
        assert len(trie._dropped_names) <= remembered
        for node in trie.nodes():
            path = (*committed, *node.path())
            assert path[: len(committed)] == tuple(committed)
            assert node.position == len(path) - 1
            assert len(node.numbers) <= MAX_ALIASES
