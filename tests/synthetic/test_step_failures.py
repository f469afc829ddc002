"""A step is a transaction, a bad row ends its own session only, and a session's past can be told again."""

from __future__ import annotations

import pytest

from shared.errors import DeviceFailure, NumericalError, PrefixMismatch, RemoteProtocolError
from shared.randomness import ids_digest
from shared.rejection import QRow
from shared.sampling import raw_logprob
from shared.types import Commit, Epoch, Finished, Reason, Resume, Rule
from tests.formula_model import EPOCH, PARAMS, Desk, Guest, PathSlot, chain, formula_row, open_frame


def test_a_failed_step_leaves_every_session_at_its_committed_length() -> None:
    desk = Desk(sessions_per_step=2)
    guests = [desk.open(open_frame(seed=seed)) for seed in range(2)]
    for _ in range(3):
        desk.step()
    for guest in guests:
        guest.session.hint(chain(guest, guest.plain(9)[3:]))
    before = [(list(g.session.ids), g.session.slot.length, g.session.trie.held, g.session.usage) for g in guests]
    desk.model.fail_next = RuntimeError("CUDA error: out of memory\nmore")
    plan = desk.scheduler.plan(desk.now)
    assert plan is not None
    with pytest.raises(DeviceFailure, match=r"CUDA error: out of memory$"):
        desk.worker.run_step(plan)
    after = [(list(g.session.ids), g.session.slot.length, g.session.trie.held, g.session.usage) for g in guests]
    assert after == before
    desk.run()
    for guest in guests:
        assert guest.sink.ids == guest.plain(24)


def test_a_row_that_is_not_finite_ends_its_session_and_no_other() -> None:
    desk = Desk(sessions_per_step=2)
    guest, neighbour = desk.open(open_frame(seed=1)), desk.open(open_frame(seed=2))
    for _ in range(4):
        desk.step()
    held = list(guest.session.ids)
    desk.model.poisoned.add(id(guest.session.slot))
    desk.run()
    assert guest.session.ids == held
    assert [fault.error for fault in guest.sink.faults] == ["NumericalError"]
    assert [type(error) for error in guest.sink.ended] == [NumericalError]
    assert isinstance(guest.session.slot, PathSlot)
    assert guest.session.slot.is_released
    assert neighbour.sink.ids == neighbour.plain(24)
    assert neighbour.sink.faults == []
    assert desk.model.released == 1


def test_a_bad_row_off_the_way_does_no_harm() -> None:
    """Only rows that decide are read: a hint that is not taken may lead to a row of NaN."""
    desk = Desk()
    guest = desk.open(open_frame())
    desk.step()
    truth = guest.plain(2)[1]
    guest.session.hint(chain(guest, [truth + 1 if truth < 20 else 0]))
    desk.model.poisoned.add(id(guest.session.slot))  # the last row is the hinted one's
    assert desk.step()
    assert guest.sink.ids == guest.plain(2)


def test_a_session_whose_every_id_is_forbidden_ends_alone() -> None:
    from shared.sampling import SamplingParams

    desk = Desk()
    params = SamplingParams(logit_bias={token: float("-inf") for token in range(22)})
    guest, neighbour = desk.open(open_frame(sampling=params)), desk.open(open_frame(seed=2))
    desk.run()
    assert [fault.error for fault in guest.sink.faults] == ["NumericalError"]
    assert neighbour.sink.ids == neighbour.plain(24)


@pytest.mark.parametrize("params", ["greedy", "cut", "penalties", "bias"])
def test_every_committed_id_has_its_raw_log_probability(params: str) -> None:
    """C05: accepted, correction and bonus alike, before warping."""
    desk = Desk()
    guest = desk.open(open_frame(sampling=PARAMS[params], logprobs=True))
    truth = guest.plain(24)
    desk.step()
    for wrong in (4, 1, 0, 9):
        hinted = truth[len(guest.generated) :][:5]
        if wrong < len(hinted):
            hinted[wrong] = (hinted[wrong] + 1) % 22
        guest.session.hint(chain(guest, hinted))
        desk.step()
    desk.run()
    ids = list(guest.session.opened_with.ids)
    told = [value for commit in guest.sink.commits for value in commit.logprobs]
    assert len(told) == len(truth)
    for token, value in zip(truth, told, strict=True):
        assert value == pytest.approx(raw_logprob(formula_row(ids), token), abs=1e-6)
        assert value < 0
        ids.append(token)


def test_log_probabilities_are_told_only_if_asked_for() -> None:
    desk = Desk()
    guest = desk.open(open_frame())
    desk.run()
    assert all(commit.logprobs == () for commit in guest.sink.commits)


def hinted_run(**changes: object) -> tuple[Desk, Guest, list[int]]:
    """A finished session whose ids were partly foretold."""
    desk = Desk()
    guest = desk.open(open_frame(logprobs=True, **changes))
    truth = guest.plain(24)
    desk.step()
    for length in (3, 0, 5, 1):
        done = len(guest.generated)
        if length:
            guest.session.hint(chain(guest, truth[done : done + length]))
        desk.step()
    return desk, guest, truth


