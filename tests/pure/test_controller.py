"""When to draft and when to leave it: by gain expected and gain measured; probes, backoff, pace, margin."""

from __future__ import annotations

import itertools

import pytest

from edge_client.calibration import Recent
from edge_client.controller import ID_COST, MOST_ID_COST, Controller, Decision, EngineSettings, Experience
from edge_client.link_clock import LinkClock
from edge_client.uplink import FRAME_IDS, Uplink
from shared.types import PaceKind


def clock_of(step_s: float = 0.1, round_trip_s: float = 0.05, draft_s: float = 0.008) -> LinkClock:
    """A clock that has measured such times, several times over."""
    clock = LinkClock()
    for node in range(1, 30):
        clock.note_sent(node, float(node))
        clock.note_draft(draft_s)
        clock.note_commit(node + round_trip_s + step_s, step_s, 0.0, node, 0.0, is_plain=True)
    return clock


def controller_of(share: float, settings: EngineSettings | None = None, tries: int = 200) -> Controller:
    """A controller that has seen so many tries, that share of them right."""
    made = Controller(settings or EngineSettings(), Experience())
    for n in range(tries):
        made.note_judged(n * 37 % 100 < 100 * share)
    return made


def controller_with(share: float, free_share: float | None = None) -> Controller:
    """A controller that takes such shares for what was learnt; `free_share`: there is look-up, right so often."""
    experience = Experience(acceptance=Recent(share), free_acceptance=Recent(free_share or 0.0))
    return Controller(EngineSettings(), experience, has_free=free_share is not None)


def decisions(controller: Controller, clock: LinkClock, start: float, seconds: float) -> list[Decision]:
    """One every 10 ms; a probe that is allowed is taken."""
    made = []
    for n in range(round(100 * seconds)):
        made.append(controller.decide(start + n / 100, clock))
        if made[-1].is_probe:
            controller.note_probe(start + n / 100, clock.draft_s or 0.0)
    return made


# ---------------------------------------------------------------- the expected gain


def test_while_nothing_is_known_drafting_is_tried() -> None:
    decision = Controller(EngineSettings()).decide(0.0, LinkClock())
    assert decision.is_drafting
    assert not decision.is_probe


def test_gain_grows_with_acceptance_and_falls_with_round_trip_and_draft_time() -> None:
    shares, links, drafts = [0.1, 0.3, 0.5, 0.7, 0.9, 0.97], [0.0, 0.01, 0.05, 0.2], [0.002, 0.008, 0.03, 0.09]

    def gain(share: float, round_trip_s: float, draft_s: float) -> float:
        return controller_with(share).expected_gain(clock_of(0.1, round_trip_s, draft_s))

    for link, draft in itertools.product(links, drafts):
        gains = [gain(share, link, draft) for share in shares]
        assert gains == sorted(gains)
    for share, draft in itertools.product(shares, drafts):
        gains = [gain(share, link, draft) for link in links]
        assert gains == sorted(gains, reverse=True)
    for share, link in itertools.product(shares, links):
        gains = [gain(share, link, draft) for draft in drafts]
        assert gains == sorted(gains, reverse=True)
    assert gain(0.9, 0.05, 0.008) > 2
    assert gain(0.9, 0.0, 0.002) > gain(0.9, 0.2, 0.09)


@pytest.mark.parametrize("draft_s", [0.1, 0.13, 1.0])
def test_a_draft_as_slow_as_the_step_gains_nothing(draft_s: float) -> None:
    controller = controller_of(0.95)
    assert controller.expected_gain(clock_of(0.1, 0.01, draft_s)) <= 1.0
    assert not controller.decide(100.0, clock_of(0.1, 0.01, draft_s)).is_drafting


def test_a_good_draft_goes_on_drafting_and_a_useless_one_rests() -> None:
    assert controller_of(0.9).decide(100.0, clock_of()).is_drafting
    useless = controller_of(0.0)
    decision = useless.decide(100.0, clock_of())
    assert not decision.is_drafting
    assert useless.rests == 1
    assert "off" in decision.why


