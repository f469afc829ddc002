"""Too little room: sessions give up their pages and are fed again, steps shrink, and every text stays right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from cloud_verifier.target_model import RowInput
from shared.errors import DeviceFailure, Overloaded
from shared.types import Limits, PaceKind, Rule
from tests.formula_model import (
    PARAMS,
    VALID,
    VOCABULARY,
    Desk,
    Guest,
    PathSlot,
    Recorder,
    chain,
    formula_row,
    open_frame,
)
from tests.oracle import plain_ids

PAGE = 16
OUT_OF_MEMORY: dict[str, Callable[[], Exception]] = {
    "CUDA": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "CPU": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
    ),
}


def guests_of(desk: Desk, contexts: Sequence[int], count: int = 24, **changes: object) -> list[Guest]:
    """Sessions with contexts of such lengths."""
    return [
        desk.open(
            open_frame(
                [1 + (seed * 7 + n) % 20 for n in range(length)],
                seed=seed,
                max_new_tokens=count,
                sampling=PARAMS[list(PARAMS)[seed % len(PARAMS)]],
                **changes,
            )
        )
        for seed, length in enumerate(contexts)
    ]


def pages_for(rows: int) -> int:
    return -(-rows // PAGE)


def held_pages(guests: Sequence[Guest]) -> int:
    return sum(len(guest.session.slot.pages) for guest in guests)


def attempts_to_finish(desk: Desk, guests: Sequence[Guest], most: int, hint_with: random.Random | None = None) -> int:
    """Plans, run or not, until all texts have ended; fails past `most`. Checks that no page is lost on the way."""
    total = desk.model.free_pages + held_pages(guests)
    for attempt in range(1, most + 1):
        for guest in guests if hint_with else ():
            assert hint_with is not None
            if hint_with.random() < 0.3 and not guest.session.is_chain:
                ids = guest.plain(len(guest.generated) + 4)[len(guest.generated) :]
                if ids and hint_with.random() < 0.5:
                    ids[hint_with.randrange(len(ids))] = hint_with.randrange(VOCABULARY - 2)
                guest.session.hint(chain(guest, ids))
        desk.now += 0.001
        desk.step()
        assert desk.model.free_pages + held_pages(guests) == total
        assert desk.model.free_pages >= 0
        if all(guest.session.finished for guest in guests):
            return attempt
    raise AssertionError(f"not done after {most} attempts")


def assert_all_right(guests: Sequence[Guest], count: int = 24) -> None:
    for guest in guests:
        assert guest.sink.ids == guest.plain(count)
        assert guest.sink.faults == []


def bound(contexts: Sequence[int], count: int, held: int, prefill: int) -> int:
    """No more attempts than this: the oldest gets on in every other one that it is part of."""
    rounds = -(-len(contexts) // held)
    return sum(2 * rounds * (-(-length // prefill) + count) for length in contexts)


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("held", [1, 3, 64])
@pytest.mark.parametrize("share", [0.15, 0.3, 0.6])
def test_texts_are_right_and_come_to_an_end_in_a_pool_for_a_fraction_of_them(share: float, held: int) -> None:
    rng = random.Random(f"{share} {held}")
    contexts = [rng.choice([3, 17, 40, 80]) for _ in range(10)]
    most = [pages_for(length + 24) for length in contexts]
    observer = Recorder()
    pages = max(*most, int(sum(most) * share))
    desk = Desk(sessions_per_step=held, prefill_tokens=32, pages=pages, observer=observer)
    guests = guests_of(desk, contexts)
    attempts = attempts_to_finish(desk, guests, bound(contexts, 24, held, 32), hint_with=rng)
    assert_all_right(guests)
    assert sum(observer.evictions) > 0
    assert attempts >= len(observer.steps)


def test_sessions_under_the_rejection_rule_outlive_an_eviction_too() -> None:
    desk = Desk(sessions_per_step=8, pages=6)
    guests = [
        desk.open(open_frame(range(1, 20), seed=seed, sampling=PARAMS["sampled"], rule=Rule.REJECTION))
        for seed in range(5)
    ]
    attempts_to_finish(desk, guests, 500)
    alone = Desk()
    for guest in guests:
        other = alone.open(guest.session.opened_with)
        alone.run()
        assert guest.sink.ids == other.sink.ids


def test_the_oldest_session_gets_on_whenever_its_turn_has_come() -> None:
    desk = Desk(sessions_per_step=64, prefill_tokens=64, pages=4)
    guests = guests_of(desk, [30] * 6)
    alive, idle_steps = list(guests), 0
    while alive:
        oldest, before = alive[0], (len(alive[0].generated), alive[0].session.slot.length)
        desk.now += 0.001
        assert desk.step()
        after = (len(oldest.generated), oldest.session.slot.length)
        idle_steps = 0 if after[0] > before[0] or after[1] > before[1] else idle_steps + 1
        assert idle_steps <= len(alive) - 1
        alive = [guest for guest in alive if not guest.session.finished]
    assert_all_right(guests)


def test_a_session_that_finds_no_room_keeps_nobody_else_from_its_turn() -> None:
    # Once wrong: it stayed first in line with all of the prefill budget, and an evicted session that woke up was never
    # fed again, though its pages were free.
    desk = Desk(sessions_per_step=64, prefill_tokens=128, pages=12, limits=Limits(max_wait_ms=10_000))
    paces = (PaceKind.WAIT, PaceKind.RUN_ON)
    waiting, old = (desk.open(open_frame(range(1, 21), pace=pace, max_new_tokens=90)) for pace in paces)
    for _ in range(60):
        desk.now += 0.001
        desk.step()
    (large,) = guests_of(desk, [150], count=4)
    for _ in range(4):
        desk.now += 0.001
        desk.step()
    assert not large.session.slot.pages
    assert waiting.session.slot.pages, "nobody gives up pages for a row that would not fit all the same"
    waiting.session.slot.clear()
    truth = waiting.plain(90)
    for _ in range(5):
        done, alive = len(waiting.generated), old.session.finished is None
        waiting.session.hint(chain(waiting, truth[done : done + 2]))
        for _ in range(3):
            desk.now += 0.001
            desk.step()
        assert len(waiting.generated) >= done + 3
        assert alive
    for _ in range(300):
        desk.now += 11
        desk.step()
    assert large.sink.ids == large.plain(4)
    for guest in (old, waiting):
        assert guest.sink.ids == guest.plain(90)


def test_nobody_is_undone_by_somebody_younger() -> None:
    desk = Desk(sessions_per_step=64, prefill_tokens=64, pages=5)
    guests = guests_of(desk, [30] * 5)
    slots = {id(guest.session.slot): place for place, guest in enumerate(guests)}
    cleared: list[int] = []
    for guest in guests:
        slot = guest.session.slot
        clear = slot.clear
        slot.clear = lambda slot=slot, clear=clear: (cleared.append(slots[id(slot)]), clear())[1]  # type: ignore
    while not all(guest.session.finished for guest in guests):
        cleared.clear()
        desk.now += 0.001
        working = [place for place, guest in enumerate(guests) if guest.session.is_at_work]
        seen = len(desk.model.seen)
        desk.step()
        served = [slots[id(row.slot)] for row in desk.model.seen[seen:]]
        for victim in cleared:
            if victim in working:
                assert min(served) < victim
    assert_all_right(guests)


@dataclass
class Full:
    """A pool that is full: who holds pages, and somebody who needs one."""

    desk: Desk
    finished: Guest
    absent: Guest
    waiting: Guest
    young: Guest
    needy: Guest


def full_pool() -> Full:
    """Two pages are held by each of four sessions: one finished, one absent, one that waits for hints, one at work."""
    desk = Desk(sessions_per_step=64, pages=10, limits=Limits(max_wait_ms=10_000))
    needy = guests_of(desk, [20], count=200)[0]
    desk.step()
    desk.now += 1
    kinds = [{"max_new_tokens": 1}, {}, {"pace": PaceKind.WAIT}, {"max_new_tokens": 200}]
    finished, absent, waiting, young = (desk.open(open_frame(range(1, 21), seed=9, **kind)) for kind in kinds)
    needy.session.run_ahead = 0
    desk.step()
    absent.session.sink = None
    needy.session.run_ahead = 256
    assert desk.model.free_pages == 0
    assert finished.session.finished
    return Full(desk, finished, absent, waiting, young, needy)


def test_idle_sessions_give_up_their_pages_before_any_that_is_at_work() -> None:
    full = full_pool()
    desk, needy = full.desk, full.needy
    gone: list[str] = []
    for _ in range(200):
        desk.now += 0.001
        desk.step()
        for name in ("finished", "absent", "waiting", "young"):
            if name not in gone and not getattr(full, name).session.slot.pages:
                gone.append(name)
        if len(gone) == 4 or needy.session.finished:
            break
    assert set(gone[:2]) == {"finished", "absent"}
    assert gone[2:] == ["waiting", "young"]
    assert needy.generated == needy.plain(len(needy.generated))


def test_of_the_idle_the_one_that_has_been_idle_longest_goes_first() -> None:
    for first, last in (("finished", "absent"), ("absent", "finished")):
        full = full_pool()
        getattr(full, first).session.idle_since -= 50
        while True:
            full.desk.now += 0.001
            assert full.desk.step()
            emptied = [name for name in (first, last) if not getattr(full, name).session.slot.pages]
            if emptied:
                break
        assert emptied == [first]


def test_an_evicted_session_that_wakes_up_writes_on_as_if_nothing_had_been() -> None:
    full = full_pool()
    for _ in range(200):
        full.desk.now += 0.001
        full.desk.step()
        if not full.waiting.session.slot.pages:
            break
    assert not full.waiting.session.slot.pages
    full.waiting.session.hint(chain(full.waiting, full.waiting.plain(4)[1:]))
    full.absent.session.sink = full.absent.sink
    full.desk.worker.drop(full.needy.session, "cancelled")
    full.desk.worker.drop(full.young.session, "cancelled")
    full.desk.now += 20
    for _ in range(100):
        full.desk.now += 20
        full.desk.step()
    for guest in (full.waiting, full.absent):
        assert guest.sink.ids == guest.plain(24)


def test_where_there_is_no_room_for_hints_a_session_takes_a_plain_step() -> None:
    """An older one may not be evicted for hints."""
    desk = Desk(sessions_per_step=2, pages=3)
    older, younger = guests_of(desk, [20, 10])
    desk.step()
    assert desk.model.free_pages == 0
    older.session.run_ahead = 0
    older.session.runnable_since = desk.now  # at work, its turn to come
    truth = younger.plain(20)
    younger.session.hint(chain(younger, truth[1:13]))
    plan = desk.scheduler.plan(desk.now)
    assert plan is not None
    older.session.runnable_since = desk.now
    desk.worker.run_step(plan)
    assert younger.sink.commits[-1].accepted == 0
    assert younger.generated == truth[:2]
    assert older.session.slot.pages


# ---------------------------------------------------------------- out of memory


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_memory_that_ran_out_once_halves_the_step_which_is_tried_again(kind: str) -> None:
    observer = Recorder()
    desk = Desk(sessions_per_step=64, observer=observer)
    guests = guests_of(desk, [3 + seed for seed in range(8)])
    desk.step()
    for guest in guests:
        guest.session.hint(chain(guest, guest.plain(5)[1:]))
    before = [len(guest.generated) for guest in guests]
    desk.model.fail_next = OUT_OF_MEMORY[kind]()
    desk.now += 0.001
    assert desk.step()
    moved = [len(guest.generated) - was for guest, was in zip(guests, before, strict=True)]
    assert sorted(moved) == [0] * 4 + [1] * 4  # half of them, without hints
    assert (observer.out_of_memories, desk.model.recovered, observer.steps[-1].sessions) == (1, 1, 4)
    steps_before = len(observer.steps)
    assert observer.steps[-1].nodes == 0
    for _ in range(200):
        desk.now += 0.001
        desk.step()
    assert_all_right(guests)
    assert observer.out_of_memories == 1
    assert max(commit.batch_size for guest in guests for commit in guest.sink.commits) == 8
    assert max(report.sessions for report in observer.steps[steps_before:]) == 8


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
@pytest.mark.parametrize("company", [0, 1, 5])
def test_a_session_that_never_fits_ends_and_its_neighbours_write_on(kind: str, company: int) -> None:
    desk = Desk(sessions_per_step=64, prefill_tokens=256)
    neighbours = guests_of(desk, [3 + seed for seed in range(company)])
    desk.step()
    (huge,) = guests_of(desk, [2000])
    slot = huge.session.slot

    def fail(rows: Sequence[RowInput]) -> None:
        if any(row.slot is slot for row in rows):
            raise OUT_OF_MEMORY[kind]()

    desk.model.on_forward = fail
    for _ in range(300):
        desk.now += 0.001
        desk.step()
    assert [type(error) for error in huge.sink.ended] == [Overloaded]
    assert [(fault.error, fault.retry) for fault in huge.sink.faults] == [("Overloaded", True)]
    assert huge.generated == []
    assert isinstance(slot, PathSlot)
    assert slot.is_released
    assert_all_right(neighbours)
    assert all(guest.session.finished for guest in neighbours)


@pytest.mark.parametrize("company", [0, 1, 5])
def test_a_long_prefill_that_fits_in_smaller_pieces_is_fed_in_smaller_pieces(company: int) -> None:
    # Once wrong: a step of one session was tried again as it was, so a prefill that half would have fitted ended it.
    observer = Recorder()
    desk = Desk(sessions_per_step=64, prefill_tokens=256, observer=observer)
    neighbours = guests_of(desk, [3 + seed for seed in range(company)], count=60)
    desk.step()
    (huge,) = guests_of(desk, [600], count=5)
    fed: list[int] = []

    def fail(rows: Sequence[RowInput]) -> None:
        tokens = sum(len(row.ids) for row in rows)
        if tokens > 150:
            raise OUT_OF_MEMORY["CUDA"]()
        fed.append(tokens)

    desk.model.on_forward = fail
    for _ in range(200):
        desk.now += 0.001
        desk.step()
    assert huge.sink.ended == []
    assert huge.sink.ids == huge.plain(5)
    assert_all_right(neighbours, 60)
    assert observer.out_of_memories > 0
    assert max(fed) > 60


def test_a_pool_and_a_device_that_are_both_too_small_still_bring_every_text_to_its_end() -> None:
    rng = random.Random(4)
    desk = Desk(sessions_per_step=64, prefill_tokens=64, pages=12)
    guests = guests_of(desk, [rng.randint(1, 60) for _ in range(9)])

    def fail(rows: Sequence[RowInput]) -> None:
        if sum(len(row.ids) for row in rows) > 40:
            raise OUT_OF_MEMORY["CPU"]()

    desk.model.on_forward = fail
    attempts_to_finish(desk, guests, 3000, hint_with=rng)
    assert_all_right(guests)


def test_memory_that_runs_out_while_judging_is_memory_that_ran_out() -> None:
    desk = Desk(sessions_per_step=64)
    guests = guests_of(desk, [3, 4, 5, 6])
    desk.step()
    judge, failures = desk.worker._runner._judge, [OUT_OF_MEMORY["CUDA"]()]
    judged = judge.judge

    def fail_once(rows: object, scores: object) -> object:
        if failures:
            raise failures.pop()
        return judged(rows, scores)  # type: ignore[arg-type]

    judge.judge = fail_once  # type: ignore[method-assign, assignment]
    for _ in range(100):
        desk.now += 0.001
        desk.step()
    assert not failures
    assert_all_right(guests)


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "out of memory"])
def test_any_other_failure_is_the_devices_and_leaves_every_session_where_it_was(text: str) -> None:
    desk = Desk(sessions_per_step=64, prefill_tokens=64, pages=30)
    guests = guests_of(desk, [3, 17, 40])
    for _ in range(3):
        desk.now += 0.001
        desk.step()
    guests += guests_of(desk, [100])
    for guest in guests[:3]:
        guest.session.hint(chain(guest, [*guest.plain(5)[len(guest.generated) :], 1, 2, 3]))
    before = [(list(g.session.ids), g.session.slot.length, list(g.session.slot.pages), g.session.usage) for g in guests]
    free, held = desk.model.free_pages, [g.session.trie.held for g in guests]
    desk.model.fail_next = RuntimeError(f"{text}\nmore lines")
    desk.now += 0.001
    plan = desk.scheduler.plan(desk.now)
    assert plan is not None
    with pytest.raises(DeviceFailure, match=f"{text}$"):
        desk.worker.run_step(plan)
    after = [(list(g.session.ids), g.session.slot.length, list(g.session.slot.pages), g.session.usage) for g in guests]
    assert after == before
    assert ([g.session.trie.held for g in guests], desk.model.free_pages) == (held, free)
    for guest in guests:
        assert guest.session.ids == [
            *guest.session.opened_with.ids,
            *plain_ids(
                formula_row,
                guest.session.opened_with.ids,
                len(guest.generated),
                guest.session.opened_with.sampling,
                guest.session.seed,
                valid=VALID,
            ),
        ]
