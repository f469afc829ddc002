"""The rule for near ties (DESIGN section 3, docs/sampling.md): which flips rounding explains, and which are bugs.

Outside fp32 on a CPU a forward over several tokens may give other last bits than one over a single token, and turn a
choice between two nearly equal ids. `check_text` feeds a text's ids one by one, and once more several at a time; the
largest difference d of the scores bounds what rounding does. An id that the one-by-one scores would not have chosen is
allowed if raising it, and lowering the winner, by d would have made it win. Pure but for the target handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloud_verifier.target_model import RowInput, TorchTarget
from shared.agreement import choose
from shared.randomness import noise
from shared.sampling import Counts, SamplingParams, penalised, warp

Row = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TieReport:
    """What a text showed."""

    length: int
    largest_difference: float
    """d: between scores of one token at a time and of several, after temperature, before cutting."""
    flips: tuple[int, ...]
    """Places in the text whose id is not the one-by-one choice, but within what d explains."""
    bugs: tuple[int, ...]
    """Places whose id d does not explain."""
    widest_gap: float
    """Largest (noised) gap among the flips, 0 without."""


def check_text(
    target: TorchTarget,
    context: Sequence[int],
    ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    valid: npt.NDArray[np.bool_] | None = None,
    at_a_time: int = 9,
) -> TieReport:
    """Holds the ids of a text to the target alone."""
    single, several = (rows_of(target, context, ids, size) for size in (1, at_a_time))
    scale = params.temperature or 1.0
    d = max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(single, several, strict=True)) / scale
    flips, bugs, widest = [], [], 0.0
    counts = Counts.of(context, len(context))
    for place, (row, token) in enumerate(zip(single, ids, strict=True)):
        position = len(context) + place
        warped = warp(row, params, counts if params.has_penalties else None, valid)
        if choose(warped, seed, position) != token:
            gap = noised_gap(row, token, params, counts, seed, position, valid)
            if is_explained(row, token, params, counts, seed, position, valid, d):
                flips.append(place)
                widest = max(widest, gap)
            else:
                bugs.append(place)
        counts.add(token)
    return TieReport(len(ids), d, tuple(flips), tuple(bugs), widest)


def is_explained(
    row: Row,
    token: int,
    params: SamplingParams,
    counts: Counts,
    seed: int,
    position: int,
    valid: npt.NDArray[np.bool_] | None,
    d: float,
) -> bool:
    """True if errors of at most `d` in each score (after temperature) could make `token` the choice.

    Two things can differ: who wins among those kept (the gap is at most 2d), and who is kept at all (the id would be
    kept with it and all ids below it raised by d and the rest lowered by d).
    """
    if noised_gap(row, token, params, counts, seed, position, valid) > 2 * d:
        return False
    scale = params.temperature or 1.0
    raised = row.astype(np.float64)
    is_low = raised <= raised[token]
    raised = np.where(is_low, raised + d * scale, raised - d * scale)
    return params.is_greedy or token in warp(raised.astype(np.float32), params, _asked(params, counts), valid).ids


def noised_gap(
    row: Row,
    token: int,
    params: SamplingParams,
    counts: Counts,
    seed: int,
    position: int,
    valid: npt.NDArray[np.bool_] | None,
) -> float:
    """By how much the choice beats `token` in (noised) scores after temperature."""
    warped = warp(row, params, _asked(params, counts), valid)
    winner = choose(warped, seed, position)
    scores = penalised(row, params, _asked(params, counts), valid) / (params.temperature or 1.0)
    pair = np.array([winner, token])
    values = scores[pair] if params.is_greedy else scores[pair] + noise(seed, position, pair)
    return float(values[0] - values[1])


def rows_of(target: TorchTarget, context: Sequence[int], ids: Sequence[int], at_a_time: int) -> list[Row]:
    """The scores that each id of a text was chosen from, fed `at_a_time` ids a forward. Shapes: len(ids) of (V,)."""
    slot = target.new_slot()
    sequence = [*context, *ids[:-1]]
    rows: list[Row] = []
    start = 0
    while start < len(sequence):
        size = len(context) if not start else at_a_time
        fed = sequence[start : start + size]
        assert slot.try_reserve(len(fed))
        wanted = range(len(fed) - 1, len(fed)) if not start else range(len(fed))
        scores = target.forward([RowInput(slot, fed, range(-1, len(fed) - 1), wanted)])
        rows += list(scores.cpu().numpy())
        slot.keep(range(len(fed)))
        start += len(fed)
    target.release(slot)
    return rows


def _asked(params: SamplingParams, counts: Counts) -> Counts | None:
    return counts if params.has_penalties else None
