"""A session's text is the target's own, whatever hints come: sessions, scheduler, judge and worker on a formula."""

from __future__ import annotations

import random

import pytest

from shared.errors import DraftwireError
from shared.types import Epoch, Hint, Reason
from tests.formula_model import EPOCH, PARAMS, VOCABULARY, Desk, Guest, chain, open_frame

COUNT = 24


@pytest.mark.parametrize("wanted", range(9))
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_every_accept_length_gives_the_targets_own_ids(params: str, wanted: int) -> None:
    desk = Desk()
    guest = desk.open(open_frame(sampling=PARAMS[params], max_new_tokens=COUNT))
    truth = guest.plain(COUNT + 9)
    desk.step()
    while guest.session.finished is None:
        done = len(guest.generated)
        hinted = truth[done : done + 8]
        if wanted < 8:
            hinted[wanted] = (hinted[wanted] + 1) % (VOCABULARY - 2)
        guest.session.hint(chain(guest, hinted))
        assert desk.step()
        commit = guest.sink.commits[-1]
        room = COUNT - done
        assert commit.accepted == min(wanted, room)
        assert len(commit.ids) == min(wanted + 1, room)
    assert guest.sink.ids == truth[:COUNT]
    assert guest.sink.finished is not None
    assert guest.sink.finished.reason is Reason.LENGTH
    assert guest.sink.finished.usage.accepted_tokens == sum(commit.accepted for commit in guest.sink.commits)
    assert guest.sink.finished.usage.steps == len(guest.sink.commits)
    assert guest.sink.finished.usage.dry_steps == 1
    assert guest.sink.finished.usage.generated_tokens == COUNT


@pytest.mark.parametrize("hint_length", [1, 2, 4, 7, 16])
def test_verify_positions_are_exactly_those_behind_the_committed_ids(hint_length: int) -> None:
    """C01: committed_length .. committed_length + K, with no gap and no repeat."""
    desk, rng = Desk(), random.Random(hint_length)
    guest = desk.open(open_frame((5,), max_new_tokens=60))
    truth = guest.plain(80)
    while guest.session.finished is None:
        done, length = len(guest.generated), guest.session.length
        hinted = truth[done : done + hint_length]
        if rng.random() < 0.7:
            place = rng.randrange(len(hinted))
            hinted[place] = (hinted[place] + 1) % (VOCABULARY - 2)
        guest.session.hint(chain(guest, hinted))
        unfed, credit = guest.session.unfed, guest.session.credit
        assert desk.step()
        row = desk.model.seen[-1]
        assert row.kept == length - unfed
        assert row.positions == list(range(length - unfed, length + min(hint_length, credit)))
        assert row.wanted == list(range(unfed - 1, len(row.ids)))
    assert guest.sink.ids == truth[:60]


def test_a_one_token_prompt_and_a_prompt_fed_in_pieces_give_the_same_rules() -> None:
    for context in ([4], list(range(20)) * 5):
        desk = Desk(prefill_tokens=7)
        guest = desk.open(open_frame(context, sampling=PARAMS["penalties"]))
        desk.run()
        assert guest.sink.ids == guest.plain(COUNT)
        fed = [token for row in desk.model.seen[: -(COUNT - 1)] for token in row.ids]
        assert fed == context
        assert all(len(row.ids) <= 7 for row in desk.model.seen)