def test_one_or_two_bad_ids_are_no_reason_to_rest() -> None:
    controller = Controller(EngineSettings())
    controller.note_judged(False)
    controller.note_judged(False)
    assert controller.decide(1.0, clock_of()).is_drafting


@pytest.mark.parametrize("has_model", [False, True], ids=["no model", "a slow model"])
def test_look_up_goes_on_alone_where_a_model_does_not_pay(has_model: bool) -> None:
    slow = clock_of(0.05, 0.02, 0.2)
    decision = controller_with(0.9, free_share=0.8).decide(1.0, slow, has_model)
    assert decision.is_drafting
    assert not decision.uses_model
    assert "by look-up" in decision.why
    assert not controller_with(0.9).decide(1.0, slow).is_drafting


def test_look_up_that_is_never_right_does_not_go_on_alone() -> None:
    assert not controller_with(0.9, free_share=0.0).decide(1.0, clock_of(0.05, 0.02, 0.2)).is_drafting


def test_look_up_goes_on_while_the_model_rests_and_is_probed() -> None:
    made = decisions(controller_with(0.9, free_share=0.8), clock_of(0.05, 0.02, 0.2), 100.0, 3.0)
    assert all(decision.is_drafting and not decision.uses_model for decision in made)
    assert any(decision.is_probe for decision in made)


# ---------------------------------------------------------------- the measured gain


def commits(controller: Controller, start: float, gaps: list[float], ids: int, is_plain: bool) -> float:
    for gap in gaps:
        start += gap
        controller.note_commit(start, ids, is_plain)
    return start


def test_text_that_comes_slower_than_plain_streaming_ends_drafting() -> None:
    controller, clock = controller_of(0.9), clock_of(0.1)
    now = commits(controller, 10.0, [0.1] * 20, 1, is_plain=True)
    assert controller.decide(now, clock).is_drafting
    now = commits(controller, now, [0.3] * 30, 2, is_plain=False)  # 6.7 ids a second instead of 10
    decision = controller.decide(now, clock)
    assert not decision.is_drafting
    assert "ids/s" in decision.reason


def test_text_that_comes_faster_than_plain_streaming_keeps_it() -> None:
    controller, clock = controller_of(0.9), clock_of(0.1)
    now = commits(controller, 10.0, [0.1] * 20, 1, is_plain=True)
    now = commits(controller, now, [0.15] * 30, 2, is_plain=False)
    assert controller.decide(now, clock).is_drafting


def test_the_time_of_a_cut_is_not_counted_as_slow() -> None:
    controller, clock = controller_of(0.9), clock_of(0.1)
    now = commits(controller, 10.0, [0.1] * 20, 1, is_plain=True)
    now = commits(controller, now, [0.1] * 12, 2, is_plain=False)
    controller.note_pause()
    now = commits(controller, now + 60.0, [0.1] * 12, 2, is_plain=False)
    assert controller.decide(now, clock).is_drafting


# ---------------------------------------------------------------- resting and coming back


def test_while_resting_probes_are_few_and_cost_little_of_the_devices_time() -> None:
    draft_s, controller = 0.04, controller_of(0.0)
    clock = clock_of(0.1, 0.05, draft_s)
    assert not controller.decide(100.0, clock).is_drafting
    made = decisions(controller, clock, 100.01, 4.0)
    probes = sum(decision.is_probe for decision in made)
    assert not any(decision.is_drafting for decision in made)
    assert probes >= 2
    assert probes * draft_s <= 0.15 * 4.0


def test_drafting_begins_again_when_probes_turn_out_right() -> None:
    controller, clock = controller_of(0.0), clock_of()
    assert not controller.decide(100.0, clock).is_drafting
    for _ in range(40):
        controller.note_judged(True)
    assert any(decision.is_drafting for decision in decisions(controller, clock, 100.01, 10.0))


