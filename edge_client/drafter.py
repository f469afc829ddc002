"""Drafters propose hints: the seam (`Drafter`), and the one that draws from any next-token model by the session's rule.

Must not know: wire, verifier, onnxruntime. Called by `generate` on a worker thread.
Whatever is proposed here can only make ids come sooner; the rules below decide how often it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared import agreement, rejection
from shared.errors import NumericalError
from shared.randomness import draft_unit, ids_digest
from shared.rejection import QRow
from shared.sampling import Counts, SamplingParams, penalised, warp
from shared.types import Epoch, Rule

Row = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Budget:
    """How much to propose: at most `depth` ids ahead, `width` alternatives a position (1: a chain)."""

    depth: int
    width: int = 1


@dataclass(frozen=True)
class HintTree:
    """Proposed ids after the synced ones. `parents[i]` < i is an index into `ids`, -1 the last synced id.

    `confidence[i]` is the drafter's probability of `ids[i]` given its parent; `rows` only under the rejection rule.
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    rows: tuple[QRow, ...] = ()

    @property
    def is_chain(self) -> bool:
        """True if every id follows the one before it."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))


@dataclass(frozen=True)
class DraftTask:
    """What a drafter must know of its session: how ids are chosen there."""

    sampling: SamplingParams
    seed: int
    rule: Rule
    epoch: Epoch
    generated_from: int
    stop_ids: frozenset[int] = frozenset()
    secret: int = 0
    """Keys the draft draws of the rejection rule; the device's own, independent of the seed."""


class Drafter(Protocol):
    """Proposes where the text may go. Used by one session at a time, from one thread at a time."""

    def begin(self, task: DraftTask) -> None:
        """A new session or epoch; what was synced before may be reused."""
        ...

    def sync(self, ids: Sequence[int]) -> None:
        """The whole committed sequence; proposals continue it."""
        ...

    def propose(self, budget: Budget) -> HintTree:
        """Hints after the synced ids; an empty tree if it has nothing to say (its context may be full)."""
        ...


class NextTokenModel(Protocol):
    """A causal model with a KV cache that rolls back by length."""

    context_size: int

    @property
    def length(self) -> int:
        """Ids in the cache."""
        ...

    def rewind(self, length: int) -> None:
        """Forgets ids from `length` on; costs nothing."""
        ...

    def feed(self, ids: Sequence[int]) -> Row:
        """Appends ids; returns the scores after the last one. Shapes: (V,) float32."""
        ...


@dataclass
class _Drawn:
    token: int
    confidence: float
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    row: QRow | None = None


