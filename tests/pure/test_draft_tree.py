"""The device's tree: how proposals are merged and weighed, what commits and late drafts teach, the chain rule."""

from __future__ import annotations

import random

import pytest

from edge_client.calibration import Calibration
from edge_client.draft_tree import DraftNode, DraftTree
from edge_client.drafter import HintTree
from shared.rejection import QRow

LENGTH = 10


def tree(is_chain: bool = False, calibration: Calibration | None = None) -> DraftTree:
    return DraftTree(99, LENGTH, calibration or Calibration(), is_chain)


def siblings(*pairs: tuple[int, float]) -> HintTree:
    """Alternatives of one id, each with its confidence."""
    return HintTree(tuple(t for t, _ in pairs), (-1,) * len(pairs), tuple(c for _, c in pairs))


def line(*ids: int, confidence: float = 0.9) -> HintTree:
    return HintTree(ids, tuple(range(-1, len(ids) - 1)), (confidence,) * len(ids))


def paths(of: DraftTree) -> set[tuple[int, ...]]:
    return {standing.node.path() for standing in of.standings() if standing.depth}


def at(of: DraftTree, *path: int) -> DraftNode:
    node = of.root
    for token in path:
        node = node.children[token]
    return node


# ---------------------------------------------------------------- growing


def test_a_new_tree_is_its_root_the_last_committed_id() -> None:
    made = tree()
    assert (made.root.token, made.root.position) == (99, LENGTH - 1)
    assert [s.node for s in made.standings()] == [made.root]
    assert made.best_node() is made.root
    assert made.best_node().path() == ()


def test_what_two_drafters_say_is_one_tree_with_the_paths_of_both() -> None:
    made = tree()
    made.add(made.root, line(1, 2, 3), "model")
    made.add(made.root, line(1, 2, 4), "retrieval")
    made.add(made.root, line(5, 6), "retrieval")
    assert paths(made) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,), (5, 6)}
    assert set(at(made, 1, 2).votes) == {"model", "retrieval"}
    assert set(at(made, 1, 2, 3).votes) == {"model"}
    assert at(made, 1, 2, 4).position == LENGTH + 2


def test_a_drafter_that_says_the_same_again_changes_nothing() -> None:
    made = tree()
    made.add(made.root, siblings((1, 0.6), (2, 0.3)), "model")
    before = {s.node.path(): (s.reach, dict(s.node.votes)) for s in made.standings()}
    made.add(made.root, siblings((1, 0.6), (2, 0.3)), "model")
    assert {s.node.path(): (s.reach, dict(s.node.votes)) for s in made.standings()} == before
    assert made.root.heard == ["model"]


def test_who_has_nothing_to_say_was_heard_all_the_same() -> None:
    made = tree()
    made.add(made.root, HintTree(), "model")
    assert made.root.heard == ["model"]
    assert paths(made) == set()


def test_chances_of_siblings_sum_to_at_most_one_and_reach_never_grows_on_the_way_down() -> None:
    rng = random.Random(3)
    for _ in range(200):
        made = tree()
        for _ in range(12):
            node = rng.choice([s.node for s in made.standings()])
            ids = rng.sample(range(8), rng.randint(1, 4))
            made.add(node, siblings(*((t, rng.random()) for t in ids)), rng.choice(["model", "retrieval", "third"]))
            if rng.random() < 0.3:
                made.advance(rng.randrange(8))
        for standing in made.standings():
            chances = [child.chance for child in standing.node.children.values()]
            assert sum(chances) <= 1 + 1e-9
            assert all(0 < chance <= 1 for chance in chances)
            assert 0 < standing.reach <= 1
        assert sum(s.reach for s in made.standings() if s.depth == 1) <= 1 + 1e-9


def test_standings_tell_parents_first_with_the_product_of_chances_and_what_was_sent() -> None:
    made = tree()
    made.add(made.root, siblings((1, 0.5), (2, 0.25)), "model")
    made.add(at(made, 1), siblings((3, 0.5)), "model")
    at(made, 1).number = 7
    told = {s.node.path(): (s.depth, s.sent_depth) for s in made.standings()}
    assert list(told.items()) == [((), (0, 0)), ((1,), (1, 1)), ((1, 3), (2, 1)), ((2,), (1, 0))]
    assert [s.reach for s in made.standings()] == pytest.approx([1.0, 0.5, 0.25, 0.25])


def test_the_best_node_ends_the_likeliest_path() -> None:
    made = tree()
    made.add(made.root, siblings((1, 0.4), (2, 0.5)), "model")
    made.add(at(made, 2), siblings((3, 0.1), (4, 0.2)), "model")
    assert made.best_node().path() == (2, 4)


# ---------------------------------------------------------------- commits


def test_a_commit_that_was_foretold_moves_the_root_down_and_drops_the_rest() -> None:
    made = tree()
    made.add(made.root, siblings((1, 0.6), (2, 0.3)), "model")
    made.add(at(made, 1), line(3, 4), "model")
    kept, lost = at(made, 1, 3), at(made, 2)
    assert made.advance(1) is True
    assert (made.root.token, made.root.position, made.root.path()) == (1, LENGTH, ())
    assert paths(made) == {(3,), (3, 4)}
    assert made.holds(kept)
    assert not made.holds(lost)
    assert made.advance(3) is True
    assert made.root is kept
    assert made.holds(kept)


