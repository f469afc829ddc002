"""The near-tie rule: what rounding may do to a text is told from what it may not (C02, C20)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_models import SHAPES, Desk, FreeTokens, Script, random_context, random_target, spoiled
from bench.near_tie import Place, check_text, is_explained, noised_gap
from cloud_verifier.judge import Verdict
from cloud_verifier.target_model import RowInput, TorchTarget
from shared.randomness import noise
from shared.sampling import GREEDY, SamplingParams

SEED = 5
DRAWN = SamplingParams(temperature=1.0)
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k and min-p": SamplingParams(temperature=1.3, top_k=12, min_p=0.01),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={3: 2.0, 4: -math.inf}, top_p=0.95
    ),
}


# ---------------------------------------------------------------- the rule on hand-made rows


def place_of(scores: Sequence[float], params: SamplingParams, position: int = 7) -> Place:
    return Place(np.array(scores, dtype=np.float32), params, SEED, position)


def place_with_gaps(noised: Sequence[float], params: SamplingParams = DRAWN) -> Place:
    """The scores that have these values once noise is added (the temperature is 1)."""
    row = np.array(noised) - noise(SEED, 7, np.arange(len(noised)))
    return place_of(list(row), params)


def position_where(loud: int, than: Sequence[int], by: float) -> int:
    """Where the noise of one id is louder than that of others by so much."""
    for position in range(100_000):
        heard = noise(SEED, position, np.array([loud, *than]))
        if heard[0] > heard[1:].max() + by:
            return position
    raise AssertionError


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, top_k=1), SamplingParams(top_p=0.0)], ids=str
)
def test_without_noise_the_gap_of_scores_counts(params: SamplingParams) -> None:
    place = place_of([5.0, 4.875, 1.0], params)
    assert place.choice() == 0
    assert noised_gap(place, 1) == 0.125
    assert is_explained(place, 1, 0.0625)
    assert not is_explained(place, 1, 0.0624)
    assert not is_explained(place, 2, 1.9)


def test_with_noise_the_gap_of_noised_scores_counts() -> None:
    place = place_with_gaps([3.0, 2.75, -2.0])
    assert place.choice() == 0
    assert noised_gap(place, 1) == pytest.approx(0.25, abs=1e-6)
    assert is_explained(place, 1, 0.126)
    assert not is_explained(place, 1, 0.124)
    assert not is_explained(place, 2, 2.4)


def test_the_gap_is_one_after_temperature() -> None:
    place = place_of([5.0, 4.75], SamplingParams(temperature=0.5, top_k=1))
    assert noised_gap(place, 1) == 0.5
    assert is_explained(place, 1, 0.26)
    assert not is_explained(place, 1, 0.24)


CUTS: list[tuple[str, list[float], SamplingParams, float]] = [
    ("top-k", [3.0, 2.0, 1.0, 0.98, -4.0], SamplingParams(top_k=3), 0.01),
    (
        "top-p",
        [*np.log([0.5, 0.3, 0.05, 0.15])],
        SamplingParams(top_p=0.79),
        0.5 * math.log(0.8 * 0.21 / 0.79 / 0.2),
    ),
    ("min-p", [3.0, 2.0, 1.0, 0.98, -4.0], SamplingParams(min_p=math.exp(-2.01)), 0.005),
]
"""Scores, parameters that cut id 3, and the least d that lets it in."""


@pytest.mark.parametrize(("name", "scores", "params", "needed"), CUTS, ids=[each[0] for each in CUTS])
def test_an_id_at_the_edge_of_the_kept_may_be_kept_by_a_near_tie_and_no_other(
    name: str, scores: list[float], params: SamplingParams, needed: float
) -> None:
    place = place_of(scores, params, position_where(3, [0, 1, 2, 4], by=4.0))
    assert place.choice() != 3
    assert noised_gap(place, 3) < 0, "kept, it would have won"
    assert is_explained(place, 3, needed * 1.02)
    assert not is_explained(place, 3, needed * 0.98)


@pytest.mark.parametrize("params", [each[2] for each in CUTS], ids=[each[0] for each in CUTS])
def test_an_id_far_below_the_kept_is_a_bug_however_loud_its_noise(params: SamplingParams) -> None:
    place = place_of([3.0, 2.0, 1.0, 0.0, -4.0], params, position_where(4, [0, 1, 2, 3], by=8.0))
    assert noised_gap(place, 4) < 0
    assert not is_explained(place, 4, 0.1)


@pytest.mark.parametrize(
    ("name", "scores", "params", "needed"),
    [
        ("top-k", [3.0, 2.0, 1.0, 0.98, -4.0], SamplingParams(top_k=3), 0.01),
        ("top-p", [*np.log([0.5, 0.29, 0.15, 0.06])], SamplingParams(top_p=0.8), None),
        ("min-p", [3.0, 2.0, 1.0, 0.9, -4.0], SamplingParams(min_p=math.exp(-2.01)), 0.005),
    ],
    ids=["top-k", "top-p", "min-p"],
)
def test_a_winner_at_the_edge_of_the_kept_may_be_cut_by_a_near_tie(
    name: str, scores: list[float], params: SamplingParams, needed: float | None
) -> None:
    """Then the next loudest is the choice, by whatever gap."""
    place = place_of(scores, params, position_where(2, [0, 1, 3], by=5.0))
    assert place.choice() == 2
    others = [token for token in (0, 1) if token != 2]
    token = min(others, key=lambda each: noised_gap(place, each))
    assert noised_gap(place, token) > 2.0
    needed = needed or 0.5 * math.log(0.8 * 0.21 / 0.79 / 0.2)  # 0.79 before it become the share of 0.8
    assert is_explained(place, token, needed * 1.05)
    assert not is_explained(place, token, needed * 0.9)
    assert not is_explained(replace(place, params=DRAWN), token, needed * 1.05), "nothing is cut"


def test_an_id_that_does_not_exist_or_is_forbidden_is_a_bug() -> None:
    params = SamplingParams(logit_bias={1: -math.inf})
    assert not is_explained(place_of([1.0, 1.0, 0.0], params), 1, 5.0)
    valid = np.array([True, False, True])
    assert not is_explained(replace(place_of([1.0, 1.0, 0.0], GREEDY), valid=valid), 1, 5.0)


# ---------------------------------------------------------------- texts of a tiny model


def target_of(dtype: torch.dtype) -> TorchTarget:
    return random_target(SHAPES["tiny"], dtype, "cpu", 8_000)


@pytest.fixture(scope="module")
def exact(one_torch_thread: None) -> TorchTarget:
    return target_of(torch.float32)


@pytest.fixture(scope="module")
def rough(one_torch_thread: None) -> TorchTarget:
    return target_of(torch.bfloat16)


VOCABULARY = SHAPES["tiny"].vocabulary
CONTEXTS = [random_context(20 + 3 * n, VOCABULARY, n) for n in range(4)]
COUNT = 20


def texts(
    target: TorchTarget, params: SamplingParams, hints: Sequence[Sequence[int]] | None = None, count: int = COUNT
) -> list[list[int]]:
    """Four sessions in one batch, streamed or with hints."""
    desk = Desk(target, FreeTokens(), math.inf, batch_nodes=256)
    given = hints or [()] * len(CONTEXTS)
    scripts = [Script(context, params, SEED, tuple(some)) for context, some in zip(CONTEXTS, given, strict=True)]
    seats = [desk.open(script, count, 8) for script in scripts]
    while desk.maybe_step():
        pass
    desk.let_go()
    while desk.maybe_step():
        pass
    found = [seat.ids for seat in seats]
    desk.close()
    assert all(len(ids) == count for ids in found)
    return found


def one_text(target: TorchTarget, context: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    desk = Desk(target, FreeTokens(), math.inf, batch_nodes=256)
    seat = desk.open(Script(tuple(context), params, SEED), count, 0)
    desk.let_go()
    while desk.maybe_step():
        pass
    desk.close()
    return seat.ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_float32_has_no_flip(kind: str, exact: TorchTarget) -> None:
    for context, ids in zip(CONTEXTS[:2], texts(exact, KINDS[kind]), strict=False):
        report = check_text(exact, context, ids, KINDS[kind], SEED)
        assert (report.length, report.flips, report.bugs, report.widest_gap) == (COUNT, (), (), 0.0)
        assert report.largest_difference < 1e-4


@pytest.mark.parametrize("kind", ["greedy", "drawn", "top-p"])
def test_a_replaced_id_is_one_bug_and_what_follows_is_held_to_the_texts_own_prefix(
    kind: str, exact: TorchTarget
) -> None:
    params, context = KINDS[kind], CONTEXTS[0]
    ids = texts(exact, params)[0]
    start = [*ids[:9], (ids[9] + 1) % VOCABULARY]
    rest = one_text(exact, [*context, *start], params, COUNT - 10)
    report = check_text(exact, context, [*start, *rest], params, SEED)
    assert (report.flips, report.bugs) == ((), (9,))


def test_ids_that_go_on_as_if_nothing_had_been_replaced_are_bugs_too(exact: TorchTarget) -> None:
    ids = texts(exact, GREEDY)[0]
    ids[9] = (ids[9] + 1) % VOCABULARY
    report = check_text(exact, CONTEXTS[0], ids, GREEDY, SEED)
    assert report.bugs[:2] == (9, 10)


def test_an_empty_text_has_nothing_to_show(exact: TorchTarget) -> None:
    report = check_text(exact, CONTEXTS[0], [], GREEDY, SEED)
    assert (report.length, report.bugs) == (0, ())


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_hinted_batch_in_bfloat16_show_no_bug(kind: str, rough: TorchTarget) -> None:
    params = KINDS[kind]
    streamed = texts(rough, params)
    hints = [spoiled(ids, 0.2, VOCABULARY, n) for n, ids in enumerate(streamed)]
    for context, ids in zip(CONTEXTS[2:], texts(rough, params, hints)[2:], strict=True):
        assert check_text(rough, context, ids, params, SEED, sessions=4).bugs == ()


def test_a_judge_that_believes_its_hints_is_caught(rough: TorchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """C02: what is wrong by a wide gap is a bug, whatever the precision."""
    streamed = texts(rough, GREEDY)
    hints = [spoiled(ids, 0.4, VOCABULARY, n) for n, ids in enumerate(streamed)]

    def believing(row: Any, decided: Any) -> Verdict:
        nodes = list(row.nodes)[: row.session.credit]
        verdict = Verdict(tokens=[node.token for node in nodes], accepted=nodes)
        if len(nodes) < row.session.credit:
            verdict.tokens.append(decided[len(nodes)].token)
        return verdict

    monkeypatch.setattr("cloud_verifier.judge._walk", believing)
    for context, ids, own in zip(CONTEXTS, texts(rough, GREEDY, hints), streamed, strict=True):
        first = next(place for place, pair in enumerate(zip(ids, own, strict=True)) if pair[0] != pair[1])
        assert check_text(rough, context, ids, GREEDY, SEED, sessions=4).bugs[0] == first


# ---------------------------------------------------------------- a device that rounds badly


class Coarse:
    """A target whose scores are off by up to `error` wherever a forward is asked for more than one row."""

    def __init__(self, target: TorchTarget, error: float) -> None:
        self.lm, self.pool, self.context_size = target.lm, target.pool, target.context_size
        self.error = error
        self._target = target
        self._generator = torch.Generator().manual_seed(3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        scores = self._target.forward(rows)
        if len(scores) == 1:
            return scores
        return scores + (2 * torch.rand(scores.shape, generator=self._generator) - 1) * self.error


@pytest.fixture
def coarse(exact: TorchTarget) -> Any:
    return Coarse(exact, 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_flip_that_errors_of_d_can_cause_is_explained(kind: str, coarse: Any) -> None:
    """d is told by a largest of some 20,000 errors that are a twentieth larger than those of the text."""
    params, coarse.error = KINDS[kind], 0.475
    streamed = texts(coarse, params, count=40)
    coarse.error = 0.5
    flips = 0
    for context, ids in zip(CONTEXTS, streamed, strict=True):
        report = check_text(coarse, context, ids, params, SEED)
        assert report.bugs == ()
        assert report.largest_difference * (params.temperature or 1.0) > 0.475
        flips += len(report.flips)
    assert flips > 0


def test_d_is_measured_after_penalties(coarse: Any) -> None:
    """A repetition penalty of 2 doubles the error of a negative score."""
    ids = texts(coarse, DRAWN)[0]
    plain, penalised = (
        check_text(coarse, CONTEXTS[0], ids, SamplingParams(repetition_penalty=penalty), SEED).largest_difference
        for penalty in (1.0, 2.0)
    )
    assert 0.45 < plain < 0.51
    assert 0.8 < penalised < 1.01
