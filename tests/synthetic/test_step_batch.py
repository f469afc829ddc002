"""C18, C39: sessions that share steps write what each writes alone, whoever joins, leaves, is cancelled or poisoned."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from cloud_verifier.judge import Verdict
from cloud_verifier.reports import Gauges, GuardedObserver, StepReport
from cloud_verifier.scheduler import PlannedRow, StepPlan
from cloud_verifier.target_model import RowInput
from shared.errors import NumericalError
from shared.hint_trie import Node
from shared.rejection import QRow, draw_from_row, quantise
from shared.sampling import SamplingParams, warp
from shared.types import Commit, Hint, Reason, Rule
from tests.formula_model import (
    EPOCH,
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

ALIVE = 16
MARKERS = 16
"""Ids 0-15 are markers: each session may write one of them only, its own. Ids 16-21 are everybody's."""
MIXED = [name for name in PARAMS if name != "bias"]


def marked(params: SamplingParams, marker: int) -> SamplingParams:
    """Only the own marker may be written, and often is."""
    bias = {token: float("-inf") for token in range(MARKERS) if token != marker}
    return replace(params, logit_bias={**bias, marker: 1.5})


# ---------------------------------------------------------------- hints of every kind


def own_row(guest: Guest, path: Sequence[int]) -> QRow:
    """What a good drafter would draw from: the target's own distribution after the committed ids and a path."""
    session = guest.session
    warped = warp(
        formula_row([*session.ids, *path]), session.opened_with.sampling, session.counts.with_path(path), VALID
    )
    return quantise(warped, 6)


def drawn_hint(rng: random.Random, guest: Guest, length: int) -> Hint:
    """A chain with rows for the rejection rule: each id drawn from its row, the row right or not."""
    path: list[int] = []
    rows: list[QRow] = []
    for _ in range(length):
        row = own_row(guest, path)
        if rng.random() < 0.4:
            ids = tuple(rng.sample(range(VOCABULARY - 2), 3))
            row = QRow(ids, (50_000, 10_000, 5_535))
        rows.append(row)
        path.append(draw_from_row(row, rng.random()))
    return chain(guest, path, rows=tuple(rows))


def foretold_hint(rng: random.Random, guest: Guest, truth: Sequence[int], length: int) -> Hint:
    """A chain or a tree: right, wrong, or right up to somewhere; with other sessions' markers in the wrong places."""
    done, kind = len(guest.generated), rng.choice(["right", "wrong", "half", "tree"])
    ids = [*truth[done : done + length], *[0] * length][:length]
    first_wrong = {"right": length, "wrong": 0}.get(kind, rng.randint(0, length))
    ids = [token if place < first_wrong else rng.randrange(VOCABULARY - 2) for place, token in enumerate(ids)]
    if kind != "tree":
        return chain(guest, ids)
    parents = tuple(min(index, rng.choice([1, 1, 1, 2, 3])) if index else 0 for index in range(length))
    depths = [0]
    for index in range(1, length):
        depths.append(depths[index - parents[index]] + 1 if parents[index] else 0)
    ids = [
        truth[done + depth] if done + depth < len(truth) and rng.random() < 0.7 else rng.randrange(VOCABULARY - 2)
        for depth in depths
    ]
    sure = tuple(rng.uniform(0.1, 1) for _ in ids) if rng.random() < 0.5 else ()
    return chain(guest, ids, parents=parents, confidence=sure)


# ---------------------------------------------------------------- the crowd


@dataclass
class Member:
    """A session of the crowd, and what is known of it beforehand."""

    guest: Guest
    marker: int
    truth: list[int]
    steps: list[tuple[int, list[Node]]] = field(default_factory=list)
    """Committed length and nodes verified of each of its rows that decided."""

    @property
    def is_drawn(self) -> bool:
        return self.guest.session.is_chain