def test_drafting_begins_again_when_the_times_have_changed() -> None:
    controller = controller_of(0.9)
    assert not controller.decide(100.0, clock_of(draft_s=0.2)).is_drafting
    assert any(decision.is_drafting for decision in decisions(controller, clock_of(), 100.01, 10.0))


def rest_after(controller: Controller, now: float) -> float:
    """How long it rests from now on, with times that would pay."""
    began, good = now, clock_of()
    while not controller.decide(now, good).is_drafting:
        now += 0.01
        assert now < began + 60
    return now - began


def rests_by_loss(controller: Controller, times: int) -> list[float]:
    """How long it rests each time that text came slower with hints than without."""
    rests, now = [], 100.0
    for _ in range(times):
        now = commits(controller, now, [0.1] * 20, 1, is_plain=True)
        now = commits(controller, now, [0.3] * 30, 2, is_plain=False)
        assert not controller.decide(now, clock_of()).is_drafting
        rests.append(rest_after(controller, now))
        now += rests[-1]
    return rests


def test_a_rest_by_expected_gain_is_short_however_often_for_probes_tell_when_it_would_pay() -> None:
    controller, bad, rests, now = controller_of(0.9), clock_of(draft_s=0.2), [], 100.0
    for _ in range(4):
        assert not controller.decide(now, bad).is_drafting
        rests.append(rest_after(controller, now))
        now += rests[-1]
    assert rests == pytest.approx([rests[0]] * 4, abs=0.02)
    assert controller.rests == controller.slow_rests == 4


def test_who_rests_by_measured_loss_again_and_again_rests_longer() -> None:
    controller = controller_of(0.9)
    rests = rests_by_loss(controller, 4)
    assert rests == sorted(rests)
    assert rests[-1] > 4 * rests[0]
    assert controller.rests == 4
    assert controller.slow_rests == 0


def test_how_long_to_rest_after_a_loss_outlives_a_text() -> None:
    experience = controller_of(0.9).experience
    first = rests_by_loss(Controller(EngineSettings(), experience), 1)
    second = rests_by_loss(Controller(EngineSettings(), experience), 1)
    assert second[0] > 1.5 * first[0]


def test_a_text_that_gains_much_takes_the_long_rest_back() -> None:
    controller = controller_of(0.9)
    long = rests_by_loss(controller, 3)[-1]
    now = commits(controller, 1000.0, [0.1] * 20, 1, is_plain=True)
    now = commits(controller, now, [0.1] * 30, 3, is_plain=False)
    assert controller.decide(now, clock_of()).is_drafting
    assert rests_by_loss(Controller(EngineSettings(), controller.experience), 1)[0] < long / 2


def test_told_to_stop_it_neither_drafts_nor_probes_ever_again() -> None:
    controller, clock = controller_of(0.95), clock_of()
    controller.stop("the caller said so")
    made = decisions(controller, clock, 100.0, 30.0)
    assert not any(decision.is_drafting or decision.is_probe for decision in made)
    assert "the caller said so" in made[-1].why


def test_where_no_hints_are_wanted_there_are_none_and_no_probes() -> None:
    controller = controller_of(0.95, EngineSettings(depth=0))
    assert not any(d.is_drafting or d.is_probe for d in decisions(controller, clock_of(), 0.0, 3.0))


# ---------------------------------------------------------------- how


@pytest.mark.parametrize("pace", list(PaceKind))
def test_the_verifier_runs_on_while_nothing_is_drafted_whatever_the_pace_asked_for(pace: PaceKind) -> None:
    controller = controller_of(0.9, EngineSettings(pace=pace))
    assert controller.decide(1.0, clock_of()).pace is pace
    controller.stop("told to")
    assert controller.decide(1.0, clock_of()).pace is PaceKind.RUN_ON


