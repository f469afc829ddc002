"""The cases of `bench.distribution` in which the product's rules stand: each text must have the target's distribution.

`HONEST` must match. Their twins that must not are in `distribution_broken`. Called by `distribution`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from bench.distribution_device import Device
from bench.distribution_setting import Link, Setting
from bench.toy_pair import PLAIN_IDS, SPREAD_IDS, ToyPair
from edge_client.drafter import HintTree
from shared import rejection
from shared.sampling import GREEDY, SamplingParams
from shared.types import Hint, Limits, PaceKind, Rule

STOP = 1
"""A likely id of the toy pair, so that many texts end early."""
TWO_BYTES = 128
"""Ids from here on take more than one byte on the wire."""
TOP_FOUR = (rejection, "quantise", partial(rejection.quantise, max_ids=4))
PATIENT = Limits(max_wait_ms=600_000)
"""A verifier that waits for hints however long they take."""


@dataclass(frozen=True)
class Case:
    """One way to run sessions, what is expected of their texts, and why."""

    name: str
    setting: Setting
    expected: str = "matches"
    why: str = ""
    share: float = 1.0
    """Of the draws asked for: strong effects need fewer."""


def lost_by_length(hint: Hint) -> float:
    """Longer frames are lost more often, as on a link that drops by bytes: here by the first id's encoding."""
    return 0.85 if hint.ids[0] >= TWO_BYTES else 0.1


def _cut_at_stop(tree: HintTree, stop_ids: tuple[int, ...]) -> HintTree:
    most = next((n + 1 for n, token in enumerate(tree.ids) if token in stop_ids), len(tree.ids))
    return HintTree(tree.ids[:most], tree.parents[:most], tree.confidence[:most], tree.rows[:most])


class CutsAtStop(Device):
    """Sends nothing behind a stop id, but no sooner for it."""

    def cut(self, tree: HintTree) -> HintTree:
        """Up to the stop id."""
        return _cut_at_stop(tree, self.setting.stop_ids)


LATE = Link(up_ms=(0.0, 35.0), down_ms=(0.0, 15.0))
UNRELIABLE = Link(up_ms=(0.0, 25.0), down_ms=(0.0, 10.0), loss=0.3, duplicate=0.3, overtakes=True)
CUT = Link(up_ms=(0.0, 12.0), down_ms=(0.0, 12.0), cut_ms=(5.0, 80.0))
LATE_ON = Setting(pace=PaceKind.RUN_ON, link=LATE, overlap_ms=(8.0, 40.0), step_ms=30.0)
WARPED = SamplingParams(temperature=0.7, top_k=6, top_p=0.9)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.6)
SCARCE = Limits(max_held_nodes=2, max_step_nodes=1, max_wait_ms=60)
SCARCE_TREE = Limits(max_held_nodes=4, max_step_nodes=3, max_wait_ms=60)
SPREAD = ToyPair(ids=SPREAD_IDS)


def _pair(quality: str) -> ToyPair:
    return ToyPair(quality, PLAIN_IDS)


REJECTION = (
    Case("chains of 1", Setting(depth=1)),
    Case("chains of 3", Setting(depth=3)),
    Case("chains of 8, texts of 10", Setting(depth=8, new_ids=10, draft_ms=0.5), share=0.6),
    Case("the target's own draft", Setting(pair=_pair("same"))),
    Case("a near draft", Setting(pair=_pair("near"))),
    Case("an opposite draft: a new draft after each correction", Setting(pair=_pair("opposite"))),
    Case("run on, late and overlapping hints", LATE_ON),
    Case("run on, near draft, chains of 2", replace(LATE_ON, pair=_pair("near"), depth=2)),
    Case("lost, repeated, overtaken; resent bytes", Setting(link=UNRELIABLE, frame_nodes=2, resend_ms=25.0)),
    Case(
        "the same, run on, drafted again",
        replace(LATE_ON, link=UNRELIABLE, frame_nodes=1, resend_ms=25.0, resends_bytes=False),
    ),
    Case("trie over budget, one node a step, resent", Setting(depth=4, limits=SCARCE, resend_ms=13.0)),
    Case("credit for 2 ids", Setting(depth=4, run_ahead=2, link=LATE)),
    Case("rows cut to their top 4", Setting(patches=(TOP_FOUR,))),
    Case("temperature, top-k, top-p", Setting(sampling=WARPED)),
    Case("target warped, draft not", Setting(sampling=WARPED, draft_sampling=SamplingParams())),
    Case("penalties", Setting(sampling=PENALISED)),
    Case("a greedy draft with one-hot rows (C06)", Setting(draft_sampling=SamplingParams(top_k=1))),
    Case("cut and resumed, the same bytes", Setting(link=CUT)),
    Case("cut and resumed, run on, drafted again", replace(LATE_ON, link=CUT, resends_bytes=False)),
    Case("verifier lost, text carried on", Setting(link=replace(CUT, verifier_dies=True), resend_ms=15.0)),
    Case("a stop id among the ids", Setting(stop_ids=(STOP,))),
    Case("a stop id, run on", replace(LATE_ON, stop_ids=(STOP,))),
    Case(
        "long frames lost more often, verifier waits, kept draws resent",
        Setting(pair=SPREAD, depth=1, limits=PATIENT, link=Link(loses=lost_by_length), resend_ms=20.0),
    ),
    Case("temperature 0", Setting(sampling=GREEDY), share=0.1),
)


def _agreement(case: Case) -> Case:
    return replace(case, setting=replace(case.setting, rule=Rule.AGREEMENT))


AGREEMENT = tuple(
    _agreement(case)
    for case in (
        Case("chains of 3, target's own draft", Setting(pair=_pair("same"))),
        Case("chains of 3, near draft", Setting(pair=_pair("near"))),
        Case("chains of 3, far draft", Setting()),
        Case("trees of 3 x 3, near draft", Setting(pair=_pair("near"), width=3)),
        Case("trees of 3 x 3, far draft, over budget", Setting(width=3, limits=SCARCE_TREE, resend_ms=13.0)),
        Case("trees of 3 x 3, opposite draft, run on", replace(LATE_ON, pair=_pair("opposite"), width=3)),
        Case("the draft at another temperature", Setting(draft_sampling=SamplingParams(temperature=0.4))),
        Case("temperature, top-k, top-p", Setting(sampling=WARPED, width=2)),
        Case("penalties, a stop id", Setting(sampling=PENALISED, width=2, stop_ids=(STOP,))),
        Case("lost, repeated, overtaken", Setting(link=UNRELIABLE, frame_nodes=2, resend_ms=25.0)),
        Case("cut and resumed", Setting(link=CUT, width=2)),
        Case("verifier lost, text carried on", replace(LATE_ON, link=replace(CUT, verifier_dies=True))),
    )
)
HONEST = REJECTION + AGREEMENT
