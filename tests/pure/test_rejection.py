"""The rejection rule: whatever the draft, the output has the target's distribution, and the draft is used optimally.

Chi-square and rate tests are seeded; each would fail for one in a million correct rules. That they can fail is shown
by the faulty draft of case C06, which they refuse.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import codec, rejection
from shared.pb import verifier_pb2 as pb
from shared.randomness import Purpose, draft_unit, ids_digest
from shared.rejection import ROW_TOTAL, QRow, draw, draw_from_row, draw_plain, judge_one, quantise
from shared.sampling import SamplingParams, Warped, warp
from shared.types import Epoch, Hint
from tests.statistics import FALSE_ALARM, FALSE_ALARM_SIGMAS, goodness_p

DRAWS = 8_000
SECRET = 0xC0FFEE


def warped_with(shares: list[float]) -> Warped:
    """A warped row with these probabilities; ids of probability 0 are not kept."""
    kept = [(token, share) for token, share in enumerate(shares) if share > 0]
    best = max(share for _, share in kept)
    return Warped(np.array([token for token, _ in kept]), np.array([math.log(share / best) for _, share in kept]))


def shares_of(row: QRow, size: int) -> npt.NDArray[np.float64]:
    return np.array([row.probability(token) for token in range(size)])


# ---------------------------------------------------------------- quantised rows

warped_rows = st.builds(
    lambda scores, gap: Warped(np.arange(len(scores)) * gap + 1, np.array(scores) - max(scores)),
    st.lists(st.floats(-60, 0), min_size=1, max_size=80),
    st.integers(1, 1000),
)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(warped=warped_rows, most=st.integers(1, 64))
def test_a_quantised_row_holds_the_likeliest_ids_with_positive_weights_that_sum_to_65535(
    warped: Warped, most: int
) -> None:
    row = quantise(warped, most)
    assert sum(row.weights) == ROW_TOTAL == 65535
    assert min(row.weights) > 0
    assert len(set(row.ids)) == len(row.ids) == len(row.weights) <= min(most, len(warped.ids))
    assert all(type(number) is int for number in (*row.ids, *row.weights))
    probabilities = dict(zip(warped.ids.tolist(), warped.probabilities().tolist(), strict=True))
    likeliest = sorted(probabilities, key=lambda token: (-probabilities[token], token))[:most]
    assert list(row.ids) == likeliest[: len(row.ids)] or set(row.ids) <= set(likeliest)
    kept_mass = math.fsum(probabilities[token] for token in likeliest)
    for token in likeliest:
        share = probabilities[token] / kept_mass
        assert abs(row.probability(token) - share) < (1 + 1e-9) / ROW_TOTAL


@settings(derandomize=True, max_examples=100, deadline=None)
@given(warped=warped_rows)
def test_quantising_is_deterministic(warped: Warped) -> None:
    assert quantise(warped) == quantise(Warped(warped.ids.copy(), warped.scores.copy()))
    assert len(quantise(warped).ids) <= 32


def test_known_rows_quantise_as_by_hand() -> None:
    assert quantise(warped_with([1.0])) == QRow((0,), (65535,))
    assert quantise(warped_with([0.0, 0.25, 0.75])) == QRow((2, 1), (49151, 16384))  # remainders .25 and .75
    assert quantise(warped_with([1 / 3] * 3)) == QRow((0, 1, 2), (21845, 21845, 21845))
    assert quantise(warped_with([0.5, 0.5])) == QRow((0, 1), (32768, 32767))  # the tie goes to the lowest id
    assert quantise(warped_with([0.4, 0.3, 0.2, 0.1]), 2) == QRow((0, 1), (37449, 28086))
    assert quantise(warped_with([1 - 1e-9, 1e-9])) == QRow((0,), (65535,))


def test_probability_of_an_id_is_its_weight_and_0_outside_the_row() -> None:
    row = QRow((7, 3), (65534, 1))
    assert [row.probability(token) for token in (7, 3, 5)] == [65534 / 65535, 1 / 65535, 0.0]


# ---------------------------------------------------------------- drawing from a row

ROWS = [
    QRow((5,), (65535,)),
    QRow((9, 2), (65534, 1)),
    QRow((2, 9), (1, 65534)),
    QRow((4, 1, 3), (21845, 21845, 21845)),
    quantise(warped_with([0.3, 0.001, 0.2, 0.2, 0.2999])),
]


@pytest.mark.parametrize("row", ROWS)
def test_each_of_the_65535_quantiles_falls_to_exactly_one_unit_of_weight(row: QRow) -> None:
    counts = Counter(draw_from_row(row, (n + 0.5) / ROW_TOTAL) for n in range(ROW_TOTAL))
    assert counts == dict(zip(row.ids, row.weights, strict=True))


@pytest.mark.parametrize("row", ROWS)
def test_the_ends_of_the_quantile_range_fall_into_the_row(row: QRow) -> None:
    assert draw_from_row(row, 2.0**-53) == row.ids[0]
    assert draw_from_row(row, 1 - 2.0**-53) == row.ids[-1]


def test_draft_draws_follow_the_weights() -> None:
    row = quantise(warped_with([0.5, 0.25, 0.125, 0.125]))
    drawn = Counter(draw_from_row(row, draft_unit(SECRET, 0, ids_digest((n,)))) for n in range(DRAWS))
    assert goodness_p([drawn[token] for token in range(4)], shares_of(row, 4).tolist()) > FALSE_ALARM


def test_masses_are_drawn_by_share_and_an_empty_mass_never() -> None:
    ids, masses = np.array([3, 5, 6, 8, 9]), np.array([0.0, 2.0, 0.0, 6.0, 0.0])
    drawn = Counter(draw(ids, masses, (n + 0.5) / 1000) for n in range(1000))
    assert drawn == {5: 250, 8: 750}
    assert draw(ids, masses, 2.0**-53) == 5
    assert draw(ids, masses, 1 - 2.0**-53) == 8


# ---------------------------------------------------------------- one position: exact for any draft

PAIRS: dict[str, tuple[list[float], list[float]]] = {
    "close": ([0.5, 0.3, 0.15, 0.05], [0.45, 0.35, 0.1, 0.1]),
    "reordered": ([0.6, 0.3, 0.08, 0.02], [0.02, 0.08, 0.3, 0.6]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "disjoint": ([0.7, 0.3, 0.0, 0.0], [0.0, 0.0, 0.4, 0.6]),
    "half disjoint": ([0.5, 0.3, 0.2, 0.0], [0.0, 0.3, 0.2, 0.5]),
    "one-hot draft": ([0.4, 0.3, 0.2, 0.1], [0.0, 1.0, 0.0, 0.0]),
    "one-hot target": ([0.0, 0.0, 1.0, 0.0], [0.4, 0.3, 0.2, 0.1]),
    "draft wider than the target": ([0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
    "target wider than the draft": ([0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]),
    "rare target id": ([0.998, 0.001, 0.001], [0.2, 0.4, 0.4]),
    "peaked draft": ([0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]),
}


def distance(p: list[float], row: QRow) -> float:
    """Total variation between the target and the draft that was really sampled from."""
    return float(np.abs(np.array(p) - shares_of(row, len(p))).sum() / 2)


def judged(
    p: list[float], row: QRow, hinted: Callable[[int], int], seed: int = 21
) -> tuple[npt.NDArray[np.int64], int]:
    """Counts per id and accepted hints over many positions with this target, row and way to choose the hinted id."""
    target, counts, accepted = warped_with(p), np.zeros(len(p), dtype=np.int64), 0
    for position in range(DRAWS):
        result = judge_one(target, row, hinted(position), seed, 1, position)
        counts[result.token] += 1
        accepted += result.is_accepted
    return counts, accepted


def sampled_from(row: QRow) -> Callable[[int], int]:
    return lambda position: draw_from_row(row, draft_unit(SECRET, 1, ids_digest((position,))))


@pytest.mark.parametrize("kind", PAIRS)
def test_the_output_has_the_targets_distribution_and_hints_are_accepted_as_often_as_can_be(kind: str) -> None:
    p, q = PAIRS[kind]
    row = quantise(warped_with(q))
    counts, accepted = judged(p, row, sampled_from(row))
    assert goodness_p(counts, p) > FALSE_ALARM
    expected = 1 - distance(p, row)
    spread = FALSE_ALARM_SIGMAS * math.sqrt(max(expected * (1 - expected), 1e-4) / DRAWS)
    assert accepted / DRAWS == pytest.approx(expected, abs=spread)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_truncated_draft_is_exact_too(most: int) -> None:
    p, q = [0.3, 0.25, 0.2, 0.15, 0.1], [0.1, 0.3, 0.25, 0.25, 0.1]
    row = quantise(warped_with(q), most)
    assert len(row.ids) == most
    counts, accepted = judged(p, row, sampled_from(row))
    assert goodness_p(counts, p) > FALSE_ALARM
    assert accepted / DRAWS == pytest.approx(1 - distance(p, row), abs=FALSE_ALARM_SIGMAS * 0.5 / math.sqrt(DRAWS))


def test_warped_targets_and_drafts_are_exact_through_the_same_filters() -> None:  # C07
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal(24) * 2).astype(np.float32)
    draft_logits = logits + rng.standard_normal(24).astype(np.float32)
    params = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)
    target, row = warp(logits, params), quantise(warp(draft_logits, params), 6)
    p = np.zeros(24)
    p[target.ids] = target.probabilities()
    hinted, counts = sampled_from(row), np.zeros(24, dtype=np.int64)
    for position in range(DRAWS):
        assert row.probability(hinted(position)) > 0
        counts[judge_one(target, row, hinted(position), 3, 0, position).token] += 1
    assert goodness_p(counts, p.tolist()) > FALSE_ALARM


def test_a_greedy_draft_is_exact_if_its_row_says_so() -> None:  # C06, second mode
    p, q = PAIRS["close"]
    one_hot = QRow((0,), (ROW_TOTAL,))
    assert quantise(warp(np.log(np.array(q, dtype=np.float32)), SamplingParams(temperature=0.0))) == one_hot
    counts, _ = judged(p, one_hot, lambda position: 0)
    assert goodness_p(counts, p) > FALSE_ALARM


@pytest.mark.parametrize("kind", ["close", "reordered", "equal", "half disjoint"])
def test_a_greedy_draft_with_a_soft_row_is_found_out_by_the_same_chi_square(kind: str) -> None:  # C06, third mode
    p, q = PAIRS[kind]
    row = quantise(warped_with(q))
    counts, _ = judged(p, row, lambda position: row.ids[0])
    assert goodness_p(counts, p) < FALSE_ALARM


def test_a_row_recomputed_after_the_draw_is_found_out_too() -> None:  # C07: the q tested is not the q drawn from
    p, q = PAIRS["close"]
    drawn_from = quantise(warped_with(q))
    sent = quantise(warp(np.log(np.array(q, dtype=np.float32)), SamplingParams(temperature=0.7)))
    counts, _ = judged(p, sent, sampled_from(drawn_from))
    assert goodness_p(counts, p) < FALSE_ALARM


def test_plain_and_bonus_draws_have_the_targets_distribution_and_are_independent() -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    target, pairs = warped_with(p), Counter[tuple[int, int]]()
    for position in range(DRAWS):
        plain = draw_plain(target, 4, 0, position, Purpose.PLAIN)
        pairs[plain, draw_plain(target, 4, 0, position, Purpose.BONUS)] += 1
    cells = list(itertools.product(range(4), range(4)))
    assert goodness_p([pairs[cell] for cell in cells], [p[a] * p[b] for a, b in cells]) > FALSE_ALARM


# ---------------------------------------------------------------- the rule at its edges


def with_units(monkeypatch: pytest.MonkeyPatch, accept: float, residual: float = 0.5) -> None:
    units = {Purpose.ACCEPT: accept, Purpose.RESIDUAL: residual}
    monkeypatch.setattr(rejection, "judge_unit", lambda seed, epoch, position, purpose: units[purpose])


def test_acceptance_is_strict_and_its_threshold_is_p_over_q(monkeypatch: pytest.MonkeyPatch) -> None:
    target, row = warped_with([0.25, 0.75]), QRow((0, 1), (49152, 16383))
    threshold = 0.25 / (49152 / ROW_TOTAL)
    for u, is_accepted in ((threshold * (1 - 1e-9), True), (threshold * (1 + 1e-9), False)):
        with_units(monkeypatch, u)
        assert judge_one(target, row, 0, 0, 0, 0).is_accepted is is_accepted


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_an_id_that_the_target_forbids_is_never_accepted(monkeypatch: pytest.MonkeyPatch, u: float) -> None:
    with_units(monkeypatch, u)
    for row in (QRow((2,), (ROW_TOTAL,)), QRow((0, 2), (65534, 1)), QRow((0,), (ROW_TOTAL,))):
        result = judge_one(warped_with([0.5, 0.5]), row, 2, 0, 0, 0)
        assert not result.is_accepted
        assert result.token in (0, 1)


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_an_id_that_the_target_likes_at_least_as_well_is_always_accepted(
    monkeypatch: pytest.MonkeyPatch, u: float
) -> None:
    with_units(monkeypatch, u)
    assert judge_one(warped_with([0.5, 0.5]), QRow((1, 0), (32768, 32767)), 0, 0, 0, 0).is_accepted
    assert judge_one(warped_with([0.0, 1.0]), QRow((1,), (ROW_TOTAL,)), 1, 0, 0, 0).is_accepted


@pytest.mark.parametrize("residual", [2.0**-53, 0.2, 0.8, 1 - 2.0**-53])
def test_a_correction_has_more_mass_under_the_target_than_under_the_draft(
    monkeypatch: pytest.MonkeyPatch, residual: float
) -> None:
    with_units(monkeypatch, 1 - 2.0**-53, residual)
    result = judge_one(warped_with([0.2, 0.5, 0.3]), QRow((0, 2, 1), (39321, 19661, 6553)), 0, 0, 0, 0)
    assert (result.token, result.is_accepted) == (1, False)


def test_without_residual_mass_the_correction_is_drawn_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only a hinted id outside its own row leaves max(p - q, 0) empty. The rim refuses it; the rule survives it.
    assert judge_one(warped_with([0.0, 1.0]), QRow((1,), (ROW_TOTAL,)), 9, 0, 0, 0).token == 1
    monkeypatch.setattr(rejection, "ROW_TOTAL", 65536)  # so that q can be one half exactly
    for residual, token in ((0.1, 0), (0.9, 1)):
        with_units(monkeypatch, 0.5, residual)
        result = judge_one(warped_with([0.5, 0.5]), QRow((0, 1), (32768, 32768)), 9, 0, 0, 0)
        assert (result.token, result.is_accepted) == (token, False)


def test_a_position_is_judged_alike_each_time_and_apart_in_other_epochs() -> None:
    p, q = PAIRS["reordered"]
    target, row = warped_with(p), quantise(warped_with(q))
    first = [judge_one(target, row, 3, 5, 1, position) for position in range(200)]
    assert first == [judge_one(target, row, 3, 5, 1, position) for position in range(200)]
    assert first != [judge_one(target, row, 3, 5, 2, position) for position in range(200)]
    assert first != [judge_one(target, row, 3, 6, 1, position) for position in range(200)]


# ---------------------------------------------------------------- chains: C06 in full, 8 ids, three hints a round

VOCABULARY, LENGTH, HINTS = 8, 3, 3
TABLES = np.random.default_rng(66)
TARGET_LOGITS = (TABLES.standard_normal((VOCABULARY, VOCABULARY)) * 1.5).astype(np.float32)
DRAFT_LOGITS = TARGET_LOGITS + TABLES.standard_normal((VOCABULARY, VOCABULARY)).astype(np.float32)
TARGETS = [warp(row, SamplingParams()) for row in TARGET_LOGITS]
DRAFTS = [quantise(warp(row, SamplingParams()), 5) for row in DRAFT_LOGITS]
RUNS = 3000
Mode = Callable[[QRow, float], tuple[int, QRow]]


def sampled(row: QRow, u: float) -> tuple[int, QRow]:
    return draw_from_row(row, u), row


def greedy(row: QRow, u: float) -> tuple[int, QRow]:
    return row.ids[0], QRow(row.ids[:1], (ROW_TOTAL,))


def greedy_with_a_soft_row(row: QRow, u: float) -> tuple[int, QRow]:
    return row.ids[0], row


def written(run: int, mode: Mode) -> list[int]:
    """Three ids after id 0, by rounds of three hints each: accepted ids, then a correction or a bonus."""
    ids, secret = [0], SECRET + run
    while len(ids) <= LENGTH:
        chain = list(ids)
        rows: list[QRow] = []
        for _ in range(HINTS):
            token, row = mode(DRAFTS[chain[-1]], draft_unit(secret, 0, ids_digest(chain)))
            chain.append(token)
            rows.append(row)
        for row, hinted in zip(rows, chain[len(ids) :], strict=True):
            result = judge_one(TARGETS[ids[-1]], row, hinted, run, 0, len(ids))
            ids.append(result.token)
            if not result.is_accepted:
                break
        else:
            ids.append(draw_plain(TARGETS[ids[-1]], run, 0, len(ids), Purpose.BONUS))
    return ids[1 : LENGTH + 1]


def p_values(mode: Mode) -> list[float]:
    """For each position, that of the id there under the target alone; then that of the last two ids together."""
    step = np.zeros((VOCABULARY, VOCABULARY))
    for token, target in enumerate(TARGETS):
        step[token, target.ids] = target.probabilities()
    texts = [written(run, mode) for run in range(RUNS)]
    values, shares = [], np.eye(VOCABULARY)[0]
    for position in range(LENGTH):
        pairs = (shares[:, None] * step).ravel()
        shares = shares @ step
        values.append(
            goodness_p(np.bincount([text[position] for text in texts], minlength=VOCABULARY), shares.tolist())
        )
    joint = np.bincount([text[-2] * VOCABULARY + text[-1] for text in texts], minlength=VOCABULARY**2)
    return [*values, goodness_p(joint, pairs.tolist())]


@pytest.mark.parametrize("mode", [sampled, greedy])
def test_chains_have_the_targets_distribution_at_every_position(mode: Mode) -> None:
    assert min(p_values(mode)) > FALSE_ALARM


def test_chains_of_a_greedy_draft_with_soft_rows_are_found_out() -> None:
    assert max(p_values(greedy_with_a_soft_row)[:LENGTH]) < FALSE_ALARM


# ---------------------------------------------------------------- what travels is what was sampled


@settings(derandomize=True, max_examples=200, deadline=None)
@given(warped=warped_rows, secret=st.integers(0, 2**64 - 1))
def test_a_row_arrives_as_the_integers_that_were_sampled_from(warped: Warped, secret: int) -> None:
    row = quantise(warped)
    hinted = draw_from_row(row, draft_unit(secret, 0, ids_digest((1, 2))))
    wire = codec.encode_up(Hint(Epoch(0), 1, (hinted,), 2, base_position=2, rows=(row,))).SerializeToString()
    arrived = codec.decode_up(pb.Up.FromString(wire), codec.Rim())
    assert isinstance(arrived, Hint)
    assert arrived.rows == (row,)
    assert arrived.rows[0].probability(hinted) == row.probability(hinted) > 0
    target = warped_with([0.25] * 4)
    assert judge_one(target, arrived.rows[0], hinted, 1, 0, 2) == judge_one(target, row, hinted, 1, 0, 2)
