"""A device that fails, and fails again at whatever is asked of it: all sessions are told, once, and so is the owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from cloud_verifier.judge import Judge
from cloud_verifier.sessions import Session
from cloud_verifier.target_model import RowInput
from cloud_verifier.worker import Worker
from shared.errors import DeviceFailure
from shared.types import Finished, PaceKind
from tests.formula_model import VALID, Desk, FormulaTarget, Guest, PathSlot, open_frame

PATIENCE_S = 20.0
PREFILL = 32
KINDS = ("release", "scrub", "clear", "roll_back")
"""What may touch the device when a session goes."""


class DeadSlot(PathSlot):
    """Once the device is dead, whatever would write to it raises."""

    def _touch(self, what: str) -> None:
        target = self._target
        assert isinstance(target, DyingTarget)
        if target.is_dead and what in target.raising:
            target.raised += 1
            raise RuntimeError(f"CUDA error in {what}")

    def scrub(self, from_row: int) -> None:
        self._touch("scrub")
        super().scrub(from_row)

    def clear(self) -> int:
        self._touch("clear")
        return super().clear()

    def roll_back(self, length: int) -> None:
        self._touch("roll_back")
        super().roll_back(length)


class DyingTarget(FormulaTarget):
    """Fails in the third forward that is part of a long prefill, and never works again."""

    def __init__(self, raising: Sequence[str]) -> None:
        super().__init__()
        self.raising = raising
        self.is_dead, self.raised, self.prefills = False, 0, 0
        self.prefilled_to: list[int] = []
        """How far each prefill of the forward that failed had come."""

    def new_slot(self, principal: str = "") -> DeadSlot:
        return DeadSlot(self)

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        self.prefills += any(not row.wanted for row in rows)
        if self.is_dead or self.prefills == 3:
            self.is_dead = True
            self.prefilled_to += [row.slot.length for row in rows if not row.wanted]
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")
        return super().forward(rows)

    def release(self, slot: PathSlot) -> None:
        if self.is_dead and "release" in self.raising:
            self.raised += 1
            raise RuntimeError("CUDA error in release")
        super().release(slot)


class Told:
    """A worker on a thread of its own, with all that it tells."""

    def __init__(self, raising: Sequence[str]) -> None:
        self.desk = Desk(sessions_per_step=64, prefill_tokens=PREFILL)
        self.desk.now = time.monotonic()
        self.desk.model = self.target = DyingTarget(raising)
        self.failures: list[DeviceFailure] = []
        self.dropped: list[tuple[Session, str]] = []
        self.has_failed = threading.Event()
        self.worker = Worker(
            self.target,
            Judge(VALID),
            self.desk.scheduler,
            on_failure=self._failed,
            on_drop=lambda session, why: self.dropped.append((session, why)),
        )

    def _failed(self, failure: DeviceFailure) -> None:
        self.failures.append(failure)
        self.has_failed.set()

    def ran(self) -> bool:
        """Whether a command that is submitted now is run."""
        done = threading.Event()
        self.worker.submit(done.set)
        return done.wait(PATIENCE_S)


@pytest.mark.parametrize("raising", [(), *((kind,) for kind in KINDS), KINDS], ids=lambda kinds: "+".join(kinds) or "-")
def test_a_device_that_fails_in_a_prefill_and_at_every_release_ends_all_sessions_and_tells_it_once(
    raising: tuple[str, ...],
) -> None:
    told = Told(raising)
    desk = told.desk
    writing = [desk.open(open_frame(range(1, 4 + n), seed=n, max_new_tokens=2000)) for n in range(3)]
    waiting = desk.open(open_frame(pace=PaceKind.RUN_ON, run_ahead=0))
    absent = desk.open(open_frame(seed=5))
    absent.session.sink = None
    prefilled = desk.open(open_frame([1 + n % 20 for n in range(400)]))
    guests: list[Guest] = [*writing, waiting, prefilled, absent]
    told.worker.start()
    assert told.has_failed.wait(PATIENCE_S)
    assert told.ran()
    assert told.ran()
    (prefilled_to,) = told.target.prefilled_to
    assert 0 < prefilled_to < 399
    assert prefilled.generated == []
    assert all(guest.generated for guest in writing)
    for guest in guests[:-1]:
        assert [type(error) for error in guest.sink.ended] == [DeviceFailure]
        assert [(fault.error, fault.retry) for fault in guest.sink.faults] == [("DeviceFailure", True)]
        assert guest.sink.ids == guest.plain(len(guest.sink.ids))
        assert not any(isinstance(frame, Finished) for frame in guest.sink.frames)
    assert absent.sink.ended == []
    assert list(desk.scheduler.sessions()) == []
    assert sorted(id(session) for session, _ in told.dropped) == sorted(id(guest.session) for guest in guests)
    assert {why for _, why in told.dropped} == {"failed"}
    assert all(guest.session.is_dropped for guest in guests)
    assert len(told.failures) == 1
    assert told.worker.failure is told.failures[0]
    assert "CUDA error" in told.failures[0].message
    assert bool(told.target.raised) == bool(set(raising) & {"release", "clear", "roll_back"})
    told.worker.stop()
    assert not told.worker._thread.is_alive()


def test_the_owner_is_told_of_the_first_failure_and_not_of_those_that_follow_from_it() -> None:
    told = Told(KINDS)
    told.desk.open(open_frame([1 + n % 20 for n in range(400)]))
    told.worker.start()
    assert told.has_failed.wait(PATIENCE_S)
    assert told.ran()
    assert "illegal memory access" in told.failures[0].message
    told.worker.stop()


def test_a_session_that_is_dropped_by_a_command_after_the_failure_is_dropped_once() -> None:
    """The device's stream ends behind its session: the engine forgets what is gone already."""
    told = Told(KINDS)
    guests = [told.desk.open(open_frame([1 + n % 20 for n in range(400)], seed=seed)) for seed in range(3)]
    told.worker.start()
    assert told.has_failed.wait(PATIENCE_S)
    for guest in guests:
        told.worker.submit(lambda guest=guest: told.worker.drop(guest.session, "lease"))
    assert told.ran()
    assert len(told.dropped) == 3
    assert {why for _, why in told.dropped} == {"failed"}
    assert len(told.failures) == 1
    told.worker.stop()
