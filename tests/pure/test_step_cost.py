"""What a step costs, learnt from steps: synthetic ones whose true cost is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cloud_verifier.step_cost import StepCost

Curve = Callable[[int], float]

LINE: Curve = lambda tokens: 0.030 + 0.0015 * tokens  # noqa: E731
FLAT_THEN_DEAR: Curve = lambda tokens: 0.020 + 0.0002 * max(0, tokens - 128)  # noqa: E731
STEEP_THEN_FLAT: Curve = lambda tokens: 0.005 + 0.002 * min(tokens, 8) + 0.0002 * tokens  # noqa: E731
CURVES = {"line": LINE, "flat, then dear": FLAT_THEN_DEAR, "steep, then flat": STEEP_THEN_FLAT}


def fed(cost: StepCost, curve: Curve, steps: int, seed: int = 1, noise: float = 0.05) -> StepCost:
    """So many steps of 1-512 tokens whose time is off by `noise` of it at most."""
    rng = random.Random(seed)
    for _ in range(steps):
        tokens = int(2 ** rng.uniform(0, 9))
        cost.note(tokens, curve(tokens) * rng.uniform(1 - noise, 1 + noise))
    return cost


@pytest.mark.parametrize("prior", [0.002, 0.06, 1.0])
@pytest.mark.parametrize("curve", CURVES)
def test_the_true_cost_is_recovered_from_noisy_steps_whatever_the_prior(prior: float, curve: str) -> None:
    cost = fed(StepCost(prior), CURVES[curve], 600)
    for tokens in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 300):
        assert cost.seconds(tokens) == pytest.approx(CURVES[curve](tokens), rel=0.2)


def test_base_and_slope_of_a_straight_line_come_out_exactly_without_noise() -> None:
    cost = fed(StepCost(0.9), LINE, 400, noise=0.0)
    for tokens in (2, 10, 100, 300):
        assert cost.seconds(tokens) == pytest.approx(LINE(tokens), rel=1e-9)
        slope = cost.seconds(tokens + 10) - cost.seconds(tokens)
        assert slope == pytest.approx(10 * 0.0015, rel=1e-6)


@pytest.mark.parametrize("share", [1e-4, 0.05, 1.0])
def test_before_the_first_step_the_prior_is_told_in_units_of_an_empty_step(share: float) -> None:
    cost = StepCost(share)
    for tokens in (0, 1, 64, 1000):
        assert cost.seconds(tokens) == pytest.approx(1 + share * tokens)
    assert cost.mean_s == 0.0


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_steps_all_of_one_size_leave_the_slope_to_the_prior(tokens: int) -> None:
    rng, cost = random.Random(2), StepCost(0.07)
    for _ in range(200):
        cost.note(tokens, 0.05 * rng.uniform(0.9, 1.1))
    assert cost.seconds(tokens) == pytest.approx(0.05, rel=0.1)
    for other in (1, 3, 30, 300):
        expected = (1 + 0.07 * other) / (1 + 0.07 * tokens)
        assert cost.seconds(other) / cost.seconds(tokens) == pytest.approx(expected)


def test_past_the_sizes_that_were_measured_the_prior_gives_the_slope() -> None:
    cost = StepCost(0.01)
    for tokens in (8, 64):
        for _ in range(20):
            cost.note(tokens, LINE(tokens))
    assert cost.seconds(640) == pytest.approx(LINE(64) * 7.4 / 1.64)
    assert cost.seconds(1) == pytest.approx(LINE(8) * 1.01 / 1.08)
    assert LINE(8) < cost.seconds(30) < LINE(64)


def test_steps_that_take_equally_long_whatever_their_size_cost_nothing_a_token() -> None:
    cost = fed(StepCost(0.07), lambda tokens: 0.5, 300, noise=0.0)
    assert [cost.seconds(tokens) for tokens in (1, 9, 200)] == pytest.approx([0.5] * 3)


def test_a_device_that_changes_is_followed() -> None:
    cost = fed(StepCost(0.05), LINE, 300)
    for seed, curve in enumerate((FLAT_THEN_DEAR, STEEP_THEN_FLAT, LINE)):
        before = cost.seconds(40)
        fed(cost, curve, 400, seed=seed)
        assert cost.seconds(40) == pytest.approx(curve(40), rel=0.12)
        assert abs(cost.seconds(40) / before - 1) > 0.3


def test_one_odd_step_moves_the_cost_a_little_only() -> None:
    cost = fed(StepCost(0.05), LINE, 300)
    before = cost.seconds(20)
    cost.note(20, 3 * LINE(20))
    assert before < cost.seconds(20) < 1.3 * before


def test_a_clock_too_coarse_to_see_a_step_leaves_a_cost_to_divide_by() -> None:
    cost = StepCost()
    for tokens in (1, 9, 80):
        cost.note(tokens, 0.0)
    for tokens in (0, 1, 20, 500):
        assert cost.seconds(tokens) > 0


def test_the_mean_is_that_of_recent_steps() -> None:
    cost = StepCost()
    for _ in range(200):
        cost.note(1, 1.0)
    assert cost.mean_s == pytest.approx(1.0)
    for _ in range(60):
        cost.note(1, 0.01)
    assert cost.mean_s == pytest.approx(0.01, rel=0.3)
