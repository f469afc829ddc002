"""What the next step holds and when it begins: fairness, budgets, pace, lingering, room after an out-of-memory."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cloud_verifier.scheduler import LINGER_MOST_S, LINGER_SHARE, StepPlan
from shared.types import Limits, PaceKind
from tests.formula_model import PARAMS, VALID, VOCABULARY, Desk, Guest, chain, formula_row, open_frame
from tests.oracle import plain_ids

MAX_WAIT_S = 0.5
FOREVER = 10**6


def endless(desk: Desk, context: int = 3, **changes: object) -> Guest:
    """A session that runs on and never ends."""
    desk.model.context_size = 10**9
    values = {"sampling": PARAMS["sampled"], "max_new_tokens": FOREVER, "run_ahead": FOREVER, **changes}
    return desk.open(open_frame([1 + n % 20 for n in range(context)], **values))


def next_ids(guest: Guest, count: int) -> list[int]:
    """What the target writes next; needs a rule without penalties."""
    session = guest.session
    return plain_ids(formula_row, session.ids, count, session.opened_with.sampling, session.seed, valid=VALID)


def hint(desk: Desk, guest: Guest, count: int, wrong_at: int | None = None) -> None:
    """A chain of the target's own ids, one of them wrong if asked, as the engine takes it in."""
    ids = next_ids(guest, count)
    if wrong_at is not None and wrong_at < count:
        ids[wrong_at] = (ids[wrong_at] + 1) % (VOCABULARY - 2)
    had_none = not guest.session.trie.children
    if guest.session.hint(chain(guest, ids)) and had_none:
        guest.session.note_hint(desk.now)


def planned(desk: Desk) -> StepPlan:
    plan = desk.scheduler.plan(desk.now)
    assert plan is not None
    return plan


# ---------------------------------------------------------------- fairness


@pytest.mark.parametrize(("count", "held"), [(1, 1), (4, 1), (7, 3), (12, 4), (9, 9), (16, 64)])
def test_with_n_runnable_sessions_none_waits_more_than_n_minus_1_steps_that_serve_others(count: int, held: int) -> None:
    rng, waits, longest = random.Random(f"{count} {held}"), Counter[int](), 0
    desk = Desk(sessions_per_step=held, prefill_tokens=24, limits=Limits(max_context_tokens=FOREVER))
    guests = [endless(desk, rng.randint(1, 60), seed=seed) for seed in range(count)]
    for _ in range(500):
        desk.now += rng.uniform(1e-6, 0.01)
        for guest in guests:
            if rng.random() < 0.3 / count and guest.session.length < 400:
                guest.session.slot.clear()  # much to prefill again
            if rng.random() < 0.2 and not guest.session.trie.children:
                hint(desk, guest, rng.randint(1, 3), rng.choice([None, 0, 1]))
        before = len(desk.model.seen)
        assert desk.step()
        served = {id(row.slot) for row in desk.model.seen[before:]}
        for guest in guests:
            waits[id(guest)] = 0 if id(guest.session.slot) in served else waits[id(guest)] + 1
        longest = max(longest, *waits.values())
        assert longest <= count - 1
    if count > held:
        assert longest >= count // held - 1  # they did wait for one another
    assert min(len(guest.generated) for guest in guests) > 0


