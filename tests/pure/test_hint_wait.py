"""How long a hint waited for its step is told once: by the first commit whose plan saw its last node."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.errors import RemoteProtocolError
from shared.types import Commit, Epoch, Hint, Limits, PaceKind
from tests.formula_model import Desk, Guest, chain, open_frame


def running(desk: Desk, **changes: object) -> Guest:
    """A session that runs on, its context fed and its first id committed."""
    guest = desk.open(open_frame(pace=PaceKind.RUN_ON, **changes))
    assert desk.step()
    return guest


def told(desk: Desk, guest: Guest) -> int | None:
    """The wait in the commit of the next step."""
    before = len(guest.sink.commits)
    assert desk.step()
    assert len(guest.sink.commits) == before + 1
    return guest.sink.commits[-1].hint_wait_us


def truth(guest: Guest, count: int) -> list[int]:
    """The ids that the target writes next."""
    return guest.plain(len(guest.generated) + count)[len(guest.generated) :]


def test_the_first_commit_that_saw_a_node_tells_the_wait_and_no_other_does() -> None:
    desk = Desk()
    guest = running(desk)
    assert guest.sink.commits[0].hint_wait_us is None
    for wait_us in (250_000, 0, 62_500):
        guest.session.hint(chain(guest, truth(guest, 2)), received_at=desk.now)
        desk.now += wait_us / 1e6
        assert told(desk, guest) == pytest.approx(wait_us, abs=1)
        assert guest.sink.commits[-1].seen_node == guest.session.trie.highest_number
        desk.now += 0.5
        assert [told(desk, guest), told(desk, guest)] == [None, None]


def test_of_several_frames_the_last_one_counts() -> None:
    desk = Desk()
    guest = running(desk)
    ids = truth(guest, 4)
    guest.session.hint(chain(guest, ids[:2]), received_at=desk.now)
    desk.now += 0.5
    guest.session.hint(chain(guest, ids[2:], base_node=2, base_position=0), received_at=desk.now)
    desk.now += 0.25
    assert told(desk, guest) == 250_000
    assert guest.sink.commits[-1].seen_node == 4


def late(guest: Guest) -> Hint:
    return chain(guest, guest.generated[-1:], at=guest.session.length - 1)


def disagreeing(guest: Guest) -> Hint:
    return chain(guest, [(guest.generated[-1] + 1) % 20], at=guest.session.length - 1)


def unknown(guest: Guest) -> Hint:
    first = guest.session.trie.highest_number + 5
    return chain(guest, [1, 2], first_node=first, base_node=first - 1, base_position=0)


@pytest.mark.parametrize("hint", [late, disagreeing, unknown], ids=lambda hint: hint.__name__)
def test_a_hint_of_which_nothing_is_kept_still_tells_its_wait(hint: Callable[[Guest], Hint]) -> None:
    desk = Desk()
    guest = running(desk)
    assert guest.session.hint(hint(guest), received_at=desk.now) == 0
    desk.now += 0.125
    assert told(desk, guest) == 125_000


def test_a_hint_over_the_rate_or_over_budget_still_tells_its_wait() -> None:
    desk = Desk(limits=Limits(max_held_nodes=2))
    guest = running(desk)
    for is_welcome in (False, True):
        guest.session.hint(chain(guest, [1, 2, 3, 4]), is_welcome, received_at=desk.now)
        desk.now += 0.125
        assert told(desk, guest) == 125_000
        assert guest.sink.commits[-1].dropped_over_budget == (2 if is_welcome else 4)


def test_frames_without_a_new_node_tell_nothing_and_do_not_touch_the_wait_of_one_that_has_some() -> None:
    desk = Desk()
    guest = running(desk)
    hint = chain(guest, truth(guest, 1))

    def others() -> None:
        guest.session.hint(hint, received_at=desk.now)
        guest.session.hint(chain(guest, []), received_at=desk.now)
        guest.session.hint(chain(guest, [1], epoch=Epoch(7)), received_at=desk.now)
        with pytest.raises(RemoteProtocolError):
            guest.session.hint(chain(guest, [1], ack=9999), received_at=desk.now)

    guest.session.hint(hint, received_at=desk.now)
    desk.now += 0.25
    others()
    assert told(desk, guest) == 250_000
    others()
    assert told(desk, guest) is None


def test_the_wait_ends_with_the_plan_of_the_commit_that_tells_it_whatever_plans_saw_the_node_before() -> None:
    desk = Desk(prefill_tokens=10)
    guest = desk.open(open_frame([1 + n % 20 for n in range(25)], pace=PaceKind.RUN_ON))
    guest.session.hint(chain(guest, guest.plain(2)), received_at=desk.now)
    for _ in range(2):  # prefill: nothing is committed, nothing told
        desk.now += 0.25
        assert desk.step()
        assert not guest.sink.commits
    assert desk.scheduler.plan(desk.now) is not None  # a plan that comes to nothing
    desk.now += 0.25
    assert told(desk, guest) == 750_000


def test_each_session_of_a_step_has_its_own_wait() -> None:
    desk = Desk(sessions_per_step=3)
    guests = [running(desk, seed=seed) for seed in range(3)]
    lengths = [len(guest.sink.commits) for guest in guests]
    for guest in guests[:2]:
        guest.session.hint(chain(guest, truth(guest, 1)), received_at=desk.now)
        desk.now += 0.25
    assert desk.step()
    assert [len(guest.sink.commits) for guest in guests] == [length + 1 for length in lengths]
    assert [guest.sink.commits[-1].hint_wait_us for guest in guests] == [500_000, 250_000, None]


def test_what_is_repeated_after_a_cut_tells_no_wait() -> None:
    desk = Desk()
    guest = running(desk)
    guest.session.hint(chain(guest, truth(guest, 2)), received_at=desk.now)
    assert told(desk, guest) == 0
    repeated = [frame for frame in guest.session.replay(0) if isinstance(frame, Commit)]
    assert [commit.hint_wait_us for commit in repeated] == [None] * len(repeated)
    assert repeated[-1].end == guest.session.length


def test_a_wait_that_is_not_known_or_does_not_fit_the_wire_is_not_told() -> None:
    desk = Desk()
    guest = running(desk)
    guest.session.hint(chain(guest, truth(guest, 1)))
    assert told(desk, guest) is None
    for wait_s, is_told in ((4294.0, True), (4295.0, False)):
        guest.session.hint(chain(guest, truth(guest, 1)), received_at=desk.now)
        desk.now += wait_s
        assert (told(desk, guest) is not None) == is_told
        assert told(desk, guest) is None
