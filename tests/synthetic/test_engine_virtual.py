"""The device's engine against the verifier's under a virtual clock: it follows what changes and never costs speed.

All times are virtual; `World` itself asserts at the end of each text that the device holds exactly the recorded ids.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from bench.recorded_target import Times
from bench.traces import Trace
from bench.virtual import World
from edge_client.controller import EngineSettings, Experience
from edge_client.drafter import Budget, DraftTask, HintTree, ModelDrafter
from edge_client.edge_engine import DraftJob, EdgeEngine
from edge_client.uplink import Uplink
from shared.sampling import GREEDY
from shared.types import Commit, Epoch, Limits, Open, Opened, PaceKind, Reason, Rule, SessionId
from tests.formula_model import VALID, formula_row
from tests.oracle import plain_ids
from tests.synthetic.scripted_world import (
    PROMPT,
    ScriptedDrafter,
    WatchedWorld,
    gain,
    streaming_s,
    trace_of,
)

CELLS = [
    (0.1, 0.05, 0.008),
    (0.1, 0.0, 0.008),
    (0.05, 0.05, 0.02),
    (0.05, 0.1, 0.005),
    (0.1, 0.2, 0.04),
    (0.02, 0.0, 0.008),
]
"""Step, round trip, draft step, in seconds."""
FLOOR_CELLS = 30


# ---------------------------------------------------------------- what changes is followed


@pytest.mark.parametrize(("cell", "within_s"), [((0.05, 0.02, 0.005), 2.0), ((0.1, 0.05, 0.008), 3.0)])
def test_a_falling_and_rising_acceptance_is_followed(cell: tuple[float, float, float], within_s: float) -> None:
    """0.9, then 0.3, then 0.9: within two seconds, or 30 steps where those take longer, known to 30 %."""
    trace, falls_at, rises_at = trace_of(300), 100, 170
    drafter = ScriptedDrafter(trace, lambda at: 0.3 if falls_at <= at < rises_at else 0.9)
    world = WatchedWorld(trace, Times(*cell), EngineSettings(), drafter)
    world.watch()
    fell, rose = (next(seen.at for seen in world.seen if seen.length >= at) for at in (falls_at, rises_at))
    assert rose - fell > within_s

    def share(start: float) -> float:
        return world.mean(lambda seen: seen.acceptance, start, 0.5)

    assert share(fell - 0.5) == pytest.approx(0.9, rel=0.3)
    assert share(fell + within_s) == pytest.approx(0.3, rel=0.3)
    assert share(rose + within_s) == pytest.approx(0.9, rel=0.3)
    assert world.mean(lambda seen: seen.is_drafting, rose + within_s, 1.0) > 0.5, "it drafts again"


@pytest.mark.parametrize("step_s", [0.05, 0.1])
def test_a_round_trip_that_grows_and_shrinks_again_is_followed_within_two_seconds(step_s: float) -> None:
    trace = trace_of(400)
    world = WatchedWorld(trace, Times(step_s, 0.01, 0.005), EngineSettings(), ScriptedDrafter(trace, 0.9))
    world.change_at(2.0, round_trip_s=0.15)
    world.change_at(5.0, round_trip_s=0.01)
    world.watch()

    def round_trip(start: float) -> float:
        return world.mean(lambda seen: seen.round_trip_s, start, 1.0)

    assert round_trip(1.0) == pytest.approx(0.01, rel=0.3)
    assert round_trip(4.0) == pytest.approx(0.15, rel=0.3)
    assert round_trip(7.0) == pytest.approx(0.01, rel=0.3)


def test_after_a_draft_has_become_useless_and_good_again_text_is_as_fast_as_before() -> None:
    trace = trace_of(400)
    drafter = ScriptedDrafter(trace, lambda at: 0.0 if 120 <= at < 200 else 0.9)
    world = WatchedWorld(trace, Times(0.1, 0.05, 0.008), EngineSettings(), drafter)
    world.watch()

    def rate(first: int, last: int) -> float:
        times = [next(seen.at for seen in world.seen if seen.length >= at) for at in (first, last)]
        return (last - first) / (times[1] - times[0])

    assert rate(40, 120) > 20
    assert rate(140, 200) > 9.5
    assert rate(280, 400) > 0.8 * rate(40, 120)


# ---------------------------------------------------------------- it never costs speed


@pytest.mark.parametrize("cell", CELLS)
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(cell: tuple[float, float, float]) -> None:
    trace = trace_of(200)
    assert gain(trace, Times(*cell), ScriptedDrafter(trace, 0.0)) >= 0.97


@pytest.mark.parametrize("told", [0.1, 0.99])
def test_a_drafter_that_is_wrong_and_knows_or_does_not_know_it_costs_next_to_nothing(told: float) -> None:
    trace = trace_of(200)
    times = Times(0.1, 0.05, 0.008, node_cost=0.02)
    assert gain(trace, times, ScriptedDrafter(trace, 0.0, told=told)) >= 0.97


@pytest.mark.parametrize("cell", [(0.05, 0.02, 0.06), (0.02, 0.1, 0.04), (0.1, 0.0, 0.5)])
def test_a_drafter_slower_than_the_step_costs_nothing(cell: tuple[float, float, float]) -> None:
    trace = trace_of(200)
    drafter = ScriptedDrafter(trace, 0.95)
    assert gain(trace, Times(*cell), drafter) >= 0.999
    assert len(drafter.asked) < 100


@pytest.mark.parametrize("seed", range(FLOOR_CELLS))
def test_whatever_the_times_and_the_acceptance_it_is_never_slower_than_streaming(seed: int) -> None:
    rng, trace = random.Random(seed), trace_of(200)
    step_s, draft_s = rng.choice([0.02, 0.05, 0.1, 0.2]), rng.choice([0.003, 0.008, 0.017, 0.04, 0.1])
    times = Times(step_s, rng.choice([0.0, 0.01, 0.05, 0.1, 0.2]), draft_s, node_cost=rng.choice([0.0, 0.003, 0.01]))
    drafter = ScriptedDrafter(trace, rng.random(), rank=rng.choice([0, 0, 1]), told=rng.uniform(0.2, 0.95))
    assert gain(trace, times, drafter, EngineSettings(width=rng.choice([1, 2, 4]))) >= 0.99


def test_a_good_drafter_is_worth_having() -> None:
    trace = trace_of(200)
    assert gain(trace, Times(0.1, 0.05, 0.008), ScriptedDrafter(trace, 0.9)) > 2
    assert gain(trace, Times(0.1, 0.05, 0.008), ScriptedDrafter(trace, 0.6)) > 1.2


# ---------------------------------------------------------------- drafting ahead


def test_it_drafts_on_past_ids_that_were_sent_and_not_confirmed_yet() -> None:
    trace = trace_of(100)
    world = WatchedWorld(trace, Times(0.1, 0.1, 0.008), EngineSettings(), ScriptedDrafter(trace, 0.95))
    world.watch()
    assert max(len(job.budget.path) for job in world.jobs) >= 6
    assert sum(len(job.budget.path) > 0 for job in world.jobs) > len(world.jobs) / 2
    ahead = [hint for hint in world.sent if hint.base_node or 0 not in (hint.parents or (0,))]
    assert ahead, "no hint went on where an unconfirmed one had ended"


def engine_with_two_branches() -> tuple[EdgeEngine, list[int]]:
    """One that has drafted 11 or 22 after the text, 12 after 11, 23 and 24 after 22."""
    request = Open(PROMPT, len(PROMPT), b"", GREEDY, 50, Epoch(0), 1, Rule.AGREEMENT, pace=PaceKind.RUN_ON)
    engine, ids = EdgeEngine(request, EngineSettings(), has_model=True), list(PROMPT)
    engine.opened(Opened(SessionId(b"s"), 1, Epoch(0), 5, 5, 1, b"", Limits()), ids, 0.0, 0.02)
    answers = {(): (11, 22), (11,): (12,), (22,): (23,), (22, 23): (24,)}
    asked: set[tuple[int, ...]] = set()
    while not asked.issuperset(answers):
        job = engine.next_job(0.0)
        assert job is not None
        asked.add(job.budget.path)
        proposed = answers.get(job.budget.path, (77,))
        told = (0.5, 0.45)[: len(proposed)] if len(proposed) > 1 else (0.9,)
        engine.drafted(job, HintTree(proposed, (-1,) * len(proposed), told), "model", 0.0, 0.005)
    return engine, ids


def test_a_correction_that_was_drafted_as_an_alternative_goes_on_from_its_branch_without_a_draft_step() -> None:
    engine, ids = engine_with_two_branches()
    steps = engine.counters.draft_steps
    ids.append(22)
    engine.committed(ids, Commit(Epoch(0), 5, (22,), 0, step_us=100_000), 1.0)
    assert engine.preview()[:2] == (23, 24)
    hint = engine.take_hint(1.0)
    assert hint is not None
    assert hint.ids[:2] == (23, 24)
    assert engine.counters.draft_steps == steps
    job = engine.next_job(1.0)
    assert job is not None
    assert len(job.budget.path) >= 2


def test_a_drafter_whose_second_choice_is_right_finds_its_corrections_drafted_already() -> None:
    """Where the text turns to an alternative, what follows it is in the tree more often than not."""
    trace = trace_of(150)
    drafter = ScriptedDrafter(trace, 1.0, rank=1, told=0.55)
    assert gain(trace, Times(0.1, 0.05, 0.004), drafter) > 1.5


# ---------------------------------------------------------------- bounds of looking ahead (CASES.md C13)


@pytest.mark.parametrize("count", [1, 2, 5, 30])
@pytest.mark.parametrize("pace", [PaceKind.RUN_ON, PaceKind.WAIT])
def test_no_hint_and_no_draft_step_goes_past_the_last_id_that_may_come(count: int, pace: PaceKind) -> None:
    trace = trace_of(count)
    drafter = ScriptedDrafter(trace, 1.0)
    world = WatchedWorld(trace, Times(0.1, 0.05, 0.004), EngineSettings(pace=pace), drafter)
    world.watch()
    last = len(PROMPT) + count - 1
    assert all(at <= last for at in drafter.asked)
    assert all(position <= last for position in world.hinted_positions())


class FormulaDraft:
    """A NextTokenModel that knows the target's formula, and fails past the end of its context."""

    def __init__(self, context_size: int) -> None:
        self.context_size = context_size
        self._ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self._ids)

    def rewind(self, length: int) -> None:
        assert 0 <= length <= len(self._ids)
        del self._ids[length:]

    def feed(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        self._ids += ids
        assert len(self._ids) <= self.context_size, "fed past the draft's context"
        return formula_row(self._ids)

    def save_rows(self, start: int) -> npt.NDArray[np.int64]:
        return np.array(self._ids[start:], dtype=np.int64)[None, None, :, None]

    def append_rows(self, rows: npt.NDArray[np.int64]) -> None:
        self._ids += rows[0, 0, :, 0].tolist()
        assert len(self._ids) <= self.context_size


TARGET_HOLDS, DRAFT_HOLDS = 64, 48


@pytest.mark.parametrize("pace", [PaceKind.RUN_ON, PaceKind.WAIT])
@pytest.mark.parametrize("start", range(40, TARGET_HOLDS))
def test_a_text_goes_to_the_end_of_the_targets_context_past_the_end_of_the_drafts(start: int, pace: PaceKind) -> None:
    """CASES.md C13: contexts of 64 and 48 ids, from every length, looking eight ids ahead."""
    prompt = [index % 20 for index in range(start)]
    ids = plain_ids(formula_row, prompt, TARGET_HOLDS - start, GREEDY, valid=VALID)
    trace, times = Trace("formula", tuple(prompt), tuple(ids), 1), Times(0.1, 0.02, 0.004)
    drafter = ModelDrafter(FormulaDraft(DRAFT_HOLDS), VALID)
    drafter.begin(DraftTask(GREEDY, 1, Rule.AGREEMENT, Epoch(0), start))
    world = WatchedWorld(trace, times, EngineSettings(depth=8, pace=pace), drafter)
    world.watch()
    assert len(world.ids) == TARGET_HOLDS
    assert world.session.finished is not None
    assert world.session.finished.reason is Reason.LENGTH
    told_to_run_on_s = 0.0 if pace is PaceKind.RUN_ON else times.round_trip_s + times.draft_s
    assert world.out.seconds <= 1.01 * streaming_s(trace, times) + told_to_run_on_s
    assert all(position <= DRAFT_HOLDS for position in world.hinted_positions())
    assert not world.sent if start >= DRAFT_HOLDS else world.sent or start > DRAFT_HOLDS - 4
    assert "context is full" in world.engine.explain()
    assert not world.engine.decision.is_drafting


# ---------------------------------------------------------------- pace wait


@pytest.mark.parametrize("cell", CELLS[:4])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.95])
def test_under_pace_wait_nothing_stalls_whatever_the_drafter_is_worth(
    cell: tuple[float, float, float], acceptance: float
) -> None:
    """The verifier steps without hints after half a second: a text that lived on that would take 100 s."""
    trace = trace_of(200)
    settings = EngineSettings(pace=PaceKind.WAIT)
    outcome = World(trace, Times(*cell), settings, ScriptedDrafter(trace, acceptance)).run()
    assert outcome.seconds < 3 * streaming_s(trace, Times(*cell)) + 2