@pytest.mark.parametrize(("count", "held"), [(5, 1), (8, 3), (12, 4)])
def test_without_prefill_every_session_is_served_once_in_each_round(count: int, held: int) -> None:
    desk = Desk(sessions_per_step=held)
    guests = [endless(desk, seed=seed) for seed in range(count)]
    waits = Counter[int]()
    for _ in range(60):
        desk.now += 0.01
        before = len(desk.model.seen)
        assert desk.step()
        served = {id(row.slot) for row in desk.model.seen[before:]}
        assert len(served) == held
        for guest in guests:
            waits[id(guest)] = 0 if id(guest.session.slot) in served else waits[id(guest)] + 1
        assert max(waits.values()) <= -(-count // held) - 1


def test_rows_stand_in_the_order_in_which_their_sessions_became_runnable() -> None:
    rng, desk = random.Random(3), Desk(sessions_per_step=3)
    guests = [endless(desk, seed=seed, pace=PaceKind.WAIT) for seed in range(8)]
    since: dict[int, float] = {}
    for _ in range(300):
        desk.now += rng.uniform(0.001, 0.01)
        for guest in rng.sample(guests, 2):
            if not guest.session.trie.children:
                hint(desk, guest, 1)
        for guest in guests:
            if guest.session.unfed > 1 or guest.session.trie.children:
                since.setdefault(id(guest.session), desk.now)
        plan = desk.scheduler.plan(desk.now)
        if plan is None:
            assert not since
            continue
        order = {id(guest.session): place for place, guest in enumerate(guests)}
        expected = sorted(since, key=lambda key: (since[key], order[key]))[:3]
        assert [id(row.session) for row in plan.rows] == expected
        for row in plan.rows:
            assert row.queue_us == pytest.approx((desk.now - since.pop(id(row.session))) * 1e6, abs=2)
        desk.worker.run_step(plan)


def test_prefill_hints_and_plain_decodes_share_a_step() -> None:
    desk = Desk(sessions_per_step=8, prefill_tokens=32)
    decoding, hinted = endless(desk, seed=1), endless(desk, seed=2)
    desk.step()
    filling = endless(desk, 100, seed=3)
    hint(desk, hinted, 4)
    rows = {id(row.session): row for row in planned(desk).rows}
    prefill, plain, tree = (rows[id(guest.session)] for guest in (filling, decoding, hinted))
    assert (len(prefill.feed), prefill.nodes, prefill.is_judged) == (32, (), False)
    assert (len(plain.feed), plain.nodes, plain.is_judged) == (1, (), True)
    assert (len(tree.feed), len(tree.nodes), tree.is_judged) == (1, 4, True)
    for _ in range(6):
        desk.now += 0.01
        desk.step()
    for guest in (decoding, hinted, filling):
        assert guest.sink.ids == guest.plain(len(guest.generated))
    assert len(filling.generated) == 3


def test_hints_wait_until_the_last_committed_id_is_fed() -> None:
    desk = Desk(prefill_tokens=10)
    guest = endless(desk, 25)
    truth = guest.plain(6)
    guest.session.hint(chain(guest, truth[:4]))
    shapes = []
    while not guest.generated:
        (row,) = planned(desk).rows
        shapes.append((len(row.feed), len(row.nodes)))
        desk.step()
    assert shapes == [(10, 0), (10, 0), (5, 4)]
    assert guest.generated == truth[:5]


@pytest.mark.parametrize("seed", range(6))
def test_no_step_holds_more_sessions_prefill_or_nodes_than_its_budget(seed: int) -> None:
    rng = random.Random(seed)
    held, prefill, nodes = rng.randint(1, 6), rng.randint(1, 40), rng.randint(0, 20)
    desk = Desk(sessions_per_step=held, prefill_tokens=prefill, nodes=nodes, limits=Limits(max_step_nodes=6))
    guests = [endless(desk, rng.randint(1, 60), seed=number) for number in range(8)]
    fullest = Counter[str]()
    for _ in range(120):
        desk.now += 0.01
        for guest in guests:
            if rng.random() < 0.05:
                guest.session.slot.clear()
            if rng.random() < 0.6 and guest.session.trie.held < 6:
                guest.session.hint(chain(guest, [rng.randrange(20) for _ in range(9)]))
        plan = planned(desk)
        used = {
            "sessions": len(plan.rows),
            "prefill": sum(len(row.feed) for row in plan.rows if row.session.unfed > 1),
            "nodes": sum(len(row.nodes) for row in plan.rows),
        }
        assert used["sessions"] <= held
        assert used["prefill"] <= prefill
        assert used["nodes"] <= nodes
        assert all(len(row.nodes) <= 6 and row.feed for row in plan.rows)
        for name, amount in used.items():
            fullest[name] = max(fullest[name], amount)
        desk.step()
    assert fullest["sessions"] == held
    assert fullest["prefill"] == prefill
    assert fullest["nodes"] >= min(nodes, 6)


def test_no_plan_goes_deeper_than_the_credit() -> None:
    desk = Desk()
    guest = endless(desk, run_ahead=5)
    desk.step()
    hint(desk, guest, 9)
    guest.session.ack -= 1
    (row,) = planned(desk).rows
    assert len(row.nodes) == guest.session.credit == 4


# ---------------------------------------------------------------- pace


def test_wait_runs_for_hints_and_run_on_without_them() -> None:
    desk = Desk(sessions_per_step=4, limits=Limits(max_wait_ms=500))
    waiting, running = endless(desk, seed=1, pace=PaceKind.WAIT), endless(desk, seed=2)
    desk.step()
    assert [row.session for row in planned(desk).rows] == [running.session]
    hint(desk, waiting, 2)
    desk.now += 0.001
    assert {id(row.session) for row in planned(desk).rows} == {id(waiting.session), id(running.session)}


def patience_s(company: int, held: int) -> float:
    """How long a session with pace auto stands still among so many at work."""
    desk = Desk(sessions_per_step=held, limits=Limits(max_wait_ms=int(MAX_WAIT_S * 1000)))
    guest = endless(desk, pace=PaceKind.AUTO)
    desk.step()
    for number in range(company):
        other = endless(desk, seed=number, pace=PaceKind.WAIT)
        other.session.slot.kept = list(other.session.ids[:-1])
        other.session.idle_since = desk.now + 1000
    desk.now += 1e-9
    if (plan := desk.scheduler.plan(desk.now)) is not None:
        assert [row.session for row in plan.rows] == [guest.session]
        return 0.0
    wake = desk.scheduler.wake_at(desk.now)
    assert wake is not None
    return wake - guest.session.idle_since


def test_auto_runs_on_up_to_half_of_what_a_step_holds_and_waits_when_it_is_full() -> None:
    found = [patience_s(company, 16) for company in range(20)]
    assert found[:9] == [0.0] * 9
    assert sorted(set(found[8:17])) == found[8:17]
    assert found[16:] == pytest.approx([MAX_WAIT_S] * 4)
    assert found[12] == pytest.approx(MAX_WAIT_S / 2)


def test_sessions_that_are_absent_finished_or_without_credit_are_no_load() -> None:
    desk = Desk(sessions_per_step=2, limits=Limits(max_wait_ms=500))
    absent, paused = endless(desk, seed=1), endless(desk, seed=2, run_ahead=0)
    ended = desk.open(open_frame(max_new_tokens=1))
    desk.step()
    absent.session.sink = None
    desk.run(3) if ended.session.finished is None else None
    assert ended.session.finished
    guest = endless(desk, pace=PaceKind.AUTO)
    for _ in range(5):
        desk.now += 0.001
        assert [row.session for row in planned(desk).rows] == [guest.session]
        desk.step()
    assert not paused.generated


@pytest.mark.parametrize("seed", range(8))
def test_wake_at_is_when_the_next_plan_is_due_and_not_before(seed: int) -> None:
    rng, woken, early = random.Random(seed), 0, 0
    desk = Desk(sessions_per_step=rng.choice([1, 4, 6]), limits=Limits(max_wait_ms=rng.choice([100, 500])))
    desk.model.on_forward = lambda rows: tick(desk, 0.02)
    guests = [endless(desk, seed=n, pace=rng.choice([PaceKind.WAIT, PaceKind.AUTO])) for n in range(5)]
    for _ in range(150):
        if desk.step():
            desk.now += rng.choice([0.0, 0.0005, 0.003])
            for guest in guests:
                if rng.random() < 0.1 and not guest.session.trie.children:
                    hint(desk, guest, 2, rng.choice([None, 0]))
            continue
        wake = desk.scheduler.wake_at(desk.now)
        assert wake is not None
        assert wake > desk.now
        between = desk.now + 0.999 * (wake - desk.now)
        if desk.scheduler.plan(between) is None:
            assert desk.scheduler.wake_at(between) == wake
        else:  # somebody's max_wait ended during a linger: late by less than one
            assert wake - desk.now <= LINGER_MOST_S
            early += 1
        desk.now, woken = wake, woken + 1
        assert desk.scheduler.plan(wake) is not None
    assert woken > 10
    assert early < woken / 10


def test_without_anybody_at_work_only_a_command_can_bring_the_next_step() -> None:
    desk = Desk()
    assert desk.scheduler.wake_at(desk.now) is None
    guest = endless(desk, run_ahead=2)
    desk.run()
    assert len(guest.generated) == 2
    assert desk.scheduler.wake_at(desk.now) is None
    assert desk.scheduler.plan(desk.now + 10**6) is None


# ---------------------------------------------------------------- lingering


def tick(desk: Desk, seconds: float) -> None:
    desk.now += seconds


STEP_S = 0.1
LINGER_S = min(LINGER_MOST_S, LINGER_SHARE * STEP_S)


def answering(lags_s: list[float], held: int = 8) -> tuple[Desk, list[Guest]]:
    """Sessions with pace wait whose devices have so far answered each step so much later; a step has just ended."""
    desk = Desk(sessions_per_step=held, limits=Limits(max_wait_ms=5000))
    desk.model.on_forward = lambda rows: tick(desk, STEP_S)
    guests = [endless(desk, seed=seed, pace=PaceKind.WAIT) for seed in range(len(lags_s))]
    desk.step()
    for _ in range(6):
        ended_at = desk.now
        for lag_s, guest in sorted(zip(lags_s, guests, strict=True), key=lambda pair: pair[0]):
            desk.now = ended_at + lag_s
            hint(desk, guest, 2)
        desk.now = max(desk.now, ended_at + LINGER_S)
        while desk.step():
            pass
    return desk, guests


def test_a_step_waits_for_hints_that_have_come_quickly_so_far_and_holds_them_all() -> None:
    desk, (first, second) = answering([0.001, 0.003])
    ended_at = desk.now
    desk.now += 0.001
    hint(desk, first, 2)
    assert desk.scheduler.plan(desk.now) is None
    assert desk.scheduler.wake_at(desk.now) == pytest.approx(ended_at + LINGER_S)
    desk.now += 0.002
    hint(desk, second, 2)
    assert len(planned(desk).rows) == 2


def test_a_hint_that_does_not_come_is_waited_for_only_so_long() -> None:
    desk, (first, _) = answering([0.001, 0.003])
    ended_at = desk.now
    desk.now += 0.001
    hint(desk, first, 2)
    wake = desk.scheduler.wake_at(desk.now)
    assert wake is not None
    assert wake - ended_at <= LINGER_MOST_S
    assert wake - ended_at <= LINGER_SHARE * STEP_S * 1.001
    assert desk.scheduler.plan(wake - 1e-6) is None
    plan = desk.scheduler.plan(wake)
    assert plan is not None
    assert [row.session for row in plan.rows] == [first.session]


def test_a_device_that_answers_slowly_is_never_waited_for() -> None:
    desk, (first, _) = answering([0.001, 0.050])
    desk.now += 0.001
    hint(desk, first, 2)
    assert [row.session for row in planned(desk).rows] == [first.session]


def test_a_device_that_has_stopped_to_send_hints_costs_the_others_one_pause_and_not_one_a_step() -> None:
    # Once wrong: its hint stayed "expected" until max_wait was over, and every step of the others began late.
    desk, (first, _) = answering([0.001, 0.001])
    pauses = 0
    for _ in range(10):
        desk.now += 0.001
        hint(desk, first, 2)
        if desk.scheduler.plan(desk.now) is None:
            pauses += 1
            wake = desk.scheduler.wake_at(desk.now)
            assert wake is not None
            desk.now = wake
        assert desk.step()
    assert pauses == 1


def test_a_step_that_is_full_or_has_everybody_begins_at_once() -> None:
    desk, guests = answering([0.001] * 4, held=2)
    for guest in guests[:2]:
        hint(desk, guest, 2)
    assert len(planned(desk).rows) == 2
    desk, guests = answering([0.001] * 2)
    for guest in guests:
        hint(desk, guest, 2)
    assert len(planned(desk).rows) == 2


def test_a_device_that_left_or_has_no_credit_is_not_waited_for() -> None:
    for leave in (True, False):
        desk, (first, second) = answering([0.001, 0.001])
        if leave:
            second.session.sink = None
        else:
            second.session.run_ahead = 0
        hint(desk, first, 2)
        assert [row.session for row in planned(desk).rows] == [first.session]


# ---------------------------------------------------------------- out of memory


def test_out_of_memory_halves_the_sessions_of_a_step_and_they_grow_again_slowly() -> None:
    desk = Desk(sessions_per_step=16)
    for seed in range(16):
        endless(desk, seed=seed)
    desk.step()
    sizes = [len(planned(desk).rows)]
    desk.scheduler.note_out_of_memory()
    for _ in range(20):
        sizes.append(len(planned(desk).rows))
        desk.scheduler.note_step(1, 1, 0.0, desk.now)
    assert sizes[:2] == [16, 8]
    assert sorted(sizes[1:]) == sizes[1:]
    assert sizes[6] < 16
    assert sizes[-1] == 16


def test_prefill_and_nodes_are_halved_with_the_room() -> None:
    desk = Desk(sessions_per_step=16, prefill_tokens=160, nodes=40)
    hinted = [endless(desk, seed=seed) for seed in range(2)]
    desk.step()
    filling = endless(desk, 3000)
    for guest in hinted:
        guest.session.hint(chain(guest, [5] * 30))

    def sizes() -> tuple[int, int]:
        rows = {id(row.session): row for row in planned(desk).rows}
        return len(rows[id(filling.session)].feed), sum(len(row.nodes) for row in rows.values())

    whole = sizes()
    desk.scheduler.note_out_of_memory()
    assert whole[0] == 160
    assert sizes()[0] == 80
    assert sizes()[1] <= 20
    desk.scheduler.note_out_of_memory()
    assert sizes()[0] == 40
    assert sizes()[1] <= 10
    for _ in range(40):
        desk.scheduler.note_step(1, 1, 0.0, desk.now)
    assert sizes() == whole


def test_however_often_memory_ran_out_a_step_still_holds_something() -> None:
    desk = Desk(sessions_per_step=8, prefill_tokens=64)
    guests = [endless(desk, 50, seed=seed) for seed in range(3)]
    for _ in range(50):
        desk.scheduler.note_out_of_memory()
    (row,) = planned(desk).rows
    assert len(row.feed) == 1
    for _ in range(400):
        desk.now += 0.01
        desk.step()
    for guest in guests:
        assert len(guest.generated) > 10
        assert guest.sink.ids == guest.plain(len(guest.generated))
