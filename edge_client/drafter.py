"""Drafters propose hints: the seam (`Drafter`), and the one that draws from any next-token model by the session's rule.

Must not know: wire, verifier, onnxruntime. Called by `draft_worker` on a worker thread.
Whatever is proposed here can only make ids come sooner; the rules below decide how often it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edge_client.branch_rows import BranchRows
from shared import agreement, rejection
from shared.errors import ModelError, NumericalError
from shared.randomness import draft_unit, ids_digest
from shared.rejection import QRow
from shared.sampling import Counts, SamplingParams, penalised, warp
from shared.types import Epoch, Open, Rule

Row = npt.NDArray[np.float32]
FEED_CHUNK = 32
"""Ids fed between two looks at whether anybody still wants them."""
NEAR = 9.0
"""An alternative this far below the best score is none."""


@dataclass(frozen=True)
class Budget:
    """What to propose: at most `depth` ids ahead, `width` alternatives a position (1: a chain), all of them after
    `path`, which is taken to follow the synced ids.
    """

    depth: int
    width: int = 1
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class HintTree:
    """Proposed ids after the synced ones and the path. `parents[i]` < i is an index into `ids`, -1 what they follow.

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

    @classmethod
    def of(cls, request: Open, seed: int, secret: int = 0) -> DraftTask:
        """What there is to know of a session opened so."""
        return cls(
            sampling=request.sampling,
            seed=seed,
            rule=request.rule,
            epoch=request.epoch,
            generated_from=request.generated_from,
            stop_ids=frozenset(request.stop_ids),
            secret=secret,
        )

    @property
    def is_chain(self) -> bool:
        """As `Open.is_chain`."""
        return self.rule is Rule.REJECTION and not self.sampling.is_greedy


class Drafter(Protocol):
    """Proposes where the text may go. Used by one session at a time, from one thread at a time."""

    name: str
    """What its hints are counted under; acceptance is calibrated for each name."""

    def begin(self, task: DraftTask) -> None:
        """A new session or epoch; what was synced before may be reused."""
        ...

    def sync(self, ids: Sequence[int]) -> None:
        """The whole committed sequence; proposals continue it."""
        ...

    def propose(self, budget: Budget) -> HintTree:
        """Hints after the synced ids and the budget's path.

        An empty tree right behind the synced ids means that it can hold no more: it is not asked again in this text.
        """
        ...


@runtime_checkable
class LongDrafter(Protocol):
    """What a Drafter may offer besides, if taking in a long prompt takes it a while."""

    def prepare(self, ids: Sequence[int]) -> None:
        """Takes in ids ahead of the first proposal; before `begin`, on the worker thread."""
        ...

    def interrupt(self) -> None:
        """(any thread) Ends what is under way with an error, as soon as may be; so does all that follows."""
        ...

    def resume(self) -> None:
        """Takes `interrupt` back."""
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

    def save_rows(self, start: int) -> Any:
        """Copies of the cached keys and values from `start` on. Shapes: (any, any, length - start, any)."""
        ...

    def append_rows(self, rows: Any) -> None:
        """Takes saved rows back, as if their ids were fed again."""
        ...


@dataclass
class _Drawn:
    token: int
    confidence: float
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    row: QRow | None = None