@pytest.mark.parametrize("context_size", [0, 6, 40])
def test_under_pace_wait_a_drafter_that_falls_silent_lets_the_verifier_run_on(context_size: int) -> None:
    trace = trace_of(100)
    settings = EngineSettings(pace=PaceKind.WAIT)
    drafter = ScriptedDrafter(trace, 0.9, context_size=context_size)
    world = WatchedWorld(trace, Times(0.05, 0.05, 0.008), settings, drafter)
    world.watch()
    assert world.out.seconds < 1.2 * streaming_s(trace, world.times) + 1
    assert world.engine.decision.pace is PaceKind.RUN_ON


def test_under_pace_wait_a_good_drafter_saves_forwards() -> None:
    trace = trace_of(200)
    settings = EngineSettings(pace=PaceKind.WAIT)
    outcome = World(trace, Times(0.1, 0.05, 0.008), settings, ScriptedDrafter(trace, 0.95)).run()
    assert outcome.steps < 0.4 * outcome.tokens


# ---------------------------------------------------------------- what must not end drafting for ever


class LookUp(ScriptedDrafter):
    """Proposes the text itself, `most` ids at a time, always right."""

    name = "retrieval"

    def __init__(self, trace: Trace, most: int = 12) -> None:
        super().__init__(trace, 1.0)
        self._most = most

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        prefix = [*self._ids, *budget.path]
        ids = (
            tuple(self._text[len(prefix) :][: min(self._most, budget.depth)])
            if prefix == self._text[: len(prefix)]
            else ()
        )
        return HintTree(ids, tuple(range(-1, len(ids) - 1)), (0.9,) * len(ids))