def test_hints_leave_the_earlier_the_more_the_link_scatters_but_never_a_whole_step_early() -> None:
    margins = []
    for scatter in (0.0, 0.01, 0.02, 0.5):
        clock = LinkClock()
        for node in range(1, 60):
            clock.note_sent(node, float(node))
            late = scatter if node % 2 else 0.0
            clock.note_commit(node + 0.05 + late + 0.1, 0.1, 0.0, node, 0.0, is_plain=True)
        margins.append(controller_of(0.9).decide(1.0, clock).margin_s)
    assert margins == sorted(margins)
    assert 0 < margins[0] < margins[2]
    assert margins[-1] < 0.05


def test_depth_and_width_are_the_callers_bounds() -> None:
    decision = controller_of(0.9, EngineSettings(depth=7, width=2)).decide(1.0, clock_of())
    assert 1 <= decision.depth <= 7
    assert 1 <= decision.width <= 2


def test_the_reason_tells_all_that_was_gone_by() -> None:
    why = controller_of(0.9).decide(1.0, clock_of()).why
    for word in ("hints on", "gain", "acceptance 0.9", "round trip 50.0 ms", "step 100.0 ms", "draft 8.0 ms", "pace"):
        assert word in why


def test_a_probe_that_takes_long_is_followed_by_a_longer_wait_but_never_by_a_very_long_one() -> None:
    controller, clock = controller_of(0.0), clock_of()
    assert not controller.decide(100.0, clock).is_drafting
    controller.note_probe(100.0, 0.15)
    assert not controller.decide(101.4, clock).is_probe
    assert controller.decide(101.6, clock).is_probe
    controller.note_probe(102.0, 30.0)
    assert controller.decide(104.1, clock).is_probe


def test_a_model_that_rests_leaves_the_past_behind_for_look_up() -> None:
    """Once wrong: look-up was blamed, in the same moment, for what the model had cost."""
    controller, clock = controller_with(0.9, 0.95), clock_of(0.1)
    now = commits(controller, 10.0, [0.1] * 20, 1, is_plain=True)
    now = commits(controller, now, [0.3] * 30, 2, is_plain=False)
    for _ in range(40):
        controller.note_judged(False)
    decision = controller.decide(now, clock)
    assert decision.is_drafting
    assert not decision.uses_model


def test_commits_that_come_in_bunches_are_no_fast_streaming() -> None:
    controller, clock = controller_of(0.9), clock_of(0.1)
    now = commits(controller, 10.0, [0.0001] * 20, 1, is_plain=True)
    now = commits(controller, now, [0.15] * 30, 2, is_plain=False)
    assert controller.decide(now, clock).is_drafting


# ---------------------------------------------------------------- a narrow uplink


def test_on_a_narrow_uplink_only_what_is_likely_is_sent_and_the_line_says_so() -> None:
    controller = controller_with(0.8)
    wide, narrow = clock_of(draft_s=0.008), clock_of(draft_s=0.008)
    narrow.uplink = narrow_uplink(0.004)
    assert controller.decide(40.0, wide).send_reach == EngineSettings().send_reach
    assert "uplink" not in controller.decide(40.0, wide).why
    decision = controller.decide(40.0, narrow)
    assert decision.send_reach == pytest.approx(ID_COST * narrow.uplink.id_s / 0.008)
    assert "uplink" in decision.why
    narrow.uplink = narrow_uplink(0.03)
    assert controller.decide(40.0, narrow).send_reach == MOST_ID_COST


def narrow_uplink(id_s: float) -> Uplink:
    """One that has found about that."""
    uplink = Uplink()
    for n in range(12):
        ids = 1 + 5 * n % 17
        uplink.note(uplink.send(float(n), ids), 0.05 + (FRAME_IDS + ids) * id_s)
    assert uplink.id_s == pytest.approx(id_s, rel=0.2)
    return uplink