class Crowd:
    """A desk with many sessions in a step. `turn()` joins, hints, cancels, steps, and keeps what each row held."""

    def __init__(self, seed: int, **parts: object) -> None:
        self.rng, self.desk = random.Random(seed), Desk(sessions_per_step=64, prefill_tokens=40, **parts)  # type: ignore[arg-type]
        self.alive: list[Member] = []
        self.gone: list[Member] = []
        self.pages = self.desk.model.free_pages
        self.joined = self.cancelled = 0

    @property
    def members(self) -> list[Member]:
        return [*self.alive, *self.gone]

    def join(self) -> None:
        number, free = self.joined, set(range(MARKERS)) - {member.marker for member in self.alive}
        self.joined += 1
        marker, is_drawn = min(free), number % 4 == 3
        params = PARAMS["sampled" if is_drawn else MIXED[number % len(MIXED)]]
        context = [self.rng.choice([*range(MARKERS, VOCABULARY - 2)]) for _ in range(self.rng.choice([1, 2, 17, 64]))]
        guest = self.desk.open(
            open_frame(
                context,
                sampling=marked(params, marker),
                rule=Rule.REJECTION if is_drawn else Rule.AGREEMENT,
                seed=1000 + number,
                max_new_tokens=self.rng.randint(20, 90),
                stop_ids=(17,) if number % 5 == 0 else (),
                logprobs=number % 3 == 0,
            )
        )
        count = guest.session.opened_with.max_new_tokens
        self.alive.append(Member(guest, marker, [] if is_drawn else guest.plain(count)))

    def send_hints(self) -> None:
        for member in self.alive:
            guest, length = member.guest, self.rng.randint(1, 8)
            if self.rng.random() < 0.5 and (not member.is_drawn or not guest.session.trie.children):
                hint = drawn_hint if member.is_drawn else None
                guest.session.hint(
                    hint(self.rng, guest, length) if hint else foretold_hint(self.rng, guest, member.truth, length)
                )

    def cancel(self, member: Member) -> None:
        """As the engine does when a device closes: whatever the session is in the middle of."""
        slot = member.guest.session.slot
        assert isinstance(slot, PathSlot)
        held, free = len(slot.pages), self.desk.model.free_pages
        self.desk.worker.drop(member.guest.session, "cancelled")
        self.desk.worker.drop(member.guest.session, "cancelled")  # once, however often it is told
        assert slot.is_released
        assert self.desk.model.free_pages == free + held
        member.guest.session.sink = None
        self.leave(member)
        self.cancelled += 1

    def leave(self, member: Member) -> None:
        self.alive.remove(member)
        self.gone.append(member)

    def turn(self) -> StepPlan | None:
        self.desk.now += 0.001
        self.send_hints()
        plan = self.desk.scheduler.plan(self.desk.now)
        if plan is not None:
            of = {id(member.guest.session): member for member in self.alive}
            counts = {key: len(member.guest.sink.commits) for key, member in of.items()}
            lengths, seen = {id(row.session): row.session.length for row in plan.rows}, len(self.desk.model.seen)
            self.desk.worker.run_step(plan)
            verified = {id(row.slot): len(row.wanted) - 1 for row in self.desk.model.seen[seen:]}
            for row in plan.rows:
                key = id(row.session)
                more = len(of[key].guest.sink.commits) - counts[key]
                assert more in (0, 1)
                if more:
                    nodes = list(row.nodes[: verified[id(row.session.slot)]])
                    of[key].steps.append((lengths[key], nodes))
        self.check()
        for member in [member for member in self.alive if member.guest.session.finished]:
            self.desk.worker.drop(member.guest.session, "finished")
            self.leave(member)
        return plan

    def check(self) -> None:
        held = sum(len(member.guest.session.slot.pages) for member in self.alive)
        assert self.desk.model.free_pages + held == self.pages
        for member in self.alive:
            slot = member.guest.session.slot
            assert isinstance(slot, PathSlot)
            assert slot.kept == member.guest.session.ids[: slot.length]
            member.guest.session.trie.check_integrity()

    def finish(self) -> None:
        """Nobody joins, and no hint comes, until the last text has ended."""
        self.send_hints = lambda: None  # type: ignore[method-assign]
        while self.alive:
            assert self.turn() is not None

    def run(self, turns: int) -> None:
        for _ in range(turns):
            while len(self.alive) < ALIVE and self.rng.random() < 0.7:
                self.join()
            if self.alive and self.rng.random() < 0.12:
                self.cancel(self.rng.choice(self.alive))
            self.turn()


def alone(member: Member) -> list[Commit]:
    """The commits of a session that meets the very same nodes at the same committed lengths, with nobody beside it."""
    desk = Desk()
    guest = desk.open(replace(member.guest.session.opened_with))
    session = guest.session
    for length, nodes in member.steps:
        assert session.length == length
        assert not session.trie.children
        session.hint(chain(guest, [node.token for node in nodes], rows=tuple(node.row for node in nodes if node.row)))
        fed = tuple(session.ids[session.slot.length :])
        assert session.slot.try_reserve(len(fed) + len(nodes))
        row = PlannedRow(
            session, fed, tuple(session.trie.nodes()), session.trie.highest_number, 0, True, session.slot.length
        )
        desk.worker.run_step(StepPlan((row,)))
        assert len(row.nodes) == len(nodes)
    return guest.sink.commits


