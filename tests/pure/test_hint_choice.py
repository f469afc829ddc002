"""Which hint nodes a step verifies: the fast choice against its slow twin, budgets, bias under rejection, learning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cloud_verifier.hint_choice import (
    DEPTHS,
    FIRST_CHILD_PROBABILITY,
    OTHER_CHILD_PROBABILITY,
    RANKS,
    Acceptance,
    Candidate,
    Cost,
    choose_nodes,
    choose_nodes_slowly,
)
from shared.hint_trie import HintTrie, Node
from shared.rejection import ROW_TOTAL, QRow
from shared.types import Epoch, Hint

SHARES = (1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 1.0)
Taken = list[list[Node]]


def line(share: float) -> Cost:
    """Each token costs `share` of an empty step."""
    return lambda tokens: 1 + share * tokens


def crooked(rng: random.Random) -> Cost:
    """Dearer with every token, now more, now less; some stretches are free."""
    steps = [rng.choice([0.0, 0.0, 1e-4, 0.01, 0.3]) * rng.random() for _ in range(160)]
    return lambda tokens: 1 + sum(steps[:tokens])


def grown_acceptance(rng: random.Random) -> Acceptance:
    """A history of its own: no two are alike."""
    acceptance = Acceptance()
    for _ in range(rng.randrange(60)):
        acceptance.note(rng.randint(1, 10), rng.randrange(5), rng.random() < 0.7)
    return acceptance


def random_hint(rng: random.Random, count: int, is_chain: bool, is_sure: bool) -> Hint:
    """A random tree, or a chain with rows; `is_sure`: with confidences."""
    parents = [1 if index else 0 for index in range(count)]
    if not is_chain:
        parents = [rng.randint(0, min(index, 4)) for index in range(count)]
    rows = tuple(QRow((token,), (ROW_TOTAL,)) for token in range(count)) if is_chain else ()
    return Hint(
        Epoch(0),
        1,
        tuple(rng.randrange(50) for _ in range(count)),
        0,
        base_position=3,
        parents=() if is_chain else tuple(parents),
        confidence=tuple(rng.random() for _ in range(count)) if is_sure else (),
        rows=tuple(replace(row, ids=(rng.randrange(50),)) for row in rows),
    )


def random_candidate(rng: random.Random) -> Candidate:
    is_chain = rng.random() < 0.3
    trie = HintTrie(3, 1000, 1000, is_chain=is_chain)
    trie.insert(random_hint(rng, rng.randrange(25), is_chain, rng.random() < 0.5), [0, 0, 0])
    depth, nodes = rng.choice([0, 1, 2, 5, 40]), rng.choice([1, 3, 8, 64])
    return Candidate(trie, grown_acceptance(rng), depth, nodes, is_chain, is_tried=rng.random() < 0.2)


def depth_of(node: Node) -> int:
    return len(node.path())


def reaches(candidates: Sequence[Candidate], taken: Taken) -> list[float]:
    """The probability that the text reaches each node taken, multiplied from the root on, sorted."""
    found: list[float] = []
    for candidate, nodes in zip(candidates, taken, strict=True):
        reach: dict[int, float] = {}
        for node in nodes:
            siblings = list((node.parent.children if node.parent else candidate.trie.children).values())
            before = reach[id(node.parent)] if node.parent else 1.0
            reach[id(node)] = before * candidate.worth(node, depth_of(node), siblings.index(node))
        found += reach.values()
    return sorted(found)


def names(taken: Taken) -> list[set[int]]:
    return [{id(node) for node in nodes} for nodes in taken]


def random_cost(rng: random.Random) -> Cost:
    return line(10 ** rng.uniform(-4, 0)) if rng.random() < 0.6 else crooked(rng)


def test_the_fast_choice_takes_what_its_slow_twin_takes() -> None:
    """Where values tie either node may be taken; the values are the same whichever it is."""
    rng, same, cut_by_cost = random.Random(1), 0, 0
    for _ in range(400):
        candidates = [random_candidate(rng) for _ in range(rng.randrange(6))]
        most, tokens, cost, gained = rng.randint(0, 40), rng.randrange(60), random_cost(rng), float(rng.randint(0, 6))
        fast = choose_nodes(candidates, most, gained, tokens, cost)
        slow = choose_nodes_slowly(candidates, most, gained, tokens, cost)
        assert reaches(candidates, fast) == reaches(candidates, slow)
        same += names(fast) == names(slow)
        free = choose_nodes(candidates, most, gained, tokens, lambda tokens: 1.0)
        cut_by_cost += 0 < sum(map(len, fast)) < sum(map(len, free))
    assert same > 200
    assert cut_by_cost > 40


def test_with_values_all_different_both_take_the_very_same_nodes() -> None:
    rng, taken = random.Random(2), 0
    for _ in range(200):
        tries = [HintTrie(3, 1000, 1000) for _ in range(rng.randint(1, 5))]
        for trie in tries:
            trie.insert(random_hint(rng, rng.randint(1, 25), False, True), [0, 0, 0])
        candidates = [Candidate(trie, Acceptance(), rng.randint(1, 9), rng.randint(1, 20), False) for trie in tries]
        most, cost = rng.randint(0, 40), random_cost(rng)
        fast = choose_nodes(candidates, most, len(tries), len(tries), cost)
        assert fast == choose_nodes_slowly(candidates, most, len(tries), len(tries), cost)
        taken += sum(map(len, fast))
    assert taken > 500


def test_no_other_number_of_the_likeliest_nodes_brings_more_ids_for_its_time() -> None:
    rng, ends = random.Random(6), set()
    for _ in range(200):
        trie = HintTrie(3, 1000, 1000)
        trie.insert(random_hint(rng, rng.randint(1, 30), False, True), [0, 0, 0])
        candidate, cost, tokens = Candidate(trie, Acceptance(), 40, 64, False), random_cost(rng), rng.randint(1, 20)
        gained = float(rng.randint(1, 4))
        every = sorted(reaches([candidate], [list(trie.nodes())]), reverse=True)
        taken = reaches([candidate], choose_nodes([candidate], 64, gained, tokens, cost))
        rates = [(gained + sum(every[:count])) / cost(tokens + count) for count in range(len(every) + 1)]
        assert taken == every[: len(taken)][::-1]
        assert rates[len(taken)] >= max(rates) * (1 - 1e-12)
        ends.add(len(taken))
    assert len(ends) > 10


def test_a_chosen_node_stands_behind_its_parent_and_within_every_limit() -> None:
    rng = random.Random(3)
    full = {"depth": 0, "session": 0, "step": 0}
    for _ in range(300):
        candidates = [random_candidate(rng) for _ in range(rng.randint(1, 6))]
        most = rng.randint(0, 40)
        taken = choose_nodes(candidates, most, 1.0, 1, line(rng.choice(SHARES[:3])))
        assert sum(map(len, taken)) <= most
        full["step"] += sum(map(len, taken)) == most > 0
        for candidate, nodes in zip(candidates, taken, strict=True):
            assert len(nodes) <= candidate.max_nodes
            seen: set[int] = set()
            for node in nodes:
                assert id(node) not in seen
                assert node.parent is None or id(node.parent) in seen
                assert depth_of(node) <= candidate.max_depth
                seen.add(id(node))
            full["session"] += len(nodes) == candidate.max_nodes
            full["depth"] += any(depth_of(node) == candidate.max_depth and node.children for node in nodes)
    assert min(full.values()) > 20, full  # each limit was met


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(4))
def test_the_more_sessions_share_a_step_the_fewer_nodes_each_gets(share: float, seed: int) -> None:
    rng = random.Random(seed)
    trie = HintTrie(3, 1000, 1000)
    trie.insert(random_hint(rng, 60, False, True), [0, 0, 0])
    candidate, before = Candidate(trie, Acceptance(), 40, 64, False), 1000
    for count in (1, 2, 3, 5, 8, 13, 21, 40, 64):
        taken = choose_nodes([candidate] * count, 10**6, float(count), count, line(share))
        each = max(map(len, taken))
        assert each <= before
        before = each
    if share == SHARES[-1]:
        assert before <= 1


def test_a_full_step_verifies_less_of_a_hint_than_a_session_alone() -> None:
    trie = HintTrie(3, 1000, 1000)
    trie.insert(random_hint(random.Random(5), 20, False, False), [0, 0, 0])
    candidate = Candidate(trie, Acceptance(), 40, 64, False)
    alone = choose_nodes([candidate], 256, 1.0, 1, line(0.05))
    in_company = choose_nodes([candidate] * 64, 4096, 64.0, 64, line(0.05))
    assert len(alone[0]) > max(map(len, in_company))


def test_a_node_that_costs_more_than_it_brings_is_left_out() -> None:
    """One session, a token costs a tenth of an empty step: a node pays from 1 / 11 of an id on."""
    for probability, is_taken in ((0.08, False), (0.1, True)):
        trie = HintTrie(3, 10, 10)
        trie.insert(Hint(Epoch(0), 1, (7,), 0, base_position=3, confidence=(probability,)), [0, 0, 0])
        taken = choose_nodes([Candidate(trie, Acceptance(), 4, 4, False)], 4, 1.0, 1, line(0.1))
        assert len(taken[0]) == is_taken


def test_what_is_to_be_tried_is_verified_however_dear_it_seems() -> None:
    # Once wrong: only a step with hints tells what one costs, so that after a single slow one none was taken any more.
    candidates = []
    for is_tried in (False, True):
        trie = HintTrie(3, 10, 10)
        trie.insert(Hint(Epoch(0), 1, (7, 8), 0, base_position=3), [0, 0, 0])
        candidates.append(Candidate(trie, Acceptance(), 4, 4, False, is_tried))
    for choose in (choose_nodes, choose_nodes_slowly):
        assert [len(taken) for taken in choose(candidates, 8, 2.0, 2, lambda tokens: 100.0**tokens)] == [0, 1]


@pytest.mark.parametrize("seed", range(40))
def test_under_the_rejection_rule_lengths_depend_on_neither_ids_nor_rows_nor_confidences(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(0, 12) for _ in range(4)]
    acceptances = [grown_acceptance(rng) for _ in lengths]
    others = [random_candidate(rng) for _ in range(2)]
    most, cost = rng.randint(0, 40), random_cost(rng)
    found = set()
    for variant in range(6):
        candidates = []
        for length, acceptance in zip(lengths, acceptances, strict=True):
            trie = HintTrie(3, 1000, 1000, is_chain=True)
            trie.insert(random_hint(rng, length, True, variant % 2 == 1), [0, 0, 0])
            assert trie.held == length
            candidates.append(Candidate(trie, acceptance, 9, 10, True))
        taken = choose_nodes([*candidates, *others], most, 4.0, 9, cost)
        slowly = choose_nodes_slowly([*candidates, *others], most, 4.0, 9, cost)
        assert reaches([*candidates, *others], taken) == reaches([*candidates, *others], slowly)
        found.add(tuple(map(len, taken)))
    assert len(found) == 1


def test_the_permutation_test_above_would_notice_a_choice_by_confidence() -> None:
    found = set()
    for seed in range(6):
        trie = HintTrie(3, 1000, 1000)
        trie.insert(random_hint(random.Random(seed), 12, False, True), [0, 0, 0])
        found.add(len(choose_nodes([Candidate(trie, Acceptance(), 9, 10, False)], 40, 1.0, 1, line(0.2))[0]))
    assert len(found) > 1


# ---------------------------------------------------------------- acceptance


def test_before_any_hint_was_judged_the_first_child_is_trusted_more_than_the_others() -> None:
    acceptance = Acceptance()
    for depth in (1, 3, DEPTHS, 50):
        assert acceptance.probability(depth, 0) == FIRST_CHILD_PROBABILITY
        for rank in (1, 2, 9):
            assert acceptance.probability(depth, rank) == pytest.approx(OTHER_CHILD_PROBABILITY)


@pytest.mark.parametrize("right", [0.1, 0.5, 0.9])
def test_acceptance_comes_to_what_was_seen(right: float) -> None:
    rng, acceptance = random.Random(4), Acceptance()
    found = []
    for count in range(1200):
        acceptance.note(2, 1, rng.random() < right)
        if count >= 200:
            found.append(acceptance.probability(2, 1))
    assert sum(found) / len(found) == pytest.approx(right, abs=0.08)


def test_old_outcomes_fade() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.note(1, 0, True)
    assert acceptance.probability(1, 0) > 0.98
    for _ in range(60):
        acceptance.note(1, 0, False)
    assert acceptance.probability(1, 0) < 0.1


def test_what_is_learnt_at_one_depth_and_rank_says_nothing_of_others() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.note(3, 1, True)
    for depth in range(1, DEPTHS + 1):
        for rank in range(RANKS):
            if (depth, rank) != (3, 1):
                expected = OTHER_CHILD_PROBABILITY if rank else FIRST_CHILD_PROBABILITY
                assert acceptance.probability(depth, rank) == pytest.approx(expected)


def test_all_that_is_deeper_or_ranks_lower_is_learnt_together() -> None:
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.note(DEPTHS + 20, RANKS + 9, True)
    assert acceptance.probability(DEPTHS, RANKS - 1) > 0.9
    assert acceptance.probability(DEPTHS + 1, RANKS) == acceptance.probability(DEPTHS, RANKS - 1)
    assert acceptance.probability(DEPTHS - 1, RANKS - 1) < 0.5
