"""`python -m bench distribution`: is the text's distribution exactly the target's, and would we see it if it were not?

Thousands of short sessions per case run through the real verifier, drafter and codec in virtual time
(`distribution_world`) over eight ids whose every probability is known (`toy_pair`); the texts are held against the
truth by chi-square. Honest cases must match, cases broken on purpose must be caught. Called by `bench.__main__`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from bench.distribution_broken import BROKEN, NO_EFFECT
from bench.distribution_edge_cases import EDGE_BROKEN, EDGE_HONEST
from bench.distribution_honest import HONEST, TWO_BYTES, Case
from bench.distribution_setting import TEXT_IDS, Outcome, Setting, patched
from bench.distribution_world import World
from bench.statistics import least_p, sigmas_off, table_p, tables_p
from bench.toy_pair import ENDED, ToyPair, next_shares, row_index, seen_through, text_shares
from shared import agreement, rejection
from shared.errors import ConfigError
from shared.sampling import Counts, Warped, warp_reference
from shared.types import Rule

FALSE_ALARM = 1e-6
"""An honest case fails below this p-value: once in a million right cases. A broken case must fall below it."""
SIGMAS = 5.0
"""How far measured acceptance of an honest case may be off the theory: another false alarm of 3e-7 on each side."""
DEFAULT_DRAWS, DEFAULT_SEED = 600, 20_261_129
VIEWS = ((0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3))
"""The places of a text that are held against the truth together; all at once in one p-value (Bonferroni)."""
CASES: tuple[Case, ...] = (*HONEST, *EDGE_HONEST, *NO_EFFECT, *BROKEN, *EDGE_BROKEN)


@dataclass(frozen=True)
class CaseResult:
    """What one case gave. Acceptance and theory are those of the first node of each hint judged, 0 if none was."""

    name: str
    rule: str
    expected: str
    p_value: float
    draws: int
    verdict: str
    acceptance: float
    theory: float
    theory_is: str
    judged_hints: int
    texts_off_plain: int | None
    seconds: float
    why: str
    did: dict[str, int]
    """What the product's device did, if it was that one: hints, drafts, rests, ..."""

    @property
    def is_as_expected(self) -> bool:
        """True if the case passes."""
        return self.verdict in ("matches", "caught", "no effect found")


def measure(case: Case, draws: int, seed: int) -> CaseResult:
    """Runs one case and judges it."""
    started = time.perf_counter()
    setting, number = case.setting, max(1, round(draws * case.share))
    world = World(setting, seed ^ zlib.crc32(f"{setting.rule.value} {case.name}".encode()))
    with patched(setting.patches):
        outcomes = [world.run(index) for index in range(number)]
    first = texts_p([outcome.text for outcome in outcomes], setting)
    others = least_p([1.0, *later_ps(outcomes, setting), *leaning_ps(outcomes, setting)])
    p_value = least_p([first, others])
    accepted, judged, expected = _acceptance(setting, outcomes)
    is_agreement = setting.rule is Rule.AGREEMENT
    off = sigmas_off(accepted, judged, expected) if judged else 0.0
    is_rate_right = off > -SIGMAS and (is_agreement or off < SIGMAS)
    off_plain = _texts_off_plain(world, outcomes) if is_agreement else None
    return CaseResult(
        name=case.name,
        rule=setting.rule.value,
        expected=case.expected,
        p_value=p_value,
        draws=number,
        verdict=_verdict(case.expected, p_value, is_rate_right, off_plain),
        acceptance=accepted / judged if judged else 0.0,
        theory=expected,
        theory_is="(1-TV)/(1+TV) at least" if is_agreement else "1-TV",
        judged_hints=judged,
        texts_off_plain=off_plain,
        seconds=time.perf_counter() - started,
        why=case.why,
        did=dict(world.tally),
    )


def _verdict(expected: str, p_value: float, is_rate_right: bool, off_plain: int | None) -> str:
    if expected == "differs":
        return "caught" if p_value < FALSE_ALARM else "NOT CAUGHT"
    if p_value < FALSE_ALARM:
        return "BIASED"
    if off_plain:
        return "TEXTS DEPEND ON HINTS"
    if expected == "matches" and not is_rate_right:
        return "ACCEPTANCE OFF"
    return expected


# ---------------------------------------------------------------- texts


def texts_p(texts: Iterable[tuple[int, ...]], setting: Setting) -> float:
    """The p-value of whole texts: single places, neighbours, runs of three, and all four ids together."""
    counts = Counter(texts)
    told = text_shares(setting.pair, setting.sampling, setting.stop_ids, TEXT_IDS, VIEWS)
    return least_p([table_p(seen_through(counts, view), told[view]) for view in VIEWS])


