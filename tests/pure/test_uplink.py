"""What one more id costs on the way up is found from round trips, whatever queues and however they scatter."""

from __future__ import annotations

import math
import random

import pytest

from edge_client.link_clock import LinkClock
from edge_client.uplink import FRAME_IDS, GUESSES_S, Uplink


class Link:
    """A narrow way up: a frame takes its time, and those behind it wait."""

    def __init__(self, id_s: float, rng: random.Random, round_trip_s: float = 0.05, jitter_s: float = 0.0) -> None:
        self.id_s, self.round_trip_s = id_s, round_trip_s
        self._rng, self._jitter_s = rng, jitter_s
        self._free_at = 0.0

    def send(self, uplink: Uplink, now: float, ids: int) -> None:
        ways_s = uplink.send(now, ids)
        self._free_at = max(now, self._free_at) + (FRAME_IDS + ids) * self.id_s
        uplink.note(ways_s, self._free_at - now + self.round_trip_s + self._rng.uniform(0, self._jitter_s))


def drive(uplink: Uplink, link: Link, rng: random.Random, frames: int, start: float = 0.0, gap_s: float = 0.1) -> float:
    now = start
    for _ in range(frames):
        link.send(uplink, now, rng.randint(1, 20))
        now += rng.uniform(0.3, 1.7) * gap_s
    return now


@pytest.mark.parametrize("id_s", [0.0005, 0.002, 0.006])
@pytest.mark.parametrize("seed", range(4))
def test_a_narrow_uplink_is_found_from_a_dozen_frames(id_s: float, seed: int) -> None:
    rng = random.Random(seed)
    uplink = Uplink()
    drive(uplink, Link(id_s, rng), rng, 12)
    assert uplink.id_s == pytest.approx(id_s, rel=0.45)


@pytest.mark.parametrize("seed", range(4))
def test_frames_that_wait_for_each_other_are_understood(seed: int) -> None:
    """All of one size, so only the queue tells: more is sent than the link carries, then less."""
    rng = random.Random(seed)
    uplink, link, now = Uplink(), Link(0.004, rng), 0.0
    for count, gap_s in ((10, 0.02), (10, 0.2)):
        for _ in range(count):
            link.send(uplink, now, 6)
            now += gap_s
    assert uplink.id_s == pytest.approx(0.004, rel=0.3)


@pytest.mark.parametrize("jitter_s", [0.0, 0.01, 0.05])
def test_on_a_wide_uplink_ids_cost_nothing(jitter_s: float) -> None:
    seen = []
    for seed in range(20):
        rng = random.Random(seed)
        uplink = Uplink()
        drive(uplink, Link(0.0, rng, jitter_s=jitter_s), rng, 40)
        seen.append(uplink.id_s)
    assert sorted(seen)[17] == 0.0
    assert max(seen) < 0.006, "what scatter alone suggests is small"


def test_until_a_few_frames_were_answered_nothing_is_believed() -> None:
    rng = random.Random(1)
    uplink, link = Uplink(), Link(0.004, rng)
    now = drive(uplink, link, rng, 3)
    assert uplink.id_s == 0.0
    assert uplink.way_s(now, 10) == 0.0


def test_round_trips_that_are_all_alike_suggest_nothing() -> None:
    uplink = Uplink()
    for n in range(60):
        uplink.note(uplink.send(float(n), 1 + n % 7), n + 0.05 - n)
    assert uplink.id_s == 0.0


def test_a_change_is_followed() -> None:
    rng = random.Random(2)
    uplink, link = Uplink(), Link(0.004, rng)
    now = drive(uplink, link, rng, 15)
    assert uplink.id_s > 0.002
    link.id_s = 0.0
    now = drive(uplink, link, rng, 60, now + 5)
    assert uplink.id_s == 0.0
    link.id_s = 0.003
    drive(uplink, link, rng, 60, now)
    assert uplink.id_s == pytest.approx(0.003, rel=0.45)


