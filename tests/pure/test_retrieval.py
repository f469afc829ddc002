"""The retrieval drafter: what it proposes and how sure it is, by example; then random texts against a slow twin."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.drafter import Budget, Drafter, DraftTask, HintTree
from edge_client.retrieval import FADING, RetrievalDrafter, grown, odds
from edge_client.suffix_index import MAX_MATCH, Continuation
from edge_client.user_text import UserText
from shared.sampling import SamplingParams
from shared.types import Epoch, Rule

Path = tuple[int, ...]
STOP = 0


def task(rule: Rule = Rule.AGREEMENT, temperature: float = 0.0, generated_from: int = 0) -> DraftTask:
    return DraftTask(SamplingParams(temperature), 1, rule, Epoch(0), generated_from, frozenset({STOP}))


def drafter(ids: Sequence[int], user: UserText | None = None, of: DraftTask | None = None) -> RetrievalDrafter:
    made = RetrievalDrafter(user)
    made.begin(of or task())
    made.sync(ids)
    return made


def chain(ids: Sequence[int], depth: int = 4, path: Path = ()) -> Path:
    tree = drafter(ids).propose(Budget(depth, 1, path))
    assert tree.is_chain
    return tree.ids


def by_path(tree: HintTree) -> dict[Path, float]:
    paths: list[Path] = []
    for token, parent in zip(tree.ids, tree.parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, tree.confidence, strict=True))


# ---------------------------------------------------------------- what is proposed


def test_it_is_a_drafter_with_a_name_of_its_own() -> None:
    made: Drafter = RetrievalDrafter()
    assert made.name == "retrieval"


def test_what_followed_before_is_proposed_again() -> None:
    assert chain([1, 2, 3, 4, 5, 6, 9, 1, 2]) == (3, 4, 5, 6)


def test_the_longest_match_leads_even_if_a_newer_one_is_there() -> None:
    assert chain([8, 1, 2, 3, 4, 7, 1, 2, 5, 6, 8, 1, 2], depth=2) == (3, 4)


def test_of_equal_matches_the_newest_leads() -> None:
    assert chain([8, 1, 2, 3, 4, 7, 1, 2, 5, 6, 9, 1, 2], depth=2) == (5, 6)


def test_what_followed_more_often_leads() -> None:
    assert chain([1, 2, 3, 4, 7, 1, 2, 3, 4, 8, 1, 2, 5, 6, 9, 1, 2], depth=2) == (3, 4)


def test_a_single_id_is_no_match() -> None:
    assert chain([5, 1, 2, 3, 6, 1]) == ()


def test_a_text_that_repeats_itself_goes_on_repeating_past_its_end() -> None:
    assert chain([9, 1, 2, 3, 1, 2, 3], depth=8) == (1, 2, 3, 1, 2, 3, 1, 2)


@pytest.mark.parametrize(("depth", "width"), [(0, 1), (-2, 1), (3, 0)])
def test_no_room_gives_no_proposal(depth: int, width: int) -> None:
    assert drafter([1, 2, 3, 1, 2]).propose(Budget(depth, width)) == HintTree()


def test_alternatives_branch_where_texts_part_and_share_what_they_share() -> None:
    tree = drafter([1, 2, 3, 4, 7, 1, 2, 3, 5, 9, 1, 2]).propose(Budget(2, 2))
    assert list(by_path(tree)) == [(3,), (3, 5), (3, 4)]


def test_no_node_has_more_children_than_the_width_and_no_tree_more_than_depth_times_width() -> None:
    ids = [token for last in range(3, 13) for token in (1, 2, last, last + 20, last + 40)]
    tree = drafter([*ids, 1, 2]).propose(Budget(3, 4))
    assert len(by_path(tree)) == 12
    assert max(tree.parents.count(parent) for parent in tree.parents) == 4


def test_the_id_that_is_likeliest_to_be_reached_comes_next() -> None:
    """A child of 0.24 under a parent of 0.51 stands behind one of 0.17 that follows at once."""
    found = [Continuation(2, ids) for ids in ((3, 4), (3, 4), (3, 5), (6,))]
    assert list(by_path(grown(found, Budget(2, 2)))) == [(3,), (3, 4), (6,), (3, 5)]


# ---------------------------------------------------------------- paths


def test_a_path_is_taken_to_follow_the_ids() -> None:
    assert chain([1, 2, 3, 4, 5, 9, 1], path=(2, 3), depth=2) == (4, 5)


def test_a_repetition_that_runs_over_the_path_goes_on() -> None:
    assert chain([9, 1, 2, 3], path=(1, 2), depth=7) == (3, 1, 2, 3, 1, 2, 3)


def test_a_path_leaves_no_trace_in_later_proposals() -> None:
    made = drafter([1, 2, 3, 4, 9, 1, 2])
    before = made.propose(Budget(4, 2))
    made.propose(Budget(4, 2, (5, 6, 7, 5, 6)))
    assert made.propose(Budget(4, 2)) == before
    assert made.propose(Budget(4, 2, (5, 6))) == HintTree()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 3), max_size=25), st.lists(st.integers(1, 3), max_size=5)), min_size=1)
)
def test_a_drafter_with_a_history_proposes_as_a_fresh_one(history: list[tuple[list[int], list[int]]]) -> None:
    made = drafter([])
    for ids, path in history:
        made.sync(ids)
        budget = Budget(5, 2, tuple(path))
        assert made.propose(budget) == made.propose(budget) == drafter(ids).propose(budget)


def test_an_edit_takes_back_what_stood_after_it() -> None:
    made = drafter([1, 2, 3, 4, 5, 1, 2])
    made.sync([1, 2, 6, 7, 1, 2])
    assert made.propose(Budget(2)).ids == (6, 7)


def test_a_new_epoch_keeps_what_was_synced() -> None:
    (made := drafter([1, 2, 3, 4, 1, 2])).begin(task(generated_from=6))
    assert made.propose(Budget(2)).ids == (3, 4)


# ---------------------------------------------------------------- stop ids and rules


def test_a_stop_id_may_be_the_last_proposed_and_nothing_follows_it() -> None:
    assert chain([1, 2, 3, STOP, 5, 6, 9, 1, 2], depth=4) == (3, STOP)


def test_nothing_follows_a_stop_id_that_was_generated_or_stands_in_the_path() -> None:
    ids = [1, STOP, 3, 4, 1, STOP]
    assert drafter(ids).propose(Budget(2)) == HintTree()
    assert drafter(ids[:-1]).propose(Budget(2, 1, (STOP,))) == HintTree()
    assert drafter(ids[:-1]).propose(Budget(2, 1, (STOP, 3))) == HintTree()


def test_a_stop_id_at_the_end_of_the_context_is_text_as_any() -> None:
    made = drafter([1, STOP, 3, 4, 1, STOP], of=task(generated_from=6))
    assert made.propose(Budget(2)).ids == (3, 4)


def test_under_the_rejection_rule_nothing_is_proposed_unless_it_is_greedy() -> None:
    ids = [1, 2, 3, 4, 9, 1, 2]
    assert drafter(ids, of=task(Rule.REJECTION, 0.8)).propose(Budget(4, 2)) == HintTree()
    greedy = drafter(ids, of=task(Rule.REJECTION, 0.0)).propose(Budget(4, 2))
    assert greedy.ids[:2] == (3, 4)
    assert greedy.rows == ()


def test_under_agreement_the_temperature_changes_no_proposal() -> None:
    ids = [1, 2, 3, 4, 9, 1, 2]
    assert drafter(ids, of=task(temperature=0.9)).propose(Budget(4, 2)) == drafter(ids).propose(Budget(4, 2))


# ---------------------------------------------------------------- the user's text


def user(*texts: list[int]) -> UserText:
    text = UserText()
    for ids in texts:
        text.add(ids)
    return text


def test_what_the_user_accepted_before_is_proposed() -> None:
    assert drafter([9, 1, 2, 3], user([1, 2, 3, 4, 5])).propose(Budget(4)).ids == (4, 5)


def test_two_ids_are_no_match_in_the_users_text() -> None:
    assert drafter([9, 2, 3], user([1, 2, 3, 4, 5])).propose(Budget(4)) == HintTree()


def test_session_and_user_text_are_merged_in_one_tree() -> None:
    made = drafter([2, 3, 7, 9, 1, 2, 3], user([1, 2, 3, 4, 5]))
    assert set(by_path(made.propose(Budget(2, 2)))) == {(4,), (4, 5), (7,), (7, 9)}


def test_drafters_share_the_users_text_and_what_is_cleared_is_not_proposed_any_more() -> None:
    text = user([1, 2, 3, 4, 5])
    sharing = [drafter([9, 1, 2, 3], text) for _ in range(2)]
    assert [made.propose(Budget(4)).ids for made in sharing] == [(4, 5), (4, 5)]
    text.clear()
    assert [made.propose(Budget(4)).ids for made in sharing] == [(), ()]


# ---------------------------------------------------------------- how sure it is


def first_confidence(ids: list[int]) -> float:
    return drafter(ids).propose(Budget(1)).confidence[0]


def test_a_longer_match_is_surer() -> None:
    text = list(range(1, 41))
    sure = [first_confidence([*text, 99, *text[20 - length : 20]]) for length in range(2, 20)]
    assert sure == sorted(set(sure))
    assert sure[0] == pytest.approx(0.5, abs=0.02)
    assert 0.95 < sure[-1] < 1


def test_more_places_that_agree_are_surer_and_one_that_disagrees_makes_less_sure() -> None:
    one = [1, 2, 3, 8]
    other = [1, 2, 5, 8]
    alone, agreed = first_confidence([*one, 1, 2]), first_confidence([*one, *one[:3], 7, 1, 2])
    assert first_confidence([*other, *one, 1, 2]) < alone < agreed


def test_deeper_ids_are_surer_given_those_before() -> None:
    sure = drafter([*range(1, 20), 99, 1, 2]).propose(Budget(10)).confidence
    assert list(sure) == sorted(set(sure))


def test_proposals_do_not_depend_on_anything_but_ids_and_text() -> None:
    draws = random.Random(3)
    ids = [draws.randrange(4) + 1 for _ in range(500)]
    texts = [[draws.randrange(4) + 1 for _ in range(100)] for _ in range(5)]
    first, second = (drafter(ids, user(*texts)).propose(Budget(12, 4)) for _ in range(2))
    assert first == second
    assert len(first.ids) == 48


# ---------------------------------------------------------------- the slow twin


def slow_continuations(ids: list[int], path: Path, depth: int) -> list[tuple[int, Path]]:
    """Match length and continuation for each place of a short text, longest match first, then newest."""
    whole = [*ids, *path]
    found = []
    for place in reversed(range(len(ids))):
        length = 0
        while length < min(place, MAX_MATCH) and ids[place - length - 1] == whole[-length - 1]:
            length += 1
        ahead = list(whole)
        while len(ahead) < place + depth or len(ahead) < len(whole) + depth:
            ahead.append(ahead[len(ahead) - (len(whole) - place)])
        if length >= 2:
            found.append((length, tuple(ahead[place : place + depth])))
    return sorted(found, key=lambda each: -each[0])


def slow_tree(found: list[tuple[int, Path]], width: int) -> dict[Path, tuple[float, float]]:
    """Confidence and reach of every path, with at most `width` children at each."""
    tree: dict[Path, tuple[float, float]] = {}

    def grow(above: Path, reach: float) -> None:
        through = [(n, ids) for n, ids in found if ids[: len(above)] == above and len(ids) > len(above)]
        weights: dict[int, float] = defaultdict(float)
        for length, ids in through:
            weights[ids[len(above)]] += odds(length + len(above)) * FADING ** (through[0][0] - length)
        total = sum(weights.values()) + len(weights)
        for token, weight in sorted(weights.items(), key=lambda item: -item[1])[:width]:
            tree[*above, token] = (weight / total, reach * weight / total)
            grow((*above, token), reach * weight / total)

    grow((), 1.0)
    return tree


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 4), max_size=17),
    st.lists(st.integers(1, 4), max_size=3),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_any_short_text_gives_the_likeliest_nodes_of_the_slow_twin(
    ids: list[int], path: list[int], depth: int, width: int
) -> None:
    """At most 17 ids: 16 places, so all have a say."""
    tree = by_path(drafter(ids).propose(Budget(depth, width, tuple(path))))
    slow = slow_tree(slow_continuations(ids, tuple(path), depth), width)
    assert len(tree) == min(len(slow), depth * width)
    for node, confidence in tree.items():
        assert 0 < confidence < 1
        assert confidence == pytest.approx(slow[node][0])
    left_out = [reach for node, (_, reach) in slow.items() if node not in tree]
    assert min((slow[node][1] for node in tree), default=1) >= max(left_out, default=0) - 1e-12
