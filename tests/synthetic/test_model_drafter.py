"""The drafter on the tiny ONNX models: what it proposes, and what its KV cache holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from edge_client.drafter import Budget, DraftTask, HintTree, ModelDrafter
from edge_client.onnx_drafter import FIRST_ROWS, OnnxModel
from shared.errors import ModelError
from shared.rejection import ROW_TOTAL
from shared.sampling import GREEDY, SamplingParams, warp
from shared.types import Epoch, Rule
from tests.oracle import PlainTarget
from tests.tiny_pair import CONTEXT, ROWS, TinyPair

PROMPT = [72, 105, 32, 116, 104, 101, 114, 101]
SAMPLED = SamplingParams(temperature=1.0)
PENALTIES = SamplingParams(
    temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2
)


def task(sampling: SamplingParams = GREEDY, rule: Rule = Rule.AGREEMENT, stop_ids: Sequence[int] = ()) -> DraftTask:
    return DraftTask(
        sampling, 77, rule, Epoch(1), generated_from=len(PROMPT), stop_ids=frozenset(stop_ids), secret=1234
    )


@pytest.fixture
def same(tiny_pair: TinyPair) -> ModelDrafter:
    """A drafter with the target's own weights."""
    return ModelDrafter(OnnxModel(tiny_pair.same_draft), np.arange(ROWS) < tiny_pair.vocabulary_size)


@pytest.fixture
def noisy(tiny_pair: TinyPair) -> ModelDrafter:
    """A half-right drafter."""
    return ModelDrafter(OnnxModel(tiny_pair.noisy_draft), np.arange(ROWS) < tiny_pair.vocabulary_size)


def assert_cache_like_fresh(drafter: ModelDrafter, pair_folder: object) -> None:
    """The drafter's keys and values are those of a fresh prefill of the ids that it says it holds."""
    model = drafter.model
    assert isinstance(model, OnnxModel)
    fresh = OnnxModel(pair_folder)  # type: ignore[arg-type]
    fresh.feed(drafter.fed_ids)
    assert model.length == fresh.length == len(drafter.fed_ids)
    for ours, own in zip(model.kv_rows(), fresh.kv_rows(), strict=True):
        assert ours.shape == own.shape
        assert np.abs(ours - own).max() <= 1e-4 * np.abs(own).max()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALTIES], ids=["greedy", "agreement", "penalties"])
def test_the_targets_own_weights_are_accepted_always(
    same: ModelDrafter, plain: PlainTarget, sampling: SamplingParams
) -> None:
    """500 ids: the rule, the penalties and the full-vocabulary noise are the same on both sides."""
    truth = plain.ids(PROMPT, 500, sampling, seed=77)
    assert len(set(truth)) > 60
    same.begin(task(sampling))
    done = 0
    while done < len(truth):
        same.sync([*PROMPT, *truth[:done]])
        tree = same.propose(Budget(depth=min(8, len(truth) - done)))
        assert tree.is_chain
        assert list(tree.ids) == truth[done : done + len(tree.ids)]
        done += len(tree.ids) + (done % 3 > 0)  # with and without a bonus id


def test_its_cache_equals_a_fresh_prefill_after_every_commit(
    noisy: ModelDrafter, plain: PlainTarget, tiny_pair: TinyPair
) -> None:
    """After wholly, partly and never accepted hints, after bonus ids, through growing buffers."""
    truth, rng = plain.ids(PROMPT, 300, SAMPLED, seed=77), random.Random(5)
    noisy.begin(task(SAMPLED))
    done, accepts, most = 0, [], 0
    while done < 290:
        ids = [*PROMPT, *truth[:done]]
        noisy.sync(ids)
        assert noisy.fed_ids == ids[: len(noisy.fed_ids)]
        tree = noisy.propose(Budget(depth=rng.randint(1, 8), width=rng.choice([1, 3])))
        spine = spine_of(tree)
        assert noisy.fed_ids == [*ids, *spine[:-1]]
        assert_cache_like_fresh(noisy, tiny_pair.noisy_draft)
        agreed = 0
        while agreed < len(spine) and spine[agreed] == truth[done + agreed]:
            agreed += 1
        accepts.append(agreed)
        most = max(most, len(spine))
        done += agreed + 1
        if rng.random() < 0.2:  # rounds without drafting
            done = min(done + rng.randint(1, 40), 290)
    assert 0 in accepts
    assert max(accepts) >= 4
    assert isinstance(noisy.model, OnnxModel)
    assert noisy.model.length > FIRST_ROWS