def later_ps(outcomes: Sequence[Outcome], setting: Setting) -> list[float]:
    """P-values of what follows the first ids, where the device knows its link: each id, and each pair, by the two
    ids before it. Nothing under penalties, where more than two ids count."""
    if setting.sampling.has_penalties:
        return []
    pair, begins = setting.pair, len(setting.pair.context) + TEXT_IDS
    ps = []
    for length in (1, 2):
        counts: dict[tuple[int, ...], Counter[tuple[int, ...]]] = defaultdict(Counter)
        for outcome in outcomes:
            ids = outcome.whole
            for at in range(begins, min(len(ids), begins - TEXT_IDS + setting.new_ids - length + 1), length):
                block = ids[at : at + length]
                counts[ids[at - 2 : at]][(*block, *[ENDED] * (length - len(block)))] += 1
        told = {before: _block_shares(pair, setting, before, length) for before in counts}
        if counts:
            ps.append(tables_p(counts, told))
    return ps


def leaning_ps(outcomes: Sequence[Outcome], setting: Setting) -> list[float]:
    """P-values of a few sums over all ids of all texts that timing by what was drawn would shift: each id's deviation
    of a feature from its mean under the target. One degree of freedom each, so they see what many cells would hide."""
    if setting.sampling.has_penalties:
        return []
    visits: Counter[tuple[tuple[int, ...], int]] = Counter()
    for outcome in outcomes:
        ids = outcome.whole
        visits.update((ids[at - 2 : at], ids[at]) for at in range(len(setting.pair.context), len(ids)))
    totals: dict[tuple[int, ...], int] = Counter()
    for (before, _), count in visits.items():
        totals[before] += count
    features = cache(lambda before, token: _features(setting, before, token))
    seen = told = variance = np.zeros(len(features(setting.pair.context, setting.pair.ids[0])))
    for (before, token), count in visits.items():
        seen = seen + count * features(before, token)
    for before, count in totals.items():
        shares = next_shares(setting.pair, setting.sampling, before, setting.pair.target_rows())
        values, chances = np.array([features(before, token) for token in shares]), np.array(list(shares.values()))
        mean = chances @ values
        told, variance = told + count * mean, variance + count * (chances @ (values - mean) ** 2)
    sigmas = np.abs(seen - told)[variance > 1] / np.sqrt(variance[variance > 1])
    return [math.erfc(float(each) / math.sqrt(2)) for each in sigmas]


def _features(setting: Setting, before: tuple[int, ...], token: int) -> npt.NDArray[np.float64]:
    """Is an id likely by the draft, a stop id, followed by a sure row, by a short one, long on the wire? Times 10, so
    that a few texts give variance enough to be looked at. Shapes: (5,)."""
    pair, sampling = setting.pair, setting.draft_sampling or setting.sampling
    here = next_shares(pair, sampling, before, pair.draft_rows())
    after = next_shares(pair, sampling, (before[-1], token), pair.draft_rows())
    is_stop, is_long = token in setting.stop_ids, token >= TWO_BYTES
    return 10 * np.array([here.get(token, 0.0), max(after.values()), len(after) / len(pair.ids), is_stop, is_long])


def _block_shares(
    pair: ToyPair, setting: Setting, before: tuple[int, ...], length: int
) -> dict[tuple[int, ...], float]:
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for block, share in shares.items():
            if block and (block[-1] == ENDED or block[-1] in setting.stop_ids):
                longer[*block, ENDED] = share
                continue
            told = next_shares(pair, setting.sampling, before + block, pair.target_rows())
            longer.update({(*block, token): share * chance for token, chance in told.items()})
        shares = longer
    return shares


def _texts_off_plain(world: World, outcomes: Sequence[Outcome]) -> int:
    """How many texts are not those of the target alone with the same seed: under agreement there must be none."""
    known: dict[tuple[int, ...], Warped] = {}
    plain = (_plain_text(world.setting, world.keys(index)[0], known) for index in range(len(outcomes)))
    return sum(text != outcome.text for text, outcome in zip(plain, outcomes, strict=True))


def _plain_text(setting: Setting, seed: int, known: dict[tuple[int, ...], Warped]) -> tuple[int, ...]:
    pair, ids = setting.pair, list(setting.pair.context)
    while len(ids) < len(pair.context) + TEXT_IDS:
        key = tuple(ids)
        if key not in known:
            row, counts = pair.target_rows()[row_index(pair.ranks, *ids[-2:])], Counts.of(ids, len(pair.context))
            known[key] = warp_reference(row, setting.sampling, counts, pair.valid_ids)
        ids.append(agreement.choose(known[key], seed, len(ids)))
        if ids[-1] in setting.stop_ids:
            break
    text = ids[len(pair.context) :]
    return (*text, *[ENDED] * (TEXT_IDS - len(text)))


