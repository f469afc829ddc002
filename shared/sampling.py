"""Sampling parameters and warping: from a row of scores to the ids that may be drawn and their probabilities.

Must not know: sessions, wire, torch. Called by `agreement`, `rejection`, the verifier's judge and the drafters.
`warp_reference` is the readable twin of `warp`; tests hold them equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError, NumericalError

Scores = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingParams:
    """How the next id is chosen from a row of scores; effects come in the order that `warp` states."""

    temperature: float = 1.0
    """0 is exact argmax (greedy); at most 1000."""
    top_k: int = 0
    """Keep the k highest scores, ties to the lowest id; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set with this share of the mass, the id that crosses included; 0 keeps one id, 1 all."""
    min_p: float = 0.0
    """Keep ids with at least this share of the best id's probability; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Once per id seen in context or generated text: positive scores divided by it, others multiplied; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted once per time the id was generated; -100 to 100."""
    presence_penalty: float = 0.0
    """Subtracted once if the id was generated; -100 to 100."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the score of an id, -1000 to 1000; -inf forbids the id."""

    def __post_init__(self) -> None:
        """Raises ConfigError that lists every bad field at once."""
        problems = list(_problems(self))
        if problems:
            raise ConfigError("; ".join(text for _, text in problems), field=problems[0][0])

    @property
    def is_greedy(self) -> bool:
        """True if the choice is an exact argmax."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True if scores depend on the ids before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def _problems(params: SamplingParams) -> Iterable[tuple[str, str]]:
    ranges: tuple[tuple[str, float, float], ...] = (
        ("temperature", 0.0, 1000.0),
        ("top_k", 0, 2**31 - 1),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-3, 1e3),
        ("frequency_penalty", -100.0, 100.0),
        ("presence_penalty", -100.0, 100.0),
    )
    for name, low, high in ranges:
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            yield name, f"{name} must be a number from {low} to {high}, got {value!r}"
    if isinstance(params.top_k, float):
        yield "top_k", f"top_k must be a whole number, got {params.top_k!r}"
    yield from _bias_problems(params.logit_bias)


def _bias_problems(biases: object) -> Iterable[tuple[str, str]]:
    if not isinstance(biases, Mapping):
        yield "logit_bias", f"logit_bias must map ids to numbers, got {biases!r}"
        return
    for token, bias in biases.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            yield "logit_bias", f"logit_bias names {token!r}, which is not an id"
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_number or not (bias == -math.inf or -1000 <= bias <= 1000):
            yield "logit_bias", f"logit_bias[{token!r}] must be from -1000 to 1000, or -inf, got {bias!r}"


GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Counts:
    """What penalties count: ids of the context, and how often each id was generated since `generated_from`."""

    context: frozenset[int] = frozenset()
    generated: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(ids: Iterable[int], generated_from: int) -> Counts:
        """Counts for a whole sequence whose first generated position is `generated_from`."""
        sequence = list(ids)
        counts = Counts(frozenset(sequence[:generated_from]))
        for token in sequence[generated_from:]:
            counts.add(token)
        return counts

    def add(self, token: int) -> None:
        """One more generated id."""
        self.generated[token] = self.generated.get(token, 0) + 1

    def with_path(self, path: Iterable[int]) -> Counts:
        """A copy that also counts these ids as generated: a hint node's own row uses its own path."""
        copy = Counts(self.context, dict(self.generated))
        for token in path:
            copy.add(token)
        return copy


@dataclass(frozen=True)
class Warped:
    """What may be drawn: kept ids in rising order and their scores after temperature (log p up to a constant).

    Shapes: `ids` (k,) int64, `scores` (k,) float64, k >= 1.
    """

    ids: Ids
    scores: Scores

    def probabilities(self) -> Scores:
        """Normalised over the kept ids. Shapes: (k,) float64, sums to 1."""
        weights = np.exp(self.scores - self.scores.max())
        return np.asarray(weights / weights.sum(), dtype=np.float64)


def penalised(
    row: npt.NDArray[np.float32], params: SamplingParams, counts: Counts | None, valid: npt.NDArray[np.bool_] | None
) -> Scores:
    """Raw scores with penalties and bias applied and absent ids (padding rows, holes) at -inf.

    Shapes: row (V,) float32; valid (V,) bool or None; result (V,) float64.
    """
    scores = row.astype(np.float64)
    if counts is not None and params.has_penalties:
        _apply_penalties(scores, params, counts)
    for token, bias in params.logit_bias.items():
        if token < len(scores):
            scores[token] += bias
    if valid is not None:
        scores[~valid] = -np.inf
    return scores


