"""What the device knows of the link from commits alone: round trip, step time, and which step a hint still reaches."""

from __future__ import annotations

import random

import pytest

from edge_client.link_clock import MOST_GUESSED_S, SENT_REMEMBERED, LinkClock, Smoothed


def clock_of(step_s: float, round_trip_s: float, last_commit_at: float = 10.0) -> LinkClock:
    """A clock that has seen two commits of such a link; the last at that time."""
    clock = LinkClock()
    for node, now in ((1, last_commit_at - step_s), (2, last_commit_at)):
        clock.note_sent(node, now - round_trip_s - step_s - 0.003)
        clock.note_commit(now, step_s, 0.0, node, 0.003, is_plain=False)
    return clock


# ---------------------------------------------------------------- the round trip


def test_the_round_trip_is_what_is_left_of_the_time_when_waiting_and_step_are_taken_off() -> None:
    clock = LinkClock()
    assert clock.round_trip_s is None
    clock.note_sent(5, 1.0)
    assert clock.note_commit(1.3, 0.1, 0.0, 5, 0.05, is_plain=False) == pytest.approx(0.15)
    assert clock.round_trip_s == pytest.approx(0.15)


def test_a_commit_that_does_not_tell_of_waiting_shows_no_round_trip() -> None:
    clock = LinkClock()
    clock.note_sent(5, 1.0)
    assert clock.note_commit(1.3, 0.1, 0.0, 5, None, is_plain=False) is None
    assert clock.note_commit(1.4, 0.1, 0.0, 5, 0.01, is_plain=False) is None, "that frame was told of before"
    assert clock.round_trip_s is None


def test_a_commit_that_saw_no_frame_of_ours_shows_no_round_trip() -> None:
    clock = LinkClock()
    clock.note_sent(5, 1.0)
    assert clock.note_commit(1.3, 0.1, 0.0, 4, 0.05, is_plain=True) is None
    assert clock.note_commit(1.6, 0.1, 0.0, 5, 0.05, is_plain=False) == pytest.approx(0.45)


def test_a_verifiers_rounding_never_makes_the_round_trip_negative() -> None:
    clock = LinkClock()
    clock.note_sent(5, 1.0)
    assert clock.note_commit(1.1, 0.1, 0.0, 5, 0.01, is_plain=False) == 0.0


def test_the_answer_to_an_open_is_a_guess_that_the_first_measured_round_trip_replaces() -> None:
    clock = LinkClock()
    clock.note_opened(0.15)
    assert clock.round_trip_s == 0.15
    assert not clock.is_measured
    clock.note_sent(5, 1.0)
    clock.note_commit(1.17, 0.1, 0.0, 5, 0.05, is_plain=False)
    assert clock.is_measured
    assert clock.round_trip_s == pytest.approx(0.02)
    clock.note_opened(0.15)
    assert clock.round_trip_s == pytest.approx(0.02), "what was measured is not given up for a guess"


def test_an_open_that_waited_for_seconds_is_no_sign_of_a_slow_link() -> None:
    clock = LinkClock()
    clock.note_opened(3.0)
    assert clock.round_trip_s == MOST_GUESSED_S <= 0.2


def test_numbers_of_another_stream_show_no_round_trip() -> None:
    clock = LinkClock()
    clock.note_sent(5, 1.0)
    clock.note_opened(0.1)
    assert clock.note_commit(9.0, 0.1, 0.0, 5, 0.05, is_plain=False) is None
    assert clock.newest_arrived(9.0, 0) == 0


def test_the_round_trip_is_right_whenever_hints_leave_and_however_long_they_wait() -> None:
    rng, clock, truth = random.Random(6), LinkClock(), 0.07
    now = 0.0
    for node in range(1, 200):
        now += rng.uniform(0, 0.2)
        clock.note_sent(node, now)
        waits, step = rng.uniform(0, 0.3), rng.uniform(0.05, 0.15)
        told = clock.note_commit(now + truth + waits + step, step, rng.random(), node, waits, is_plain=False)
        assert told == pytest.approx(truth)
    assert clock.round_trip_s == pytest.approx(truth)


def test_frames_that_no_commit_ever_tells_of_are_forgotten() -> None:
    clock = LinkClock()
    for node in range(10 * SENT_REMEMBERED):
        clock.note_sent(node, float(node))
    assert len(clock._sent) == SENT_REMEMBERED
    last = 10 * SENT_REMEMBERED - 1
    assert clock.note_commit(last + 1.0, 0.1, 0.0, last, 0.1, is_plain=False) == pytest.approx(0.8)
    assert len(clock._sent) == 0


# ---------------------------------------------------------------- steps


def test_step_times_are_followed_and_plain_ones_told_apart() -> None:
    clock = LinkClock()
    assert clock.step_s is clock.plain_step_s is None
    for _ in range(40):
        clock.note_commit(1.0, 0.12, 0.0, 0, None, is_plain=False)
    assert clock.plain_step_s == pytest.approx(0.12), "none was plain yet"
    for n in range(40):
        is_plain = n % 2 == 0
        clock.note_commit(1.0, 0.10 if is_plain else 0.12, 0.0, 0, None, is_plain=is_plain)
    assert clock.plain_step_s == pytest.approx(0.10)
    assert clock.step_s is not None
    assert 0.10 < clock.step_s < 0.12


def test_one_slow_plain_step_does_not_count() -> None:
    clock = LinkClock()
    for n in range(15):
        clock.note_commit(1.0, 5.0 if n == 7 else 0.1, 0.0, 0, None, is_plain=True)
    assert clock.plain_step_s == pytest.approx(0.1)