def test_an_alternative_that_was_right_keeps_its_branch() -> None:
    made = tree()
    made.add(made.root, siblings((1, 0.6), (2, 0.3)), "model")
    made.add(at(made, 2), line(5, 6), "model")
    assert made.advance(2) is False
    assert paths(made) == {(5,), (5, 6)}


def test_a_commit_that_nobody_foretold_leaves_a_bare_root() -> None:
    made = tree()
    made.add(made.root, line(1, 2), "model")
    gone = at(made, 1, 2)
    assert made.advance(8) is False
    assert (made.root.token, made.root.position, made.root.heard) == (8, LENGTH, [])
    assert paths(made) == set()
    assert not made.holds(gone)
    assert made.advance(9) is None, "nothing was proposed there"


def test_numbers_are_forgotten_of_all_nodes_and_the_root() -> None:
    made = tree()
    made.add(made.root, line(1, 2, 3), "model")
    for number, standing in enumerate(made.standings(), start=1):
        standing.node.number = number
    made.forget_numbers()
    assert [s.node.number for s in made.standings()] == [0, 0, 0, 0]


# ---------------------------------------------------------------- learning


def test_commits_teach_what_a_confidence_is_worth() -> None:
    calibration = Calibration()
    made = tree(calibration=calibration)
    for step in range(200):
        made.add(made.root, siblings((1, 0.9)), "model")
        made.advance(1 if step % 5 == 0 else 2)
    made.add(made.root, siblings((1, 0.9)), "model")
    assert at(made, 1).chance == pytest.approx(0.2, abs=0.08)


def test_an_id_of_two_drafters_is_learnt_apart_from_an_id_of_one() -> None:
    calibration = Calibration()
    made = tree(calibration=calibration)
    for step in range(200):
        both = step % 2 == 0
        made.add(made.root, siblings((1 if both else 2, 0.5)), "retrieval")
        made.add(made.root, siblings((1, 0.5)), "model")
        made.advance(1 if both else 3)  # right whenever the two agree, wrong whenever they do not
    made.add(made.root, siblings((1, 0.5)), "retrieval")
    made.add(made.root, siblings((1, 0.5)), "model")
    agreed = at(made, 1).chance
    made.advance(1)
    made.add(made.root, siblings((2, 0.5)), "retrieval")
    made.add(made.root, siblings((1, 0.5)), "model")
    assert agreed > 0.9
    assert max(at(made, 1).chance, at(made, 2).chance) < 0.15


def test_a_draft_that_comes_too_late_still_teaches() -> None:
    calibration = Calibration()
    made = tree(calibration=calibration)
    before = calibration.chance("model", 0, 0.5)
    passed = made.root
    made.advance(4)
    made.add(passed, siblings((4, 0.5)), "model")
    assert made.learn(passed, 4) is True
    assert made.root.token == 4
    made.add(made.root, siblings((7, 0.5)), "model")
    assert at(made, 7).chance > before
    assert made.learn(DraftNode(1, 1), 4) is None


# ---------------------------------------------------------------- the rejection rule


def row(first: int) -> QRow:
    return QRow((first, first + 1), (40000, 25535))


def drawn(token: int, confidence: float) -> HintTree:
    return HintTree((token,), (-1,), (confidence,), (row(token),))


def test_under_the_rejection_rule_one_id_stands_at_a_position_the_first() -> None:
    made = tree(is_chain=True)
    made.add(made.root, drawn(1, 0.9), "model")
    made.add(made.root, drawn(2, 0.9), "model")
    assert paths(made) == {(1,)}
    assert at(made, 1).row == row(1)


def test_under_the_rejection_rule_a_row_once_there_is_never_replaced() -> None:
    made = tree(is_chain=True)
    made.add(made.root, drawn(1, 0.9), "model")
    made.add(made.root, HintTree((1,), (-1,), (0.9,), (QRow((1, 5), (60000, 5535)),)), "model")
    assert at(made, 1).row == row(1)


def test_under_the_rejection_rule_worth_never_depends_on_the_id_drawn_or_its_probability() -> None:
    """Two devices with the same history but other draws: every node is worth the same, so the same is sent when."""
    reaches = []
    for draws in ([(1, 0.99), (2, 0.02), (3, 0.5)], [(7, 0.01), (8, 0.9), (9, 0.3)]):
        made = tree(is_chain=True)
        for step in range(40):
            made.add(made.root, drawn(5, (step % 10) / 10), "model")
            made.advance(5 if step % 3 else 6)
        node = made.root
        for token, confidence in draws:
            made.add(node, drawn(token, confidence), "model")
            node = node.children[token]
        reaches.append([s.reach for s in made.standings()])
    assert reaches[0] == reaches[1]
    assert reaches[0] == sorted(reaches[0], reverse=True)