# ---------------------------------------------------------------- acceptance


def _acceptance(setting: Setting, outcomes: Sequence[Outcome]) -> tuple[int, int, float]:
    """First nodes accepted, first nodes judged, and the rate that theory gives for their contexts on average."""
    judged = [pair for outcome in outcomes for pair in outcome.judged]
    if not judged:
        return 0, 0, 0.0
    with patched(setting.patches):
        rate = cache(lambda ids: _theory(setting, ids))
        expected = sum(rate(ids) for ids, _ in judged) / len(judged)
    return sum(is_accepted for _, is_accepted in judged), len(judged), expected


def _theory(setting: Setting, ids: tuple[int, ...]) -> float:
    pair, counts = setting.pair, Counts.of(ids, len(setting.pair.context))
    target = next_shares(pair, setting.sampling, ids, pair.target_rows())
    scores = pair.draft_rows()[row_index(pair.ranks, *ids[-2:])]
    drafted = warp_reference(scores, setting.draft_sampling or setting.sampling, counts, pair.valid_ids)
    if setting.rule is Rule.REJECTION:
        row = rejection.quantise(drafted)
        return sum(min(row.probability(token), share) for token, share in target.items())
    draft: dict[int, float] = dict(zip(drafted.ids.tolist(), drafted.probabilities().tolist(), strict=True))
    overlap = sum(min(draft.get(token, 0.0), share) for token, share in target.items())
    return overlap / (2 - overlap)  # 1 - TV is the overlap


# ---------------------------------------------------------------- the command


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `distribution`."""
    parser = subparsers.add_parser(
        "distribution",
        help="is the text's distribution the target's own? chi-square over toy sessions, with broken twins",
        description=(
            "Runs many short sessions per case through the real codec, session, scheduler, judge, worker and drafter, "
            "in virtual time, over a toy target and draft of eight ids with known probabilities. Honest cases must "
            f"have the target's distribution (an honest case fails by chance once in {1 / FALSE_ALARM:,.0f}); cases "
            "with one rule broken on purpose must be told from it; cases marked 'no effect found' break a rule in a "
            "way that was found not to matter, and say why. Exit code 0 if all are as expected."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--draws",
        type=_draws,
        default=DEFAULT_DRAWS,
        metavar="N",
        help="sessions per case (%(default)s: about a minute on one core); some cases take a stated share of it",
    )
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, metavar="N", help="of all draws (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose rule or name holds this text")
    parser.set_defaults(handler=run)


def _draws(text: str) -> int:
    value = int(text)
    if value < 10:
        raise argparse.ArgumentTypeError("at least 10: the chi-square law needs counts")
    return value


def run(args: argparse.Namespace) -> int:
    """The subcommand; 0 only if every case is as expected."""
    started = time.perf_counter()
    cases = [case for case in CASES if args.only in f"{case.setting.rule.value} {case.name}"]
    if not cases:
        raise ConfigError(f"--only: no case holds {args.only!r}", field="only")
    tell: Callable[[str], None] = (lambda line: None) if args.json else print
    tell(f"{'rule':<10}{'case':<76}{'expected':<17}{'p-value':>9}  {'acceptance':>10}  {'theory':>7}  verdict")
    results = []
    for case in cases:
        result = measure(case, args.draws, args.seed)
        results.append(result)
        tell(_line(result))
        if case.expected == "no effect found":
            tell(f"{'':<10}  because {case.why}")
        sys.stdout.flush()
    passed = all(result.is_as_expected for result in results)
    seconds = time.perf_counter() - started
    if args.json:
        report = [asdict(result) for result in results]
        print(json.dumps({"cases": report, "passed": passed, "false_alarm": FALSE_ALARM, "seconds": seconds}))
    wrong = sum(not result.is_as_expected for result in results)
    tell(f"{len(results)} cases, {wrong} not as expected; false alarm {FALSE_ALARM:g} a case; {seconds:.0f} s")
    return 0 if passed else 1


def _line(result: CaseResult) -> str:
    bound = ">=" if result.rule == Rule.AGREEMENT.value else "="
    rates = f"{result.acceptance:>10.3f}  {bound:>2}{result.theory:.3f}"
    if result.expected == "differs":
        rates = " " * len(rates)
    name = result.name if len(result.name) < 75 else result.name[:72] + "..."
    return f"{result.rule:<10}{name:<76}{result.expected:<17}{result.p_value:>9.1e}  {rates}  {result.verdict}"
