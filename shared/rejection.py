"""The rejection rule: accept a draft id with probability min(1, p/q), else draw from the residual; exact for any q.

Must not know: torch, wire, sessions. Letters of the paper hold in this file only: p = target, q = draft.
Called by the verifier's judge (`judge_one`, `draw_plain`) and by drafters (`quantise`, `draw_from_row`).

Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding",
arXiv 2211.17192, section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.randomness import Purpose, judge_unit
from shared.sampling import Warped

ROW_TOTAL = 65535
"""What the weights of a quantised row sum to."""
DEFAULT_ROW_IDS = 32


@dataclass(frozen=True)
class QRow:
    """A draft distribution as integers: the very one that was sampled from.

    `ids` are distinct, `weights` are > 0 and sum to 65535, in the same order (as drawn: likeliest first).
    """

    ids: tuple[int, ...]
    weights: tuple[int, ...]

    def probability(self, token: int) -> float:
        """q(token), exactly weight / 65535; 0 outside the row."""
        return self.weights[self.ids.index(token)] / ROW_TOTAL if token in self.ids else 0.0


@dataclass(frozen=True)
class Judged:
    """What became of one position: the id that stands there, and whether it is the hinted one."""

    token: int
    is_accepted: bool


def quantise(warped: Warped, max_ids: int = DEFAULT_ROW_IDS) -> QRow:
    """The likeliest `max_ids` ids with integer weights summing to 65535 by largest remainder; weight 0 is left out."""
    probs = warped.probabilities()
    order = np.lexsort((warped.ids, -probs))[:max_ids]
    shares = probs[order] / probs[order].sum() * ROW_TOTAL
    weights = np.floor(shares).astype(np.int64)
    missing = ROW_TOTAL - int(weights.sum())
    weights[np.argsort(-(shares - weights), kind="stable")[:missing]] += 1
    kept = weights > 0
    return QRow(tuple(warped.ids[order][kept].tolist()), tuple(weights[kept].tolist()))


def draw_from_row(row: QRow, u: float) -> int:
    """The id at quantile u in (0, 1) of the quantised row: sampled from the very weights that travel."""
    point, passed = u * ROW_TOTAL, 0
    for token, weight in zip(row.ids, row.weights, strict=True):
        passed += weight
        if point < passed:
            return token
    return row.ids[-1]


def draw(ids: npt.NDArray[np.int64], masses: npt.NDArray[np.float64], u: float) -> int:
    """The id at quantile u of unnormalised masses, in id order. Shapes: ids, masses (k,)."""
    passed = np.cumsum(masses)
    index = int(np.searchsorted(passed, u * passed[-1], side="right"))
    return int(ids[min(index, int(np.flatnonzero(masses > 0)[-1]))])


def judge_one(target: Warped, row: QRow, hinted: int, seed: int, epoch: int, position: int) -> Judged:
    """Accept the hinted id or draw its correction from the residual; each position is judged once."""
    p = target.probabilities()
    q_of_hinted = row.probability(hinted)
    at = np.flatnonzero(target.ids == hinted)
    p_of_hinted = float(p[at[0]]) if len(at) else 0.0
    if judge_unit(seed, epoch, position, Purpose.ACCEPT) * q_of_hinted < p_of_hinted:
        return Judged(hinted, True)
    residual = p.copy()
    places = {int(token): place for place, token in enumerate(target.ids)}
    for token, weight in zip(row.ids, row.weights, strict=True):
        if token in places:
            residual[places[token]] = max(residual[places[token]] - weight / ROW_TOTAL, 0.0)
    if not residual.sum() > 0:
        residual = p
    return Judged(draw(target.ids, residual, judge_unit(seed, epoch, position, Purpose.RESIDUAL)), False)


def draw_plain(target: Warped, seed: int, epoch: int, position: int, purpose: Purpose) -> int:
    """The id at a position without a hint: `Purpose.BONUS` after a wholly accepted hint, else `Purpose.PLAIN`."""
    return draw(target.ids, target.probabilities(), judge_unit(seed, epoch, position, purpose))
