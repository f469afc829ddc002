"""The length of hints follows how often drafted ids stand."""

import pytest

from edge_client.hint_length import HintLength


def judged(acceptances: list[int], of: int, reach: float = 0.3) -> HintLength:
    length = HintLength(reach)
    for accepted in acceptances:
        length.learn(accepted, accepted == of)
    return length


def test_a_drafter_that_is_always_right_drafts_as_far_as_it_may() -> None:
    assert judged([8] * 40, of=8).depth(16) == 16


def test_a_drafter_that_is_always_wrong_drafts_one_id() -> None:
    assert judged([0] * 40, of=8).depth(16) == 1


@pytest.mark.parametrize(("accepted", "acceptance", "depth"), [(1, 0.5, 1), (3, 0.75, 4), (9, 0.9, 11)])
def test_the_length_is_where_the_chance_of_all_of_it_meets_the_reach(
    accepted: int, acceptance: float, depth: int
) -> None:
    length = judged([accepted] * 200, of=99)
    assert length.acceptance == pytest.approx(acceptance, abs=0.01)
    assert length.depth(32) == depth


def test_it_follows_a_drift_both_ways() -> None:
    length = judged([8] * 60, of=8)
    for _ in range(60):
        length.learn(0, False)
    assert length.depth(16) == 1
    for _ in range(60):
        length.learn(8, True)
    assert length.depth(16) >= 12


def test_without_a_reach_every_hint_is_as_long_as_it_may_be() -> None:
    assert judged([0] * 40, of=8, reach=0.0).depth(16) == 16
