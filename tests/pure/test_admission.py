"""Who is let in, who waits, who is sent away; and the rate of hint nodes. Time is the test's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from cloud_verifier.admission import LEAST_RETRY_MS, MOST_RETRY_MS, Admission, AdmissionLimits, Entry


@dataclass(eq=False)
class Ticket:
    """Somebody who asks. Two that look alike are not the same."""

    name: str


def entered(admission: Admission[Ticket], *names: str, principal: str = "a") -> list[Ticket]:
    """So many who found a place or a place in the queue."""
    tickets = [Ticket(name) for name in names]
    for ticket in tickets:
        assert admission.enter(principal, ticket) in (Entry.ADMITTED, Entry.QUEUED)
    return tickets


def test_places_are_given_until_they_are_gone_then_the_queue_until_it_is_full() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=2, max_queue=3))
    found = [admission.enter("a", Ticket(str(number))) for number in range(7)]
    assert found == [Entry.ADMITTED] * 2 + [Entry.QUEUED] * 3 + [Entry.QUEUE_FULL] * 2
    assert (admission.held, admission.queued) == (2, 3)


def test_without_a_queue_whoever_finds_no_place_is_sent_away() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=1, max_queue=0))
    assert admission.has_place()
    assert admission.enter("a", Ticket("x")) is Entry.ADMITTED
    assert not admission.has_place()
    assert admission.enter("a", Ticket("y")) is Entry.QUEUE_FULL
    admission.leave("a", 1.0)
    assert admission.enter("a", Ticket("z")) is Entry.ADMITTED


def test_the_queue_is_served_first_come_first_served_whoever_asks() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=1, max_queue=9))
    entered(admission, "in")
    waiting = [entered(admission, name, principal=name)[0] for name in ("b", "c", "a", "d")]
    assert admission.next_to_enter() is None
    served = []
    for holder in ("a", "b", "c", "a"):
        admission.leave(holder, 1.0)
        served.append(admission.next_to_enter())
        assert admission.next_to_enter() is None
    assert served == waiting
    assert (admission.held, admission.queued) == (1, 0)


def test_nobody_passes_those_who_wait_though_a_place_is_free() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=1, max_queue=9))
    entered(admission, "in")
    (first,) = entered(admission, "first")
    admission.leave("a", 1.0)
    assert not admission.has_place()
    assert admission.enter("a", Ticket("second")) is Entry.QUEUED
    assert admission.next_to_enter() is first


def test_a_principal_holds_and_waits_for_no_more_than_its_share() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=2, max_queue=9, principal_sessions=3))
    assert [admission.enter("a", Ticket(str(number))) for number in range(4)] == [
        Entry.ADMITTED,
        Entry.ADMITTED,
        Entry.QUEUED,
        Entry.PRINCIPAL_SESSIONS,
    ]
    assert admission.enter("b", Ticket("other")) is Entry.QUEUED
    assert admission.queued == 2
    admission.leave("a", 1.0)
    assert admission.enter("a", Ticket("again")) is Entry.QUEUED


def test_a_ticket_that_is_withdrawn_is_never_served_and_the_others_keep_their_order() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=1, max_queue=9, principal_sessions=5))
    entered(admission, "in")
    first, second, third = entered(admission, "x", "x", "x")
    assert admission.maybe_withdraw(second)
    assert not admission.maybe_withdraw(second)
    assert not admission.maybe_withdraw(Ticket("x"))
    assert admission.enter("a", Ticket("y")) is Entry.QUEUED  # its share counts those who left no more
    admission.leave("a", 1.0)
    assert admission.next_to_enter() is first
    assert not admission.maybe_withdraw(first)
    admission.leave("a", 2.0)
    assert admission.next_to_enter() is third


def test_a_drain_takes_all_out_of_the_queue_without_a_place() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=1, max_queue=9))
    entered(admission, "in")
    waiting = entered(admission, "x", "y", "z")
    assert list(iter(admission.next_queued, None)) == waiting
    assert (admission.held, admission.queued) == (1, 0)


def test_a_session_that_moves_takes_its_place_along() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=4, principal_sessions=2))
    entered(admission, "x", "y")
    admission.move("a", "b")
    admission.move("a", "a")
    assert admission.held == 2
    assert admission.enter("a", Ticket("z")) is Entry.ADMITTED
    assert admission.enter("b", Ticket("z")) is Entry.ADMITTED
    assert admission.enter("b", Ticket("z")) is Entry.PRINCIPAL_SESSIONS
    for holder in ("b", "b", "a", "a"):
        admission.leave(holder, 1.0)
    assert admission.held == 0


def test_nobody_leaves_who_holds_no_place() -> None:
    admission = Admission[Ticket](AdmissionLimits())
    entered(admission, "x")
    with pytest.raises(AssertionError):
        admission.leave("b", 1.0)
    admission.leave("a", 1.0)
    with pytest.raises(AssertionError):
        admission.leave("a", 2.0)
    assert admission.held == 0


@pytest.mark.parametrize("seed", range(5))
def test_at_any_time_places_and_queue_hold_what_a_slow_twin_says(seed: int) -> None:
    rng = random.Random(seed)
    limits = AdmissionLimits(rng.randint(1, 5), rng.randint(0, 5), rng.choice([0, 2, 4]))
    admission = Admission[Ticket](limits)
    held: list[str] = []
    queue: list[tuple[str, Ticket]] = []
    seen = Counter[Entry]()
    for number in range(2000):
        act, name = rng.random(), rng.choice("abcd")
        if act < 0.5:
            ticket = Ticket(str(number))
            own = held.count(name) + sum(1 for principal, _ in queue if principal == name)
            if limits.principal_sessions and own >= limits.principal_sessions:
                expected = Entry.PRINCIPAL_SESSIONS
            elif len(held) < limits.max_sessions and not queue:
                expected = Entry.ADMITTED
                held.append(name)
            elif len(queue) >= limits.max_queue:
                expected = Entry.QUEUE_FULL
            else:
                expected = Entry.QUEUED
                queue.append((name, ticket))
            assert admission.enter(name, ticket) is expected
            seen[expected] += 1
        elif act < 0.8 and held:
            leaver = held.pop(rng.randrange(len(held)))
            admission.leave(leaver, float(number))
            while queue and len(held) < limits.max_sessions:
                least = min(held.count(principal) for principal, _ in queue)
                place = next(n for n, (principal, _) in enumerate(queue) if held.count(principal) == least)
                principal, ticket = queue.pop(place)
                assert admission.next_to_enter() is ticket
                held.append(principal)
            assert admission.next_to_enter() is None
        elif act < 0.9 and queue:
            assert admission.maybe_withdraw(queue.pop(rng.randrange(len(queue)))[1])
        elif held:
            place = rng.randrange(len(held))
            admission.move(held[place], name)
            held[place] = name
        assert (admission.held, admission.queued) == (len(held), len(queue))
        assert admission.has_place() == (len(held) < limits.max_sessions and not queue)
        assert LEAST_RETRY_MS <= admission.retry_after_ms() <= MOST_RETRY_MS
    assert seen[Entry.ADMITTED] > 50


# ---------------------------------------------------------------- when to come again


def queued(admission: Admission[Ticket], count: int) -> None:
    while admission.queued < count:
        entered(admission, "x")


def test_retry_after_grows_with_the_queue_and_stays_within_its_bounds() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=1, max_queue=1000))
    entered(admission, "in")
    told = []
    for length in range(0, 200, 5):
        queued(admission, length)
        told.append(admission.retry_after_ms())
    assert told[0] < told[1] < told[2]
    assert sorted(told) == told
    assert told[0] >= LEAST_RETRY_MS
    assert told[-1] == MOST_RETRY_MS


@pytest.mark.parametrize(("interval_s", "expected"), [(0.5, 5 * 500), (3.0, 5 * 3000), (100.0, MOST_RETRY_MS)])
def test_retry_after_follows_how_fast_places_are_left(interval_s: float, expected: int) -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=100, max_queue=9))
    entered(admission, *["in"] * 100)
    for number in range(60):
        admission.leave("a", number * interval_s)
        entered(admission, "x")
    queued(admission, 4)
    assert admission.retry_after_ms() == pytest.approx(expected, rel=0.05)


def test_places_left_at_the_same_moment_do_not_bring_retry_after_below_its_bound() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=1))
    for _ in range(200):
        entered(admission, "x")
        admission.leave("a", 5.0)
    assert admission.retry_after_ms() == LEAST_RETRY_MS


def test_places_that_are_left_while_others_are_free_say_nothing_of_how_long_one_waits() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=2))
    before = admission.retry_after_ms()
    for number in range(200):
        entered(admission, "x")
        admission.leave("a", 30.0 * number)
    assert admission.retry_after_ms() == before


# ---------------------------------------------------------------- hint nodes


def bucket(rate: int) -> Admission[Ticket]:
    return Admission[Ticket](AdmissionLimits(hint_nodes_per_second=rate))


def test_without_a_rate_any_number_of_nodes_may_be_sent() -> None:
    admission = bucket(0)
    assert all(admission.may_send("a", 10**6, 0.0) for _ in range(10))


def test_a_burst_of_four_seconds_worth_then_the_rate() -> None:
    admission = bucket(10)
    assert [admission.may_send("a", 8, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert admission.may_send("a", 8, 100.1), "one node's worth is there: the rest is owed"
    assert not admission.may_send("a", 8, 100.7)
    assert admission.may_send("a", 8, 100.9)
    assert not admission.may_send("a", 8, 100.9)
    taken = sum(8 for n in range(1, 1001) if admission.may_send("a", 8, 100.9 + n * 0.1))
    assert 10 * 100 - 16 <= taken <= 10 * 100 + 16


def test_a_frame_that_came_before_one_already_counted_neither_earns_nor_takes_allowance_by_its_time() -> None:
    admission = bucket(10)
    assert admission.may_send("a", 38, 100.0), "two nodes' worth is left"
    assert admission.may_send("a", 1, 90.0)
    assert admission.may_send("a", 1, 100.0)
    assert not admission.may_send("a", 1, 100.0)


def test_a_hint_larger_than_a_burst_passes_once_and_is_paid_for() -> None:
    admission = bucket(10)
    assert admission.may_send("a", 100, 0.0)
    assert not admission.may_send("a", 1, 5.9)
    assert admission.may_send("a", 1, 6.1)


def test_a_refused_hint_costs_nothing_and_one_without_nodes_always_passes() -> None:
    admission = bucket(10)
    assert admission.may_send("a", 40, 0.0)
    assert not admission.may_send("a", 1000, 0.0)
    assert admission.may_send("a", 0, 0.0)
    assert admission.may_send("a", 1, 0.2)


def test_idle_time_buys_no_more_than_one_burst() -> None:
    admission = bucket(10)
    assert admission.may_send("a", 40, 0.0)
    assert admission.may_send("a", 40, 10_000.0)
    assert not admission.may_send("a", 1, 10_000.0)


def test_each_principal_has_a_rate_of_its_own() -> None:
    admission = bucket(10)
    assert admission.may_send("a", 40, 0.0)
    assert not admission.may_send("a", 1, 0.0)
    assert admission.may_send("b", 40, 0.0)


def test_whoever_has_gone_is_forgotten_when_its_allowance_would_be_full_again() -> None:
    admission = bucket(10)
    for number in range(1000):
        entered(admission, "x", principal=str(number))
        admission.may_send(str(number), 40, 0.0)
        admission.leave(str(number), 0.0)
    assert not admission._held
    assert admission.may_send("new", 1, 4.0)
    assert list(admission._rates) == ["new"]


def test_a_principal_keeps_its_rate_while_one_of_its_sessions_is_there() -> None:
    admission = bucket(10)
    entered(admission, "x", "y")
    assert admission.may_send("a", 40, 0.0)
    admission.leave("a", 0.0)
    assert not admission.may_send("a", 40, 0.0)


# ---------------------------------------------------------------- fair to those who wait, and to those who share


def test_of_those_who_wait_the_one_whose_principal_holds_fewest_places_enters_first_then_the_first_to_come() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=4, max_queue=9))
    entered(admission, "1", "2", "3", principal="a")
    entered(admission, "4", principal="b")
    (a,) = entered(admission, "a", principal="a")
    (b,) = entered(admission, "b", principal="b")
    c, later_c = entered(admission, "c", "later c", principal="c")
    served = []
    for _ in range(4):  # held: a 2, b 1, c 0; then 1, 1, 1; then 1, 1, 1; then 0, 2, 1
        admission.leave("a", 1.0)
        served.append(admission.next_to_enter())
        assert admission.next_to_enter() is None
    assert served == [c, a, b, later_c]
    assert (admission.held, admission.queued) == (4, 0)


def test_one_that_floods_the_queue_keeps_nobody_else_waiting_for_more_than_a_place() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=3, max_queue=99))
    entered(admission, *"123", principal="greedy")
    entered(admission, *(str(n) for n in range(50)), principal="greedy")
    others = [entered(admission, name, principal=name)[0] for name in ("b", "c")]
    served = []
    for _ in range(2):
        admission.leave("greedy", 1.0)
        served.append(admission.next_to_enter())
    assert served == others


def test_whose_turn_it_is_follows_the_places_as_they_are_now_not_as_they_were_when_it_came() -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=3, max_queue=9))
    entered(admission, "1", "2", principal="a")
    entered(admission, "3", principal="b")
    (b,) = entered(admission, "b", principal="b")
    (a,) = entered(admission, "a", principal="a")
    admission.move("a", "b")
    admission.leave("b", 1.0)  # a holds 1, b 1: the first to come
    assert admission.next_to_enter() is b
    admission.leave("a", 2.0)
    assert admission.next_to_enter() is a


@pytest.mark.parametrize("quiet_s", [60.0, 3600.0, 1e6])
def test_a_place_that_is_left_after_a_long_quiet_time_does_not_make_anybody_wait_longer(quiet_s: float) -> None:
    admission = Admission[Ticket](AdmissionLimits(max_sessions=10, max_queue=9))
    entered(admission, *["in"] * 10)
    for number in range(60):
        admission.leave("a", number * 0.5)
        entered(admission, "x")
    for _ in range(10):
        admission.leave("a", 30.0)
    assert admission.held == 0
    entered(admission, *["in"] * 10)  # after the quiet, all at once
    admission.leave("a", 30.0 + quiet_s)
    entered(admission, "in")
    queued(admission, 4)
    assert admission.retry_after_ms() <= 2 * 5 * 500


def test_closing_and_opening_again_does_not_refill_the_allowance_of_hint_nodes() -> None:
    admission = bucket(10)
    taken = 0
    for number in range(1000):  # ten seconds
        entered(admission, "x")
        taken += 8 * admission.may_send("a", 8, 100.0 + number * 0.01)
        admission.leave("a", 100.0 + number * 0.01)
    assert 40 + 10 * 10 - 8 <= taken <= 40 + 10 * 10 + 8
    entered(admission, "x")
    assert admission.may_send("a", 40, 120.0), "it fills with time all the same"


def test_moving_to_another_connection_does_not_take_anothers_allowance_away() -> None:
    admission = bucket(10)
    entered(admission, "x", principal="a")
    entered(admission, "y", principal="b")
    assert admission.may_send("a", 40, 0.0)
    admission.move("a", "b")
    assert admission.may_send("b", 40, 0.0)
    entered(admission, "x", principal="a")
    assert not admission.may_send("a", 40, 0.0)
