"""The batched choice against its slow twin, `warp` then `agreement.choose`, row by row.

The twins' logarithms and exponentials may differ in the last place. That changes an id only if two noised scores, or a
mass and a share, agree to about 10^-13: below 10^-8 for all random rows of this file together, and the rows are seeded.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloud_verifier import noise as torch_noise
from cloud_verifier import row_choice
from cloud_verifier.row_choice import Outcome, RowChoices, RowChooser, RowRequest
from shared import agreement, randomness
from shared.errors import NumericalError
from shared.sampling import Counts, SamplingParams, penalised, raw_logprob, warp

Rows = npt.NDArray[np.float32]
Valid = npt.NDArray[np.bool_]
CPU = torch.device("cpu")

CASES = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1000.0),
    SamplingParams(temperature=1e-3),
    SamplingParams(temperature=5e-324),
    SamplingParams(temperature=1e-32, top_p=0.5),
    SamplingParams(temperature=1e-320, top_k=3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=2),
    SamplingParams(temperature=2.0, top_k=7),
    SamplingParams(temperature=5.0, top_k=60),
    SamplingParams(temperature=50.0, top_k=999),
    SamplingParams(top_k=2**31 - 1),
    SamplingParams(top_p=0),
    SamplingParams(top_p=5e-324),
    SamplingParams(temperature=0.8, top_p=0.5),
    SamplingParams(temperature=2.0, top_p=0.9),
    SamplingParams(temperature=1000.0, top_p=0.5),
    SamplingParams(temperature=1000.0, top_p=0.99),
    SamplingParams(top_p=1 - 2**-53),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=20.0, min_p=0.5),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=3.0, top_k=20, top_p=0.7),
    SamplingParams(temperature=9.0, top_k=500, top_p=0.7),
    SamplingParams(temperature=3.0, top_p=0.8, min_p=0.1),
    SamplingParams(temperature=3.0, top_k=30, min_p=0.2),
    SamplingParams(temperature=30.0, top_k=900, top_p=0.97, min_p=0.01),
]
TOUCHES: list[dict[str, object]] = [
    {},
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.75, "presence_penalty": -0.5},
    {
        "repetition_penalty": 0.6,
        "frequency_penalty": -2.1,
        "logit_bias": {**dict.fromkeys(range(10), 5.3), 3: -math.inf, 10**6: 1.0},
    },
    {"logit_bias": {1: -math.inf, 2: 1000.0}},
    {"logit_bias": dict.fromkeys(range(22), -math.inf)},
]


def reference(row: Rows, request: RowRequest, valid: Valid | None) -> tuple[int, int]:
    """Id and outcome of the slow twin."""
    if not np.isfinite(row).all():
        return -1, Outcome.NOT_FINITE
    try:
        warped = warp(row, request.params, request.counts, valid)
    except NumericalError:
        return -1, Outcome.ALL_FORBIDDEN
    return agreement.choose(warped, request.seed, request.position), Outcome.CHOSEN


def references(rows: Rows, requests: Sequence[RowRequest], valid: Valid | None = None) -> list[tuple[int, int]]:
    return [reference(row, request, valid) for row, request in zip(rows, requests, strict=True)]


def pairs(choices: RowChoices) -> list[tuple[int, int]]:
    return list(zip(choices.ids.tolist(), choices.ok.tolist(), strict=True))


def chosen(
    rows: Rows, requests: Sequence[RowRequest], valid: Valid | None = None, seeks_loud_ids: bool | None = None
) -> list[tuple[int, int]]:
    exists = np.ones(rows.shape[1], dtype=np.bool_) if valid is None else valid
    return pairs(RowChooser(exists, CPU, seeks_loud_ids).choose(torch.from_numpy(rows), requests).fetch())


def some_row(rng: np.random.Generator, size: int) -> Rows:
    """Peaked, ordinary, flat, tied, rounded as bfloat16 does, equal throughout, or of a great scale."""
    row = rng.standard_normal(size) * rng.choice([0.01, 1.0, 4.0, 30.0])
    match rng.integers(6):
        case 0:
            row = np.round(row * 2) / 2
        case 1:
            row = torch.from_numpy(row).to(torch.bfloat16).to(torch.float64).numpy()
        case 2 if rng.random() < 0.3:
            row = np.full(size, row[0])
        case 3 if rng.random() < 0.3:
            row = row * 1e30
    return np.asarray(row, dtype=np.float32)


def some_request(rng: np.random.Generator, size: int) -> RowRequest:
    case: SamplingParams = CASES[rng.integers(len(CASES))]
    params = dataclasses.replace(case, **TOUCHES[rng.integers(len(TOUCHES))])  # type: ignore[arg-type]
    seed = (0, 1, 2**63, 2**64 - 1, int(rng.integers(2**64, dtype=np.uint64)))[rng.integers(5)]
    position = (0, 1, 2**31, int(rng.integers(2**31)))[rng.integers(4)]
    ids = rng.integers(size + 3, size=rng.integers(0, 40)).tolist()
    counts = Counts.of(ids, int(rng.integers(len(ids) + 1))) if params.has_penalties or rng.random() < 0.2 else None
    return RowRequest(params, seed, position, counts)


def some_batch(rng: np.random.Generator, size: int, count: int) -> tuple[Rows, list[RowRequest]]:
    rows = np.stack([some_row(rng, size) for _ in range(count)])
    for n in range(count):
        if rng.random() < 0.05:
            rows[n, rng.integers(size)] = rng.choice([np.nan, np.inf, -np.inf])
    return rows, [some_request(rng, size) for _ in range(count)]


def some_valid(rng: np.random.Generator, size: int) -> Valid | None:
    """Every id, or without padding at the end, or with holes, or both."""
    valid = np.ones(size, dtype=np.bool_)
    if rng.random() < 0.5:
        valid[size - int(rng.integers(1, size // 3)) :] = False
    if rng.random() < 0.5:
        valid[rng.integers(size, size=size // 5)] = False
    return None if valid.all() else valid


# ---------------------------------------------------------------- the same as the slow twin


@pytest.mark.parametrize(("size", "batches", "count"), [(1, 20, 40), (2, 20, 40), (24, 60, 64), (1000, 25, 64)])
def test_mixed_batches_choose_what_the_slow_twin_chooses(size: int, batches: int, count: int) -> None:
    rng = np.random.default_rng(size)
    outcomes: set[int] = set()
    sampled = 0
    for _ in range(batches):
        valid = some_valid(rng, size) if size > 5 else None
        rows, requests = some_batch(rng, size, count)
        expected = references(rows, requests, valid)
        assert chosen(rows, requests, valid) == expected
        assert chosen(rows, requests, valid, seeks_loud_ids=False) == expected
        outcomes.update(outcome for _, outcome in expected)
        sampled += sum(token != int(row.argmax()) for (token, ok), row in zip(expected, rows, strict=True) if not ok)
    assert size == 1000 or outcomes == {Outcome.CHOSEN, Outcome.NOT_FINITE, Outcome.ALL_FORBIDDEN}
    assert size < 24 or sampled > 10 * batches


@pytest.mark.parametrize("has_holes", [False, True])
def test_rows_of_a_real_vocabularys_size_choose_what_the_slow_twin_chooses(has_holes: bool) -> None:
    rng = np.random.default_rng(77)
    rows, requests = some_batch(rng, 49_157, 72)
    valid = np.ones(49_157, dtype=np.bool_)
    valid[49_100:] = False
    valid[1000:1100] = not has_holes
    assert chosen(rows, requests, valid) == references(rows, requests, valid)


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("seeks_loud_ids", [True, False])
def test_each_kind_alone_chooses_what_the_slow_twin_chooses(params: SamplingParams, seeks_loud_ids: bool) -> None:
    rng = np.random.default_rng(78)
    rows = np.stack([some_row(rng, 700) for _ in range(30)])
    requests = [RowRequest(params, n, 5 * n) for n in range(30)]
    assert chosen(rows, requests, seeks_loud_ids=seeks_loud_ids) == references(rows, requests)


@pytest.mark.parametrize("attempt", [1, 2, 3])
@pytest.mark.parametrize("seeks_loud_ids", [True, False])
def test_every_later_attempt_chooses_the_same_or_nothing_and_the_last_always_chooses(
    attempt: int, seeks_loud_ids: bool
) -> None:
    rng = np.random.default_rng(79)
    rows, requests = some_batch(rng, 1500, 300)
    chooser = RowChooser(np.ones(1500, dtype=np.bool_), CPU, seeks_loud_ids)
    ids, outcomes, _ = chooser.choose(torch.from_numpy(rows), requests, attempt=attempt)._packed.tolist()
    expected = references(rows, requests)
    decided = [n for n, outcome in enumerate(outcomes) if outcome != Outcome.UNDECIDED]
    assert [(ids[n], outcomes[n]) for n in decided] == [expected[n] for n in decided]
    assert len(decided) == 300 if attempt == 3 else len(decided) > 270


def test_few_rows_are_undecided_by_the_first_attempt_and_a_later_one_decides_them() -> None:
    """Without this, the tests above might pass with a first attempt that never decides."""
    rng = np.random.default_rng(80)
    rows = (rng.standard_normal((64, 2000)) * 6).astype(np.float32)
    for params in (SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(top_k=40, top_p=0.9), SamplingParams()):
        requests = [RowRequest(params, n, n) for n in range(64)]
        chooser = RowChooser(np.ones(2000, dtype=np.bool_), CPU)
        pending = chooser.choose(torch.from_numpy(rows), requests)
        undecided = int((pending._packed[1] == Outcome.UNDECIDED).sum())
        assert undecided <= 5
        assert pairs(pending.fetch()) == references(rows, requests)
    flat = [RowRequest(SamplingParams(temperature=100.0, top_p=0.9), n, n) for n in range(64)]
    for seeks_loud_ids, undecided in ((True, 0), (False, 64)):
        chooser = RowChooser(np.ones(2000, dtype=np.bool_), CPU, seeks_loud_ids)
        pending = chooser.choose(torch.from_numpy(rows), flat)
        assert int((pending._packed[1] == Outcome.UNDECIDED).sum()) == undecided
        assert pairs(pending.fetch()) == references(rows, flat)


# ---------------------------------------------------------------- rows do not depend on each other


def test_a_row_is_chosen_the_same_alone_in_a_batch_and_in_any_order() -> None:
    rng = np.random.default_rng(81)
    for size in (30, 900):
        rows, requests = some_batch(rng, size, 80)
        together = chosen(rows, requests)
        order = rng.permutation(80)
        assert chosen(rows[order], [requests[n] for n in order]) == [together[n] for n in order]
        alone = [chosen(rows[n : n + 1], [requests[n]])[0] for n in range(80)]
        assert alone == together


def test_rows_in_small_chunks_are_chosen_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(82)
    rows, requests = some_batch(rng, 400, 90)
    whole = chosen(rows, requests)
    monkeypatch.setattr(row_choice, "CHUNK_BYTES", 3 * 8 * 400)
    monkeypatch.setattr(row_choice, "CACHED_BYTES", 2 * 8 * 400)
    assert chosen(rows, requests) == whole


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 129, 130, 140])
def test_a_row_that_is_not_finite_is_told_and_harms_no_other(bad: float, place: int) -> None:
    """Places beyond 130 are padding: a bad number there tells of a broken model too."""
    rng = np.random.default_rng(83)
    valid = np.arange(141) <= 130
    for params in (CASES[0], CASES[1], CASES[10], CASES[17], CASES[22], SamplingParams(frequency_penalty=1.0)):
        rows = np.stack([some_row(rng, 141) for _ in range(9)])
        counts = Counts(frozenset(), {place: 3})
        requests = [RowRequest(params, 7, n, counts) for n in range(9)]
        expected = references(rows, requests, valid)
        rows[4, place] = bad
        expected[4] = (-1, Outcome.NOT_FINITE)
        assert chosen(rows, requests, valid) == expected


def test_rows_with_every_id_forbidden_are_told_and_harm_no_other() -> None:
    rows = np.zeros((12, 5), dtype=np.float32)
    none = dict.fromkeys(range(5), -math.inf)
    kinds: list[dict[str, float]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"top_k": 1},
    ]
    requests = []
    for kind in kinds:
        requests.append(RowRequest(SamplingParams(**kind, logit_bias=none), 1, 1))  # type: ignore[arg-type]
        requests.append(RowRequest(SamplingParams(**kind), 1, 1))  # type: ignore[arg-type]
    found = chosen(rows, requests)
    assert found == references(rows, requests)
    assert [ok for _, ok in found] == [Outcome.ALL_FORBIDDEN, Outcome.CHOSEN] * 6
    assert chosen(rows, requests, np.zeros(5, dtype=np.bool_)) == [(-1, Outcome.ALL_FORBIDDEN)] * 12


def test_scores_stay_as_they_are_and_need_not_be_contiguous() -> None:
    rng = np.random.default_rng(84)
    rows, requests = some_batch(rng, 200, 50)
    wide = torch.from_numpy(np.repeat(rows, 2, axis=1))[:, ::2]
    transposed = torch.from_numpy(rows.T.copy()).T
    for valid in (np.arange(200) % 7 != 3, np.ones(200, dtype=np.bool_)):
        biased = [RowRequest(SamplingParams(logit_bias={3: 2.0}), 0, n) for n in range(50)]
        for some in (requests, biased):
            expected = references(rows, some, valid)
            for scores in (torch.from_numpy(rows), wide, transposed):
                before = scores.clone()
                assert pairs(RowChooser(valid, CPU).choose(scores, some).fetch()) == expected
                assert torch.equal(scores.nan_to_num(), before.nan_to_num())


def test_no_rows_make_no_choices() -> None:
    assert pairs(RowChooser(np.ones(5, dtype=np.bool_), CPU).choose(torch.zeros(0, 5), [], []).fetch()) == []


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize("size", [5, 64, 130, 3000])
def test_of_equal_highest_scores_the_lowest_existing_id_is_chosen(size: int) -> None:
    rng = np.random.default_rng(85)
    for _ in range(40):
        row = np.zeros((1, size), dtype=np.float32)
        tied = np.sort(rng.choice(size, size=int(rng.integers(1, 5)), replace=False))
        row[0, tied] = 1
        valid = np.ones(size, dtype=np.bool_)
        request = [RowRequest(SamplingParams(temperature=0), 0, 0)]
        assert chosen(row, request)[0] == (tied[0], 0)
        valid[tied[:-1]] = False
        assert chosen(row, request, valid)[0] == (tied[-1], 0)


def test_cuts_through_ties_keep_the_lowest_ids() -> None:
    """Ties across the end of the prefix too: 300 ids share every place from the 2nd on."""
    rng = np.random.default_rng(86)
    for width in (300, 2000):
        row = np.zeros(width, dtype=np.float32)
        row[rng.choice(width, size=5, replace=False)] = 1
        rows = np.stack([row] * 200)
        for cut in ({"top_k": 3}, {"top_k": 8}, {"top_k": 64}, {"top_k": 70}, {"top_p": 0.01}, {"top_p": 0.3}):
            params = SamplingParams(temperature=5.0, **cut)
            requests = [RowRequest(params, 3, n) for n in range(200)]
            found = chosen(rows, requests)
            assert found == references(rows, requests)
            assert len({token for token, _ in found}) > 1


def test_equal_noised_scores_give_the_lowest_id() -> None:
    ids, noised = torch.tensor([[7, 3, 5, 3, 0]]), torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert row_choice._first_of_loudest(ids, noised).tolist() == [[3]]


@pytest.mark.parametrize("seeks_loud_ids", [True, False])
def test_a_share_that_cuts_through_ties_far_beyond_the_prefix_keeps_the_lowest_ids(seeks_loud_ids: bool) -> None:
    """The prefix ends among the ties, with any of them: few of many, or half of all, in the share or not."""
    rng = np.random.default_rng(93)
    for size, better, score in ((700, 60, -1.5), (120, 4, -0.5)):
        row = np.full(size, score, dtype=np.float32)
        row[rng.choice(size, size=better, replace=False)] = 0
        rows, ties = np.stack([row] * 400), 0
        for top_p in (0.33, 0.5, 0.9):
            requests = [RowRequest(SamplingParams(top_p=top_p), 8, n) for n in range(400)]
            found = chosen(rows, requests, seeks_loud_ids=seeks_loud_ids)
            assert found == references(rows, requests)
            ties += sum(row[token] < 0 for token, _ in found)
        assert ties > 100


def test_a_prefix_with_nearly_the_whole_share_is_not_taken_for_all_of_it() -> None:
    row = np.full(704, -4, dtype=np.float32)
    row[200:264] = 0
    rows = np.stack([row] * 500)
    requests = [RowRequest(SamplingParams(top_p=0.9), 8, n) for n in range(500)]
    found = chosen(rows, requests)
    assert found == references(rows, requests)
    assert sum(row[token] < 0 for token, _ in found) > 10


def test_scores_that_scaling_makes_equal_are_cut_by_id() -> None:
    """By value, these ids would be cut in another order."""
    rng = np.random.default_rng(94)
    rows = (rng.random((300, 500)) * 1e-20).astype(np.float32)
    rows[:, 250] = 100
    requests = [RowRequest(SamplingParams(temperature=40.0, top_p=0.5), 2, n) for n in range(300)]
    assert chosen(rows, requests) == references(rows, requests)


def test_temperatures_below_float32_are_exact() -> None:
    rng = np.random.default_rng(95)
    rows = (rng.integers(0, 12, (300, 200)) * 1.4e-45).astype(np.float32)
    requests = [RowRequest(SamplingParams(temperature=2e-45, top_p=0.8), 2, n) for n in range(300)]
    found = chosen(rows, requests)
    assert found == references(rows, requests)
    assert len({token for token, _ in found}) > 10


@pytest.mark.parametrize("seeks_loud_ids", [True, False])
def test_a_share_that_ends_within_rounding_of_the_winner_is_told_apart(seeks_loud_ids: bool) -> None:
    """Shares a ten-millionth above and below the mass before an uncut winner: the winner is in, and out."""
    rng = np.random.default_rng(96)
    rows = (rng.standard_normal((150, 900)) * 1.5).astype(np.float32)
    uncut = np.array([token for token, _ in chosen(rows, [RowRequest(SamplingParams(), 6, n) for n in range(150)])])
    masses = np.exp(rows.astype(np.float64) - rows.max(1, keepdims=True))
    is_before = rows > rows[np.arange(150), uncut, None]
    shares = (masses * is_before).sum(1) / masses.sum(1)
    factors = [1 + 1e-7, 1 - 1e-7, 1 + 1e-11, 1 - 1e-11]
    requests = [
        RowRequest(SamplingParams(top_p=float(share * factor)), 6, n)
        for factor in factors
        for n, share in enumerate(shares)
    ]
    found = chosen(np.tile(rows, (4, 1)), requests, seeks_loud_ids=seeks_loud_ids)
    assert found == references(np.tile(rows, (4, 1)), requests)
    ins = int(sum(token == other for (token, _), other in zip(found, np.tile(uncut, 4), strict=True)))
    beyond = int((is_before.sum(1) > row_choice.PREFIX_WIDTHS[0]).sum())
    assert 250 < ins < 350
    assert beyond > 30


def test_a_share_that_ends_exactly_at_an_id_includes_it_and_no_more() -> None:
    """Equal scores have masses of exactly 1, so the bounds of a sum in another order cannot tell."""
    rows = np.zeros((64, 128), dtype=np.float32)
    requests = [RowRequest(SamplingParams(top_p=0.25), 5, n) for n in range(64)]
    found = chosen(rows, requests)
    assert found == references(rows, requests)
    assert max(token for token, _ in found) <= 31


def test_masses_lost_in_rounding_count_as_the_slow_twin_counts_them() -> None:
    """Two best ids of mass 1 each, and ten thousand of 10^-17: each alone vanishes in the sum in order."""
    row = np.full((1, 10_000), math.log(1e-17), dtype=np.float32)
    row[0, [70, 9000]] = 0
    requests = [RowRequest(SamplingParams(top_p=0.5), 0, n) for n in range(20)]
    rows = np.repeat(row, 20, axis=0)
    assert {token for token, _ in references(rows, requests)} == {70}
    assert chosen(rows, requests) == [(70, 0)] * 20


# ---------------------------------------------------------------- loud ids beyond the prefix


def test_thousands_of_flat_rows_are_won_beyond_the_prefix_as_the_full_noise_says() -> None:
    rng = np.random.default_rng(87)
    beyond = 0
    for temperature in (0.7, 2.0, 1000.0):
        rows = rng.standard_normal((1000, 800)).astype(np.float32)
        params = SamplingParams(temperature=temperature)
        requests = [RowRequest(params, 2**64 - 1 - n, 2**31 - n) for n in range(1000)]
        found = chosen(rows, requests)
        assert found == chosen(rows, requests, seeks_loud_ids=False) == references(rows, requests)
        ranks = [int((row > row[token]).sum()) for (token, _), row in zip(found, rows, strict=True)]
        beyond += sum(rank >= row_choice.PREFIX_WIDTHS[0] for rank in ranks)
    assert beyond > 1000


def test_a_loud_id_wins_by_a_hair_where_many_share_the_highest_score_beyond_the_prefix() -> None:
    """The bound on loudness is as tight as can be: all ids beyond the prefix have nearly the score that it assumes."""
    size, seed, tried = 3000, 13, 0
    for position in range(100):
        noise = randomness.noise(seed, position, np.arange(size))
        order = np.argsort(-noise)
        token, prefix = int(order[0]), order[1000:1064]
        reached = noise[prefix].max()
        score = np.float32(reached - noise[token])
        if score > -0.5:
            continue
        tried += 1
        row = np.full(size, score - 20, dtype=np.float32)
        row[order[2000:2400]] = row[token] = score
        row[prefix] = 0
        for hair, winner in ((1e-12, token), (-1e-12, int(prefix[noise[prefix].argmax()]))):
            bias = {token: float(reached - noise[token] - np.float64(score)) + hair}
            request = [RowRequest(SamplingParams(logit_bias=bias), seed, position)]
            assert chosen(row[None], request) == [(winner, 0)] == references(row[None], request)
    assert tried > 50


def test_one_very_loud_id_wins_from_far_below_by_a_hair_and_loses_by_a_hair() -> None:
    size, seed, rng = 40_000, 12, np.random.default_rng(88)
    tried = 0
    for position in range(60):
        noise = randomness.noise(seed, position, np.arange(size))
        token = int(noise.argmax())
        row = rng.standard_normal(size).astype(np.float32)
        row[token] = -30
        noised = row + noise
        rival = int(noised.argmax())
        enough = np.float32(noised[rival] - noise[token])
        for score, winner in ((np.nextafter(enough, np.float32(9)) + 1e-5, token), (enough - 1e-5, rival)):
            row[token] = score
            tried += int((row > score).sum()) > row_choice.PREFIX_WIDTHS[0]
            request = [RowRequest(SamplingParams(), seed, position)]
            assert chosen(row[None], request) == [(winner, 0)] == references(row[None], request)
    assert tried > 50


def test_min_p_and_top_p_hold_for_loud_ids_too() -> None:
    rng = np.random.default_rng(89)
    rows = rng.standard_normal((600, 900)).astype(np.float32)
    cut = 0
    for params in (SamplingParams(min_p=0.05), SamplingParams(top_p=0.6), SamplingParams(min_p=0.02, top_p=0.95)):
        requests = [RowRequest(params, 4, n) for n in range(600)]
        found = chosen(rows, requests)
        assert found == chosen(rows, requests, seeks_loud_ids=False) == references(rows, requests)
        uncut = chosen(rows, [dataclasses.replace(request, params=SamplingParams()) for request in requests])
        cut += sum(one != other for one, other in zip(found, uncut, strict=True))
    assert cut > 100


# ---------------------------------------------------------------- penalties, logprobs, masses


def test_penalised_scores_are_the_slow_twins_to_the_last_bit() -> None:
    rng = np.random.default_rng(97)
    rows, requests = np.stack([some_row(rng, 60) for _ in range(300)]), [some_request(rng, 60) for _ in range(300)]
    values = torch.from_numpy(rows).to(torch.float64)
    row_choice._penalise(values, requests)
    for row, request, ours in zip(rows, requests, values.numpy(), strict=True):
        np.testing.assert_array_equal(ours, penalised(row, request.params, request.counts, None))
    assert sum(request.is_touched for request in requests) > 100


def test_each_row_is_penalised_by_its_own_counts_and_biases() -> None:
    rows = np.tile(np.array([3.0, 2.9, 2.8, -1.0], dtype=np.float32), (4, 1))
    once = SamplingParams(temperature=0, frequency_penalty=1.0)
    requests = [
        RowRequest(once, 0, 0, Counts()),
        RowRequest(once, 0, 0, Counts(frozenset({1}), {0: 1})),
        RowRequest(once, 0, 0, Counts(frozenset(), {0: 1, 1: 2, 9: 5})),
        RowRequest(SamplingParams(temperature=0, logit_bias={3: 9.0, 4: 99.0}), 0, 0, Counts(frozenset(), {3: 9})),
    ]
    assert [token for token, _ in chosen(rows, requests)] == [0, 1, 2, 3]


def test_repetition_counts_an_id_of_context_and_text_once() -> None:
    rows = np.array([[4.0, 1.5], [-1.0, -3.0]], dtype=np.float32)
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    requests = [RowRequest(params, 0, 0, Counts(frozenset({0, 5}), {0: 4}))] * 2
    assert [token for token, _ in chosen(rows, requests)] == [0, 0]  # 4 / 2 and -1 * 2; twice would be 1 and -4


def test_logprobs_are_the_raw_ones_where_asked_for_and_nan_elsewhere() -> None:
    rng = np.random.default_rng(90)
    rows, requests = some_batch(rng, 500, 120)
    wanted = (rng.random(120) < 0.6).tolist()
    valid = np.arange(500) % 9 != 4
    choices = RowChooser(valid, CPU).choose(torch.from_numpy(rows), requests, wanted).fetch()
    assert pairs(choices) == references(rows, requests, valid)
    told = 0
    for row, token, logprob, is_wanted in zip(rows, choices.ids, choices.logprobs, wanted, strict=True):
        if is_wanted and token >= 0:
            told += 1
            assert logprob == pytest.approx(raw_logprob(row, int(token)), rel=1e-12, abs=1e-12)
        else:
            assert math.isnan(logprob)
    assert told > 40


def test_masses_stay_within_half_their_bounds() -> None:
    rng = np.random.default_rng(91)
    for scale in (0.01, 1.0, 5.0, 40.0):
        rows = torch.from_numpy((rng.standard_normal((20, 50_000)) * scale).astype(np.float32))
        temperatures = torch.from_numpy(rng.uniform(0.05, 3, (20, 1)))
        best = rows.amax(1, keepdim=True)
        ordered = ((rows.double() - best) / temperatures).sort(dim=1, descending=True).values
        exact = ordered.exp().cumsum(1)[:, -1:]
        for dtype, bound in row_choice.MASS_ERROR.items():
            masses = row_choice._mass(rows.to(dtype), best.to(dtype), temperatures)
            assert float(((masses - exact) / exact).abs().max()) < bound / 2


def test_the_highest_are_found_through_blocks_as_without() -> None:
    rng = np.random.default_rng(92)
    for size in (64 * 130, 64 * 130 + 1, 64 * 131 - 1):
        values = torch.from_numpy(np.round(rng.standard_normal((5, size)) * 8).astype(np.float32))
        highest, ids = row_choice._highest(values, 65)
        assert torch.equal(highest, torch.topk(values, 65, dim=1).values)
        assert torch.equal(values.gather(1, ids), highest)
        assert all(len(set(row)) == 65 for row in ids.tolist())


def test_the_noise_is_that_of_the_rows_own_seed_and_position() -> None:
    """The winner of a flat row is the id of the greatest noise."""
    rows = np.zeros((4, 3000), dtype=np.float32)
    places = [(0, 0), (0, 1), (2**63, 2**31), (2**64 - 1, 2**31)]
    found = chosen(rows, [RowRequest(SamplingParams(), seed, position) for seed, position in places])
    for (token, _), (seed, position) in zip(found, places, strict=True):
        assert token == int(randomness.noise(seed, position, np.arange(3000)).argmax())
    assert len({token for token, _ in found}) == 4
    assert randomness.noise(0, 0, np.arange(3000)).max() < torch_noise.LOUDEST


@pytest.mark.parametrize("attempt", [0, 1, 2])
def test_nothing_waits_for_a_device_that_is_not_the_cpu(attempt: int) -> None:
    """Tensors of the meta device have no data: reading any on the host, or mixing devices, raises."""
    rng = np.random.default_rng(98)
    meta = torch.device("meta")
    valid = np.arange(2000) % 9 != 4
    requests = [RowRequest(params, 1, 2) for params in CASES] + [some_request(rng, 2000) for _ in range(100)]
    pending = RowChooser(valid, meta).choose(
        torch.empty((len(requests), 2000), device=meta), requests, [True] * len(requests), attempt=attempt
    )
    assert pending._packed.shape == (3, len(requests))
    assert pending._packed.is_meta
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        pending.fetch()
