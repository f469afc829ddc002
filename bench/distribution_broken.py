"""The cases of `bench.distribution` in which one rule of docs/sampling.md is broken on purpose.

`BROKEN` must be caught: they show that the honest cases could fail. `NO_EFFECT` break a rule too, in a way that was
found not to bias, each with its reason; they must match. Called by `distribution`.
"""

from __future__ import annotations

from dataclasses import replace

import edge_client.drafter as drafting
from bench import distribution_breakage as breakage
from bench.distribution_honest import LATE_ON, PATIENT, SPREAD, STOP, Case, CutsAtStop, lost_by_length
from bench.distribution_setting import Link, Setting
from bench.toy_pair import SPREAD_IDS, ToyPair
from cloud_verifier import row_choice
from shared import agreement, rejection
from shared.sampling import SamplingParams
from shared.types import PaceKind, Rule

BY_LENGTH = Setting(
    pair=SPREAD,
    depth=1,
    limits=PATIENT,
    link=Link(loses=lost_by_length),
    resend_ms=20.0,
    resends_bytes=False,
)
ONE_HOT = SamplingParams(top_k=1)
RUN_ON = Setting(pace=PaceKind.RUN_ON, step_ms=20.0, link=Link(up_ms=(0.0, 4.0), down_ms=(0.0, 4.0)))
DRAFTED_AGAIN = Setting(limits=PATIENT, link=Link(loss=0.75), resend_ms=20.0, resends_bytes=False)


def _broken(name: str, setting: Setting, why: str, share: float = 0.6) -> Case:
    return Case(name, setting, "differs", why, share)


def _harmless(name: str, setting: Setting, why: str) -> Case:
    return Case(name, setting, "no effect found", why)


BROKEN = (
    _broken(
        "soft rows though the draft was greedy (C06)",
        Setting(drafter=breakage.SoftGreedy),
        "q is not what was drawn from",
    ),
    _broken("rows before the cut they were drawn after (C07)", Setting(drafter=breakage.CutAfterTheRow), "the same"),
    _broken("rows of another temperature (C07)", Setting(drafter=breakage.OtherTemperature), "the same"),
    _broken(
        "a kept token with a recomputed row",
        replace(DRAFTED_AGAIN, drafter=breakage.RecomputedRow),
        "most rows that arrive are not those drawn from",
        1.5,
    ),
    _broken(
        "long frames lost more often, tokens redrawn",
        replace(BY_LENGTH, drafter=breakage.Redrawing),
        "the token that arrives is a short one; with kept draws the same link does no harm (honest case)",
    ),
    _broken(
        "an unlikely token drawn again, the last hint wins",
        replace(RUN_ON, device=breakage.TriesAgain, drafter=breakage.Redrawing, trie=breakage.LastHintWins),
        "the second draw replaces the first because of what the first was",
        1.5,
    ),
    _broken("only likely tokens sent", Setting(device=breakage.OnlyLikely), "a hint's presence tells its token"),
    _broken("only likely tokens sent, run on", replace(RUN_ON, device=breakage.OnlyLikely), "the same"),
    _broken(
        "a flush deadline from the token, run on",
        replace(RUN_ON, device=breakage.LikelySooner),
        "likely tokens are judged",
        1.5,
    ),
    _broken(
        "a flush by the look of a later row, run on",
        replace(RUN_ON, device=breakage.UnsureSooner, depth=2, pair=ToyPair("near")),
        "the later row follows from the token before it",
    ),
    _broken(
        "a chain cut at a stop id and sent sooner, run on",
        replace(RUN_ON, device=breakage.StopSooner, stop_ids=(STOP,)),
        "a stop id comes in time, others come late",
        1.5,
    ),
    _broken(
        "a chain cut by bytes",
        Setting(device=breakage.ByBytes, pair=ToyPair("same", SPREAD_IDS), depth=4),
        "ids of one byte are hinted more often",
    ),
    _broken(
        "one accept draw for all positions",
        Setting(draft_sampling=ONE_HOT, patches=breakage.units(breakage.one_accept_draw)),
        "what was accepted once is accepted again",
    ),
    _broken(
        "the residual reuses the accept draw",
        Setting(draft_sampling=ONE_HOT, patches=breakage.units(breakage.residual_with_accept_draw)),
        "after a rejection that draw is a high one",
    ),
    _broken(
        "the bonus reuses the accept draw before it",
        Setting(
            depth=1,
            pair=ToyPair("near"),
            draft_sampling=ONE_HOT,
            patches=breakage.units(breakage.bonus_with_accept_draw),
        ),
        "after an acceptance that draw is a low one",
    ),
    _broken(
        "the residual is the target's whole row",
        Setting(patches=((rejection, "judge_one", breakage.residual_from_target),)),
        "what the draft likes comes twice",
    ),
    _broken(
        "a position judged again with a second draw",
        Setting(patches=((rejection, "judge_one", breakage.judged_twice),)),
        "what the draft likes comes twice",
    ),
    _broken(
        "draft draws that are the accept draws",
        Setting(drafter=breakage.AcceptDraws),
        "keyed by the seed and without a purpose of their own",
    ),
    _broken(
        "draft draws keyed by the last id alone",
        Setting(
            depth=4,
            pair=ToyPair("same"),
            patches=((drafting, "ids_digest", breakage.digest_of_last),),
        ),
        "an id that comes again brings the draw of its first time",
        1.5,
    ),
    _broken(
        "one device secret for many sessions of one context",
        Setting(secret_of=lambda seed, secret: 1),
        "each text alone is right, but all are drawn with the same hints",
    ),
    _broken(
        "noise that forgets its position",
        Setting(
            rule=Rule.AGREEMENT,
            patches=(
                (agreement, "noise", breakage.noise_of_one_position),
                (row_choice, "row_keys", breakage.keys_of_one_position),
            ),
        ),
        "the same id wins again and again",
    ),
)

NO_EFFECT = (
    _harmless(
        "draft draws keyed by the session seed",
        Setting(secret_of=lambda seed, secret: seed),
        "the hash keeps purposes apart; it biases only with the accept draws' own key (above)",
    ),
    _harmless(
        "draft draws keyed by position",
        replace(LATE_ON, drafter=breakage.PositionDraws),
        "each position is judged once, so its draw is used once; what was drawn at other prefixes was never judged",
    ),
    _harmless(
        "tokens redrawn, link loses at random",
        replace(DRAFTED_AGAIN, drafter=breakage.Redrawing),
        "what was lost was lost whatever it was; it biases when loss looks at the frame (above)",
    ),
    _harmless(
        "an unlikely token drawn again, the first hint wins",
        replace(RUN_ON, device=breakage.TriesAgain, drafter=breakage.Redrawing),
        "the trie's own rule undoes it",
    ),
    _harmless(
        "the last hint wins, kept draws",
        replace(LATE_ON, trie=breakage.LastHintWins),
        "the same prefix brings the same token, so there is nothing to replace",
    ),
    _harmless(
        "a chain cut at a stop id, sent no sooner",
        replace(RUN_ON, device=CutsAtStop, stop_ids=(STOP,)),
        "nothing follows a stop id that stands; what follows one that falls is not looked at",
    ),
    _harmless(
        "the bonus reuses the accept draw of its own position",
        Setting(depth=1, patches=breakage.units(breakage.bonus_with_own_accept_draw)),
        "a position has a bonus or a judged hint, never both",
    ),
)
