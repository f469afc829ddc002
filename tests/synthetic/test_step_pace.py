"""When a session runs: pace, credit and max_wait under a clock that the test moves."""

from __future__ import annotations

import pytest

from shared.errors import RemoteProtocolError
from shared.types import Limits, Pace, PaceKind
from tests.formula_model import EPOCH, Desk, Guest, chain, open_frame

MAX_WAIT_MS = 500


def pace(guest: Guest, kind: PaceKind, run_ahead: int = 256, ack: int | None = None) -> None:
    guest.session.set_pace(Pace(EPOCH, kind, run_ahead, guest.session.length if ack is None else ack))


def waiting_desk(**changes: object) -> tuple[Desk, Guest]:
    """A session with pace wait whose prompt is fed and whose first id is committed."""
    desk = Desk(limits=Limits(max_wait_ms=MAX_WAIT_MS))
    guest = desk.open(open_frame(pace=PaceKind.WAIT, **changes))
    assert desk.step()
    return desk, guest


def test_run_on_never_waits() -> None:
    desk = Desk()
    guest = desk.open(open_frame(pace=PaceKind.RUN_ON))
    desk.run()
    assert len(guest.sink.commits) == 24


def test_wait_runs_for_a_hint_at_once_and_without_one_after_max_wait_only() -> None:
    desk, guest = waiting_desk()
    assert len(guest.sink.ids) == 1
    assert not desk.step()
    assert desk.scheduler.wake_at(desk.now) == pytest.approx(desk.now + MAX_WAIT_MS / 1000)
    guest.session.hint(chain(guest, guest.plain(3)[1:]))
    assert desk.step()
    assert guest.sink.ids == guest.plain(4)[: len(guest.sink.ids)]
    assert not desk.step()
    desk.now += MAX_WAIT_MS / 1000 - 0.001
    assert not desk.step()
    desk.now += 0.001
    assert desk.step()
    assert guest.sink.commits[-1].accepted == 0
    assert not desk.step()


def test_max_wait_alone_writes_the_same_text() -> None:
    desk, guest = waiting_desk()
    while guest.session.finished is None:
        wake = desk.scheduler.wake_at(desk.now)
        assert wake is not None
        desk.now = wake
        assert desk.step()
    assert guest.sink.ids == guest.plain(24)


def test_wait_counts_a_dry_step_for_each_time_it_stood_still() -> None:
    desk, guest = waiting_desk(max_new_tokens=5)
    for _ in range(4):
        desk.now += 1
        desk.step()
    assert guest.sink.finished is not None
    assert guest.sink.finished.usage.dry_steps == 5


def test_auto_runs_on_alone_and_waits_in_company() -> None:
    desk = Desk()
    guest = desk.open(open_frame(pace=PaceKind.AUTO))
    for _ in range(3):
        assert desk.step()
    other = desk.open(open_frame(pace=PaceKind.AUTO, seed=5))
    desk.run()
    assert len(guest.generated) == 3
    assert len(other.generated) == 1  # its prompt, and the id behind it
    other.session.sink = None  # the other device is gone
    desk.run()
    assert guest.sink.ids == guest.plain(24)


def test_a_finished_session_is_no_company() -> None:
    desk = Desk()
    first = desk.open(open_frame(pace=PaceKind.AUTO, max_new_tokens=1))
    desk.step()
    assert first.session.finished
    guest = desk.open(open_frame(pace=PaceKind.AUTO))
    desk.run()
    assert len(guest.generated) == 24


def test_pace_can_be_changed_on_the_way() -> None:
    desk, guest = waiting_desk()
    assert not desk.step()
    pace(guest, PaceKind.RUN_ON)
    assert desk.step()
    pace(guest, PaceKind.WAIT)
    assert not desk.step()


def test_a_pace_of_another_epoch_changes_nothing() -> None:
    desk, guest = waiting_desk()
    guest.session.set_pace(Pace(EPOCH + 1, PaceKind.RUN_ON, 256, guest.session.length))  # type: ignore[arg-type]
    assert not desk.step()