class ModelDrafter:
    """Drafts a chain with a model, and beside each of its ids the likeliest alternatives."""

    def __init__(self, model: NextTokenModel, valid_ids: npt.NDArray[np.bool_]) -> None:
        """`valid_ids` (V,) bool: ids that exist; padding rows are never proposed."""
        self.model = model
        self._valid = None if valid_ids.all() else valid_ids
        self._fed: list[int] = []
        self._scores: Row | None = None
        self._ids: list[int] = []
        self._drawn_rows: dict[bytes, tuple[int, QRow, int]] = {}
        self._task: DraftTask | None = None

    @property
    def fed_ids(self) -> list[int]:
        """The ids whose keys and values the model holds."""
        return self._fed[: self.model.length]

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""
        self._task = task
        self._drawn_rows.clear()

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter. Keeps the longest common prefix; feeding waits for the next proposal."""
        self._ids = list(ids)
        common = _common_length(self._fed, self._ids)
        if common < len(self._fed):
            self._rewind(common)
        for digest, (position, _, _) in list(self._drawn_rows.items()):
            if position < len(ids):
                del self._drawn_rows[digest]

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        assert self._task is not None, "begin() comes first"
        depth = min(budget.depth, self.model.context_size - len(self._ids))
        if depth <= 0 or not self._ids:
            return HintTree()
        if len(self._fed) > len(self._ids):  # proposed before, not synced since
            self._rewind(len(self._ids))
        if len(self._fed) == len(self._ids) and self._scores is None:
            self._rewind(len(self._ids) - 1)
        self._feed(self._ids[len(self._fed) :])
        return self._grow(replace(budget, depth=depth), self._task)

    def _grow(self, budget: Budget, task: DraftTask) -> HintTree:
        counts = Counts.of(self._ids, task.generated_from) if task.sampling.has_penalties else Counts()
        path: list[int] = []
        ids: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        rows: list[QRow] = []
        above = -1
        while len(path) < budget.depth:
            drawn = self._draw(task, counts, path, budget.width)
            spine = len(ids)
            for token, probability in [(drawn.token, drawn.confidence), *drawn.alternatives]:
                ids.append(token)
                parents.append(above)
                confidence.append(probability)
            if drawn.row is not None:
                rows.append(drawn.row)
            path.append(drawn.token)
            above = spine
            if len(path) == budget.depth or (drawn.row is None and drawn.token in task.stop_ids):
                break  # under the rejection rule a chain is cut by count only: a cut by the token drawn biases the text
            counts.add(drawn.token)
            self._feed([drawn.token])
        return HintTree(tuple(ids), tuple(parents), tuple(confidence), tuple(rows))

    # ------------------------------------------------------------ one id

    def _draw(self, task: DraftTask, counts: Counts, path: list[int], width: int) -> _Drawn:
        assert self._scores is not None
        position = len(self._ids) + len(path)
        if task.rule is Rule.REJECTION and not task.sampling.is_greedy:
            return self._draw_from_quantised(task, counts, [*self._ids, *path])
        (token, confidence), *others = self._ranked(task, counts, position, width)
        return _Drawn(token, confidence, others)

    def _ranked(self, task: DraftTask, counts: Counts, position: int, width: int) -> list[tuple[int, float]]:
        """The `width` likeliest ids in the order in which the target is expected to choose them, and how likely.

        Under noise that order and likelihood follow from the gaps between noised scores, not from the draft's
        probabilities alone: the id with the best noised score is the one both sides mostly agree on.
        """
        assert self._scores is not None
        if task.sampling.is_greedy:
            scores = penalised(self._scores, task.sampling, counts, self._valid)
            ids = np.arange(len(scores))
        else:
            warped = warp(self._scores, task.sampling, counts, self._valid)
            scores, ids = agreement.noised_scores(warped, task.seed, position), warped.ids
        best = np.argpartition(-scores, min(width, len(scores)) - 1)[:width] if width > 1 else np.array([])
        best = np.union1d(best, [np.argmax(scores)]).astype(np.int64)  # argmax: ties go to the lowest id
        best = best[np.argsort(-scores[best], kind="stable")][:width]
        best = best[np.isfinite(scores[best])]
        if not len(best):
            raise NumericalError("the draft model gave no finite score")
        probabilities = np.exp(scores[best] - scores.max()) / np.exp(scores - scores.max()).sum()
        return [(int(ids[place]), float(chance)) for place, chance in zip(best, probabilities, strict=True)]

    def _draw_from_quantised(self, task: DraftTask, counts: Counts, prefix: list[int]) -> _Drawn:
        """A row and its token are drawn once per epoch and prefix, and kept: never from a recomputed row."""
        digest = ids_digest(prefix)
        known = self._drawn_rows.get(digest)
        if known is None:
            assert self._scores is not None
            row = rejection.quantise(warp(self._scores, task.sampling, counts, self._valid))
            token = rejection.draw_from_row(row, draft_unit(task.secret, task.epoch, digest))
            known = self._drawn_rows[digest] = (len(prefix), row, token)
        _, row, token = known
        return _Drawn(token, row.probability(token), row=row)

    # ------------------------------------------------------------ the model's cache

    def _feed(self, ids: Sequence[int]) -> None:
        if ids:
            self._scores = self.model.feed(ids)
            self._fed.extend(ids)

    def _rewind(self, length: int) -> None:
        del self._fed[length:]
        self.model.rewind(length)
        self._scores = None


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    most = min(len(a), len(b))
    return next((index for index in range(most) if a[index] != b[index]), most)
