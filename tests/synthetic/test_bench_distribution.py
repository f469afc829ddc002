"""The distribution bench in short: honest cases match, broken ones are caught. Seeded, so it passes or fails for ever.

False-alarm rate: 1e-6 an honest case, and 6e-7 for its acceptance (5 sigmas, both sides).
`python -m bench distribution --draws 20000` is the long version.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bench import distribution, statistics
from bench.distribution_broken import BROKEN, NO_EFFECT
from bench.distribution_edge_cases import EDGE_BROKEN, EDGE_HONEST, EDGE_REJECTION
from bench.distribution_honest import HONEST, Case
from bench.distribution_setting import TEXT_IDS, Outcome, Setting
from bench.toy_pair import ENDED, PLAIN_IDS, SPREAD_IDS, ToyPair, next_shares, text_shares
from shared.sampling import SamplingParams
from tests import statistics as yardstick

HONEST_DRAWS, BROKEN_DRAWS, SEED = 80, 350, 5
EDGE_DRAWS, EDGE_BROKEN_DRAWS = 8, 130
STRONGEST = (
    "soft rows though the draft was greedy (C06)",
    "rows of another temperature (C07)",
    "long frames lost more often, tokens redrawn",
    "only likely tokens sent",
    "a position judged again with a second draw",
    "one device secret for many sessions of one context",
    "noise that forgets its position",
)
STRONGEST_OF_THE_EDGE = (
    "own device flushes once an unlikely id was drawn",
    "own device, frames as long as their rows, on a slow uplink",
)


def named(case: Case) -> str:
    return f"{case.setting.rule.value}: {case.name}"


@pytest.mark.parametrize("case", [*HONEST, *NO_EFFECT], ids=named)
def test_the_texts_have_the_targets_distribution(case: Case) -> None:
    result = distribution.measure(case, HONEST_DRAWS, SEED)
    assert result.is_as_expected, result
    assert result.p_value >= distribution.FALSE_ALARM


@pytest.mark.parametrize("case", [case for case in BROKEN if case.name in STRONGEST], ids=named)
def test_a_broken_rule_is_caught(case: Case) -> None:
    result = distribution.measure(case, BROKEN_DRAWS, SEED)
    assert result.verdict == "caught", result
    assert result.p_value < distribution.FALSE_ALARM


@pytest.mark.parametrize("case", EDGE_HONEST, ids=named)
def test_the_products_own_device_gives_the_targets_distribution(case: Case) -> None:
    result = distribution.measure(case, EDGE_DRAWS, SEED)
    assert result.is_as_expected, result
    assert result.p_value >= distribution.FALSE_ALARM


@pytest.mark.parametrize("case", [case for case in EDGE_BROKEN if case.name in STRONGEST_OF_THE_EDGE], ids=named)
def test_an_engine_that_looks_at_what_was_drawn_is_caught(case: Case) -> None:
    result = distribution.measure(case, EDGE_BROKEN_DRAWS, SEED)
    assert result.verdict == "caught", result
    assert result.p_value < distribution.FALSE_ALARM


def test_the_products_own_device_drafts_ahead_rests_probes_and_says_again_in_these_cases() -> None:
    did: Counter[str] = Counter()
    for case in EDGE_REJECTION:
        did.update(distribution.measure(replace(case, share=1.0), 3, SEED).did)
    for what in ("hints", "drafts", "late", "rests", "probes", "rebases", "cuts", "drafted offline", "said again"):
        assert did[what] > 0, (what, did)
    assert did["nodes"] > did["hints"]


def test_the_strongest_breakages_are_all_there_and_names_are_unique() -> None:
    assert set(STRONGEST) <= {case.name for case in BROKEN}
    assert set(STRONGEST_OF_THE_EDGE) <= {case.name for case in EDGE_BROKEN}
    assert len({named(case) for case in distribution.CASES}) == len(distribution.CASES)


def test_after_a_broken_case_the_product_is_whole_again() -> None:
    broken = next(case for case in BROKEN if case.setting.patches)
    distribution.measure(broken, 5, SEED)
    for owner, name, value in broken.setting.patches:
        assert getattr(owner, name) is not value


def test_a_case_gives_the_same_figures_each_time() -> None:
    case = HONEST[1]
    first, second = (distribution.measure(case, 30, SEED) for _ in range(2))
    assert (first.p_value, first.judged_hints, first.acceptance) == (
        second.p_value,
        second.judged_hints,
        second.acceptance,
    )


@pytest.mark.parametrize("ids", [PLAIN_IDS, SPREAD_IDS])
def test_the_truth_sums_to_one_and_ends_texts_at_the_stop_id(ids: tuple[int, ...]) -> None:
    pair, stop = ToyPair(ids=ids), ids[1]
    every = tuple(range(TEXT_IDS))
    texts = text_shares(pair, SamplingParams(), (stop,), TEXT_IDS, (every, (0,)))
    assert sum(texts[every].values()) == pytest.approx(1)
    first = next_shares(pair, SamplingParams(), pair.context, pair.target_rows())
    assert texts[0,] == pytest.approx({(token,): share for token, share in first.items()})
    assert texts[every][stop, ENDED, ENDED, ENDED] == pytest.approx(first[stop])
    assert set(first) == set(ids)


def test_texts_drawn_from_the_truth_match_it_and_slightly_wrong_ones_do_not() -> None:
    setting, rng = Setting(), np.random.default_rng(1)
    every = tuple(range(TEXT_IDS))
    shares = text_shares(setting.pair, setting.sampling, (), TEXT_IDS, (every,))[every]
    texts, chances = list(shares), np.array(list(shares.values()))
    right = [texts[index] for index in rng.choice(len(texts), 3000, p=chances)]
    assert distribution.texts_p(right, setting) > 1e-3
    flat = chances**0.8
    wrong = [texts[index] for index in rng.choice(len(texts), 3000, p=flat / flat.sum())]
    assert distribution.texts_p(wrong, setting) < distribution.FALSE_ALARM


@pytest.mark.parametrize("degrees", [1, 2, 7, 63, 511])
@pytest.mark.parametrize("ratio", [0.2, 0.9, 1.0, 1.1, 2.0, 8.0])
def test_the_benchs_chi_square_equals_that_of_the_tests(degrees: int, ratio: float) -> None:
    theirs = yardstick.chi_square_tail(degrees * ratio, degrees)
    assert statistics.chi_square_tail(degrees * ratio, degrees) == pytest.approx(theirs, rel=1e-9, abs=1e-300)


def test_later_ids_drawn_from_the_truth_match_it_and_slightly_wrong_ones_do_not() -> None:
    setting, rng = Setting(new_ids=24), np.random.default_rng(3)
    for sharpness, is_right in ((1.0, True), (0.5, False)):
        outcomes = []
        for _ in range(100):
            ids = list(setting.pair.context)
            while len(ids) < len(setting.pair.context) + setting.new_ids:
                shares = next_shares(setting.pair, setting.sampling, ids, setting.pair.target_rows())
                chances = np.array(list(shares.values())) ** sharpness
                ids.append(int(rng.choice(list(shares), p=chances / chances.sum())))
            outcomes.append(Outcome(tuple(ids[2 : 2 + TEXT_IDS]), (), tuple(ids)))
        for ps in (distribution.later_ps(outcomes, setting), distribution.leaning_ps(outcomes, setting)):
            assert (min(ps) > 1e-3) is is_right
            assert (min(ps) < distribution.FALSE_ALARM) is not is_right


def test_several_tables_add_up_to_one_p_value_that_is_spread_evenly() -> None:
    rng, chances = np.random.default_rng(4), {0: 0.1, 1: 0.2, 2: 0.7}
    ps = []
    for _ in range(400):
        tables = {at: dict(enumerate(rng.multinomial(100, list(chances.values())).tolist())) for at in range(20)}
        ps.append(statistics.tables_p(tables, dict.fromkeys(tables, chances)))
    assert yardstick.uniform_p(np.array(ps)) > 1e-3
    assert statistics.tables_p({0: {0: 1}, 1: {3: 1}}, {0: chances, 1: chances}) == 0


def test_a_count_where_nothing_can_be_has_no_chance_and_rare_cells_are_merged() -> None:
    assert statistics.table_p({"a": 99, "c": 1}, {"a": 0.5, "b": 0.5}) == 0
    assert statistics.table_p({"a": 500, "b": 500}, {"a": 0.5, "b": 0.5}) == 1
    rare = {0: 0.9, **dict.fromkeys(range(1, 11), 0.01)}
    counts = dict(enumerate(np.random.default_rng(2).multinomial(200, list(rare.values())).tolist()))
    assert statistics.table_p(counts, rare) > 1e-3
    assert statistics.table_p({**counts, 1: 60}, rare) < distribution.FALSE_ALARM


def test_the_command_prints_one_json_object_and_its_exit_code_tells_failure(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    distribution.add_parser(parser.add_subparsers())
    args = parser.parse_args(["distribution", "--json", "--draws", "40", "--only", "chains of 1"])
    assert args.handler(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert {"name", "rule", "expected", "p_value", "draws", "verdict"} <= report["cases"][0].keys()
    args = parser.parse_args(["distribution", "--draws", "10", "--only", "the residual reuses"])
    assert args.handler(args) == 1  # too few draws to catch it
    assert "NOT CAUGHT" in capsys.readouterr().out