@pytest.mark.parametrize("cell", [(0.02, 0.01, 0.004), (0.1, 0.05, 0.008)])
def test_a_first_open_that_took_seconds_does_not_keep_the_device_from_drafting(
    cell: tuple[float, float, float],
) -> None:
    """Once wrong: with a round trip of 3 s nothing seemed ever in time, so nothing left and nothing was measured."""
    trace = trace_of(400)
    world = WatchedWorld(trace, Times(*cell), EngineSettings(), ScriptedDrafter(trace, 0.9))
    plain = world.engine.opened
    world.engine.opened = lambda opened, ids, now, took_s: plain(opened, ids, now, 3.0)  # type: ignore[method-assign]
    outcome = world.watch()
    assert world.engine.clock.is_measured
    assert world.engine.clock.round_trip_s == pytest.approx(cell[1], abs=0.01)
    assert outcome.seconds < streaming_s(trace, world.times) / 1.5


@pytest.mark.parametrize("which", [1, 2, 20])
def test_one_slow_draft_step_does_not_end_drafting_for_ever(which: int) -> None:
    """Once wrong: a device that was busy for 30 ms took its drafts to be slower than the verifier's 20 ms."""

    class Busy(WatchedWorld):
        def _draft_s(self, job: DraftJob) -> float:
            plain = super()._draft_s(job)
            return 0.03 if len(self.jobs) == which + 1 else plain

    trace = trace_of(400)
    world = Busy(trace, Times(0.02, 0.01, 0.004), EngineSettings(), ScriptedDrafter(trace, 0.9))
    outcome = world.watch()
    assert outcome.seconds < streaming_s(trace, world.times) / 1.3
    assert world.mean(lambda seen: seen.is_drafting, outcome.seconds / 2, outcome.seconds) == 1.0


