"""What a drafter's confidence is worth: taken at its word first, then measured, for each kind and rank apart."""

from __future__ import annotations

import random

import pytest

from edge_client.calibration import LEAST, MOST, Calibration, Recent


def taught(confidence: float, share: float, tries: int = 300, rank: int = 0, source: str = "model") -> Calibration:
    calibration = Calibration()
    for n in range(tries):
        calibration.learn(source, rank, confidence, n * 37 % 100 < 100 * share)
    return calibration


@pytest.mark.parametrize("confidence", [0.02, 0.3, 0.5, 0.97])
def test_before_anything_was_learnt_a_drafter_is_taken_at_its_word(confidence: float) -> None:
    assert Calibration().chance("model", 0, confidence) == confidence


@pytest.mark.parametrize(("confidence", "share"), [(0.9, 0.2), (0.5, 0.95), (0.02, 0.5), (0.99, 0.7)])
def test_the_share_that_was_right_replaces_the_word(confidence: float, share: float) -> None:
    assert taught(confidence, share).chance("model", 0, confidence) == pytest.approx(share, abs=0.06)


def test_one_try_is_not_believed_more_than_the_drafter() -> None:
    calibration = Calibration()
    calibration.learn("model", 0, 0.8, False)
    assert 0.4 < calibration.chance("model", 0, 0.8) < 0.8


def test_a_chance_is_never_nothing_and_never_certain() -> None:
    assert taught(0.5, 0.0, 2000).chance("model", 0, 0.5) >= LEAST > 0
    assert taught(0.5, 1.0, 2000).chance("model", 0, 0.5) <= MOST < 1
    assert Calibration().chance("model", 0, 0.0) >= LEAST
    assert Calibration().chance("model", 0, 1.0) <= MOST


def test_other_drafters_ranks_and_confidences_learn_apart() -> None:
    calibration = taught(0.9, 0.1)
    assert calibration.chance("retrieval", 0, 0.9) == 0.9
    assert calibration.chance("model", 1, 0.9) == 0.9
    assert calibration.chance("model", 0, 0.3) == 0.3
    assert calibration.chance("model", 0, 0.9) < 0.3


def test_confidences_close_together_are_learnt_together() -> None:
    assert taught(0.75, 0.2).chance("model", 0, 0.76) < 0.35


def test_all_late_ranks_are_one() -> None:
    assert taught(0.1, 0.9, rank=3).chance("model", 7, 0.1) > 0.7


def test_old_tries_fade() -> None:
    calibration = taught(0.9, 1.0)
    for _ in range(150):
        calibration.learn("model", 0, 0.9, False)
    assert calibration.chance("model", 0, 0.9) < 0.2


def test_the_share_of_a_steady_coin_is_found_within_a_few_hundredths() -> None:
    """Averaged over the last 1,000 of 2,000 seeded tosses: it wavers, but about the truth."""
    rng, calibration, told = random.Random(4), Calibration(), []
    for n in range(2000):
        calibration.learn("model", 0, 0.5, rng.random() < 0.35)
        told += [calibration.chance("model", 0, 0.5)] if n >= 1000 else []
    assert sum(told) / len(told) == pytest.approx(0.35, abs=0.04)
    assert max(told) - min(told) > 0.01


# ---------------------------------------------------------------- the last dozen


def test_a_recent_share_begins_where_it_is_told_to() -> None:
    recent = Recent(0.7)
    assert recent.share == pytest.approx(0.7)
    assert recent.count == 0


def test_a_recent_share_follows_a_change_within_two_or_three_dozen_tries() -> None:
    recent = Recent(0.7)
    for n in range(100):
        recent.learn(n % 10 < 9)
    assert recent.share == pytest.approx(0.9, abs=0.09)
    for n in range(30):
        recent.learn(n % 10 < 3)
    assert recent.share == pytest.approx(0.3, abs=0.15)
    assert recent.count == 130


def test_a_recent_share_stays_between_none_and_all() -> None:
    recent = Recent(0.5)
    for is_right in (True, False):
        for _ in range(500):
            recent.learn(is_right)
            assert 0 <= recent.share <= 1
        assert recent.share == pytest.approx(float(is_right), abs=0.01)