def test_a_replayed_commit_has_no_step_time_and_says_nothing_of_steps() -> None:
    clock = clock_of(0.1, 0.02)
    clock.note_commit(11.0, 0.0, 0.0, 2, None, is_plain=True)
    assert clock.step_s == clock.plain_step_s == pytest.approx(0.1)


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("round_trip_s", [0.0, 0.01, 0.05, 0.1, 0.26])
@pytest.mark.parametrize("step_s", [0.02, 0.1])
def test_missed_plans_are_the_steps_that_begin_before_the_hint_arrives(step_s: float, round_trip_s: float) -> None:
    """The slow twin counts them: the last commit left as a step began, and one begins with each step time."""
    clock = clock_of(step_s, round_trip_s)
    left = 10.0 - round_trip_s / 2
    for n in range(60):
        sent_at = 10.0 + n * 0.00731 + 0.0001
        arrives = sent_at + round_trip_s / 2
        begun = sum(left + k * step_s <= arrives for k in range(1000))
        assert clock.plans_missed(sent_at) == begun


def test_the_step_that_began_when_a_commit_left_is_always_missed() -> None:
    assert clock_of(0.1, 0.0).plans_missed(10.0) == 1


@pytest.mark.parametrize("round_trip_s", [0.01, 0.05, 0.1, 0.26])
def test_a_hint_that_leaves_before_the_departure_reaches_that_step_and_after_it_the_next(round_trip_s: float) -> None:
    clock = clock_of(0.1, round_trip_s)
    for n in range(50):
        now = 10.0 + n * 0.0113
        departure = clock.next_departure(now)
        assert departure is not None
        assert now < departure + 1e-9 <= now + 0.1 + 2e-9
        missed = clock.plans_missed(now)
        assert clock.plans_missed(departure - 1e-6) == missed
        assert clock.plans_missed(departure + 1e-6) == missed + 1


def test_the_queue_before_a_step_is_part_of_the_time_between_steps() -> None:
    step_s, queue_s, round_trip_s = 0.1, 0.04, 0.05
    clock = LinkClock()
    for n in range(60):
        clock.note_sent(n + 1, n - round_trip_s - queue_s - step_s)
        clock.note_commit(float(n), step_s, queue_s, n + 1, queue_s, is_plain=False)
    for missed in range(1, 6):
        last_chance = 59.0 - round_trip_s + missed * (step_s + queue_s)
        assert clock.plans_missed(last_chance - 1e-3) == missed
        assert clock.plans_missed(last_chance + 1e-3) == missed + 1
        assert clock.next_departure(last_chance - 1e-3) == pytest.approx(last_chance, abs=1e-3)


def test_without_a_commit_or_with_the_link_cut_no_deadline_is_known() -> None:
    fresh, cut = LinkClock(), clock_of(0.1, 0.05)
    cut.last_commit_at = None
    for clock in (fresh, cut):
        assert clock.next_departure(10.0) is None
        assert clock.plans_missed(10.0) == 0


# ---------------------------------------------------------------- outliers and changes


def followed(*values: float) -> Smoothed:
    smoothed = Smoothed()
    for value in values:
        smoothed.note(value)
    return smoothed


STEADY = [0.1, 0.101, 0.099] * 5


@pytest.mark.parametrize("outlier", [0.0, 0.5, 10.0])
def test_one_or_two_outliers_are_not_believed(outlier: float) -> None:
    assert followed(*STEADY, outlier).value == pytest.approx(0.1, abs=0.002)
    assert followed(*STEADY, outlier, 0.1, outlier, 0.1).value == pytest.approx(0.1, abs=0.002)
    assert followed(*STEADY, outlier, outlier).value == pytest.approx(0.1, abs=0.002)


@pytest.mark.parametrize("new", [0.01, 0.03, 0.3, 1.0])
def test_what_stays_changed_is_believed_soon(new: float) -> None:
    assert followed(*STEADY, *[new] * 5).value == pytest.approx(new, rel=0.05)


def test_outliers_on_both_sides_are_no_change() -> None:
    smoothed = followed(*STEADY, *[1.0, 0.0] * 2)
    assert smoothed.value == pytest.approx(0.1, abs=0.02)


def test_a_slow_drift_is_followed() -> None:
    smoothed = followed(*STEADY, *(0.1 + 0.0005 * n for n in range(200)))
    assert smoothed.value == pytest.approx(0.2, rel=0.05)


def test_scatter_tells_a_steady_link_from_a_restless_one() -> None:
    rng = random.Random(8)
    steady = followed(*(0.1 + rng.uniform(-0.001, 0.001) for _ in range(100)))
    restless = followed(*(0.1 + rng.uniform(-0.02, 0.02) for _ in range(100)))
    assert steady.scatter < 0.002
    assert 0.004 < restless.scatter < 0.03
    assert restless.value == pytest.approx(0.1, abs=0.01)


def test_outliers_do_not_blow_the_scatter_up() -> None:
    assert followed(*STEADY, *[30.0, 0.1, 0.1] * 4).scatter < 0.05


def test_one_slow_draft_step_is_not_taken_for_the_rule() -> None:
    clock = LinkClock()
    for seconds in [0.008] * 10 + [0.4] + [0.008] * 3:
        clock.note_draft(seconds)
    assert clock.draft_s == pytest.approx(0.008, rel=0.05)