def assert_is_its_own(member: Member) -> None:
    """What came of a session is what would have come of it alone, as far as it went."""
    guest = member.guest
    assert guest.sink.ids == guest.generated
    if member.is_drawn:
        found = [(commit.start, commit.ids, commit.accepted) for commit in guest.sink.commits]
        expected = [(commit.start, commit.ids, commit.accepted) for commit in alone(member)]
        assert found == expected
    else:
        assert guest.generated == member.truth[: len(guest.generated)]
    foreign = set(guest.generated) & (set(range(MARKERS)) - {member.marker})
    assert not foreign


def test_sixteen_mixed_sessions_that_come_and_go_write_what_each_writes_alone() -> None:
    """C18: 300 steps, every rule and temperature, hints of 1-8 ids, right, wrong and half right."""
    crowd = Crowd(1)
    crowd.run(300)
    crowd.finish()
    accepted = Counter[bool]()
    for member in crowd.members:
        assert_is_its_own(member)
        accepted[member.is_drawn] += sum(commit.accepted for commit in member.guest.sink.commits)
    whole = [member for member in crowd.members if member.guest.session.finished]
    for member in whole:
        assert member.guest.sink.finished
        if not member.is_drawn:
            assert member.guest.generated == member.truth
    assert len(whole) > 15
    assert crowd.cancelled > 15
    assert {member.is_drawn for member in whole} == {True, False}
    assert min(accepted.values()) > 50  # or the hints proved nothing
    assert sum(1 for member in crowd.members if member.marker in member.guest.generated) > 20
    assert max(commit.batch_size for member in crowd.members for commit in member.guest.sink.commits) >= ALIVE


def test_the_comparison_above_would_notice_a_neighbours_scores() -> None:
    """The same crowd on a target that mixes up two of its rows now and then."""
    crowd = Crowd(5)
    forward, rng = crowd.desk.model.forward, random.Random(1)

    def mixed_up(rows: Sequence[RowInput]) -> torch.Tensor:
        scores = forward(rows)
        if rng.random() < 0.05 and len(scores) > 1:
            scores[[0, 1]] = scores[[1, 0]]
        return scores

    crowd.desk.model.forward = mixed_up  # type: ignore[method-assign]
    crowd.run(60)

    def is_its_own(member: Member) -> bool:
        try:
            assert_is_its_own(member)
        except AssertionError:
            return False
        return True

    assert not all(is_its_own(member) for member in crowd.members)


# ---------------------------------------------------------------- poison


def test_a_poisoned_session_ends_alone_in_the_middle_of_a_full_batch() -> None:
    crowd = Crowd(7)
    for _ in range(ALIVE):
        crowd.join()
    for _ in range(8):
        crowd.turn()
    victim = next(each for each in crowd.alive if not each.is_drawn and not each.guest.session.trie.children)
    held, count = list(victim.guest.session.ids), len(crowd.alive)
    crowd.desk.model.poisoned.add(id(victim.guest.session.slot))
    crowd.send_hints = lambda: None  # type: ignore[method-assign]
    crowd.turn()
    assert victim.guest.session.ids == held
    assert [type(error) for error in victim.guest.sink.ended] == [NumericalError]
    assert [fault.error for fault in victim.guest.sink.faults] == ["NumericalError"]
    slot = victim.guest.session.slot
    assert isinstance(slot, PathSlot)
    assert slot.is_released
    assert slot.scrubbed[-1] == 0  # nothing of it may stay in a page that another session takes
    assert len(crowd.alive) == count - 1
    crowd.finish()
    for member in crowd.members:
        assert_is_its_own(member)
        if member is not victim:
            assert member.guest.sink.faults == []
            assert member.guest.session.finished