def resume(guest: Guest, have: int, /, **changes: object) -> Resume:
    values: dict[str, object] = {
        "session_id": guest.session.id,
        "epoch": EPOCH,
        "have": have,
        "digest": ids_digest(guest.session.ids[:have]),
        **changes,
    }
    return Resume(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_finished", [True, False])
def test_resume_tells_the_ids_from_have_on_and_finished_again(is_finished: bool) -> None:
    desk, guest, _ = hinted_run()
    if is_finished:
        desk.run()
    session = guest.session
    logprobs = [value for commit in guest.sink.commits for value in commit.logprobs]
    for have in range(3, session.length + 1):
        session.check_resume(resume(guest, have))
        frames = session.replay(have)
        commits = [frame for frame in frames if isinstance(frame, Commit)]
        assert [token for commit in commits for token in commit.ids] == session.ids[have:]
        assert [value for commit in commits for value in commit.logprobs] == logprobs[have - 3 :]
        start = have
        for commit in commits:
            assert commit.start == start
            start = commit.end
        assert sum(commit.accepted for commit in commits) == sum(session.accepted_flags[have - 3 :])
        assert [type(frame) for frame in frames[len(commits) :]] == ([Finished] if is_finished else [])
    assert session.replay(3) == session.replay(3)


def test_resume_counts_as_an_ack() -> None:
    desk = Desk()
    guest = desk.open(open_frame(run_ahead=4))
    desk.run()
    guest.session.replay(5)
    desk.run()
    assert len(guest.generated) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": bytes(16)},
        {"have": 99},
        {"have": 4},
        {"epoch": Epoch(EPOCH + 1)},
        {"epoch": Epoch(EPOCH - 1)},
    ],
    ids=str,
)
def test_resume_with_other_ids_is_refused(changes: dict[str, object]) -> None:
    desk, guest, truth = hinted_run()
    with pytest.raises(PrefixMismatch):
        guest.session.check_resume(resume(guest, 6, **changes))
    desk.run()
    assert guest.sink.ids == truth


def test_a_session_without_a_stream_stands_still_and_goes_on_after_resume() -> None:
    desk, guest, truth = hinted_run()
    guest.session.sink = None
    assert not desk.step()
    assert desk.scheduler.wake_at(desk.now) is None
    guest.session.sink = guest.sink
    desk.run()
    assert guest.sink.ids == truth


def test_keys_and_values_may_be_dropped_at_any_time() -> None:
    desk, guest, truth = hinted_run()
    guest.session.slot.clear()
    desk.run()
    assert guest.sink.ids == truth
    assert desk.model.seen[0].kept == 0


def test_hints_of_other_epochs_and_after_the_end_are_not_kept() -> None:
    desk = Desk()
    guest = desk.open(open_frame())
    desk.step()
    for epoch in (EPOCH - 1, EPOCH + 1):
        assert guest.session.hint(chain(guest, [1, 2], epoch=Epoch(epoch), ack=9999)) == 0
    assert (guest.session.trie.held, guest.session.usage.hint_nodes) == (0, 0)
    desk.run()
    assert guest.session.hint(chain(guest, [1, 2])) == 0
    assert guest.session.trie.held == 0


def test_rejection_takes_rows_and_agreement_takes_none() -> None:
    desk = Desk()
    row = QRow((4,), (65535,))
    agreement = desk.open(open_frame(sampling=PARAMS["sampled"]))
    with pytest.raises(RemoteProtocolError, match=r"hint\.rows"):
        agreement.session.hint(chain(agreement, [4], rows=(row,)))
    rejection = desk.open(open_frame(sampling=PARAMS["sampled"], rule=Rule.REJECTION))
    with pytest.raises(RemoteProtocolError, match=r"hint\.rows"):
        rejection.session.hint(chain(rejection, [4]))
    with pytest.raises(RemoteProtocolError, match=r"hint\.parents"):
        rejection.session.hint(chain(rejection, [4, 4], rows=(row, row), parents=(0, 0)))


def test_rejection_accepts_a_row_that_is_the_targets_own() -> None:
    """A hint drawn from q is accepted with probability min(1, p/q): here q puts less on the id than p does."""
    from shared.rejection import quantise
    from shared.sampling import warp
    from tests.formula_model import VALID

    desk = Desk()
    guest = desk.open(open_frame(sampling=PARAMS["greedy"], max_new_tokens=3))
    assert not guest.session.is_chain
    desk.run()
    guest = desk.open(open_frame(sampling=PARAMS["sampled"], rule=Rule.REJECTION, max_new_tokens=200))
    desk.step()
    accepted = 0
    while guest.session.finished is None:
        warped = warp(formula_row(guest.session.ids), PARAMS["sampled"], None, VALID)
        best = int(warped.ids[int(warped.scores.argmax())])
        own = quantise(warped, 32)
        other = next(token for token in own.ids if token != best)
        share = max(1, int(own.probability(best) * 65535 * 0.5))
        row = QRow((best, other), (share, 65535 - share))
        guest.session.hint(chain(guest, [best], rows=(row,)))
        desk.step()
        accepted += guest.sink.commits[-1].accepted
        assert guest.sink.commits[-1].accepted == 1
    assert accepted > 50
    assert guest.sink.finished is not None
    assert guest.sink.finished.reason is Reason.LENGTH
    assert all(token < 22 for token in guest.sink.ids)
