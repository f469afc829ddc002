"""The rule for near ties (DESIGN section 3, docs/sampling.md): which flips rounding explains, and which are bugs.

Outside fp32 on a CPU a forward over several tokens may give other last bits than one over a single token, and turn a
choice between two nearly equal ids. `check_text` feeds a text's ids one by one, and once more as a step does, several
at a time beside other sessions; the largest difference d of the scores bounds what rounding does. An id that the
one-by-one scores would not have chosen is allowed if errors of at most d in each score could have made it the choice.
Pure but for the target handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cloud_verifier.target_model import RowInput, TorchTarget
from shared.agreement import choose
from shared.randomness import noise
from shared.sampling import Counts, SamplingParams, Scores, Warped, penalised, warp

Row = npt.NDArray[np.float32]
Valid = npt.NDArray[np.bool_] | None

SLACK = 1e-9
"""Added to d, so that a gap of just 2d is no question of which id is lower."""


@dataclass(frozen=True)
class Place:
    """One place of a text: the scores that its id was chosen from, and how. Shapes: row (V,), valid (V,) or None."""

    row: Row
    params: SamplingParams
    seed: int
    position: int
    counts: Counts | None = None
    """Read only if the parameters have penalties."""
    valid: Valid = None

    def scores(self) -> Scores:
        """After penalties, biases and temperature (none if greedy), before any cut. Shapes: (V,) float64."""
        return penalised(self.row, self.params, self.counts, self.valid) / (self.params.temperature or 1.0)

    def choice(self) -> int:
        """The target's own id."""
        return choose(warp(self.row, self.params, self.counts, self.valid), self.seed, self.position)


@dataclass(frozen=True)
class TieReport:
    """What a text showed."""

    length: int
    largest_difference: float
    """d: between scores of one token at a time and of a step like the verifier's, after temperature, before cutting."""
    flips: tuple[int, ...]
    """Places in the text whose id is not the one-by-one choice, but within what d explains."""
    bugs: tuple[int, ...]
    """Places whose id d does not explain."""
    widest_gap: float
    """Largest (noised) gap among the flips, 0 without."""
    relative_difference: float
    """Root mean square of that difference over that of the raw scores: rounding keeps it small, a wrong mask does not.

    d explains nothing if this is beyond what the self-check allows."""


def check_text(
    target: TorchTarget,
    context: Sequence[int],
    ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    valid: Valid = None,
    at_a_time: int = 9,
    sessions: int = 1,
) -> TieReport:
    """Holds the ids of a text to the target alone. Each id is judged after the text's own ids before it.

    `at_a_time`, `sessions`: of the steps that d is measured with; like those that wrote the text.
    """
    single, several = rows_of(target, context, ids, 1), rows_of(target, context, ids, at_a_time, sessions)
    counts, d = Counts.of(context, len(context)), 0.0
    squares = wrong = 0.0
    odd: list[tuple[int, Place]] = []
    for index, (row, other, token) in enumerate(zip(single, several, ids, strict=True)):
        asked = counts.with_path([]) if params.has_penalties else None
        place = Place(row, params, seed, len(context) + index, asked, valid)
        d = max(d, _difference(place.scores(), replace(place, row=other).scores()))
        squares += float(np.square(row, dtype=np.float64).mean())
        wrong += float(np.square(row.astype(np.float64) - other).mean())
        if place.choice() != token:
            odd.append((index, place))
        counts.add(token)
    flips = [(index, noised_gap(place, ids[index])) for index, place in odd if is_explained(place, ids[index], d)]
    explained = tuple(index for index, _ in flips)
    bugs = tuple(index for index, _ in odd if index not in explained)
    relative = float(np.sqrt(wrong / squares)) if squares else 0.0
    return TieReport(len(ids), d, explained, bugs, max((gap for _, gap in flips), default=0.0), relative)


def is_explained(place: Place, token: int, d: float) -> bool:
    """True if errors of at most `d` in each score (after temperature) could make `token` the choice.

    Two things can differ. Who wins among those kept: the gap is at most 2d. And who is kept at all: `token`, if it
    would be with it and all ids below it raised by d and the rest lowered by d; and whoever beats `token` by more than
    2d must be one that errors can cut in the same way.
    """
    scores, params = place.scores(), place.params
    if _keeps_one(params):
        return noised_gap(place, token) <= 2 * d + SLACK
    kept = _kept(scores, params).ids
    noised = scores + noise(place.seed, place.position, np.arange(len(scores)))
    is_louder = noised[kept] - noised[token] > 2 * d + SLACK
    return _can_be_kept(scores, token, params, d + SLACK) and all(
        _can_be_cut(scores, int(louder), params, d + SLACK) for louder in kept[is_louder]
    )


def noised_gap(place: Place, token: int) -> float:
    """By how much the choice beats `token` in (noised) scores after temperature; negative if `token` was cut."""
    pair = np.array([place.choice(), token])
    values = place.scores()[pair]
    if not _keeps_one(place.params):
        values = values + noise(place.seed, place.position, pair)
    return float(values[0] - values[1])


def rows_of(
    target: TorchTarget, context: Sequence[int], ids: Sequence[int], at_a_time: int, sessions: int = 1
) -> list[Row]:
    """The scores that each id of a text was chosen from, fed `at_a_time` ids a forward, to so many sessions alike.

    Shapes: len(ids) of (V,).
    """
    slots = [target.new_slot() for _ in range(sessions)]
    sequence = [*context, *ids[:-1]]
    rows: list[Row] = []
    start = 0
    while ids and start < len(sequence):
        size = len(context) if not start else at_a_time
        fed = sequence[start : start + size]
        wanted = range(len(fed) - 1, len(fed)) if not start else range(len(fed))
        has_room = [slot.try_reserve(len(fed)) for slot in slots]
        assert all(has_room)
        scores = target.forward([RowInput(slot, fed, range(-1, len(fed) - 1), wanted) for slot in slots])
        rows += list(scores[: len(wanted)].cpu().numpy())
        for slot in slots:
            slot.keep(range(len(fed)))
        start += len(fed)
    for slot in slots:
        target.release(slot)
    return rows


def _difference(scores: Scores, others: Scores) -> float:
    """The largest difference. Ids that do not exist or are forbidden stand at -inf in both."""
    is_finite = np.isfinite(scores)
    return float(np.abs(scores[is_finite] - others[is_finite]).max(initial=0.0))


def _keeps_one(params: SamplingParams) -> bool:
    """True if the highest score wins, without noise."""
    return params.is_greedy or params.top_k == 1 or params.top_p == 0


def _kept(scores: Scores, params: SamplingParams) -> Warped:
    """What top-k, top-p and min-p keep of scores that have had the rest of `warp`. float64 goes through it as it is."""
    cuts = SamplingParams(temperature=1.0, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return warp(scores, cuts)  # type: ignore[arg-type]


def _can_be_kept(scores: Scores, token: int, params: SamplingParams, d: float) -> bool:
    favourable = np.where(scores <= scores[token], scores + d, scores - d)
    return token in _kept(favourable, params).ids


def _can_be_cut(scores: Scores, token: int, params: SamplingParams, d: float) -> bool:
    """Lowered by d, with all that may pass it then raised by d, and the rest lowered."""
    adverse = np.where(scores > scores[token] - 2 * d, scores + d, scores - d)
    adverse[token] = scores[token] - d
    return token not in _kept(adverse, params).ids
