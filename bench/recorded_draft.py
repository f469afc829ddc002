"""A real draft model whose answers are remembered: the same path is never drafted twice, whatever times are simulated.

Called by `simulate`. What a model says of a path does not depend on time, so a grid of times costs little more than its
first cell. Answers are kept in the user's cache folder between runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.traces import Trace
from edge_client.drafter import Budget, Drafter, DraftTask, HintTree, ModelDrafter

WIDTH = 8
"""Alternatives remembered of each path."""

Answer = tuple[tuple[int, ...], tuple[float, ...]]


class AnswerStore:
    """Answers by digest of rule, seed and path, for one pair and precision."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._answers: dict[bytes, Answer] = {}
        self._is_changed = False
        if file.exists():
            with np.load(file) as held:
                keys, ids, confidence = held["keys"], held["ids"], held["confidence"]
            for key, row, values in zip(keys, ids, confidence, strict=True):
                count = int((row >= 0).sum())
                self._answers[key.tobytes()] = (tuple(map(int, row[:count])), tuple(map(float, values[:count])))

    def get(self, key: bytes) -> Answer | None:
        """What was answered, if it was."""
        return self._answers.get(key)

    def put(self, key: bytes, answer: Answer) -> None:
        """Remembers an answer."""
        self._answers[key] = answer
        self._is_changed = True

    def save(self) -> None:
        """Writes the file if anything is new."""
        if not self._is_changed:
            return
        ids = np.full((len(self._answers), WIDTH), -1, dtype=np.int32)
        confidence = np.zeros((len(self._answers), WIDTH), dtype=np.float32)
        for index, (row, values) in enumerate(self._answers.values()):
            ids[index, : len(row)], confidence[index, : len(row)] = row, values
        keys = np.array([np.frombuffer(key, dtype=np.uint8) for key in self._answers])
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(f".{os.getpid()}.npz")
        np.savez(part, keys=keys, ids=ids, confidence=confidence)
        part.replace(self._file)
        self._is_changed = False


class RecordedDrafter:
    """A Drafter of one text: single steps from the store, or from the model and then into the store."""

    name = "model"

    def __init__(self, trace: Trace, task: DraftTask, model: ModelDrafter | None, store: AnswerStore) -> None:
        self._model, self._store, self._task = model, store, task
        self._ids: list[int] = []
        parts = f"{task.seed}|{task.sampling}|".encode()
        self._salt = hashlib.sha256(parts + np.asarray(trace.prompt, dtype="<u4").tobytes()).digest()
        self._start = len(trace.prompt)
        self.asked = 0
        self._is_begun = False

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""
        self._ids = list(ids)

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter. One id deep."""
        assert budget.depth == 1
        generated = [*self._ids[self._start :], *budget.path]
        key = hashlib.sha256(self._salt + np.asarray(generated, dtype="<u4").tobytes()).digest()[:16]
        answer = self._store.get(key)
        if answer is None:
            assert self._model is not None, "no model was wanted"
            if not self._is_begun:
                self._model.begin(self._task)
                self._is_begun = True
            self._model.sync(self._ids)
            tree = self._model.propose(replace(budget, width=WIDTH))
            answer = tree.ids, tree.confidence
            self._store.put(key, answer)
            self.asked += 1
        ids, confidence = answer[0][: budget.width], answer[1][: budget.width]
        return HintTree(ids, (-1,) * len(ids), confidence)


_: type[Drafter] = RecordedDrafter
