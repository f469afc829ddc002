"""C16: runs over bound, shared and reused buffers are plain runs over copied arrays; nobody gets another's rows."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from edge_client.drafter import Budget, DraftTask, ModelDrafter, NextTokenModel
from edge_client.onnx_drafter import FIRST_ROWS, MAX_CHUNK, OnnxModel
from shared.sampling import GREEDY, SamplingParams
from shared.types import Epoch, Rule
from tests.tiny_pair import CONTEXT, ROWS, TinyPair

LAYERS, HEADS, HEAD_SIZE = 2, 2, 16
IDS = 300
SAME = 1e-6
"""What two runs of one graph may differ by, relative to the largest score: fp32's last bits and no more."""
SAMPLED = SamplingParams(temperature=1.0)
Rows = npt.NDArray[np.float32]


class UnboundModel:
    """The slow twin: plain `run`, nothing bound, arrays of exactly the cached length copied in and out at each step."""

    context_size = CONTEXT

    def __init__(self, folder: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.rows: Rows = np.zeros((2 * LAYERS, HEADS, 0, HEAD_SIZE), dtype=np.float32)
        self.first_feeds = self.taken_back = 0

    @property
    def length(self) -> int:
        """See NextTokenModel."""
        return self.rows.shape[2]

    def rewind(self, length: int) -> None:
        """See NextTokenModel."""
        self.rows = self.rows[:, :, :length].copy()

    def feed(self, ids: Sequence[int]) -> Rows:
        """See NextTokenModel. In the chunks of the fast one, for a matrix kernel's last bits go by its rows."""
        self.first_feeds += not self.length
        scores: Rows = np.zeros((0, ROWS), dtype=np.float32)
        for start in range(0, len(ids), MAX_CHUNK):
            scores = self._run(ids[start : start + MAX_CHUNK])
        return scores[-1]

    def _run(self, ids: Sequence[int]) -> Rows:
        kinds = [(layer, kind) for layer in range(LAYERS) for kind in ("key", "value")]
        pasts = {
            f"past_key_values.{layer}.{kind}": self.rows[place][None].copy()
            for place, (layer, kind) in enumerate(kinds)
        }
        tokens = np.array([ids], dtype=np.int64)
        mask = np.ones((1, self.length + len(ids)), dtype=np.int64)
        names = ["logits", *(f"present.{layer}.{kind}" for layer, kind in kinds)]
        logits, *presents = self._session.run(names, {"input_ids": tokens, "attention_mask": mask, **pasts})
        self.rows = np.stack([present[0] for present in presents])
        return np.asarray(logits[0], dtype=np.float32)

    def save_rows(self, start: int) -> Rows:
        """See NextTokenModel."""
        return self.rows[:, :, start:].copy()

    def append_rows(self, rows: Any) -> None:
        """See NextTokenModel."""
        self.taken_back += 1
        self.rows = np.concatenate([self.rows, rows], axis=2)


def assert_same(ours: Rows, twins: Rows) -> None:
    assert ours.shape == twins.shape
    assert np.abs(ours - twins).max(initial=0) <= SAME * max(1.0, float(np.abs(twins).max(initial=0)))


def assert_same_cache(model: OnnxModel, twin: UnboundModel) -> None:
    assert model.length == twin.length
    assert_same(np.stack(model.kv_rows()), twin.rows)


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(IDS) for _ in range(count)]


class Walk:
    """Lengths that grow and shrink at random; branches that are left, kept, and taken back where they were left."""

    def __init__(self, model: NextTokenModel, seed: int, most: int = CONTEXT) -> None:
        self.model, self.rng, self.most = model, random.Random(seed), most
        self.branches: list[tuple[int, Any]] = []

    def step(self) -> Rows:
        """One thing of many, then the scores after one more id."""
        rng, model = self.rng, self.model
        act = rng.random()
        if act < 0.04:
            self._forget(rng.randint(0, model.length))
        elif act < 0.07:
            self._forget(0)
        elif act < 0.35 and model.length:
            self._leave(max(0, model.length - rng.randint(1, 6)))
        elif act < 0.6:
            self._take_back()
        count = rng.choice([1, 1, 1, 2, 5, rng.randint(6, 70)])
        if model.length + count > self.most:
            self._forget(self.most - count - rng.randint(0, 60))
        return model.feed(random_ids(rng, count))

    def _forget(self, length: int) -> None:
        self.model.rewind(min(length, self.model.length))
        self.branches = [branch for branch in self.branches if branch[0] <= self.model.length]

    def _leave(self, length: int) -> None:
        saved = (length, self.model.save_rows(length))
        self._forget(length)
        self.branches.append(saved)

    def _take_back(self) -> None:
        """The newest branch; what was fed since where it begins is left for it."""
        if self.branches and self.branches[-1][0] + self.branches[-1][1].shape[2] < self.most:
            start, rows = self.branches.pop()
            self._forget(start)
            self.model.append_rows(rows)


def test_a_bound_run_is_an_unbound_run_at_every_one_of_500_steps(tiny_pair: TinyPair) -> None:
    """C16: lengths grow and shrink, from nothing, through a buffer that grows, with branches left and taken back."""
    model, twin = OnnxModel(tiny_pair.noisy_draft), UnboundModel(tiny_pair.noisy_draft)
    ours, twins = Walk(model, 16), Walk(twin, 16)
    lengths = []
    for _ in range(500):
        scores = ours.step()
        assert_same(scores, twins.step())
        assert_same_cache(model, twin)
        lengths.append(model.length)
    grown = next(step for step, length in enumerate(lengths) if length > FIRST_ROWS)
    assert 0 < grown < 400, "steps before and after the buffer has grown"
    assert min(lengths[grown:]) < 10
    assert max(lengths) > 400
    assert twin.first_feeds > 10, "an empty past, first and after roll-backs to nothing"
    assert twin.taken_back > 50