def spine_of(tree: HintTree) -> list[int]:
    """The main chain: the first child of each position."""
    spine: list[int] = []
    at = -1
    while (child := next((n for n, parent in enumerate(tree.parents) if parent == at), None)) is not None:
        spine.append(tree.ids[child])
        at = child
    return spine


def test_a_proposal_after_a_rewind_is_the_first_proposal(same: ModelDrafter) -> None:
    same.begin(task(SAMPLED))
    same.sync(PROMPT)
    first = same.propose(Budget(6))
    same.sync([*PROMPT, (first.ids[0] + 1) % 300, 5, 6])
    other = same.propose(Budget(6))
    assert other != first
    same.sync(PROMPT)
    assert same.propose(Budget(6)).ids == first.ids
    same.sync(PROMPT[:3])
    same.propose(Budget(2))
    same.sync(PROMPT)
    assert same.propose(Budget(6)).ids == first.ids


def test_scores_after_a_roll_back_are_those_of_a_fresh_prefill(tiny_pair: TinyPair) -> None:
    model, fresh, rng = OnnxModel(tiny_pair.same_draft), OnnxModel(tiny_pair.same_draft), random.Random(2)
    ids = [rng.randrange(300) for _ in range(70)]
    model.feed(ids)
    for length in (69, 40, 1, 0):
        model.rewind(length)
        scores = model.feed(ids[length:])
        fresh.rewind(0)
        assert np.abs(scores - fresh.feed(ids)).max() < 1e-4


def test_a_prompt_longer_than_the_first_buffer_is_fed_in_chunks(tiny_pair: TinyPair, plain: PlainTarget) -> None:
    rng, model = random.Random(9), OnnxModel(tiny_pair.same_draft)
    ids = [rng.randrange(300) for _ in range(CONTEXT)]
    assert np.abs(model.feed(ids[:FIRST_ROWS]) - plain.row(ids[:FIRST_ROWS])).max() < 1e-4
    assert np.abs(model.feed(ids[FIRST_ROWS : FIRST_ROWS + 1]) - plain.row(ids[: FIRST_ROWS + 1])).max() < 1e-4
    assert np.abs(model.feed(ids[FIRST_ROWS + 1 :]) - plain.row(ids)).max() < 1e-4
    assert model.length == CONTEXT
    before = model.kv_rows()
    with pytest.raises(ModelError, match="context full"):
        model.feed([1])
    assert model.length == CONTEXT
    assert all(np.array_equal(a, b) for a, b in zip(before, model.kv_rows(), strict=True))


@pytest.mark.parametrize(("held", "depth"), [(CONTEXT - 3, 3), (CONTEXT - 1, 1), (CONTEXT, 0)])
def test_a_full_context_shortens_the_proposal_to_nothing(same: ModelDrafter, held: int, depth: int) -> None:
    rng = random.Random(1)
    ids = [rng.randrange(300) for _ in range(held)]
    same.begin(task())
    for _ in range(2):  # again: nothing was broken
        same.sync(ids)
        assert len(same.propose(Budget(8)).ids) == depth


