"""Chi-square tests without scipy: how likely is a count table if the stated probabilities are true.

Must not know: Draftwire. Called by randomised tests, which are seeded, so they pass or fail for ever: a p-value below
`FALSE_ALARM` means a wrong distribution, save for one correct test in a million.
Checked by tests/pure/test_statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FALSE_ALARM = 1e-6
"""A test fails if what it saw is rarer than this under the distribution that it claims."""
FALSE_ALARM_SIGMAS = 4.892
"""The same, two-sided, for a count that is nearly normal."""
SMALLEST_CELL = 5.0
"""Cells with a smaller expected count are pooled, or the chi-square law does not hold."""


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(X >= statistic) for chi-square with `degrees` degrees of freedom.

    Source: Abramowitz and Stegun, 6.5.29 (series of the lower part) and 6.5.31 (continued fraction of the upper part).
    """
    if statistic <= 0:
        return 1.0
    a, x = degrees / 2, statistic / 2
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    return 1 - front * _series(a, x) if x < a + 1 else front * _fraction(a, x)


def _series(a: float, x: float) -> float:
    term = total = 1 / a
    n = 0
    while term > total * 1e-17:
        n += 1
        term *= x / (a + n)
        total += term
    return total


def _fraction(a: float, x: float) -> float:
    depth = 400 + int(10 * math.sqrt(a))
    value = x + 2 * depth + 1 - a
    for n in range(depth, 0, -1):
        value = x + 2 * n - 1 - a + n * (a - n) / value
    return 1 / value


def goodness_p(counts: Sequence[int] | npt.NDArray[np.int64], probabilities: Sequence[float]) -> float:
    """The p-value of `counts` under `probabilities`; a count where the probability is 0 gives 0.

    Shapes: counts, probabilities (k,).
    """
    observed = np.asarray(counts, dtype=np.float64)
    shares = np.asarray(probabilities, dtype=np.float64)
    if observed[shares == 0].any():
        return 0.0
    expected = shares / shares.sum() * observed.sum()
    small = expected < SMALLEST_CELL
    if small.any():  # pooled, with the smallest of the others if even the pool is small
        order = np.argsort(expected)
        pool = int(np.searchsorted(np.cumsum(expected[order]), SMALLEST_CELL)) + 1
        pool = max(pool, int(small.sum()))
        observed = np.append(observed[order[pool:]], observed[order[:pool]].sum())
        expected = np.append(expected[order[pool:]], expected[order[:pool]].sum())
    if len(expected) < 2:
        return 1.0
    return chi_square_tail(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def uniform_p(values: Sequence[float] | npt.NDArray[np.float64], bins: int = 64) -> float:
    """The p-value of values in (0, 1) under the uniform distribution. Shapes: values (n,)."""
    cells = (np.asarray(values) * bins).astype(np.int64)
    return goodness_p(np.bincount(cells, minlength=bins), [1 / bins] * bins)


def independence_p(
    first: Sequence[float] | npt.NDArray[np.float64], second: Sequence[float] | npt.NDArray[np.float64], bins: int = 16
) -> float:
    """The p-value of pairs in (0, 1)² under the uniform distribution on the square. Shapes: first, second (n,)."""
    rows = (np.asarray(first) * bins).astype(np.int64)
    columns = (np.asarray(second) * bins).astype(np.int64)
    return goodness_p(np.bincount(rows * bins + columns, minlength=bins * bins), [1 / bins**2] * bins**2)