def test_a_row_of_a_refuted_branch_that_is_not_finite_ends_nobody_and_is_scrubbed() -> None:
    desk = Desk(sessions_per_step=8)
    guests = [desk.open(open_frame(seed=seed, sampling=PARAMS["sampled"])) for seed in range(4)]
    desk.step()
    truths = [guest.plain(24) for guest in guests]
    guest, truth = guests[1], truths[1]
    done = len(guest.generated)
    wrong = (truth[done] + 1) % (VOCABULARY - 2)
    guest.session.hint(chain(guest, [*truth[done : done + 2], wrong], parents=(0, 1, 0)))
    guests[2].session.hint(chain(guests[2], truths[2][done : done + 3]))
    desk.model.poisoned.add(id(guest.session.slot))  # its last row: the wrong branch
    kept = guest.session.slot.length
    assert desk.step()
    desk.model.poisoned.clear()
    slot = guest.session.slot
    assert isinstance(slot, PathSlot)
    assert guest.sink.commits[-1].accepted == 2
    assert guest.generated == truth[: done + 3]
    assert (slot.scrubbed, slot.length) == ([kept], kept)  # kept rows stand, what was fed is fed again
    fed_before = len(desk.model.seen)
    assert desk.step()
    again = next(row for row in desk.model.seen[fed_before:] if row.slot is slot)
    assert (again.kept, again.ids) == (kept, guest.session.ids[kept : kept + len(again.ids)])
    desk.run()
    for each, expected in zip(guests, truths, strict=True):
        assert each.sink.ids == expected
        assert each.sink.faults == []


def test_a_bad_row_under_the_rejection_rule_ends_its_session_only_if_it_decides() -> None:
    desk = Desk(sessions_per_step=8)
    guests = [
        desk.open(open_frame(seed=seed, sampling=PARAMS["sampled"], rule=Rule.REJECTION, max_new_tokens=60))
        for seed in range(3)
    ]
    neighbour = desk.open(open_frame(seed=9))
    desk.step()
    refuted, decided, clean = guests
    nothing = QRow((0, 1), (65_534, 1))
    for guest in (refuted, decided):
        desk.model.poisoned.add(id(guest.session.slot))
    never = next(token for token in range(VOCABULARY - 2) if token not in own_row(refuted, []).ids)
    refuted.session.hint(chain(refuted, [never], rows=(QRow((never,), (65_535,)),)))
    clean.session.hint(chain(clean, [0], rows=(nothing,)))
    desk.step()
    assert [type(error) for error in decided.sink.ended] == [NumericalError]
    assert refuted.sink.ended == clean.sink.ended == []
    assert refuted.sink.commits[-1].accepted == 0
    desk.model.poisoned.clear()
    desk.run()
    assert neighbour.sink.ids == neighbour.plain(24)
    for guest in (refuted, clean):
        assert guest.sink.finished
        assert guest.sink.finished.reason is Reason.LENGTH


def test_a_judge_that_fails_on_one_session_fails_that_session_only() -> None:
    desk = Desk(sessions_per_step=8)
    guests = [desk.open(open_frame(seed=seed)) for seed in range(3)]
    desk.step()
    guests[1].session.opened_with = replace(guests[1].session.opened_with, sampling=None)  # type: ignore[arg-type]
    desk.run()
    assert [fault.error for fault in guests[1].sink.faults] == ["LocalProtocolError"]
    for guest in (guests[0], guests[2]):
        assert guest.sink.ids == guest.plain(24)


# ---------------------------------------------------------------- reports


def told_by(plan: StepPlan, commits: Sequence[Commit]) -> dict[str, int]:
    rows: Sequence[PlannedRow] = plan.rows
    return {
        "sessions": len(rows),
        "nodes": sum(len(row.nodes) for row in rows),
        "prefill_tokens": sum(len(row.feed) - row.is_judged for row in rows),
        "judged_rows": sum(row.is_judged for row in rows),
        "dry_rows": sum(row.is_judged and not row.nodes for row in rows),
        "committed": sum(len(commit.ids) for commit in commits),
        "accepted": sum(commit.accepted for commit in commits),
    }