@pytest.mark.parametrize("rule", list(Rule))
def test_proposing_twice_gives_the_same_ids_behind_the_synced_ones(same: ModelDrafter, rule: Rule) -> None:
    # Once wrong: a second propose() without sync() goes on behind the first proposal, as if it stood at the synced ids.
    same.begin(task(SAMPLED, rule))
    same.sync(PROMPT)
    assert same.propose(Budget(6)).ids == same.propose(Budget(6)).ids


def test_nothing_synced_gives_an_empty_proposal(same: ModelDrafter) -> None:
    same.begin(task())
    same.sync([])
    assert same.propose(Budget(8)) == HintTree()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALTIES], ids=["greedy", "agreement", "penalties"])
@pytest.mark.parametrize("rule", list(Rule))
def test_padding_ids_are_never_proposed(
    same: ModelDrafter, plain: PlainTarget, sampling: SamplingParams, rule: Rule, tiny_pair: TinyPair
) -> None:
    """The padding rows of this model win often where nothing forbids them."""
    ids = [*PROMPT, *plain.ids(PROMPT, 100, sampling, seed=77)]
    won = sum(int(row.argmax()) >= tiny_pair.vocabulary_size for row in plain.rows(ids))
    assert won > 10
    same.begin(task(sampling, rule))
    for length in range(len(PROMPT), len(ids), 3):
        same.sync(ids[:length])
        tree = same.propose(Budget(4, width=1 if rule is Rule.REJECTION else 4))
        assert tree.ids
        assert max(tree.ids) < tiny_pair.vocabulary_size
        assert all(max(row.ids) < tiny_pair.vocabulary_size for row in tree.rows)


def test_a_chain_is_cut_behind_a_stop_id_under_agreement(same: ModelDrafter) -> None:
    same.begin(task(SAMPLED))
    same.sync(PROMPT)
    whole = same.propose(Budget(8))
    for place, stop in enumerate(whole.ids):
        same.begin(task(SAMPLED, stop_ids=(stop,)))
        same.sync(PROMPT)
        assert same.propose(Budget(8)).ids == whole.ids[: whole.ids.index(stop) + 1]
        assert whole.ids.index(stop) <= place


def test_a_chain_is_never_cut_by_a_stop_id_under_rejection(same: ModelDrafter) -> None:
    """The cut would depend on the id drawn, and bias the text."""
    same.begin(task(SAMPLED, Rule.REJECTION))
    same.sync(PROMPT)
    whole = same.propose(Budget(8))
    assert len(whole.ids) == len(whole.rows) == 8
    for stop in whole.ids:
        same.begin(task(SAMPLED, Rule.REJECTION, stop_ids=(stop,)))
        same.sync(PROMPT)
        assert same.propose(Budget(8)).ids == whole.ids


def test_rejection_sends_the_row_that_it_drew_from(same: ModelDrafter, plain: PlainTarget) -> None:
    same.begin(task(PENALTIES, Rule.REJECTION))
    same.sync(PROMPT)
    tree = same.propose(Budget(8))
    for node, (token, row) in enumerate(zip(tree.ids, tree.rows, strict=True)):
        assert sum(row.weights) == ROW_TOTAL
        assert token in row.ids
        from shared.sampling import Counts

        path = [*PROMPT, *tree.ids[:node]]
        own = warp(plain.row(path), PENALTIES, Counts.of(path, len(PROMPT)), plain.valid)
        best = int(own.ids[int(own.scores.argmax())])
        assert row.ids[0] == best
        assert row.probability(best) == pytest.approx(float(own.probabilities().max()), abs=0.02)


def test_under_rejection_a_row_and_its_token_are_drawn_once_for_a_prefix(same: ModelDrafter) -> None:
    same.begin(task(SAMPLED, Rule.REJECTION))
    same.sync(PROMPT)
    first = same.propose(Budget(6))
    same.sync([*PROMPT, first.ids[0]])
    second = same.propose(Budget(6))
    assert second.ids[:5] == first.ids[1:]
    assert second.rows[:5] == first.rows[1:]
    same.sync([*PROMPT, first.ids[0], (first.ids[1] + 1) % 300])
    strayed = same.propose(Budget(6))
    assert strayed.ids[:4] != first.ids[2:]
    same.sync([*PROMPT, first.ids[0]])
    assert same.propose(Budget(6)) == second