def test_under_pace_wait_a_hint_of_look_up_is_not_held_back_for_a_model_whose_context_is_full() -> None:
    trace = trace_of(200)
    drafter = ScriptedDrafter(trace, 0.9, context_size=20)
    settings = EngineSettings(pace=PaceKind.WAIT)
    world = WatchedWorld(trace, Times(0.05, 0.05, 0.008), settings, drafter, retrieval=LookUp(trace))
    plain = world.engine.send_at

    def send_at(now: float) -> float | None:
        due = plain(now)
        is_full = world.engine.counters.is_context_full
        assert not is_full or due is None or due < now + 1, "it is held back for what never comes"
        return due

    world.engine.send_at = send_at  # type: ignore[method-assign]
    outcome = world.watch()
    assert world.engine.counters.is_context_full
    assert outcome.seconds < streaming_s(trace, world.times) / 1.5


def test_while_resting_beside_look_up_the_model_is_still_probed() -> None:
    """Once wrong: where look-up had proposed something nobody was asked any more how good the model has become."""
    trace = trace_of(500)
    drafter = ScriptedDrafter(trace, 0.9)
    world = WatchedWorld(trace, Times(0.1, 0.05, 0.15), EngineSettings(), drafter, retrieval=LookUp(trace, 1))
    world.change_at(6.0, draft_s=0.008)
    outcome = world.watch()
    assert world.engine.counters.slow_rests > 0
    assert sum(job.is_probe for job in world.jobs) >= 2
    assert world.engine.decision.uses_model, "probes have told that it became fast"
    assert outcome.seconds > 10