def random_tree(rng: random.Random, guest: Guest, truth: list[int], at: int) -> Hint:
    """A tree at position `at`, each id the target's own with some chance, numbers ahead of all before or re-used."""
    start = guest.session.generated_from
    count = rng.randint(1, 10)
    depths: list[int] = []
    ids: list[int] = []
    parents: list[int] = []
    for index in range(count):
        delta = rng.choice([0, 1, 1, 1, 2, 3]) if index else 0
        parent = index - delta if 0 < delta <= index else None
        parents.append(delta if parent is not None else 0)
        depths.append(depths[parent] + 1 if parent is not None else 0)
        place = at + depths[-1] - start
        own = truth[place] if 0 <= place < len(truth) else None
        ids.append(own if own is not None and rng.random() < 0.75 else rng.randrange(VOCABULARY - 2))
    highest = guest.session.trie.highest_number
    return Hint(
        epoch=EPOCH if rng.random() < 0.93 else Epoch(EPOCH + rng.choice([-1, 1])),
        first_node=max(1, highest + rng.choice([1, 1, 1, 2, 9, -3])),
        ids=tuple(ids),
        ack=rng.randint(max(0, guest.session.length - 4), guest.session.length),
        base_position=at,
        parents=tuple(parents),
        confidence=tuple(rng.random() for _ in ids) if rng.random() < 0.5 else (),
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_random_late_wrong_repeated_and_stale_hints_cannot_change_a_text(params: str, seed: int) -> None:
    rng = random.Random(f"{params} {seed}")
    desk = Desk()
    stop_ids = (9,) if seed % 3 == 0 else ()
    guest = desk.open(open_frame((6, 7), sampling=PARAMS[params], max_new_tokens=60, stop_ids=stop_ids, seed=seed))
    truth = guest.plain(60)
    sent: list[Hint] = []
    while guest.session.finished is None:
        for _ in range(rng.randint(0, 3)):
            if sent and rng.random() < 0.2:
                hint = rng.choice(sent)  # a duplicate, perhaps long after
            else:
                at = max(0, guest.session.length + rng.choice([-5, -2, -1, 0, 0, 0, 0, 1, 3]))
                hint = random_tree(rng, guest, truth, at)
                sent.append(hint)
            guest.session.hint(hint)
            guest.session.trie.check_integrity()
        assert desk.step()
    assert guest.sink.ids == truth
    assert guest.sink.commits[-1].end == guest.session.length


def test_random_hints_do_foretell_ids() -> None:
    """The fuzz above would prove little if no hint were ever accepted, or every one."""
    rng, accepted, committed = random.Random(1), 0, 0
    for seed in range(20):
        desk = Desk()
        guest = desk.open(open_frame((6, 7), sampling=PARAMS["cut"], max_new_tokens=60, seed=seed))
        truth = guest.plain(60)
        while guest.session.finished is None:
            guest.session.hint(random_tree(rng, guest, truth, guest.session.length))
            desk.step()
        accepted += sum(commit.accepted for commit in guest.sink.commits)
        committed += len(guest.generated)
    assert 0.3 < accepted / committed < 0.95


@pytest.mark.parametrize("index", range(9))
def test_a_stop_id_at_every_place_of_an_accepted_block_ends_the_text_there(index: int) -> None:
    """C03: nothing after the stop id, no row of it cached beyond the committed ids."""
    prefix, block = 3, 8
    truth = Desk().open(open_frame(max_new_tokens=40, sampling=PARAMS["hot"])).plain(40)
    stop = truth[prefix + index]
    first = truth.index(stop)
    desk = Desk()
    guest = desk.open(open_frame(max_new_tokens=40, sampling=PARAMS["hot"], stop_ids=(stop,)))
    for _ in range(min(prefix, first)):
        desk.step()
    while guest.session.finished is None:
        done = len(guest.generated)
        guest.session.hint(chain(guest, truth[done : done + block]))
        desk.step()
    assert guest.sink.ids == truth[: first + 1]
    assert guest.sink.finished is not None
    assert guest.sink.finished.reason is Reason.STOP_ID
    slot = guest.session.slot
    assert slot.length <= guest.session.length - 1
    before = len(guest.sink.frames)
    guest.session.hint(chain(guest, truth[first + 1 : first + 5], ack=0))
    assert not desk.step()
    assert len(guest.sink.frames) == before


def test_the_stop_test_above_meets_every_index_of_a_block() -> None:
    truth = Desk().open(open_frame(max_new_tokens=40, sampling=PARAMS["hot"])).plain(40)
    assert len(set(truth[:12])) >= 10


def test_a_stop_id_in_the_context_does_not_end_a_text() -> None:
    desk = Desk()
    guest = desk.open(open_frame((9, 8, 9), stop_ids=(9,), max_new_tokens=5))
    desk.run()
    assert len(guest.generated) >= 1
    assert guest.sink.ids == guest.plain(5)


@pytest.mark.parametrize("cut", [0, 1, 7, 23])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_text_continued_elsewhere_is_the_undisturbed_text(params: str, cut: int) -> None:
    desk = Desk()
    whole = desk.open(open_frame(sampling=PARAMS[params]))
    truth = whole.plain(COUNT)
    other = Desk()
    guest = other.open(open_frame((1, 2, 3, *truth[:cut]), 3, sampling=PARAMS[params]))
    assert guest.opened.committed_length == 3 + cut
    other.run()
    assert guest.sink.ids == truth[cut:]
    assert guest.sink.finished is not None
    assert guest.sink.finished.usage.generated_tokens == COUNT


@pytest.mark.parametrize(("ids", "reason"), [((1, 2, 9), Reason.STOP_ID), (tuple(range(1, 7)), Reason.LENGTH)])
def test_a_text_continued_after_its_end_is_finished_at_once(ids: tuple[int, ...], reason: Reason) -> None:
    desk = Desk()
    guest = desk.open(open_frame(ids, 2, stop_ids=(9,), max_new_tokens=4))
    assert guest.sink.finished is not None
    assert guest.sink.finished.reason is reason
    assert not desk.step()


def test_a_text_ends_where_the_context_is_full() -> None:
    desk = Desk()
    desk.model.context_size = 12
    guest = desk.open(open_frame((1, 2, 3), max_new_tokens=100))
    truth = guest.plain(9)
    desk.step()
    guest.session.hint(chain(guest, [*truth[1:], 1, 2, 3]))
    desk.run()
    assert guest.sink.ids == truth
    assert guest.sink.finished is not None
    assert guest.sink.finished.reason is Reason.CONTEXT_FULL


def test_a_hint_that_is_refused_leaves_the_session_as_it_was() -> None:
    desk = Desk()
    guest = desk.open(open_frame())
    desk.step()
    for bad in (
        chain(guest, [1, 2], ack=guest.session.length + 1),
        chain(guest, [1, 2], base_digest=12345),
        chain(guest, [1, 2], at=guest.session.length + 5, base_digest=1),
    ):
        with pytest.raises(DraftwireError):
            guest.session.hint(bad)
        assert guest.session.trie.held == 0
    desk.run()
    assert guest.sink.ids == guest.plain(COUNT)