def test_under_rejection_a_kept_row_is_resent_even_if_the_model_would_give_another(
    same: ModelDrafter, tiny_pair: TinyPair
) -> None:
    same.begin(task(SAMPLED, Rule.REJECTION))
    same.sync(PROMPT)
    first = same.propose(Budget(6))
    same.model = OnnxModel(tiny_pair.noisy_draft)
    same._fed.clear()
    assert same.propose(Budget(6)) == first
    same.begin(task(SAMPLED, Rule.REJECTION))
    assert same.propose(Budget(6)).rows != first.rows


def test_draft_draws_of_the_rejection_rule_follow_the_secret_and_the_epoch(same: ModelDrafter) -> None:
    base = task(SAMPLED, Rule.REJECTION)
    trees = []
    for changed in (base, base, replace(base, secret=99), replace(base, epoch=Epoch(2)), replace(base, seed=5)):
        same.begin(changed)
        same.sync(PROMPT)
        trees.append(same.propose(Budget(6)))
    first, again, other_secret, other_epoch, other_seed = trees
    assert again.ids == other_seed.ids == first.ids
    assert other_secret.ids != first.ids
    assert other_epoch.ids != first.ids


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "agreement"])
def test_alternatives_stand_beside_the_chain_likeliest_first(same: ModelDrafter, sampling: SamplingParams) -> None:
    same.begin(task(sampling))
    same.sync(PROMPT)
    chain = same.propose(Budget(5))
    same.sync(PROMPT)
    tree = same.propose(Budget(5, width=3))
    assert spine_of(tree) == list(chain.ids)
    assert len(tree.ids) == 15
    for parent in set(tree.parents):
        siblings = [token for token, above in zip(tree.ids, tree.parents, strict=True) if above == parent]
        assert len(set(siblings)) == len(siblings) == 3
    assert all(0 <= value <= 1 for value in tree.confidence)
    if sampling.is_greedy:
        first = tree.confidence[:3]
        assert list(first) == sorted(first, reverse=True)


def test_under_noise_the_drafters_own_choice_is_the_surest_of_its_alternatives(same: ModelDrafter) -> None:
    same.begin(task(SAMPLED, Rule.AGREEMENT))
    same.sync(PROMPT)
    tree = same.propose(Budget(6, width=3))
    for place, parent in enumerate(tree.parents):
        siblings = [tree.confidence[other] for other, p in enumerate(tree.parents) if p == parent]
        assert tree.confidence[place] <= siblings[0]
        assert 0 < tree.confidence[place] <= 1


# ---------------------------------------------------------------- taking in a prompt, and giving it up


