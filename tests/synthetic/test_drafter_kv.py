"""The drafter's keys and values through branch switches: always those of a fresh prefill, and no id is fed twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_client.drafter import Budget, DraftTask, HintTree, ModelDrafter
from edge_client.onnx_drafter import OnnxModel
from shared.sampling import GREEDY, SamplingParams
from shared.types import Epoch, Rule
from tests.tiny_pair import ROWS, TinyPair

PROMPT = [72, 105, 32, 116, 104, 101, 114, 101]
SAMPLED = SamplingParams(temperature=1.0)
VALID = np.arange(ROWS) < 300


class CountingModel(OnnxModel):
    """The tiny model; `fed` is every id that went through a forward, `copied` counts rows that came from a copy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fed: list[int] = []
        self.copied = 0

    def feed(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        self.fed += ids
        return super().feed(ids)

    def append_rows(self, rows: npt.NDArray[Any]) -> None:
        self.copied += rows.shape[2]
        super().append_rows(rows)


@pytest.fixture
def model(tiny_pair: TinyPair) -> CountingModel:
    return CountingModel(tiny_pair.noisy_draft)


@pytest.fixture
def fresh_model(tiny_pair: TinyPair) -> OnnxModel:
    return OnnxModel(tiny_pair.noisy_draft)


def task(sampling: SamplingParams = GREEDY, rule: Rule = Rule.AGREEMENT, epoch: int = 1) -> DraftTask:
    return DraftTask(sampling, 77, rule, Epoch(epoch), generated_from=len(PROMPT), secret=1234)


def begun(model: OnnxModel, of: DraftTask, ids: Sequence[int] = PROMPT) -> ModelDrafter:
    drafter = ModelDrafter(model, VALID)
    drafter.begin(of)
    drafter.sync(ids)
    return drafter


def assert_cache_like_fresh(drafter: ModelDrafter, fresh: OnnxModel) -> None:
    """Keys and values equal those of one prefill of the ids that the drafter says it holds."""
    assert isinstance(drafter.model, OnnxModel)
    fresh.rewind(0)
    fresh.feed(drafter.fed_ids)
    assert drafter.model.length == fresh.length == len(drafter.fed_ids)
    for ours, own in zip(drafter.model.kv_rows(), fresh.kv_rows(), strict=True):
        assert ours.shape == own.shape
        assert np.abs(ours - own).max() <= 1e-4 * np.abs(own).max()


def assert_like_a_fresh_drafters(proposed: HintTree, drafter: ModelDrafter, budget: Budget, fresh: OnnxModel) -> None:
    """What a drafter proposes that was never asked anything else."""
    assert drafter._task is not None
    fresh.rewind(0)
    assert_same(proposed, begun(fresh, drafter._task, drafter._ids).propose(budget))


def assert_same(one: HintTree, other: HintTree) -> None:
    """The same ids, as sure to five digits: how many ids a forward held shows in the last bits of its scores."""
    assert one.ids
    assert (one.ids, one.parents) == (other.ids, other.parents)
    assert one.confidence == pytest.approx(other.confidence, abs=1e-5)


class Walk:
    """Random visits to the branches of a tree, commits that follow one of them or none, and new epochs."""

    def __init__(self, model: CountingModel, fresh: OnnxModel, sampling: SamplingParams, seed: int) -> None:
        self.model, self.fresh, self.sampling = model, fresh, sampling
        self.rng = random.Random(seed)
        self.drafter = begun(model, task(sampling))
        self.ids, self.epoch = list(PROMPT), 1
        self.known: list[tuple[int, ...]] = [()]

    def propose(self) -> None:
        path = self.rng.choice(self.known)
        budget = Budget(self.rng.choice([1, 1, 1, 3]), self.rng.choice([1, 3, 4]), path)
        proposed = self.drafter.propose(budget)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(proposed.ids, proposed.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else path), token))
        self.known = list(dict.fromkeys([*self.known, *paths]))[:60]
        assert_like_a_fresh_drafters(proposed, self.drafter, budget, self.fresh)

    def commit(self) -> None:
        """Ids of a branch, often with a correction that no branch has."""
        path = self.rng.choice(self.known)
        new = list(path[: self.rng.randint(1, 4)])
        if not new or self.rng.random() < 0.4:
            new.append(self.rng.randrange(300))
        self.ids += new
        self.known = [p[len(new) :] for p in self.known if p[: len(new)] == tuple(new)] or [()]
        self.drafter.sync(self.ids)
        assert self.drafter.fed_ids == [*self.ids, *self.drafter.fed_ids[len(self.ids) :]][: self.model.length]

    def edit(self) -> None:
        self.epoch += 1
        del self.ids[self.rng.randint(1, len(self.ids)) :]
        self.ids.append(self.rng.randrange(300))
        self.known = [()]
        self.drafter.begin(task(self.sampling, epoch=self.epoch))
        self.drafter.sync(self.ids)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "agreement"])
