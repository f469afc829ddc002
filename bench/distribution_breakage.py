"""Ways to break the rules in docs/sampling.md, from outside: drafters, devices, tries and judges that do wrong.

None of this is reachable from the product. Called by `distribution_broken`, which says what each must lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

import edge_client.drafter as drafting
from bench.distribution_device import Device
from bench.distribution_honest import TWO_BYTES, CutsAtStop
from bench.distribution_setting import Patch
from cloud_verifier.noise import row_keys
from edge_client.drafter import DraftTask, HintTree, ModelDrafter
from shared import randomness, rejection
from shared.hint_trie import HintTrie, Node
from shared.randomness import Purpose, draft_unit, ids_digest, judge_unit
from shared.rejection import Judged, QRow
from shared.sampling import Counts, SamplingParams, Warped, warp
from shared.types import Hint

Drawn = drafting._Drawn
UNLIKELY = 0.3


# ---------------------------------------------------------------- drafters


class SoftGreedy(ModelDrafter):
    """Takes the likeliest id and sends the row as if it had drawn from it."""

    def _draw_from_quantised(self, task: DraftTask, counts: Counts, prefix: list[int]) -> Drawn:
        row = super()._draw_from_quantised(task, counts, prefix).row
        assert row is not None
        return Drawn(row.ids[0], row.probability(row.ids[0]), row=row)


class CutAfterTheRow(ModelDrafter):
    """Draws from the row cut to its top 3 and sends the row before the cut."""

    def _draw_from_quantised(self, task: DraftTask, counts: Counts, prefix: list[int]) -> Drawn:
        assert self._scores is not None
        warped = warp(self._scores, task.sampling, counts, self._valid)
        row, cut = rejection.quantise(warped), rejection.quantise(warped, max_ids=3)
        token = rejection.draw_from_row(cut, draft_unit(task.secret, task.epoch, ids_digest(prefix)))
        return Drawn(token, row.probability(token), row=row)


class OtherTemperature(ModelDrafter):
    """Draws at temperature 0.5 and sends the row of temperature 1."""

    def _draw_from_quantised(self, task: DraftTask, counts: Counts, prefix: list[int]) -> Drawn:
        assert self._scores is not None
        cold = rejection.quantise(warp(self._scores, SamplingParams(temperature=0.5), counts, self._valid))
        row = rejection.quantise(warp(self._scores, task.sampling, counts, self._valid))
        token = rejection.draw_from_row(cold, draft_unit(task.secret, task.epoch, ids_digest(prefix)))
        return Drawn(token, row.probability(token), row=row)


class Redrawing(ModelDrafter):
    """Draws afresh each time it is asked: keyed by a counter, nothing kept."""

    def _draw_from_quantised(self, task: DraftTask, counts: Counts, prefix: list[int]) -> Drawn:
        assert self._scores is not None
        row = rejection.quantise(warp(self._scores, task.sampling, counts, self._valid))
        self._asked = getattr(self, "_asked", 0) + 1
        token = rejection.draw_from_row(row, draft_unit(task.secret, task.epoch, ids_digest([self._asked])))
        return Drawn(token, row.probability(token), row=row)


class RecomputedRow(ModelDrafter):
    """Keeps the token, but recomputes its row each time, as a forward of other shape or filters would: hotter."""

    def _draw_from_quantised(self, task: DraftTask, counts: Counts, prefix: list[int]) -> Drawn:
        is_kept = ids_digest(prefix) in self._drawn_rows
        drawn = super()._draw_from_quantised(task, counts, prefix)
        if not is_kept:
            return drawn
        assert self._scores is not None
        row = rejection.quantise(warp(self._scores, SamplingParams(temperature=3.0), counts, self._valid))
        return Drawn(drawn.token, drawn.confidence, row=row)


class AcceptDraws(ModelDrafter):
    """Draws with the verifier's own accept draw: the session seed keys both."""

    def _draw_from_quantised(self, task: DraftTask, counts: Counts, prefix: list[int]) -> Drawn:
        assert self._scores is not None
        row = rejection.quantise(warp(self._scores, task.sampling, counts, self._valid))
        token = rejection.draw_from_row(row, judge_unit(task.seed, task.epoch, len(prefix), Purpose.ACCEPT))
        return Drawn(token, row.probability(token), row=row)


class PositionDraws(ModelDrafter):
    """Keys draft draws by position, not by the ids before."""

    def _draw_from_quantised(self, task: DraftTask, counts: Counts, prefix: list[int]) -> Drawn:
        assert self._scores is not None
        row = rejection.quantise(warp(self._scores, task.sampling, counts, self._valid))
        token = rejection.draw_from_row(row, draft_unit(task.secret, task.epoch, ids_digest([len(prefix)])))
        return Drawn(token, row.probability(token), row=row)


# ---------------------------------------------------------------- devices


def _first(tree: HintTree, most: int) -> HintTree:
    return HintTree(tree.ids[:most], tree.parents[:most], tree.confidence[:most], tree.rows[:most])


