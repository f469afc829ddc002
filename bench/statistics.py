"""Chi-square without scipy (how likely is a table of counts if the stated shares are true) and intervals of ratios.

Must not know: Draftwire. Called by `bench.distribution` and `bench.link_table`. Checked by
tests/synthetic/test_bench_distribution.py and test_bench_link.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

J = TypeVar("J")
K = TypeVar("K")

SMALLEST_EXPECTED = 5.0
"""Cells that expect fewer counts are merged: below it the chi-square law does not hold."""
TINY = 1e-300


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(X >= statistic) for a chi-square variable with `degrees` degrees of freedom.

    Source: Press et al., Numerical Recipes, 6.2: series below the mean, Lentz's continued fraction above it.
    """
    if statistic <= 0:
        return 1.0
    a, x = degrees / 2, statistic / 2
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    return 1 - front * _lower_series(a, x) if x < a + 1 else front * _upper_fraction(a, x)


def _lower_series(a: float, x: float) -> float:
    term = total = 1 / a
    n = 0
    while term > total * 1e-16:
        n += 1
        term *= x / (a + n)
        total += term
    return total


def _upper_fraction(a: float, x: float) -> float:
    b = x + 1 - a
    c, d = 1 / TINY, 1 / b
    value = d
    for n in range(1, 10_000):
        numerator = -n * (n - a)
        b += 2
        d = 1 / _away_from_zero(numerator * d + b)
        c = _away_from_zero(b + numerator / c)
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY


def table_p(counts: Mapping[K, int], shares: Mapping[K, float]) -> float:
    """The p-value of `counts` under `shares` (which sum to 1); 0 if something was seen that cannot be.

    Cells that expect less than `SMALLEST_EXPECTED` are merged, the rarest first, until each merged one expects enough.
    """
    return tables_p({0: counts}, {0: shares})


def tables_p(counts: Mapping[J, Mapping[K, int]], shares: Mapping[J, Mapping[K, float]]) -> float:
    """One p-value of several tables, each with its own shares: the sum of their chi-squares."""
    statistic, degrees = 0.0, 0
    for key, table in counts.items():
        if any(count and shares[key].get(cell, 0.0) <= 0 for cell, count in table.items()):
            return 0.0
        cells = _merged(table, shares[key])
        statistic += sum((seen - told) ** 2 / told for seen, told in cells)
        degrees += max(0, len(cells) - 1)
    return chi_square_tail(statistic, degrees) if degrees else 1.0


def _merged(counts: Mapping[K, int], shares: Mapping[K, float]) -> list[tuple[float, float]]:
    """(seen, expected) of cells that expect enough; none if there are fewer than two."""
    total = sum(counts.values())
    cells: list[tuple[float, float]] = []
    expected = observed = 0.0
    for share, key in sorted(((share, key) for key, share in shares.items() if share > 0), key=lambda cell: cell[0]):
        expected += share * total
        observed += counts.get(key, 0)
        if expected >= SMALLEST_EXPECTED:
            cells.append((observed, expected))
            expected = observed = 0.0
    if cells and expected > 0:
        cells[-1] = (cells[-1][0] + observed, cells[-1][1] + expected)
    return cells if len(cells) >= 2 else []


def least_p(p_values: Sequence[float]) -> float:
    """One p-value for several tests at once, whatever their dependence: the least, times their number (Bonferroni)."""
    return min(1.0, min(p_values) * len(p_values))


def sigmas_off(successes: int, trials: int, rate: float) -> float:
    """By how many standard deviations `successes` exceeds `trials * rate`; negative if it falls short."""
    spread = math.sqrt(max(trials * rate * (1 - rate), 1.0))
    return (successes - trials * rate) / spread


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """The ratio of the two sums, and the ends of its 95 % interval by the paired bootstrap.

    The i-th of both belong together (one prompt) and are drawn together. Source: Efron and Tibshirani, 1993, 13.3.
    """
    rng, count = random.Random(seed), len(numerators)
    ratios = []
    for _ in range(resamples):
        drawn = rng.choices(range(count), k=count)
        ratios.append(_over(sum(numerators[i] for i in drawn), sum(denominators[i] for i in drawn)))
    ratios.sort()
    low, high = ratios[int(0.025 * resamples)], ratios[min(resamples - 1, int(0.975 * resamples))]
    return _over(sum(numerators), sum(denominators)), low, high


def _over(numerator: float, denominator: float) -> float:
    return numerator / max(denominator, TINY)