@pytest.mark.parametrize("run_ahead", [0, 1, 5, 8])
def test_never_more_than_run_ahead_past_the_ack(run_ahead: int) -> None:
    desk = Desk()
    guest = desk.open(open_frame(run_ahead=run_ahead))
    truth = guest.plain(40)
    guest.session.hint(chain(guest, truth[:12], ack=0))
    desk.run()
    assert len(guest.generated) == run_ahead
    acked = run_ahead // 2
    pace(guest, PaceKind.RUN_ON, run_ahead, 3 + acked)
    guest.session.hint(chain(guest, truth[run_ahead : run_ahead + 12], ack=0))
    desk.run()
    assert len(guest.generated) == acked + run_ahead
    assert guest.sink.ids == truth[: acked + run_ahead]


def test_an_old_ack_takes_no_credit_back() -> None:
    desk = Desk()
    guest = desk.open(open_frame(run_ahead=4))
    desk.run()
    pace(guest, PaceKind.RUN_ON, 4)
    pace(guest, PaceKind.RUN_ON, 4, ack=3)
    desk.run()
    assert len(guest.generated) == 8


def test_an_ack_past_the_committed_ids_is_refused() -> None:
    desk = Desk()
    guest = desk.open(open_frame(run_ahead=4))
    desk.run()
    with pytest.raises(RemoteProtocolError) as caught:
        pace(guest, PaceKind.RUN_ON, 4, ack=guest.session.length + 1)
    assert caught.value.field == "pace.ack"
    assert guest.session.credit == 0


def test_finished_needs_no_credit() -> None:
    desk = Desk()
    guest = desk.open(open_frame(run_ahead=24))
    desk.run()
    assert guest.session.credit == 0
    assert guest.sink.finished is not None


def test_run_ahead_0_pauses_and_credit_goes_on() -> None:
    desk = Desk()
    guest = desk.open(open_frame(run_ahead=0))
    assert not desk.step()
    assert desk.scheduler.wake_at(desk.now) is None
    desk.now += 3600
    assert not desk.step()
    pace(guest, PaceKind.RUN_ON, 256)
    desk.run()
    assert guest.sink.ids == guest.plain(24)


def test_max_wait_stands_still_while_a_session_has_no_credit() -> None:
    # Once wrong: Session.idle_since runs on during the pause, so the first step after it comes dry and at once.
    desk, guest = waiting_desk()
    pace(guest, PaceKind.WAIT, run_ahead=0)
    assert not desk.step()
    desk.now += 60
    assert not desk.step()
    pace(guest, PaceKind.WAIT, run_ahead=256)
    assert not desk.step()
    desk.now += MAX_WAIT_MS / 1000
    assert desk.step()


def test_the_session_that_waited_longest_goes_first() -> None:
    desk = Desk()
    guests = [desk.open(open_frame(seed=seed, max_new_tokens=8)) for seed in range(4)]
    for _ in range(8):
        before = [len(guest.generated) for guest in guests]
        for _ in guests:
            assert desk.step()
            desk.now += 0.01
        assert [len(guest.generated) - was for guest, was in zip(guests, before, strict=True)] == [1, 1, 1, 1]
    for guest in guests:
        assert guest.sink.ids == guest.plain(8)


def test_a_step_over_several_sessions_gives_each_its_own_text() -> None:
    desk = Desk(sessions_per_step=3)
    guests = [desk.open(open_frame(range(2 + seed), seed=seed, max_new_tokens=20 + seed)) for seed in range(5)]
    for round_ in range(3):
        for guest in guests[round_:]:
            guest.session.hint(chain(guest, guest.plain(20)[len(guest.generated) :][:4]))
        desk.step()
    desk.run()
    for guest in guests:
        assert guest.sink.ids == guest.plain(20 + guest.session.seed)
    assert max(commit.batch_size for guest in guests for commit in guest.sink.commits) == 3


def test_no_more_nodes_than_the_limit_are_verified_in_a_step() -> None:
    desk = Desk(limits=Limits(max_step_nodes=5))
    guest = desk.open(open_frame())
    truth = guest.plain(24)
    desk.step()
    guest.session.hint(chain(guest, truth[1:17]))
    desk.step()
    assert guest.sink.commits[-1].accepted == 5
    assert len(desk.model.seen[-1].ids) == 6
    desk.run()
    assert guest.sink.ids == truth