def test_beside_a_model_slower_than_the_verifier_the_hints_of_look_up_still_leave() -> None:
    trace = trace_of(400)
    drafter = ScriptedDrafter(trace, 0.9)
    world = WatchedWorld(trace, Times(0.02, 0.01, 0.04), EngineSettings(), drafter, retrieval=LookUp(trace))
    outcome = world.watch()
    assert world.engine.counters.slow_rests > 0
    assert world.seen[-1].is_drafting
    assert outcome.seconds < streaming_s(trace, world.times) / 1.5
    assert sum(seen.at > outcome.seconds / 2 and seen.is_drafting for seen in world.seen) > 5


# ---------------------------------------------------------------- a narrow uplink


class Wordy(ScriptedDrafter):
    """Names six alternatives beside each id."""

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        said = super().propose(budget)
        ids = tuple(dict.fromkeys((*said.ids, *range(200, 206))))
        return HintTree(ids, (-1,) * len(ids), (0.7, *[0.05] * (len(ids) - 1)))


class Blind(Uplink):
    """Never believes that ids cost time."""

    def note(self, ways_s: tuple[float, ...], round_trip_s: float) -> None:
        """Learns nothing."""


@pytest.mark.parametrize("acceptance", [0.6, 0.9])
def test_after_a_text_over_a_narrow_uplink_the_next_over_a_wide_one_is_as_fast_as_ever(acceptance: float) -> None:
    experience, times = Experience(), Times(0.05, 0.01, 0.008)
    first = trace_of(120)
    World(
        first,
        replace(times, up_bytes_per_s=120),
        EngineSettings(),
        ScriptedDrafter(first, acceptance),
        experience=experience,
    ).run()
    assert experience.uplink.id_s > 0.01
    seconds = []
    for known in (experience, Experience()):
        texts = [trace_of(200), trace_of(210)]
        runs = [World(t, times, EngineSettings(), ScriptedDrafter(t, acceptance), experience=known) for t in texts]
        seconds.append(sum(world.run().seconds for world in runs))
    assert experience.uplink.id_s == 0.0
    assert seconds[0] < 1.05 * seconds[1]


@pytest.mark.parametrize("draft_s", [0.002, 0.008])
def test_under_pace_wait_a_narrow_uplink_that_is_known_costs_a_good_draft_nothing(draft_s: float) -> None:
    trace, seconds = trace_of(200), {}
    for known in (Uplink(), Blind()):
        times = replace(Times(0.1, 0.05, draft_s), up_bytes_per_s=500)
        settings, experience = EngineSettings(pace=PaceKind.WAIT), Experience(uplink=known)
        seconds[type(known)] = (
            World(trace, times, settings, ScriptedDrafter(trace, 0.9), experience=experience).run().seconds
        )
    assert seconds[Uplink] < 1.03 * seconds[Blind]


@pytest.mark.parametrize("up_bytes_per_s", [250, 500, 1000])
def test_on_a_narrow_uplink_knowing_it_saves_bytes_and_costs_no_time(up_bytes_per_s: float) -> None:
    traces, outcomes = [trace_of(150), trace_of(160)], {}
    for known in (Uplink(), Blind()):
        experience = Experience(uplink=known)
        times = replace(Times(0.1, 0.05, 0.008), up_bytes_per_s=up_bytes_per_s)
        outcomes[type(known)] = [
            World(trace, times, EngineSettings(width=7), Wordy(trace, 0.9), experience=experience).run()
            for trace in traces
        ]
        assert (known.id_s > 0) is not isinstance(known, Blind)
    with_it, without = outcomes[Uplink], outcomes[Blind]
    assert sum(text.up_bytes for text in with_it) < 0.9 * sum(text.up_bytes for text in without)
    assert sum(text.seconds for text in with_it) < 1.02 * sum(text.seconds for text in without)