def _apply_penalties(scores: Scores, params: SamplingParams, counts: Counts) -> None:
    size = len(scores)
    if params.repetition_penalty != 1:
        seen = np.array(sorted(t for t in counts.context | counts.generated.keys() if t < size), dtype=np.int64)
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    for token, times in counts.generated.items():
        if token < size:
            scores[token] -= params.frequency_penalty * times + params.presence_penalty


def warp(
    row: npt.NDArray[np.float32],
    params: SamplingParams,
    counts: Counts | None = None,
    valid: npt.NDArray[np.bool_] | None = None,
) -> Warped:
    """The ids that may be drawn after one row, in the order penalties, bias, temperature, top-k, top-p, min-p.

    A greedy warp keeps one id: the highest score, the lowest id among equals.

    Shapes: row (V,) float32; valid (V,) bool.
    Raises: NumericalError if no id may be drawn.
    """
    scores = penalised(row, params, counts, valid)
    if not np.isfinite(scores.max()):
        raise NumericalError("no id may be drawn: every score is forbidden or not finite")
    if params.is_greedy or params.top_k == 1 or params.top_p == 0:
        best = int(np.argmax(scores))
        return Warped(np.array([best]), np.zeros(1))
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        scores = (scores - scores.max()) / params.temperature
    ids = _keep_top_k(scores, params.top_k)
    ids = _keep_top_p(scores, ids, params.top_p)
    if params.min_p > 0:
        ids = ids[scores[ids] >= math.log(params.min_p)]
    return Warped(ids, scores[ids])


def _cut(values: Scores, ids: Ids, keep: int) -> Ids:
    """The `keep` ids with the highest values, ties to the lowest id, in rising order. Shapes: values, ids (k,)."""
    if keep >= len(ids):
        return ids
    threshold = np.partition(values, len(values) - keep)[len(values) - keep]
    above = values > threshold
    chosen = above.copy()
    ties = np.flatnonzero(values == threshold)
    chosen[ties[: keep - int(above.sum())]] = True
    return np.asarray(ids[chosen], dtype=np.int64)


def _keep_top_k(scores: Scores, top_k: int) -> Ids:
    finite = np.flatnonzero(scores > -np.inf)
    if top_k == 0 or top_k >= len(finite):
        return np.asarray(finite, dtype=np.int64)
    return _cut(scores[finite], finite, top_k)


def _keep_top_p(scores: Scores, ids: Ids, top_p: float) -> Ids:
    if top_p >= 1 or len(ids) == 1:
        return ids
    values = scores[ids]
    masses = np.cumsum(np.exp(np.sort(values)[::-1]))
    keep = int(np.searchsorted(masses, top_p * masses[-1], side="left")) + 1
    return _cut(values, ids, min(keep, len(ids)))


def warp_reference(
    row: npt.NDArray[np.float32],
    params: SamplingParams,
    counts: Counts | None = None,
    valid: npt.NDArray[np.bool_] | None = None,
) -> Warped:
    """The slow readable twin of `warp`: one sorted list, cut three times."""
    scores = penalised(row, params, counts, valid)
    order = sorted((i for i in range(len(scores)) if scores[i] > -math.inf), key=lambda i: (-scores[i], i))
    if params.is_greedy:
        return Warped(np.array(order[:1]), np.zeros(1))
    best = scores[order[0]]
    with np.errstate(over="ignore"):
        scaled = {i: float((scores[i] - best) / params.temperature) for i in order}
    order = sorted((i for i in order if scaled[i] > -math.inf), key=lambda i: (-scaled[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    masses = np.cumsum(np.exp(np.array([scaled[i] for i in order])))
    crossing = next((n for n, mass in enumerate(masses) if mass >= params.top_p * masses[-1]), len(order) - 1)
    if params.top_p < 1:
        order = order[: crossing + 1]
    if params.min_p > 0:
        order = [i for i in order if scaled[i] >= math.log(params.min_p)]
    ids = np.array(sorted(order))
    return Warped(ids, np.array([scaled[i] for i in ids]))


def raw_logprob(row: npt.NDArray[np.float32], token: int) -> float:
    """The target's own log-probability of an id, before any warping. Shapes: row (V,)."""
    scores = row.astype(np.float64)
    best = float(scores.max())
    return float(scores[token]) - best - math.log(float(np.exp(scores - best).sum()))