class Recorder:
    """A tiny model whose scores and rows follow from its ids and all before them; `after_feed` is told of each feed."""

    context_size = 4096

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.rows: list[int] = []
        """What a key or value is to hold: a digest of the ids up to it."""
        self.after_feed: Callable[[], None] = lambda: None

    @property
    def length(self) -> int:
        return len(self.ids)

    def rewind(self, length: int) -> None:
        del self.ids[length:], self.rows[length:]

    def feed(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        for token in ids:
            self.ids.append(token)
            self.rows.append(digest_of(self.rows[-1:], token))
        self.after_feed()
        return scores_of(self.rows[-1])

    def save_rows(self, start: int) -> npt.NDArray[np.int64]:
        pairs = [[one, two] for one, two in zip(self.ids[start:], self.rows[start:], strict=True)]
        return np.array(pairs, dtype=np.int64).reshape(1, 1, -1, 2)

    def append_rows(self, rows: npt.NDArray[np.int64]) -> None:
        self.ids += rows[0, 0, :, 0].tolist()
        self.rows += rows[0, 0, :, 1].tolist()


def digest_of(above: Sequence[int], token: int) -> int:
    return (31 * (above[0] if above else 7) + token + 1) % 1_000_003


def scores_of(row: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(row).normal(size=300).astype(np.float32)


def fresh_rows(ids: Sequence[int]) -> list[int]:
    model = Recorder()
    model.feed(ids)
    return model.rows


def fresh_choice(ids: Sequence[int]) -> int:
    return int(np.argmax(scores_of(fresh_rows(ids)[-1])))


def recording() -> tuple[ModelDrafter, Recorder]:
    model = Recorder()
    return ModelDrafter(model, np.ones(300, dtype=bool)), model


def test_taking_in_a_prompt_ahead_takes_back_no_rows_of_another_text() -> None:
    """Once wrong: text 1 left a branch behind ten ids; it seemed to fit behind any ten ids."""
    drafter, model = recording()
    one, two, branch = list(range(10)), list(range(50, 60)), [21, 22, 23, 24]
    drafter.begin(task())
    drafter.sync(one)
    drafter.propose(Budget(1, 1, tuple(branch)))
    drafter.propose(Budget(1, 1, (31, 32)))
    drafter.prepare(two)
    assert model.rows == fresh_rows(two)
    three = [*two, *branch[:3]]
    drafter.prepare(three)
    assert model.rows == fresh_rows(three)
    drafter.begin(task())
    drafter.sync(three)
    assert drafter.propose(Budget(1)).ids == (fresh_choice(three),)


def test_scores_after_a_feed_that_was_interrupted_behind_a_copy_are_not_those_of_an_earlier_id() -> None:
    """Once wrong: rows of a branch were taken back, the feed behind them was given up, and the scores from before it
    counted as those of the last row taken back."""
    drafter, _ = recording()
    branch: tuple[int, ...] = (21, 22, 23, 24)
    drafter.begin(task())
    drafter.sync(PROMPT)
    drafter.propose(Budget(1, 1, branch))
    drafter.propose(Budget(1))
    drafter.interrupt()
    for path in (branch, (*branch, 25)):
        with pytest.raises(ModelError, match="interrupted"):
            drafter.propose(Budget(1, 1, path))
    drafter.resume()
    for length in range(len(branch), -1, -1):
        expected = (fresh_choice([*PROMPT, *branch[:length]]),)
        assert drafter.propose(Budget(1, 1, branch[:length])).ids == expected
    assert drafter.propose(Budget(1, 1, (*branch, 25))).ids == (fresh_choice([*PROMPT, *branch, 25]),)


def test_scores_after_an_interrupted_feed_are_right_wherever_one_goes_on() -> None:
    rng = random.Random(3)
    drafter, _ = recording()
    drafter.begin(task())
    drafter.sync(PROMPT)
    paths = [tuple(start + n for n in range(length)) for start in (20, 60, 100) for length in range(6)]
    for _ in range(600):
        path = rng.choice(paths)
        if rng.random() < 0.3:
            drafter.interrupt()
            with suppress(ModelError):
                drafter.propose(Budget(1, 1, path))
            drafter.resume()
        else:
            assert drafter.propose(Budget(1, 1, path)).ids == (fresh_choice([*PROMPT, *path]),)


def test_a_long_prompt_that_is_given_up_midway_is_gone_on_with_where_it_was_left() -> None:
    drafter, model = recording()
    prompt = [n * 7 % 300 for n in range(200)]
    model.after_feed = drafter.interrupt
    with pytest.raises(ModelError, match="interrupted"):
        drafter.prepare(prompt)
    assert 0 < model.length < len(prompt)
    assert model.rows == fresh_rows(prompt[: model.length])
    model.after_feed = lambda: None
    drafter.resume()
    drafter.begin(task())
    drafter.sync(prompt)
    assert drafter.propose(Budget(1)).ids == (fresh_choice(prompt),)
