"""The measuring stick of the randomised tests, held against published tables and against wrong distributions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.statistics import FALSE_ALARM, chi_square_tail, goodness_p, independence_p, uniform_p


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    [  # the usual table of critical values
        (3.841459, 1, 0.05),
        (10.827566, 1, 0.001),
        (5.991465, 2, 0.05),
        (13.815511, 2, 0.001),
        (11.070498, 5, 0.05),
        (2.558212, 10, 0.99),
        (18.307038, 10, 0.05),
        (29.588298, 10, 0.001),
        (43.772972, 30, 0.05),
        (70.064895, 100, 0.99),
        (124.342113, 100, 0.05),
        (149.449253, 100, 0.001),
    ],
)
def test_the_chi_square_tail_equals_the_published_critical_values(statistic: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=2e-6)


@pytest.mark.parametrize("statistic", [0.1, 1.0, 3.9, 4.1, 27.6, 100.0])
def test_with_two_degrees_the_tail_is_the_exponential(statistic: float) -> None:
    assert chi_square_tail(statistic, 2) == pytest.approx(np.exp(-statistic / 2), rel=1e-12)


@pytest.mark.parametrize("degrees", [3, 63, 255, 1023])
def test_series_and_fraction_meet_where_one_takes_over_from_the_other(degrees: int) -> None:
    below, above = chi_square_tail(degrees + 2 - 1e-9, degrees), chi_square_tail(degrees + 2 + 1e-9, degrees)
    assert below > above > below * (1 - 1e-8)


def test_goodness_accepts_the_true_distribution_and_refuses_a_slightly_wrong_one() -> None:
    rng = np.random.default_rng(1)
    true, wrong = [0.5, 0.3, 0.2], [0.48, 0.32, 0.2]
    counts = rng.multinomial(40_000, true)
    assert goodness_p(counts, true) > 1e-3
    assert goodness_p(counts, wrong) < FALSE_ALARM


def test_goodness_refuses_a_single_count_where_nothing_may_be() -> None:
    assert goodness_p([999, 1], [1.0, 0.0]) == 0
    assert goodness_p([1000, 0], [1.0, 0.0]) == 1


def test_goodness_pools_rare_cells_without_losing_them() -> None:
    rare = [0.9, 0.098, 0.0005, 0.0005, 0.001]
    counts = np.random.default_rng(2).multinomial(5000, rare)
    assert goodness_p(counts, rare) > 1e-3
    assert goodness_p([4463, 487, 12, 13, 25], rare) < FALSE_ALARM


def test_p_values_of_true_tables_are_themselves_uniform() -> None:
    rng = np.random.default_rng(3)
    values = [goodness_p(rng.multinomial(2000, [0.125] * 8), [0.125] * 8) for _ in range(2000)]
    assert uniform_p(values, bins=10) > FALSE_ALARM


def test_uniformity_and_independence_see_a_bias_and_a_correlation() -> None:
    rng = np.random.default_rng(4)
    first, second = rng.random(20_000), rng.random(20_000)
    assert uniform_p(first) > 1e-3
    assert independence_p(first, second) > 1e-3
    assert uniform_p(first**1.15) < FALSE_ALARM
    assert independence_p(first, (first + 0.3 * second) % 1) < FALSE_ALARM