class OnlyLikely(Device):
    """Sends ids only while they are likely."""

    def cut(self, tree: HintTree) -> HintTree:
        """Before the first unlikely id."""
        return _first(tree, next((n for n, q in enumerate(tree.confidence) if q < UNLIKELY), len(tree.ids)))


class ByBytes(Device):
    """Cuts a chain where its encoded ids no longer fit what the packet has left."""

    left_bytes = 1

    def cut(self, tree: HintTree) -> HintTree:
        """As many ids as fit."""
        ends = accumulate(2 if token >= TWO_BYTES else 1 for token in tree.ids)
        return _first(tree, sum(end <= self.left_bytes for end in ends))


class LikelySooner(Device):
    """Its flush deadline starts from the token: a likely one goes at once, an unlikely one waits for more."""

    def draft_ms(self, tree: HintTree) -> float:
        """By the first token drawn."""
        return 1.0 if tree.confidence[0] >= UNLIKELY else 22.0


class UnsureSooner(Device):
    """Flushes early when a later row looks unsure."""

    def draft_ms(self, tree: HintTree) -> float:
        """By the second row, which the first token has led to."""
        is_unsure = len(tree.rows) > 1 and max(tree.rows[1].weights) < 0.45 * rejection.ROW_TOTAL
        return 1.0 if is_unsure else 30.0


class StopSooner(CutsAtStop):
    """A chain that ends in a stop id is done sooner, so it leaves sooner."""

    def draft_ms(self, tree: HintTree) -> float:
        """By the length left."""
        return 7.0 * len(self.cut(tree).ids)


class TriesAgain(Device):
    """Sends a second draw behind the first if the first is unlikely, in the same moment."""

    def send(self, base: int, tree: HintTree) -> None:
        """The first draw, then perhaps another."""
        super().send(base, tree)
        if tree.confidence[0] < UNLIKELY:
            self.drafter.sync(self.ids)
            super().send(base, self.drafter.propose(drafting.Budget(len(tree.ids))))


# ---------------------------------------------------------------- the verifier


class LastHintWins(HintTrie):
    """A new hint at a position and prefix replaces the one held."""

    def _hang(
        self, number: int, token: int, parent: Node | None, siblings: dict[int, Node], hint: Hint, index: int
    ) -> None:
        for other in [known for known in siblings if known != token]:
            self._prune(siblings.pop(other))
        super()._hang(number, token, parent, siblings, hint, index)


_judge_one, _draw_plain, _noise = rejection.judge_one, rejection.draw_plain, randomness.noise


def one_accept_draw(seed: int, epoch: int, position: int, purpose: Purpose) -> float:
    """One u for the accept draws of all positions."""
    return judge_unit(seed, epoch, 0 if purpose is Purpose.ACCEPT else position, purpose)


def residual_with_accept_draw(seed: int, epoch: int, position: int, purpose: Purpose) -> float:
    """The correction is drawn with the u that refused the hint."""
    return judge_unit(seed, epoch, position, Purpose.ACCEPT if purpose is Purpose.RESIDUAL else purpose)


def bonus_with_accept_draw(seed: int, epoch: int, position: int, purpose: Purpose) -> float:
    """The bonus draw is the accept draw of the id before it."""
    is_bonus = purpose is Purpose.BONUS
    return judge_unit(seed, epoch, position - is_bonus, Purpose.ACCEPT if is_bonus else purpose)


def bonus_with_own_accept_draw(seed: int, epoch: int, position: int, purpose: Purpose) -> float:
    """The bonus is drawn with the accept draw of its own position."""
    return judge_unit(seed, epoch, position, Purpose.ACCEPT if purpose is Purpose.BONUS else purpose)


def residual_from_target(target: Warped, row: QRow, hinted: int, seed: int, epoch: int, position: int) -> Judged:
    """The correction is drawn from p instead of max(p - q, 0)."""
    judged = _judge_one(target, row, hinted, seed, epoch, position)
    if judged.is_accepted:
        return judged
    return Judged(_draw_plain(target, seed, epoch, position, Purpose.RESIDUAL), False)


def judged_twice(target: Warped, row: QRow, hinted: int, seed: int, epoch: int, position: int) -> Judged:
    """A refused hint is followed by another draw from the same row, judged afresh."""
    judged = _judge_one(target, row, hinted, seed, epoch, position)
    if judged.is_accepted:
        return judged
    again = rejection.draw_from_row(row, draft_unit(seed + 1, epoch, ids_digest([position])))
    return _judge_one(target, row, again, seed + 1, epoch, position)


def noise_of_one_position(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Noise that does not depend on the position."""
    return _noise(seed, 0, ids)


def keys_of_one_position(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The verifier's keys of noise that does not depend on the position."""
    return row_keys(seeds, torch.zeros_like(positions))


def digest_of_last(ids: Sequence[int]) -> bytes:
    """The digest of the last id alone."""
    return ids_digest(list(ids[-1:]))


def units(replacement: Callable[[int, int, int, Purpose], float]) -> tuple[Patch, ...]:
    """A patch of the verifier's draws."""
    return ((rejection, "judge_unit", replacement),)