def test_keys_values_and_proposals_are_a_fresh_drafters_wherever_the_walk_leads(
    model: CountingModel, fresh_model: OnnxModel, sampling: SamplingParams, seed: int
) -> None:
    walk = Walk(model, fresh_model, sampling, seed)
    for _ in range(120):
        event = walk.rng.choices([walk.propose, walk.commit, walk.edit], [12, 3, 0.5])[0]
        event()
        if model.length:
            assert_cache_like_fresh(walk.drafter, fresh_model)
    assert model.copied > 10
    assert walk.epoch > 1


# ---------------------------------------------------------------- going back costs a copy


def test_going_back_to_a_branch_that_was_left_feeds_only_its_last_id(
    model: CountingModel, fresh_model: OnnxModel
) -> None:
    drafter = begun(model, task())
    first = drafter.propose(Budget(1, 2))
    one, two = [(first.ids[0], 11, 12, 13, 14, 15), (first.ids[1], 21, 22, 23)]
    asked = {path: drafter.propose(Budget(1, 4, path)) for path in (one, two)}
    for path in (one, two, one, one, two):
        model.fed.clear()
        assert_same(drafter.propose(Budget(1, 4, path)), asked[path])
        assert len(model.fed) <= 1, "its last id, for the scores; none where the model stands already"
        assert_cache_like_fresh(drafter, fresh_model)


def test_a_branch_grown_by_one_id_each_time_in_turn_with_another_costs_two_ids_a_step_at_most(
    model: CountingModel,
) -> None:
    """The last id of the saved part, if its scores are needed, and the new one."""
    drafter = begun(model, task())
    drafter.propose(Budget(1))
    model.fed.clear()
    for length in range(1, 12):
        for start in (30, 60):
            drafter.propose(Budget(1, 4, tuple(range(start, start + length))))
    assert len(model.fed) == 2 * 11


def test_rows_that_were_copied_are_the_rows_that_were_left_bit_for_bit(model: CountingModel) -> None:
    drafter = begun(model, task())
    one, two = tuple(range(40, 52)), tuple(range(60, 64))
    drafter.propose(Budget(1, 1, one))
    left = model.kv_rows()
    drafter.propose(Budget(1, 1, two))
    drafter.propose(Budget(1, 1, one))
    assert model.copied >= len(one) - 1
    copied = slice(0, len(PROMPT) + len(one) - 1)
    for now, before in zip(model.kv_rows(), left, strict=True):
        assert np.array_equal(now[:, copied], before[:, copied])


def test_a_correction_that_was_an_alternative_goes_on_from_its_branch(
    model: CountingModel, fresh_model: OnnxModel
) -> None:
    drafter = begun(model, task())
    first = drafter.propose(Budget(1, 2))
    best, other = first.ids
    drafter.propose(Budget(1, 1, (other, 21, 22)))
    expected = drafter.propose(Budget(1, 4, (other, 21, 22, 23)))
    drafter.propose(Budget(1, 1, (best, 31, 32, 33)))
    drafter.sync([*PROMPT, other])
    model.fed.clear()
    assert_same(drafter.propose(Budget(1, 4, (21, 22, 23))), expected)
    assert model.fed == [23]
    assert_cache_like_fresh(drafter, fresh_model)


def test_a_new_epoch_takes_no_rows_of_the_old_one(model: CountingModel, fresh_model: OnnxModel) -> None:
    """The same ids stand at other positions once the text before them was changed."""
    drafter = begun(model, task())
    drafter.propose(Budget(1, 1, (41, 42, 43, 44)))
    drafter.propose(Budget(1, 1, (51, 52)))
    changed = [*PROMPT[:3], 99, *PROMPT[4:]]
    drafter.begin(task(epoch=2))
    drafter.sync(changed)
    drafter.propose(Budget(1))
    model.copied = 0
    budget = Budget(1, 4, (41, 42, 43, 44))
    assert_like_a_fresh_drafters(drafter.propose(budget), drafter, budget, fresh_model)
    assert_cache_like_fresh(drafter, fresh_model)
    assert model.copied == 0


def test_under_rejection_a_row_drawn_on_a_branch_that_was_left_is_given_again(model: CountingModel) -> None:
    drafter = begun(model, task(SAMPLED, Rule.REJECTION))
    first = drafter.propose(Budget(4))
    assert drafter.propose(Budget(4, 1, (7, 8))) != first
    assert drafter.propose(Budget(4)) == first
    for length in range(4):
        again = drafter.propose(Budget(1, 1, first.ids[:length]))
        assert (again.ids[0], again.rows[0]) == (first.ids[length], first.rows[length])
