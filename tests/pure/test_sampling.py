"""Warping held against its slow twin, against a ten-line reference, and against what each parameter says of itself."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, NumericalError
from shared.sampling import GREEDY, Counts, SamplingParams, Warped, penalised, raw_logprob, warp, warp_reference

Row = npt.NDArray[np.float32]
TEMPERATURES = (0.0, 1e-45, 1e-6, 1e-4, 0.1, 0.5, 0.7, 1.0, 1.5, 2.0, 10.0, 100.0)
TOP_PS = (0.0, 1e-6, 0.1, 0.3, 0.5, 0.8, 0.9, 0.95, 0.999, 1.0)


def row_of(values: Iterable[float]) -> Row:
    return np.array(list(values), dtype=np.float32)


def row_with(shares: Iterable[float]) -> Row:
    """Logits whose softmax is these shares."""
    return row_of(math.log(share) for share in shares)


def same(first: Warped, second: Warped) -> bool:
    """Ids and scores equal bit for bit."""
    return first.ids.tolist() == second.ids.tolist() and first.scores.tolist() == second.scores.tolist()


def some_row(rng: np.random.Generator) -> Row:
    """A row of one of the kinds that break samplers: ties, flat, peaked, one-hot, holes, tiny, huge."""
    size = int(rng.choice([1, 2, 3, 7, 40, 97]))
    row: Row = (rng.standard_normal(size) * rng.choice([0.1, 1, 5, 30])).astype(np.float32)
    kind = rng.integers(8)
    if kind == 0:
        row = np.round(row)  # ties everywhere, also at the cut
    elif kind == 1:
        row[:] = row[0]  # all equal
    elif kind == 2:
        row[rng.integers(size)] = 40.0  # peaked
    elif kind == 3:
        kept = rng.integers(size)
        row[np.arange(size) != kept] = -np.inf  # one-hot
    elif kind == 4:
        row[rng.random(size) < 0.5] = -np.inf
        row[rng.integers(size)] = 1.5
    elif kind == 5:
        row = row * np.float32(1e30)
    return row


def some_params(rng: np.random.Generator, size: int) -> SamplingParams:
    bias = {int(rng.integers(size + 3)): float(rng.choice([-np.inf, -5.0, 0.5, 20.0])) for _ in range(rng.integers(3))}
    return SamplingParams(
        temperature=float(rng.choice(TEMPERATURES)),
        top_k=int(rng.choice([0, 0, 1, 2, 5, max(size - 1, 0), size, size + 1])),
        top_p=float(rng.choice(TOP_PS)),
        min_p=float(rng.choice([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 0.5, 1.3, 2.0])),
        frequency_penalty=float(rng.choice([0.0, 0.0, -0.7, 0.9])),
        presence_penalty=float(rng.choice([0.0, 0.0, -0.7, 1.1])),
        logit_bias=bias,
    )


def some_counts(rng: np.random.Generator, size: int) -> Counts | None:
    if rng.random() < 0.3:
        return None
    return Counts.of(rng.integers(size + 2, size=rng.integers(12)).tolist(), int(rng.integers(6)))


def some_valid(rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_] | None:
    if rng.random() < 0.5:
        return None
    return np.asarray(rng.random(size) < 0.8)


# ---------------------------------------------------------------- the twin


def outcome(function: Any, *arguments: Any) -> tuple[Any, ...]:
    try:
        warped = function(*arguments)
    except NumericalError:
        return ("nothing may be drawn",)
    return (warped.ids.tolist(), warped.scores.tolist())


@pytest.mark.parametrize("seed", range(10))
def test_warp_equals_its_slow_twin_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawable = 0
    for _ in range(600):
        row = some_row(rng)
        if not np.isfinite(row).any():
            continue
        arguments = row, some_params(rng, len(row)), some_counts(rng, len(row)), some_valid(rng, len(row))
        found = outcome(warp, *arguments)
        if found == ("nothing may be drawn",):
            assert not np.isfinite(penalised(*arguments)).any()
        else:
            drawable += 1
            assert found == outcome(warp_reference, *arguments), arguments
    assert drawable > 400


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
    values=st.lists(st.integers(-24, 24), min_size=1, max_size=12),
    temperature=st.sampled_from(TEMPERATURES),
    top_k=st.integers(0, 14),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
)
def test_warp_equals_its_slow_twin_on_rows_full_of_ties(
    values: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = row_of(v / 4 for v in values)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert same(warp(row, params), warp_reference(row, params))


def test_scores_that_merge_when_the_best_is_taken_off_are_ties_for_warp_and_twin_alike() -> None:
    # Once wrong: 1e-20 - 5 == 2e-20 - 5 in float64. `warp` cuts by the score after temperature (a tie: id 0 stays),
    # `warp_reference` by the raw score (id 1 stays).
    row = row_of([1e-20, 2e-20, 5.0])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.99)):
        assert warp(row, params).ids.tolist() == warp_reference(row, params).ids.tolist()


def test_ids_rise_and_the_best_is_always_kept_with_score_0() -> None:
    rng = np.random.default_rng(20)
    for _ in range(500):
        row = some_row(rng)
        warped = warp(row, dataclasses.replace(some_params(rng, len(row)), logit_bias={}))
        assert (np.diff(warped.ids) > 0).all()
        assert int(np.argmax(row)) in warped.ids or not np.isfinite(row).any()
        assert warped.scores.max() == 0
        assert warped.probabilities().sum() == pytest.approx(1, abs=1e-12)
        assert (warped.probabilities() >= 0).all()


# ---------------------------------------------------------------- C11: an independent nucleus


def nucleus(row: Row, top_k: int, top_p: float) -> list[int]:
    """The smallest set with this share of the mass, written without looking at `warp`."""
    best = max(float(x) for x in row)
    pairs = [(math.exp(float(x) - best), -token) for token, x in enumerate(row) if x != -math.inf]
    pairs.sort(reverse=True)
    survivors = pairs[: top_k or len(pairs)]
    total, mass, kept = math.fsum(w for w, _ in survivors), 0.0, []
    for weight, negative in survivors:
        kept.append(-negative)
        mass += weight
        if mass >= top_p * total and top_p < 1:
            break
    return sorted(kept)


HAND_MADE = {
    "flat": row_of([0.0] * 10),
    "peaked": row_with([0.9, 0.05, 0.03, 0.02]),
    "peaked last": row_with([0.02, 0.03, 0.05, 0.9]),
    "ties at the cut": row_with([0.1, 0.2, 0.2, 0.2, 0.3]),
    "one-hot": row_of([-np.inf, 3.0, -np.inf]),
    "holes": row_of([-np.inf, 1.0, -np.inf, 2.0, 1.0, -np.inf]),
    "single": row_of([-7.0]),
    "two": row_of([1.0, 1.0]),
}


@pytest.mark.parametrize("kind", HAND_MADE)
@pytest.mark.parametrize("top_p", [n / 10 for n in range(1, 11)])
@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 10, 11])
def test_top_k_and_top_p_keep_what_a_ten_line_reference_keeps(kind: str, top_p: float, top_k: int) -> None:
    row = HAND_MADE[kind]
    found = warp(row, SamplingParams(top_k=top_k, top_p=top_p)).ids.tolist()
    assert found == nucleus(row, top_k, top_p)
    assert int(np.argmax(row)) in found


def test_top_p_keeps_what_a_ten_line_reference_keeps_on_random_rows() -> None:
    rng = np.random.default_rng(11)
    for _ in range(1500):
        row = (rng.standard_normal(rng.integers(1, 60)) * rng.choice([0.5, 2, 8])).astype(np.float32)
        top_p, top_k = float(rng.random()), int(rng.integers(0, 20))
        assert warp(row, SamplingParams(top_k=top_k, top_p=top_p)).ids.tolist() == nucleus(row, top_k, top_p)


@pytest.mark.parametrize("tenths", range(1, 10))
def test_a_flat_row_keeps_the_share_asked_for_from_the_lowest_id(tenths: int) -> None:
    assert warp(row_of([0.0] * 10), SamplingParams(top_p=tenths / 10)).ids.tolist() == list(range(tenths))


def test_the_id_that_crosses_is_kept_and_the_next_is_not() -> None:
    row = row_with([0.5, 0.3, 0.2])
    assert warp(row, SamplingParams(top_p=0.49)).ids.tolist() == [0]
    assert warp(row, SamplingParams(top_p=0.51)).ids.tolist() == [0, 1]
    assert warp(row, SamplingParams(top_p=0.79)).ids.tolist() == [0, 1]
    assert warp(row, SamplingParams(top_p=0.81)).ids.tolist() == [0, 1, 2]


def test_ties_at_the_cut_go_to_the_lowest_id() -> None:
    row = row_of([1, 3, 2, 2, 2, 0])
    assert warp(row, SamplingParams(top_k=3)).ids.tolist() == [1, 2, 3]
    assert warp(row_of([0.0] * 5), SamplingParams(top_k=2)).ids.tolist() == [0, 1]


# ---------------------------------------------------------------- greedy, and C09: tiny and extreme values


def test_greedy_is_the_argmax_and_the_lowest_id_among_equals() -> None:
    rng = np.random.default_rng(30)
    for _ in range(500):
        row = some_row(rng)
        expected = [int(np.flatnonzero(row == row.max())[0])]
        for params in (GREEDY, SamplingParams(top_k=1), SamplingParams(top_p=0.0), SamplingParams(temperature=-0.0)):
            warped = warp(row, params)
            assert warped.ids.tolist() == expected
            assert warped.probabilities().tolist() == [1.0]


def test_greedy_obeys_penalties_bias_and_holes() -> None:
    row = row_of([1.0, 5.0, 4.0, 3.0])
    assert warp(row, GREEDY, valid=np.array([True, False, True, True])).ids.tolist() == [2]
    assert warp(row, dataclasses.replace(GREEDY, logit_bias={1: -math.inf, 2: -2.0})).ids.tolist() == [3]
    repeated = dataclasses.replace(GREEDY, repetition_penalty=2.0)
    assert warp(row, repeated, Counts(frozenset({1}))).ids.tolist() == [2]


VOCABULARY = 12


@pytest.mark.parametrize("top_k", [0, 1, VOCABULARY, VOCABULARY + 1])
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-45, 1e-6, 1e-4, 2.0, 100.0])
def test_extreme_parameters_give_finite_probabilities_and_greedy_where_they_must(
    temperature: float, top_p: float, top_k: int
) -> None:
    rng = np.random.default_rng(9)
    for scale in (0.01, 1.0, 1e4):
        row = (rng.standard_normal(VOCABULARY) * scale).astype(np.float32)
        warped = warp(row, SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k))
        probabilities = warped.probabilities()
        assert np.isfinite(warped.scores).all()
        assert np.isfinite(probabilities).all()
        assert probabilities.sum() == pytest.approx(1)
        if temperature == 0 or top_k == 1 or top_p == 0:
            assert len(warped.ids) == 1
        if temperature <= 1e-4 or top_k == 1 or top_p <= 1e-6:
            most_likely = int(warped.ids[int(np.argmax(probabilities))])
            assert most_likely == int(warp(row, GREEDY).ids[0])
        if temperature <= 1e-6 or top_p <= 1e-6:
            assert probabilities.max() == 1.0


@pytest.mark.parametrize("temperature", [5e-324, 1e-310])
def test_the_smallest_temperatures_that_floats_hold_are_greedy_and_silent(temperature: float) -> None:
    # Once wrong: dividing by a subnormal temperature overflows to -inf, as meant, but numpy warns of it.
    row = row_of([0.0, 5.0, 4.0, 5.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warped = warp(row, SamplingParams(temperature=temperature))
    assert warped.ids.tolist() == [1, 3]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SamplingParams) if f.name != "logit_bias"])
def test_null_is_refused_for_each_number(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: None})  # type: ignore[arg-type]


# ---------------------------------------------------------------- C10: nothing is accepted and ignored

EFFECTIVE: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.9,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {3: 2.0},
}


def test_every_parameter_changes_what_may_be_drawn() -> None:
    assert EFFECTIVE.keys() == {f.name for f in dataclasses.fields(SamplingParams)}
    row, counts = row_of([2.0, 1.5, 1.0, 0.5, -1.0]), Counts(frozenset({1}), {2: 2, 4: 1})
    plain = warp(row, SamplingParams(), counts)
    seen = [plain]
    for name, value in EFFECTIVE.items():
        changed = warp(row, SamplingParams(**{name: value}), counts)
        assert not any(same(changed, other) for other in seen), name
        seen.append(changed)


def test_both_signs_of_a_penalty_count() -> None:
    row, counts = row_of([2.0, 1.5]), Counts(frozenset(), {0: 2})
    for name, subtracted in (("frequency_penalty", 2.0), ("presence_penalty", 1.0)):
        for sign in (2.0, -2.0):
            scores = penalised(row, SamplingParams(**{name: sign}), counts, None)  # type: ignore[arg-type]
            assert scores.tolist() == [2.0 - sign * subtracted, 1.5]


# ---------------------------------------------------------------- the order of the cuts


def test_top_p_works_on_what_top_k_left_and_not_the_other_way_round() -> None:
    row = row_with([0.4, 0.3, 0.2, 0.1])
    # top-k first: 0.4 of 0.7 is 0.571, over 0.55. Top-p first: 0.4 is under 0.55, so two ids stay.
    assert warp(row, SamplingParams(top_k=2, top_p=0.55)).ids.tolist() == [0]


def test_min_p_comes_after_top_p() -> None:
    row = row_with([0.5, 0.2, 0.1, 0.1, 0.1])
    # min-p first: 0.5 of 0.7 is 0.714, over 0.71. Top-p first: 0.5, 0.2 and 0.1 are needed, then min-p takes 0.1 off.
    assert warp(row, SamplingParams(min_p=0.3, top_p=0.71)).ids.tolist() == [0, 1]


def test_temperature_comes_before_the_cuts() -> None:
    row = row_with([0.64, 0.25, 0.11])
    assert warp(row, SamplingParams(top_p=0.6)).ids.tolist() == [0]
    assert warp(row, SamplingParams(top_p=0.6, temperature=2.0)).ids.tolist() == [0, 1]
    assert warp(row, SamplingParams(min_p=0.5)).ids.tolist() == [0]
    assert warp(row, SamplingParams(min_p=0.5, temperature=2.0)).ids.tolist() == [0, 1]


def test_repetition_comes_before_frequency_and_presence_and_all_before_bias() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={0: 1.0})
    scores = penalised(row_of([8.0, -8.0]), params, Counts(frozenset(), {0: 3, 1: 1}), None)
    assert scores.tolist() == [8 / 2 - 0.25 * 3 - 0.5 + 1.0, -8 * 2 - 0.25 - 0.5]


def test_bias_comes_before_temperature() -> None:
    warped = warp(row_of([0.0, 0.0]), SamplingParams(temperature=0.5, logit_bias={1: 1.0}))
    assert warped.scores.tolist() == [-2.0, 0.0]


# ---------------------------------------------------------------- penalties and what they count


def test_repetition_counts_once_over_context_and_generated_and_the_others_only_generated() -> None:
    counts = Counts.of([0, 0, 1, 1, 2, 2, 2], generated_from=3)
    assert counts == Counts(frozenset({0, 1}), {1: 1, 2: 3})
    row = row_of([4.0, 4.0, 4.0, 4.0])
    assert penalised(row, SamplingParams(repetition_penalty=2.0), counts, None).tolist() == [2, 2, 2, 4]
    assert penalised(row, SamplingParams(frequency_penalty=0.5), counts, None).tolist() == [4, 3.5, 2.5, 4]
    assert penalised(row, SamplingParams(presence_penalty=0.5), counts, None).tolist() == [4, 3.5, 3.5, 4]


def test_repetition_moves_every_score_down_whatever_its_sign_or_size() -> None:
    counts = Counts(frozenset({0, 1, 2}), {3: 1, 4: 2})
    scores = penalised(row_of([8.0, 0.5, 0.0, -0.5, -8.0, 1.0]), SamplingParams(repetition_penalty=2.0), counts, None)
    assert scores.tolist() == [4.0, 0.25, 0.0, -1.0, -16.0, 1.0]


def test_a_path_is_counted_in_a_copy_only() -> None:
    counts = Counts.of([5, 6], generated_from=1)
    along = counts.with_path([6, 7, 7])
    assert along.generated == {6: 2, 7: 2}
    assert along.context == frozenset({5})
    assert counts.generated == {6: 1}
    along.add(8)
    assert 8 not in counts.generated


def test_counting_a_path_equals_counting_the_longer_sequence() -> None:
    rng = np.random.default_rng(40)
    for _ in range(100):
        ids = rng.integers(6, size=12).tolist()
        start, cut = sorted(rng.integers(0, 13, size=2).tolist())
        assert Counts.of(ids[:cut], start).with_path(ids[cut:]) == Counts.of(ids, start)


def test_ids_beyond_the_row_are_counted_without_harm() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={9: 1.0})
    assert penalised(row_of([2.0]), params, Counts(frozenset({7}), {8: 1}), None).tolist() == [2.0]


def test_forbidden_and_absent_ids_never_come_back() -> None:
    row = row_of([9.0, 1.0, 2.0, -np.inf])
    params = SamplingParams(logit_bias={0: -math.inf, 1: 1000.0, 3: 1000.0})
    assert warp(row, params, valid=np.array([True, False, True, True])).ids.tolist() == [2]


# ---------------------------------------------------------------- a row alone and in company


def test_a_row_warps_the_same_alone_in_a_batch_in_a_view_and_again() -> None:
    rng = np.random.default_rng(50)
    batch = (rng.standard_normal((9, 101)) * 4).astype(np.float32)
    wide = np.repeat(batch, 2, axis=1)
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    counts = Counts(frozenset({3, 4}), {5: 2})
    for n in range(9):
        alone = warp(batch[n].copy(), params, counts)
        unaligned = np.concatenate([np.zeros(n + 1, dtype=np.float32), batch[n]])[n + 1 :]
        for other in (batch[n], np.asfortranarray(batch)[n], wide[n, ::2], unaligned, batch[::-1][8 - n]):
            assert same(warp(other, params, counts), alone)


def test_absent_ids_behind_a_row_change_nothing() -> None:
    rng = np.random.default_rng(51)
    for extra in (1, 7, 64):
        row = rng.standard_normal(50).astype(np.float32)
        padded = np.concatenate([row, np.full(extra, 50, dtype=np.float32)])
        params = SamplingParams(temperature=0.7, top_p=0.9)
        valid = np.arange(50 + extra) < 50
        assert same(warp(padded, params, valid=valid), warp(row, params))


def test_warp_leaves_its_arguments_alone() -> None:
    row, valid, counts = row_of([1.0, 2.0, 3.0]), np.array([True, True, False]), Counts(frozenset({0}), {1: 1})
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={0: 1.0})
    warp(row, params, counts, valid)
    assert row.tolist() == [1, 2, 3]
    assert valid.tolist() == [True, True, False]
    assert counts == Counts(frozenset({0}), {1: 1})


# ---------------------------------------------------------------- what is refused

BAD = [
    ("temperature", math.nan),
    ("temperature", -0.1),
    ("temperature", math.inf),
    ("temperature", 1000.1),
    ("temperature", True),
    ("temperature", "1"),
    ("top_k", -1),
    ("top_k", 2.0),
    ("top_k", math.nan),
    ("top_k", True),
    ("top_k", 2**31),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("top_p", math.nan),
    ("top_p", math.inf),
    ("min_p", -1e-9),
    ("min_p", 2),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("frequency_penalty", 101.0),
    ("frequency_penalty", -math.inf),
    ("frequency_penalty", math.nan),
    ("presence_penalty", -101.0),
    ("presence_penalty", math.nan),
    ("presence_penalty", False),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: 1001.0}),
    ("logit_bias", {-1: 1.0}),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as refused:
        SamplingParams(**{name: value})
    assert refused.value.field == name


@pytest.mark.parametrize("value", [{"a": 1.0}, {1: "x"}, {1.5: 1.0}, {1: None}, None, [1]])
def test_a_bias_of_a_wrong_type_is_refused_by_name(value: Any) -> None:
    # Once wrong: {1.5: 1.0} is accepted (and breaks `penalised` later); the others end in TypeError or AttributeError.
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias=value)


def test_all_bad_values_are_named_at_once() -> None:
    bad: Mapping[str, Any] = {
        "temperature": math.nan,
        "top_k": -1,
        "top_p": 2.0,
        "min_p": -1.0,
        "repetition_penalty": 0.0,
        "frequency_penalty": math.inf,
        "presence_penalty": True,
        "logit_bias": {7: math.nan, -3: 0.0},
    }
    assert bad.keys() == {f.name for f in dataclasses.fields(SamplingParams)}
    with pytest.raises(ConfigError) as refused:
        SamplingParams(**bad)
    for name in (*bad, "logit_bias[7]", "-3"):
        assert name in str(refused.value)
    assert refused.value.field == "temperature"


def test_the_ends_of_every_range_are_accepted() -> None:
    SamplingParams(0, 0, 0, 0, 1e-3, -100, -100, {0: -1000, 1: -math.inf})
    SamplingParams(1000.0, 2**31 - 1, 1.0, 1.0, 1e3, 100.0, 100.0, {2**31: 1000.0})


@pytest.mark.parametrize(
    "row",
    [[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [math.inf, -math.inf], [-math.inf, -math.inf], [math.nan] * 2],
)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_p=0.5)])
def test_a_row_that_is_not_finite_is_refused(row: list[float], params: SamplingParams) -> None:
    with pytest.raises(NumericalError):
        warp(row_of(row), params)


def test_a_row_with_everything_forbidden_is_refused_and_a_bad_number_in_a_hole_is_not() -> None:
    row = row_of([1.0, 2.0])
    with pytest.raises(NumericalError):
        warp(row, SamplingParams(logit_bias={0: -math.inf, 1: -math.inf}))
    with pytest.raises(NumericalError):
        warp(row, SamplingParams(), valid=np.array([False, False]))
    assert warp(row_of([1.0, math.nan]), SamplingParams(), valid=np.array([True, False])).ids.tolist() == [0]


# ---------------------------------------------------------------- logprobs


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=30),
    offset=st.sampled_from([0.0, 1024.0, -4096.0]),
)
def test_raw_logprobs_equal_an_independent_log_softmax(values: list[float], offset: float) -> None:
    row = row_of(v + offset for v in values)
    best = max(row.tolist())
    log_total = math.log(math.fsum(math.exp(x - best) for x in row.tolist()))
    for token, x in enumerate(row.tolist()):
        assert raw_logprob(row, token) == pytest.approx(x - best - log_total, rel=1e-12, abs=1e-12)


def test_raw_logprobs_sum_to_one_and_an_impossible_id_has_minus_infinity() -> None:
    row = row_of([1.0, -np.inf, 3.0])
    assert math.fsum(math.exp(raw_logprob(row, token)) for token in range(3)) == pytest.approx(1)
    assert raw_logprob(row, 1) == -math.inf
