"""The cases of `bench.distribution` with the product's own device: it drafts ahead and sends by the link clock.

`EDGE_HONEST` must match, `EDGE_BROKEN` must be caught: each lets the engine see what it may not. Called by
`distribution`.
"""

from __future__ import annotations

from dataclasses import replace

from bench import distribution_edge_breakage as breakage
from bench.distribution_edge import EdgeDevice
from bench.distribution_honest import PENALISED, STOP, WARPED, Case
from bench.distribution_setting import Link, Setting
from bench.toy_pair import ToyPair
from edge_client import edge_engine
from shared.sampling import SamplingParams
from shared.types import Limits, PaceKind, Rule

NEAR, SAME, FAR, OPPOSITE = ToyPair("near"), ToyPair("same"), ToyPair("far"), ToyPair("opposite")
FAST = Link(up_ms=(1.0, 4.0), down_ms=(1.0, 4.0))
SLOW = Link(up_ms=(10.0, 40.0), down_ms=(10.0, 40.0))
CUTS = Link(up_ms=(2.0, 12.0), down_ms=(2.0, 12.0), cut_ms=(20.0, 200.0))
BASE = Setting(
    device=EdgeDevice,
    pace=PaceKind.RUN_ON,
    pair=NEAR,
    depth=24,
    width=4,
    new_ids=16,
    link=FAST,
    step_ms=20.0,
    draft_ms=5.0,
    scatter=0.4,
)
"""A verifier that runs on and a device that drafts four times as fast; both scatter."""
NARROW = Limits(max_held_nodes=2, max_step_nodes=2, max_wait_ms=60)
SHORT_WAIT = Limits(max_wait_ms=25)
WAITS = replace(BASE, pace=PaceKind.WAIT, limits=Limits(max_wait_ms=60))

EDGE_REJECTION = (
    Case("own device, fast link", BASE),
    Case("own device, far draft", replace(BASE, pair=FAR)),
    Case("own device, the target's own draft", replace(BASE, pair=SAME)),
    Case("own device, slow link", replace(BASE, link=SLOW)),
    Case("own device, slow draft: rests and probes", replace(BASE, pair=OPPOSITE, draft_ms=15.0, new_ids=30), share=0.5),
    Case("own device, hints just about in time", replace(BASE, pair=FAR, draft_ms=14.0, scatter=0.8)),
    Case("own device, pace wait", WAITS),
    Case("own device, pace wait, impatient", replace(WAITS, limits=SHORT_WAIT, link=SLOW, pair=FAR)),
    Case("own device, cut and resumed", replace(BASE, link=CUTS)),
    Case("own device, cut and resumed, drafts on offline", replace(BASE, link=CUTS, is_local=True, pair=SAME)),
    Case("own device, verifier lost", replace(BASE, link=replace(CUTS, verifier_dies=True), is_local=True)),
    Case("own device, trie over budget", replace(BASE, limits=NARROW, pair=SAME)),
    Case("own device, credit for 2 ids", replace(BASE, run_ahead=2)),
    Case("own device, hints repeated and overtaken", replace(BASE, link=replace(SLOW, duplicate=0.4, overtakes=True))),
    Case("own device, frames of 1", replace(BASE, limits=Limits(max_frame_nodes=1))),
    Case("own device, a stop id", replace(BASE, stop_ids=(STOP,)), share=1.5),
    Case("own device, a stop id, pace wait", replace(WAITS, limits=SHORT_WAIT, stop_ids=(STOP,)), share=1.5),
    Case("own device, temperature, top-k, top-p", replace(BASE, sampling=WARPED)),
    Case("own device, target warped, draft not", replace(BASE, sampling=WARPED, draft_sampling=SamplingParams())),
    Case("own device, penalties", replace(BASE, sampling=PENALISED)),
)
EDGE_AGREEMENT = tuple(
    Case(case.name, replace(case.setting, rule=Rule.AGREEMENT))
    for case in (
        Case("own device, trees", BASE),
        Case("own device, trees, slow link, over budget", replace(BASE, link=SLOW, limits=NARROW, pair=FAR)),
        Case("own device, trees, cut and resumed, a stop id", replace(BASE, link=CUTS, stop_ids=(STOP,), is_local=True)),
        Case("own device, trees, verifier lost, pace wait", replace(WAITS, link=replace(CUTS, verifier_dies=True))),
    )
)
EDGE_HONEST = EDGE_REJECTION + EDGE_AGREEMENT


def _broken(name: str, setting: Setting, why: str, share: float = 1.0) -> Case:
    return Case(name, setting, "differs", why, share)


EDGE_BROKEN = (
    _broken(
        "own device told how likely the drawn ids are",
        replace(BASE, pair=FAR, patches=((edge_engine, "DraftTree", breakage.ToldTree),)),
        "what is drafted on and sent follows the ids drawn",
    ),
    _broken(
        "own device sends only likely ids",
        replace(BASE, pair=FAR, engine=breakage.OnlyLikely),
        "a hint's presence tells its token",
    ),
    _broken(
        "own device flushes once an unlikely id was drawn",
        replace(BASE, pair=FAR, engine=breakage.UnlikelySooner),
        "unlikely ids come in time, likely ones at the last moment, and some of them late",
    ),
    _broken(
        "own device flushes by the look of a later row",
        replace(BASE, pair=NEAR, engine=breakage.UnsureSooner),
        "the later row follows from the token before it",
    ),
    _broken(
        "own device drafts nothing behind a stop id, pace wait",
        replace(WAITS, limits=SHORT_WAIT, stop_ids=(STOP,), engine=breakage.EndsAtStop),
        "with nothing left to draft it sends at once: a stop id comes in time, others late",
        1.5,
    ),
)
EDGE_NO_EFFECT: tuple[Case, ...] = ()
