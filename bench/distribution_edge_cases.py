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
from shared.hint_trie import HintTrie
from shared.sampling import SamplingParams
from shared.types import Limits, PaceKind, Rule

NEAR, SAME, FAR, OPPOSITE = ToyPair("near"), ToyPair("same"), ToyPair("far"), ToyPair("opposite")
FAST = Link(up_ms=(1.0, 4.0), down_ms=(1.0, 4.0))
SLOW = Link(up_ms=(10.0, 40.0), down_ms=(10.0, 40.0))
COOL = SamplingParams(temperature=0.6)
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


class FullTrie(HintTrie):
    """Has room for fewer nodes than the device was told, as where many sessions share it: what is over is dropped."""

    def __init__(self, committed_length: int, max_held: int, remembered: int, is_chain: bool = False) -> None:
        super().__init__(committed_length, min(2, max_held), remembered, is_chain)


WAITS = replace(BASE, pace=PaceKind.WAIT, limits=Limits(max_wait_ms=60))
RACE = replace(
    WAITS,
    pair=SAME,
    depth=2,
    draft_ms=8.0,
    scatter=0.1,
    limits=Limits(max_wait_ms=17),
    link=Link(up_ms=(1.0, 2.0), down_ms=(1.0, 2.0)),
    new_ids=24,
)
"""The verifier waits just about as long as a hint takes, and each hint is for the next two ids: whatever makes one
leave a moment later decides whether it is judged. By the target's own draft a judged id is the one that was drawn."""
UPLINK = Link(up_ms=(1.0, 1.0), down_ms=(1.0, 1.0), up_bytes_per_ms=1.0)
UPHILL = replace(
    RACE, limits=Limits(max_wait_ms=60), link=UPLINK, scatter=0.0, sampling=SamplingParams(temperature=0.8, top_p=0.8)
)
"""A race in which bytes take time, over rows of one to eight ids."""
ONE_EACH = Limits(max_wait_ms=35, max_frame_nodes=1)

EDGE_REJECTION = (
    Case("own device, fast link", BASE),
    Case("own device, far draft, drafts on while steps run", replace(BASE, pair=FAR, step_ms=60.0)),
    Case("own device, slow link", replace(BASE, link=SLOW, step_ms=60.0, sampling=COOL)),
    Case("own device, slow draft: rests and probes", replace(BASE, pair=OPPOSITE, draft_ms=15.0, new_ids=30)),
    Case("own device, hints just about in time", replace(BASE, pair=FAR, draft_ms=14.0, scatter=0.8)),
    Case("own device, pace wait, slow link", replace(WAITS, link=SLOW, pair=FAR)),
    Case("own device, a race", RACE),
    Case("own device, a race, far draft", replace(RACE, pair=FAR)),
    Case("own device, a race, a stop id", replace(RACE, stop_ids=(STOP,))),
    Case("own device, a race, cut and resumed", replace(RACE, link=CUTS)),
    Case(
        "own device, a race on an uplink of padded frames",
        replace(UPHILL, link=replace(UPLINK, padded_node_bytes=24), engine=breakage.WholeFrames),
    ),
    Case("own device, a race on an uplink of frames of one id", replace(UPHILL, limits=ONE_EACH)),
    Case("own device, cut and resumed, drafts on offline", replace(BASE, link=CUTS, is_local=True)),
    Case("own device, verifier lost", replace(BASE, link=replace(CUTS, verifier_dies=True), is_local=True)),
    Case("own device, narrow trie", replace(BASE, limits=NARROW, pair=SAME)),
    Case("own device, trie over budget", replace(BASE, trie=FullTrie, pair=SAME)),
    Case("own device, credit for 2 ids", replace(BASE, run_ahead=2)),
    Case("own device, hints repeated and overtaken", replace(BASE, link=replace(SLOW, duplicate=0.4, overtakes=True))),
    Case("own device, a stop id", replace(BASE, stop_ids=(STOP,))),
    Case("own device, target warped, draft not", replace(BASE, sampling=WARPED, draft_sampling=SamplingParams())),
    Case("own device, penalties", replace(BASE, sampling=PENALISED)),
)
EDGE_AGREEMENT = tuple(
    Case(case.name, replace(case.setting, rule=Rule.AGREEMENT), share=0.5)
    for case in (
        Case("own device, trees", BASE),
        Case("own device, trees, slow link, over budget", replace(BASE, link=SLOW, limits=NARROW, pair=FAR)),
        Case(
            "own device, trees, cut and resumed, a stop id", replace(BASE, link=CUTS, stop_ids=(STOP,), is_local=True)
        ),
        Case("own device, trees, verifier lost, pace wait", replace(WAITS, link=replace(CUTS, verifier_dies=True))),
    )
)
EDGE_HONEST = EDGE_REJECTION + EDGE_AGREEMENT


def _broken(name: str, setting: Setting, why: str, share: float = 1.0) -> Case:
    return Case(name, setting, "differs", why, share)


EDGE_BROKEN = (
    _broken(
        "own device sends only likely ids",
        replace(RACE, engine=breakage.OnlyLikely),
        "a hint's presence tells its token",
        5.0,
    ),
    _broken(
        "own device flushes once an unlikely id was drawn",
        replace(RACE, engine=breakage.UnlikelySooner),
        "unlikely ids come in time, likely ones late",
    ),
    _broken(
        "own device told how likely the drawn ids are",
        replace(RACE, patches=((edge_engine, "DraftTree", breakage.ToldTree),)),
        "behind an unlikely id it drafts no more, so it sends sooner",
    ),
    _broken(
        "own device drafts nothing behind a stop id",
        replace(RACE, stop_ids=(STOP,), engine=breakage.EndsAtStop),
        "with nothing left to draft it sends at once: a stop id comes in time, others late",
        5.0,
    ),
    _broken(
        "own device flushes by the look of a later row",
        replace(RACE, engine=breakage.UnsureSooner, depth=3, limits=Limits(max_wait_ms=25)),
        "the later row follows from the token before it",
        8.0,
    ),
    _broken(
        "own device, frames as long as their rows, on a slow uplink",
        replace(UPHILL, engine=breakage.WholeFrames),
        "the row behind a token follows from it, and a frame of both is longer or shorter: it comes later or sooner",
        2.5,
    ),
)
