"""What the device's engine asks for and sends, told by hand what came of it; whole texts are in test_engine_virtual."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from edge_client.controller import EngineSettings
from edge_client.drafter import Budget, DraftTask, HintTree
from edge_client.edge_engine import DraftJob, EdgeEngine
from shared.rejection import ROW_TOTAL, QRow
from shared.sampling import GREEDY, SamplingParams
from shared.types import Commit, Epoch, Hint, Limits, Open, Opened, PaceKind, Rule, SessionId

PROMPT = (70, 71, 72)
EPOCH = Epoch(0)


class LookUp:
    """Proposes the numbers of positions, as many as are asked for."""

    name = "retrieval"

    def __init__(self) -> None:
        self.length = 0

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""
        self.length = len(ids)

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        start = self.length + len(budget.path)
        return HintTree(tuple(range(start, start + budget.depth)), tuple(range(-1, budget.depth - 1)))


def engine_of(
    rule: Rule = Rule.AGREEMENT,
    pace: PaceKind = PaceKind.RUN_ON,
    look_up: bool = False,
    context_size: int = 1 << 20,
    new: int = 100,
) -> EdgeEngine:
    """An open engine; its model takes 10 ms."""
    sampling = SamplingParams(temperature=1.0) if rule is Rule.REJECTION else GREEDY
    request = Open(PROMPT, len(PROMPT), bytes(32), sampling, new, rule=rule, pace=pace)
    retrieval = LookUp() if look_up else None
    settings = EngineSettings(pace=pace)
    engine = EdgeEngine(request, settings, has_model=True, retrieval=retrieval, context_size=context_size)
    opened = Opened(SessionId(b"s" * 16), 9, EPOCH, len(PROMPT), len(PROMPT), 1, bytes(32), Limits())
    engine.opened(opened, list(PROMPT), 0.0, 0.02)
    return engine


def answer(engine: EdgeEngine, job: DraftJob, now: float, rule: Rule = Rule.AGREEMENT) -> None:
    """The model says the number of the position."""
    token = job.length + len(job.budget.path)
    rows = (QRow((token, 7), (ROW_TOTAL - 100, 100)),) if rule is Rule.REJECTION else ()
    engine.drafted(job, HintTree((token,), (-1,), (0.95,), rows), "model", now, 0.01)


def drafted_on(engine: EdgeEngine, seconds: float, rule: Rule = Rule.AGREEMENT) -> tuple[list[DraftJob], list[Hint]]:
    """Jobs and hints of a time in which no commit comes."""
    jobs: list[DraftJob] = []
    hints: list[Hint] = []
    for n in range(round(100 * seconds)):
        now = n / 100
        if (job := engine.next_job(now)) is not None:
            jobs.append(job)
            answer(engine, job, now, rule)
        due = engine.send_at(now)
        if due is not None and due <= now and (hint := engine.take_hint(now)) is not None:
            hints.append(hint)
    return jobs, hints


@pytest.mark.parametrize("look_up", [False, True], ids=["model alone", "with look-up"])
@pytest.mark.parametrize("context_size", [3, 4, 8])
def test_the_look_ahead_never_passes_the_targets_context(context_size: int, look_up: bool) -> None:
    """However much is asked for: an id stands at position 7 at most where the target holds 8."""
    jobs, hints = drafted_on(engine_of(look_up=look_up, context_size=context_size), 3.0)
    assert all(job.length + len(job.budget.path) < context_size for job in jobs)
    sent = [token for hint in hints for token in hint.ids]  # here an id is its position
    assert sorted(sent) == list(range(len(PROMPT), context_size))


def test_the_look_ahead_ends_with_the_ids_asked_for_where_the_context_holds_more() -> None:
    _, hints = drafted_on(engine_of(new=4, context_size=100), 3.0)
    assert sorted(token for hint in hints for token in hint.ids) == [3, 4, 5, 6]


def test_under_the_rejection_rule_a_frame_holds_one_id() -> None:
    _, hints = drafted_on(engine_of(Rule.REJECTION), 2.0, Rule.REJECTION)
    assert len(hints) > 3
    assert all(len(hint.ids) == len(hint.rows) == 1 for hint in hints)


def drafted_not_sent(rule: Rule) -> tuple[EdgeEngine, DraftJob]:
    """Three ids are drafted, none is sent, and a fourth is under way."""
    engine = engine_of(rule)
    for _ in range(3):
        job = engine.next_job(0.1)
        assert job is not None
        answer(engine, job, 0.1, rule)
    job = engine.next_job(0.1)
    assert job is not None
    return engine, job


def test_under_the_rejection_rule_a_model_that_fails_still_sends_what_it_drew() -> None:
    """Whether it fails may follow from the id drawn: to hold that back would bias the text."""
    engine, job = drafted_not_sent(Rule.REJECTION)
    engine.model_failed(job, "it broke", 0.1)
    jobs, hints = drafted_on(engine, 1.0, Rule.REJECTION)
    assert jobs == []
    assert [hint.ids for hint in hints] == [(3,), (4,), (5,)]


def test_under_the_agreement_rule_a_model_that_fails_ends_hints_and_jobs() -> None:
    engine, job = drafted_not_sent(Rule.AGREEMENT)
    engine.model_failed(job, "it broke", 0.1)
    assert drafted_on(engine, 1.0) == ([], [])
    assert "it broke" in engine.explain()


def test_under_pace_wait_look_up_is_sent_at_once_where_the_models_context_is_full() -> None:
    """Once wrong: a hint was held back for a draft step that never came, until the verifier had waited long enough."""
    engine, ids = engine_of(pace=PaceKind.WAIT, look_up=True), list(PROMPT)
    job = engine.next_job(0.0)
    while job is not None and job.budget.path:
        answer(engine, job, 0.0)
        job = engine.next_job(0.0)
    assert job is not None
    engine.drafted(job, HintTree(), "model", 0.01, 0.01)
    assert engine.counters.is_context_full
    hints = 0
    for n in range(20):
        now = 0.1 * n + 0.02
        due = engine.send_at(now)
        assert due is not None
        assert due < math.inf
        hint = engine.take_hint(due)
        assert hint is not None
        hints += 1
        fresh = tuple(range(len(ids), len(ids) + len(hint.ids) + 1))
        ids += fresh
        commit = Commit(
            EPOCH, fresh[0], fresh, len(hint.ids), hint.first_node + len(hint.ids) - 1, step_us=50_000, hint_wait_us=0
        )
        engine.committed(ids, commit, due + 0.07)
        if len(ids) > 90:
            break
    assert hints > 3


def test_what_was_drawn_before_a_model_failed_is_still_sent_after_the_next_commit() -> None:
    """Once wrong: with nobody left to draft the engine rested, and held back what stood."""
    engine, job = drafted_not_sent(Rule.REJECTION)
    engine.model_failed(job, "it broke", 0.1)
    engine.committed([*PROMPT, 3], Commit(EPOCH, 3, (3,), 0, step_us=20_000), 0.2)
    assert engine.decision.is_drafting
    _, hints = drafted_on(engine, 1.0, Rule.REJECTION)
    assert [hint.ids for hint in hints] == [(4,), (5,)]


def test_a_drafter_named_as_look_up_is_asked_about_each_node_once() -> None:
    engine = engine_of()
    paths = []
    for _ in range(4):
        job = engine.next_job(0.1)
        assert job is not None
        paths.append(job.budget.path)
        token = job.length + len(job.budget.path)
        engine.drafted(job, HintTree((token,), (-1,), (0.95,)), "retrieval", 0.1, 0.01)
    assert paths == [(), (3,), (3, 4), (3, 4, 5)]


def test_where_there_is_no_room_for_all_the_likeliest_are_sent_and_what_leads_to_them() -> None:
    engine = engine_of()
    engine.limits = Limits(max_frame_nodes=3)
    job = engine.next_job(0.1)
    assert job is not None
    engine.drafted(job, HintTree((50, 51, 52), (-1, -1, -1), (0.1, 0.8, 0.05)), "model", 0.1, 0.01)
    job = engine.next_job(0.1)
    assert job is not None
    assert job.budget.path == (51,)
    engine.drafted(job, HintTree((60, 61), (-1, -1), (0.9, 0.05)), "model", 0.1, 0.01)
    hint = engine.take_hint(1.0)
    assert hint is not None
    assert set(hint.ids) == {51, 60, 50}
    assert hint.ids.index(51) < hint.ids.index(60)