@pytest.mark.parametrize("count", [1, MAX_CHUNK, MAX_CHUNK + 1, FIRST_ROWS + 1, CONTEXT])
def test_a_past_of_no_length_works_on_the_first_call(tiny_pair: TinyPair, count: int) -> None:
    """C16: whatever the first call brings, and again after a roll-back to nothing."""
    model, rng = OnnxModel(tiny_pair.noisy_draft), random.Random(count)
    for _ in range(2):
        ids, twin = random_ids(rng, count), UnboundModel(tiny_pair.noisy_draft)
        assert_same(model.feed(ids), twin.feed(ids))
        assert_same_cache(model, twin)
        model.rewind(0)


def test_rows_taken_back_where_the_buffer_must_grow_are_the_rows_that_were_saved(tiny_pair: TinyPair) -> None:
    """C16: the buffer grows under `append_rows`, and is bound anew before the next run."""
    model, twin, rng = OnnxModel(tiny_pair.noisy_draft), UnboundModel(tiny_pair.noisy_draft), random.Random(4)
    begin, branch, after = random_ids(rng, FIRST_ROWS - 3), random_ids(rng, 6), random_ids(rng, 2)
    elsewhere = model.another()
    elsewhere.feed([*begin, *branch])
    model.feed(begin)  # its buffer has not grown yet
    model.append_rows(elsewhere.save_rows(len(begin)))
    twin.feed([*begin, *branch])
    assert_same_cache(model, twin)
    assert_same(model.feed(after), twin.feed(after))
    assert_same_cache(model, twin)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "agreement"])
def test_a_drafter_over_bound_runs_proposes_what_one_over_unbound_runs_does(
    tiny_pair: TinyPair, sampling: SamplingParams
) -> None:
    """C16: a tree's branches are drafted in turns, and ids are committed that follow some of them or none."""
    rng, model, twin = random.Random(61), OnnxModel(tiny_pair.noisy_draft), UnboundModel(tiny_pair.noisy_draft)
    valid = np.arange(ROWS) < tiny_pair.vocabulary_size
    drafters = [ModelDrafter(model, valid), ModelDrafter(twin, valid)]
    task = DraftTask(sampling, 7, Rule.AGREEMENT, Epoch(1), generated_from=0)
    committed, paths = random_ids(rng, 3), [tuple[int, ...]()]
    for drafter in drafters:
        drafter.begin(task)
    for _ in range(240):
        if rng.random() < 0.1:
            path = rng.choice(paths)
            committed += path[: rng.randint(0, len(path))] if rng.random() < 0.7 else random_ids(rng, 1)
            paths = [()]
        if len(committed) > CONTEXT - 12:
            committed, paths = committed[: rng.randint(1, 30)], [()]
        budget = Budget(rng.randint(1, 5), rng.choice([1, 3]), rng.choice(paths))
        for drafter in drafters:
            drafter.sync(committed)
        ours, twins = (drafter.propose(budget) for drafter in drafters)
        assert (ours.ids, ours.parents) == (twins.ids, twins.parents)
        assert ours.confidence == pytest.approx(twins.confidence, rel=1e-4)
        assert_same_cache(model, twin)
        for place, token in enumerate(ours.ids):
            if ours.parents[place] == -1 and len(budget.path) < 7:
                paths.append((*budget.path, token))
    assert twin.taken_back > 30, "branches were gone back to"


def test_two_models_over_one_session_used_in_turns_do_not_see_each_other(tiny_pair: TinyPair) -> None:
    """C16: `another()` shares weights and nothing else; each goes its own way, and one is made in mid text."""
    first = OnnxModel(tiny_pair.noisy_draft)
    ours, twins = [Walk(first, 1)], [Walk(UnboundModel(tiny_pair.noisy_draft), 1)]
    for turn in range(500):
        if turn == 20:
            assert first.length
            ours.append(Walk(first.another(), 2))
            twins.append(Walk(UnboundModel(tiny_pair.noisy_draft), 2))
        for mine, twin in zip(ours, twins, strict=True):
            assert_same(mine.step(), twin.step())
    for mine, twin in zip(ours, twins, strict=True):
        assert isinstance(mine.model, OnnxModel)
        assert isinstance(twin.model, UnboundModel)
        assert_same_cache(mine.model, twin.model)


def test_four_threads_at_once_each_with_its_own_model_get_their_own_scores(tiny_pair: TinyPair) -> None:
    """C16: 4 times 2,000 steps of one session at once, then the same again with models and threads exchanged."""
    seeds, steps = range(4), 2_000
    alone = []
    for seed in seeds:
        walk = Walk(OnnxModel(tiny_pair.noisy_draft), seed)
        alone.append([walk.step() for _ in range(steps)])
    first = OnnxModel(tiny_pair.noisy_draft)
    models = [first, *(first.another() for _ in range(3))]
    together = threading.Barrier(4)

    def act(model: OnnxModel, seed: int) -> list[Rows]:
        together.wait(60)
        walk = Walk(model, seed)
        return [walk.step() for _ in range(steps)]

    with ThreadPoolExecutor(4) as threads:
        for shift in (0, 1):
            for model in models:
                model.rewind(0)
            jobs = [threads.submit(act, models[(seed + shift) % 4], seed) for seed in seeds]
            for job, expected in zip(jobs, alone, strict=True):
                for ours, own in zip(job.result(), expected, strict=True):
                    assert_same(ours, own)