@pytest.mark.parametrize("id_s", [0.004, 0.012])
@pytest.mark.parametrize("seed", range(4))
def test_a_link_that_becomes_narrow_after_long_use_is_found_too(id_s: float, seed: int) -> None:
    """While it was wide, the guesses that it is narrow had queues that never were."""
    rng = random.Random(seed)
    uplink, link = Uplink(), Link(0.0, rng)
    now = drive(uplink, link, rng, 200)
    assert uplink.id_s == 0.0
    link.id_s = id_s
    for _ in range(60):
        now = drive(uplink, link, rng, 1, now)
        if uplink.id_s:
            break
    drive(uplink, link, rng, 5, now)
    assert uplink.id_s == pytest.approx(id_s, rel=0.45)


def test_what_takes_longer_than_the_whole_round_trip_is_not_believed() -> None:
    """Frames waited for each other, then the link is wide: two round trips show that no id takes so long."""
    uplink, now = Uplink(), 0.0
    for n in range(8):
        uplink.note(uplink.send(now, 10), 0.35 + n * 0.2)
        now += 0.1
    assert uplink.id_s > 0.02
    for n in range(2):
        uplink.note(uplink.send(now + 20 + n, 10), 0.05)
    assert uplink.id_s < 0.05 / 10


def test_a_frame_waits_for_those_before_it_and_a_new_stream_has_none() -> None:
    rng = random.Random(3)
    uplink = Uplink()
    drive(uplink, Link(GUESSES_S[7], rng), rng, 20)
    assert uplink.id_s == GUESSES_S[7]
    uplink.begin()
    alone_s = (FRAME_IDS + 5) * uplink.id_s
    assert uplink.way_s(100.0, 5) == pytest.approx(alone_s)
    ways_s = uplink.send(100.0, 5)
    assert uplink.way_of(ways_s) == pytest.approx(alone_s)
    assert uplink.way_s(100.0, 5) == pytest.approx(2 * alone_s)
    assert uplink.way_s(100.0 + alone_s / 2, 5) == pytest.approx(1.5 * alone_s)
    uplink.begin()
    assert uplink.way_s(100.0, 5) == pytest.approx(alone_s)


def narrow_clock(id_s: float) -> LinkClock:
    """Steps of 0.1 s, a round trip of 0.05, an uplink of `id_s`; the last commit came at 10."""
    rng = random.Random(4)
    uplink = Uplink()
    drive(uplink, Link(id_s, rng), rng, 20)
    clock = LinkClock(uplink)
    clock.note_opened(0.05)
    for node, now in enumerate((9.7, 9.8, 9.9, 10.0), start=1):
        sent_at = now - 0.05 - 0.1 - (FRAME_IDS + 4) * id_s
        clock.note_sent(node, sent_at, 4)
        clock.note_commit(now, 0.1, 0.0, node, 0.0, is_plain=False)
    return clock


def test_the_way_of_the_ids_is_no_part_of_the_round_trip() -> None:
    assert narrow_clock(GUESSES_S[8]).round_trip_s == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("ids", [1, 6, 12])
def test_a_larger_frame_has_to_leave_sooner_by_what_its_ids_take(ids: int) -> None:
    id_s = GUESSES_S[6]
    clock = narrow_clock(id_s)
    wide = narrow_clock(0.0)
    departure, least = clock.next_departure(10.001, ids), wide.next_departure(10.001, ids)
    assert departure is not None
    assert least is not None
    assert least - departure == pytest.approx((FRAME_IDS + ids) * id_s, abs=1e-6)


def test_what_cannot_be_across_before_the_step_is_aimed_at_the_next() -> None:
    clock, id_s = narrow_clock(GUESSES_S[12]), GUESSES_S[12]
    departure = clock.next_departure(10.001, 6)
    assert departure is not None
    assert departure >= 10.001
    assert math.isclose((departure + 0.05 + (FRAME_IDS + 6) * id_s - 10.0) % 0.1, 0.0, abs_tol=1e-6) or math.isclose(
        (departure + 0.05 + (FRAME_IDS + 6) * id_s - 10.0) % 0.1, 0.1, abs_tol=1e-6
    )


def test_a_frame_counts_as_arrived_when_its_last_id_is_across() -> None:
    clock, id_s = narrow_clock(GUESSES_S[12]), GUESSES_S[12]
    clock.note_sent(9, 20.0, 10)
    across_s = (FRAME_IDS + 10) * id_s
    assert clock.newest_arrived(20.0 + 0.05 + across_s - 0.001, 4) == 4
    assert clock.newest_arrived(20.0 + 0.05 + across_s + 0.001, 4) == 9