def test_every_report_adds_up_to_what_the_devices_were_sent() -> None:
    """C39: committed = accepted + corrections and bonuses, proposed = accepted + rejected, nothing is negative."""
    observer = Recorder()
    crowd = Crowd(20, observer=observer)
    sent = 0
    for _ in range(150):
        while len(crowd.alive) < ALIVE:
            crowd.join()
        if crowd.rng.random() < 0.1:
            crowd.cancel(crowd.rng.choice(crowd.alive))
        before = {id(member): len(member.guest.sink.commits) for member in crowd.alive}
        alive = list(crowd.alive)
        plan = crowd.turn()
        assert plan is not None
        commits = [commit for member in alive for commit in member.guest.sink.commits[before[id(member)] :]]
        sent += len(commits)
        report = observer.steps[-1]
        assert {name: getattr(report, name) for name in told_by(plan, commits)} == told_by(plan, commits)
        corrections = report.committed - report.accepted
        assert 0 <= corrections <= report.judged_rows <= report.sessions
        assert 0 <= report.accepted <= report.nodes
        assert sum(report.accepted_by_depth) == report.accepted
        assert len(report.offered_by_depth) == len(report.accepted_by_depth)
        for offered, accepted in zip(report.offered_by_depth, report.accepted_by_depth, strict=True):
            assert 0 <= accepted <= offered <= report.judged_rows - report.dry_rows
        assert list(report.accepted_by_depth) == sorted(report.accepted_by_depth, reverse=True)
        for name in ("plan_s", "stage_s", "forward_s", "gather_s", "judge_s", "commit_s"):
            assert getattr(report, name) >= 0
    assert len(observer.steps) == 150
    assert len(observer.drops) == sent
    assert min(min(drop) for drop in observer.drops) == 0
    told = [
        (commit.dropped_late, commit.dropped_disagreeing, commit.dropped_over_budget)
        for member in crowd.members
        for commit in member.guest.sink.commits
    ]
    assert sorted(told) == sorted(observer.drops)
    assert sum(report.accepted for report in observer.steps) > 200
    assert sum(report.prefill_tokens for report in observer.steps) > 200


def test_a_session_that_ended_in_its_step_is_in_the_report_and_adds_no_ids() -> None:
    observer = Recorder()
    desk = Desk(sessions_per_step=4, observer=observer)
    guests = [desk.open(open_frame(seed=seed)) for seed in range(3)]
    desk.step()
    desk.model.poisoned.add(id(guests[0].session.slot))
    desk.step()
    report = observer.steps[-1]
    assert (report.sessions, report.judged_rows, report.committed, report.accepted) == (3, 3, 2, 0)


class Raising:
    """An observer that fails at everything it is told."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def _fail(self, name: str) -> NoReturn:
        self.calls[name] += 1
        raise RuntimeError(f"{name} is broken")

    def step(self, report: StepReport) -> None:
        self._fail("step")

    def session_opened(self, context_tokens: int, reused_tokens: int) -> None:
        self._fail("session_opened")

    def session_ended(self, reason: str) -> None:
        self._fail("session_ended")

    def refused(self, reason: str) -> None:
        self._fail("refused")

    def hints(self, nodes: int, fresh: int) -> None:
        self._fail("hints")

    def dropped(self, late: int, disagreeing: int, over_budget: int) -> None:
        self._fail("dropped")

    def evicted(self, pages: int) -> None:
        self._fail("evicted")

    def out_of_memory(self) -> None:
        self._fail("out_of_memory")

    def gauges(self, g: Gauges) -> None:
        self._fail("gauges")


def test_an_observer_that_fails_at_everything_harms_nobody() -> None:
    raising = Raising()
    crowd = Crowd(31, observer=GuardedObserver(raising))
    crowd.run(30)
    crowd.desk.model.fail_next = torch.OutOfMemoryError("CUDA out of memory")
    crowd.run(30)
    crowd.finish()
    for member in crowd.members:
        assert_is_its_own(member)
    assert raising.calls["step"] > 50
    assert raising.calls["dropped"] > 50
    assert raising.calls["out_of_memory"] == 1


def test_verdicts_count_a_node_as_tested_only_if_its_parent_was_accepted() -> None:
    """What acceptance learns from: one node a depth along the way, alternatives at the place where it was left."""
    desk = Desk()
    guest = desk.open(open_frame())
    desk.step()
    truth = guest.plain(8)[1:]
    wrong = [(token + 1) % (VOCABULARY - 2) for token in truth]
    hint = chain(guest, [wrong[0], truth[0], truth[1], wrong[2], 5, 6], parents=(0, 0, 1, 1, 1, 5))
    guest.session.hint(hint)
    verdicts: list[Verdict] = []
    judge = desk.worker._runner._judge
    judged = judge.judge

    def spied(rows: Sequence[PlannedRow], scores: torch.Tensor) -> list[object]:
        found = judged(rows, scores)
        verdicts.extend(verdict for verdict in found if isinstance(verdict, Verdict))
        return found  # type: ignore[return-value]

    judge.judge = spied  # type: ignore[method-assign, assignment]
    desk.step()
    (verdict,) = verdicts
    tested = [(test.depth, test.rank, test.is_right) for test in verdict.tested]
    assert tested == [(1, 0, False), (1, 1, True), (2, 0, True), (3, 0, False)]
    assert verdict.tokens == truth[:3]
    assert guest.sink.commits[-1].epoch == EPOCH