class ModelDrafter:
    """Drafts a chain with a model, and beside each of its ids the likeliest alternatives.

    Going from one branch of a tree to another costs a copy: rows of a branch that is left are kept for a while.
    """

    name = "model"

    def __init__(self, model: NextTokenModel, valid_ids: npt.NDArray[np.bool_], noised_ids: int = 0) -> None:
        """`valid_ids` (V,) bool: ids that exist; padding rows are never proposed.

        `noised_ids`: under the agreement rule noise is computed for so many likeliest ids; 0: for all that are kept.
        """
        self.model = model
        self._valid = None if valid_ids.all() else valid_ids
        self._noised_ids = noised_ids
        self._fed: list[int] = []
        self._scores: Row | None = None
        self._ids: list[int] = []
        self._branches = BranchRows()
        self._drawn_rows: dict[bytes, tuple[int, QRow, int]] = {}
        self._task: DraftTask | None = None
        self._is_interrupted = False

    @property
    def fed_ids(self) -> list[int]:
        """The ids whose keys and values the model holds."""
        return self._fed[: self.model.length]

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""
        self._task = task
        self._drawn_rows.clear()
        self._branches.clear()

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter. What the cache holds beyond is kept: it may be where the text is going."""
        self._ids = list(ids)
        common = _common_length(self._fed, self._ids)
        if common < min(len(self._fed), len(self._ids)):
            self._rewind(common)
        self._branches.keep_agreeing(self._ids)
        for digest, (position, _, _) in list(self._drawn_rows.items()):
            if position < len(ids):
                del self._drawn_rows[digest]

    def prepare(self, ids: Sequence[int]) -> None:
        """See LongDrafter."""
        self._branches.clear()  # of another text
        self.sync(ids)
        self._hold(self._ids[: self.model.context_size])

    def interrupt(self) -> None:
        """See LongDrafter."""
        self._is_interrupted = True

    def resume(self) -> None:
        """See LongDrafter."""
        self._is_interrupted = False

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        assert self._task is not None, "begin() comes first"
        prefix = [*self._ids, *budget.path]
        depth = min(budget.depth, self.model.context_size - len(prefix))
        if depth <= 0 or not prefix:
            return HintTree()
        self._hold(prefix)
        return self._grow(prefix, replace(budget, depth=depth), self._task)

    def _grow(self, prefix: list[int], budget: Budget, task: DraftTask) -> HintTree:
        counts = Counts.of(prefix, task.generated_from) if task.sampling.has_penalties else Counts()
        path = list(prefix)
        ids: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        rows: list[QRow] = []
        above = -1
        while True:
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
            if len(path) == len(prefix) + budget.depth or (drawn.row is None and drawn.token in task.stop_ids):
                break  # under the rejection rule a chain is cut by count only: a cut by the token drawn biases the text
            counts.add(drawn.token)
            self._feed([drawn.token])
        return HintTree(tuple(ids), tuple(parents), tuple(confidence), tuple(rows))

    # ------------------------------------------------------------ one id

    def _draw(self, task: DraftTask, counts: Counts, path: list[int], width: int) -> _Drawn:
        assert self._scores is not None
        if task.is_chain:
            return self._draw_from_quantised(task, counts, path)
        (token, confidence), *others = self._ranked(task, counts, len(path), width)
        return _Drawn(token, confidence, others)

    def _ranked(self, task: DraftTask, counts: Counts, position: int, width: int) -> list[tuple[int, float]]:
        """The `width` likeliest ids in the order in which the target is expected to choose them, and how likely.

        Under noise that order and likelihood follow from the gaps between noised scores, not from the draft's
        probabilities alone: the id with the best noised score is the one both sides mostly agree on.
        """
        assert self._scores is not None
        scores, ids = self._final_scores(self._scores, task, counts, position)
        best = float(scores.max())
        if not math.isfinite(best):
            raise NumericalError("the draft model gave no finite score")
        near = np.flatnonzero(scores >= best - NEAR) if width > 1 else np.array([np.argmax(scores)])
        near = near[np.argsort(-scores[near], kind="stable")][:width]  # ties go to the lowest id
        total = float(np.exp(scores - best).sum(dtype=np.float64))
        chances = np.exp(scores[near].astype(np.float64) - best) / total
        return [(int(place if ids is None else ids[place]), float(c)) for place, c in zip(near, chances, strict=True)]

    def _final_scores(
        self, row: Row, task: DraftTask, counts: Counts, position: int
    ) -> tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.int64] | None]:
        """Scores whose highest is the draft's choice, and the ids they belong to (None: their places)."""
        sampling = task.sampling
        if not sampling.is_greedy:
            warped = warp(row, sampling, counts, self._valid)
            if 0 < self._noised_ids < len(warped.ids):
                kept = np.sort(np.argpartition(-warped.scores, self._noised_ids - 1)[: self._noised_ids])
                warped = replace(warped, ids=warped.ids[kept], scores=warped.scores[kept])
            return agreement.noised_scores(warped, task.seed, position), warped.ids
        if sampling.has_penalties or sampling.logit_bias:
            return penalised(row, sampling, counts, self._valid), None
        return (row if self._valid is None else np.where(self._valid, row, -np.inf)), None

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

    def _hold(self, prefix: list[int]) -> None:
        """Makes the cache hold exactly these ids, with the scores after the last of them."""
        common = _common_length(self._fed, prefix)
        if common == len(prefix) == len(self._fed) and self._scores is not None:
            return
        if common < len(self._fed):
            self._leave(common)
        while (rows := self._branches.find(prefix[:-1], len(self._fed))) is not None:
            self.model.append_rows(rows)
            self._scores = None
            self._fed = prefix[: len(self._fed) + rows.shape[2]]
        if len(self._fed) == len(prefix):  # the cache holds it all, but the scores of its last id are gone
            self._rewind(len(prefix) - 1)
        self._feed(prefix[len(self._fed) :])

    def _leave(self, length: int) -> None:
        """Rewinds, and keeps the rows of what was only drafted."""
        start = max(length, len(self._ids))
        if start < len(self._fed) and self._fed[: len(self._ids)] == self._ids:
            self._branches.save(self._fed, len(self._ids), start, self.model.save_rows(start))
        self._rewind(length)

    def _feed(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), FEED_CHUNK):
            if self._is_interrupted:
                raise ModelError("the draft was interrupted")
            chunk = ids[start : start + FEED_CHUNK]
            self._scores = self.model.feed(chunk)
            self._fed.extend(chunk)

    def _rewind(self, length: int) -> None:
        del self._fed[length:]
        self.model.rewind(length)
        self._scores = None


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    most = min(len(a), len(b))
    if list(a[:most]) == list(b[:most]):
        return most
    return next((index for index in range(most) if a[index] != b[index]), most)
