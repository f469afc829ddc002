"""The agreement rule: right distribution, the promised rate of agreement, and nothing but (row, seed, position) counts.

Chi-square and rate tests are seeded; each would fail for one in a million correct rules.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import agreement
from shared.agreement import choose, noised_scores
from shared.randomness import noise
from shared.sampling import GREEDY, SamplingParams, Warped, warp
from tests.statistics import FALSE_ALARM, FALSE_ALARM_SIGMAS, goodness_p, independence_p

DRAWS = 8_000


def warped_with(shares: list[float]) -> Warped:
    """A warped row with these probabilities; ids of probability 0 are not kept."""
    kept = [(token, share) for token, share in enumerate(shares) if share > 0]
    best = max(share for _, share in kept)
    return Warped(np.array([token for token, _ in kept]), np.array([math.log(share / best) for _, share in kept]))


def shares_of(warped: Warped, size: int) -> npt.NDArray[np.float64]:
    full = np.zeros(size)
    full[warped.ids] = warped.probabilities()
    return full


ROW = np.array([2.0, 1.0, 1.0, -3.0, 0.5, 0.0, -1.0, 2.2], dtype=np.float32)
PARAMS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=5.0),
    "top-k": SamplingParams(top_k=3),
    "top-p": SamplingParams(top_p=0.8, temperature=0.8),
    "min-p and bias": SamplingParams(min_p=0.1, logit_bias={7: -math.inf, 4: 1.0}),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_over_seeds_the_choice_has_the_warped_distribution(kind: str) -> None:
    warped = warp(ROW, PARAMS[kind])
    counts = np.bincount([choose(warped, seed, 17) for seed in range(DRAWS)], minlength=8)
    assert goodness_p(counts, shares_of(warped, 8).tolist()) > FALSE_ALARM


@pytest.mark.parametrize("kind", ["plain", "top-p"])
def test_over_positions_the_choice_has_the_warped_distribution(kind: str) -> None:
    warped = warp(ROW, PARAMS[kind])
    counts = np.bincount([choose(warped, 2**63 + 5, position) for position in range(DRAWS)], minlength=8)
    assert goodness_p(counts, shares_of(warped, 8).tolist()) > FALSE_ALARM


def test_the_test_above_can_tell_a_slightly_wrong_distribution() -> None:
    warped = warp(ROW, SamplingParams())
    counts = np.bincount([choose(warped, seed, 17) for seed in range(DRAWS)], minlength=8)
    wrong = warp(ROW, SamplingParams(temperature=1.2))
    assert goodness_p(counts, shares_of(wrong, 8).tolist()) < FALSE_ALARM


def test_choices_at_neighbouring_positions_and_seeds_are_independent() -> None:
    warped = warped_with([0.25] * 4)
    by_position = [choose(warped, 3, position) / 4 for position in range(DRAWS + 1)]
    by_seed = [choose(warped, seed, 3) / 4 for seed in range(DRAWS + 1)]
    for run in (by_position, by_seed):
        assert independence_p(run[:-1], run[1:], bins=4) > FALSE_ALARM


PAIRS = {
    "close": ([0.5, 0.3, 0.2], [0.45, 0.35, 0.2]),
    "reordered": ([0.6, 0.3, 0.1], [0.1, 0.3, 0.6]),
    "flat against peaked": ([0.25] * 4, [0.91, 0.03, 0.03, 0.03]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
    "half cut away": ([0.25] * 4, [0.5, 0.5, 0.0, 0.0]),
    "one-hot draft": ([0.4, 0.3, 0.3], [1.0, 0.0, 0.0]),
    "many ids": ([1 / 40] * 40, [1 / 40 + (0.02 if n % 2 else -0.02) for n in range(40)]),
    "equal": ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_draft_and_target_agree_as_often_as_promised_and_never_more_than_they_can(kind: str) -> None:
    p, q = PAIRS[kind]
    distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    target, draft = warped_with(p), warped_with(q)
    rate = sum(choose(target, seed, 5) == choose(draft, seed, 5) for seed in range(DRAWS)) / DRAWS
    noise_of_the_rate = FALSE_ALARM_SIGMAS * 0.5 / math.sqrt(DRAWS)
    if distance in (0.0, 1.0):
        assert rate == 1 - distance
    else:
        assert rate >= (1 - distance) / (1 + distance) - noise_of_the_rate
        assert rate <= 1 - distance + noise_of_the_rate
    # without shared noise the two would agree far more rarely wherever agreement is possible but not certain
    unshared = sum(choose(target, seed, 5) == choose(draft, seed, 6) for seed in range(DRAWS)) / DRAWS
    assert unshared == pytest.approx(sum(a * b for a, b in zip(p, q, strict=True)), abs=noise_of_the_rate)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    scores=st.lists(st.floats(-20, 0), min_size=1, max_size=12),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
)
def test_the_same_inputs_give_the_same_id_and_it_is_the_argmax(scores: list[float], seed: int, position: int) -> None:
    warped = Warped(np.arange(len(scores)) * 3, np.array(scores))
    chosen = choose(warped, seed, position)
    assert chosen == choose(Warped(warped.ids.copy(), warped.scores.copy()), seed, position)
    ranked = [
        (score + float(noise(seed, position, np.array([token]))[0]), -int(token))
        for token, score in zip(warped.ids, scores, strict=True)
    ]
    assert chosen == -max(ranked)[1]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=12),
    seed=st.integers(0, 2**64 - 1),
    keep=st.integers(1, 12),
)
def test_the_chosen_id_stays_chosen_when_others_are_cut_away(logits: list[int], seed: int, keep: int) -> None:
    row = np.array(logits, dtype=np.float32) / 8
    whole, cut = warp(row, SamplingParams()), warp(row, SamplingParams(top_k=keep))
    chosen = choose(whole, seed, 7)
    if chosen in cut.ids:
        assert choose(cut, seed, 7) == chosen
    else:
        assert choose(cut, seed, 7) in cut.ids


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "noise", lambda seed, position, ids: np.zeros(len(ids)))
    assert choose(Warped(np.array([2, 4, 9]), np.array([-1.0, 0.0, 0.0])), 1, 2) == 4
    assert choose(Warped(np.array([2, 4, 9]), np.zeros(3)), 1, 2) == 2


def test_one_kept_id_is_chosen_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_noise(*arguments: object) -> None:
        raise AssertionError("noise was computed")

    monkeypatch.setattr(agreement, "noise", no_noise)
    assert choose(Warped(np.array([4711]), np.zeros(1)), 1, 2) == 4711
    assert choose(warp(ROW, GREEDY), 1, 2) == 7


def test_noised_scores_are_the_scores_plus_the_noise_of_their_ids() -> None:
    warped = warp(ROW, SamplingParams(top_k=4))
    expected = [s + noise(9, 8, np.array([t]))[0] for t, s in zip(warped.ids, warped.scores, strict=True)]
    assert noised_scores(warped, 9, 8).tolist() == expected


def test_greedy_ids_do_not_depend_on_seed_or_position() -> None:
    warped = warp(ROW, GREEDY)
    assert {choose(warped, seed, position) for seed in range(20) for position in range(20)} == {7}
