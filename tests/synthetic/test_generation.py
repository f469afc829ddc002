"""The loop of one generation against a verifier that is a script: every id is told once, whatever fails when."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edge_client.drafter import Budget, Drafter, DraftTask, HintTree
from edge_client.events import Committed, Done, Event, FinishReason, State, StateChanged
from edge_client.generate import Generation, encode_tree
from edge_client.text import TextStream
from edge_client.tokenizer import TextTokenizer
from edge_client.transport import Traffic
from shared.errors import (
    DraftwireError,
    NumericalError,
    PrefixMismatch,
    RemoteProtocolError,
    SessionNotFound,
    TransportError,
)
from shared.randomness import ids_digest
from shared.sampling import GREEDY
from shared.types import (
    Close,
    Commit,
    DownFrame,
    Epoch,
    Fault,
    Finished,
    Hint,
    Limits,
    ModelCard,
    Open,
    Opened,
    Pace,
    PaceKind,
    Reason,
    Resume,
    SessionId,
    UpFrame,
)

PROMPT = (70, 71, 72)
EPOCH = Epoch(0)
SESSION = SessionId(b"s" * 16)

Turn = DownFrame | None | DraftwireError
"""What one receive gives: a frame, the end, or an error."""


class ScriptedConnection:
    """Gives `turns` one after another, then waits for ever; `refuses` says which frames cannot be sent."""

    def __init__(self, turns: Sequence[Turn], refuses: Callable[[UpFrame], DraftwireError | None]) -> None:
        self.turns, self.refuses = deque(turns), refuses
        self.sent: list[UpFrame] = []
        self.is_closed = False

    async def send(self, frame: UpFrame) -> None:
        """See Connection."""
        self.sent.append(frame)
        if (error := self.refuses(frame)) is not None:
            raise error
        if isinstance(frame, Close):
            self.turns.append(None)

    async def receive(self) -> DownFrame | None:
        """See Connection."""
        while not self.turns:  # noqa: ASYNC110 (a script, not a queue: the test reads it too)
            await asyncio.sleep(0.001)
        turn = self.turns.popleft()
        if isinstance(turn, DraftwireError):
            raise turn
        return turn

    async def close(self) -> None:
        """See Connection."""
        self.is_closed = True


class ScriptedTransport:
    """Hands out the connections of a script."""

    def __init__(self, *scripts: ScriptedConnection) -> None:
        self.scripts, self.used = list(scripts), list[ScriptedConnection]()

    async def describe(self) -> ModelCard:
        """See Transport."""
        raise NotImplementedError

    async def connect(self, traffic: Traffic) -> ScriptedConnection:
        """See Transport."""
        self.used.append(self.scripts.pop(0))
        return self.used[-1]

    async def close(self) -> None:
        """See Transport."""


def connection(*turns: Turn, refuses: Callable[[UpFrame], DraftwireError | None] = lambda f: None) -> Any:
    return ScriptedConnection(turns, refuses)


def opened(length: int = 3, **changes: Any) -> Opened:
    values = {"committed_length": length, "next_node": 1, "target_id": bytes(32), "limits": Limits(), **changes}
    return Opened(SESSION, 9, EPOCH, 3, **values)


def commit(start: int, *ids: int, accepted: int = 0, seen: int = 0) -> Commit:
    return Commit(EPOCH, start, ids, accepted, seen_node=seen)


FINISHED = Finished(EPOCH, Reason.LENGTH)


@pytest.fixture
async def run(tiny_tokenizer: TextTokenizer) -> AsyncIterator[Callable[..., Any]]:
    """Runs a generation on scripted connections; gives its events."""
    with ThreadPoolExecutor(1) as executor:

        async def events(
            *scripts: Any, busy: threading.Event | None = None, drafter: Drafter | None = None, **changes: Any
        ) -> list[Event]:
            values = {"max_new_tokens": 8, "run_ahead": 4, "pace": PaceKind.RUN_ON, **changes}
            stop = values.pop("stop", ())
            if busy is not None:
                executor.submit(busy.wait, 20)
            request = Open(PROMPT, 3, bytes(32), GREEDY, **values)
            generation = Generation(
                ScriptedTransport(*scripts),
                request,
                drafter,
                TextStream(tiny_tokenizer.vocabulary, stop),
                budget=Budget(3),
                executor=executor,
                secret=1,
            )
            async with asyncio.timeout(20):
                return [event async for event in generation.run()]

        yield events


def told(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Committed) for token in event.ids]


async def test_ids_are_told_in_order_and_acknowledged_at_half_of_run_ahead(run: Callable[..., Any]) -> None:
    line = connection(opened(), commit(3, 80), commit(4, 81, 82), commit(6, 83), FINISHED)
    events = await run(line)
    assert told(events) == [80, 81, 82, 83]
    assert isinstance(events[-1], Done)
    assert events[-1].reason is FinishReason.LENGTH
    assert [frame for frame in line.sent if isinstance(frame, Pace)] == [Pace(EPOCH, PaceKind.RUN_ON, 4, 6)]
    assert isinstance(line.sent[-1], Close)
    assert line.is_closed


async def test_ids_whose_ack_cannot_be_sent_are_told_all_the_same(run: Callable[..., Any]) -> None:
    # Once wrong: Generation._apply_commit takes the ids, then the Pace fails, and the event with them is lost.
    first = connection(
        opened(),
        commit(3, 80, 81),
        refuses=lambda frame: TransportError("cut") if isinstance(frame, Pace) else None,
    )
    second = connection(opened(5), commit(5, 82), FINISHED)
    events = await run(first, second)
    assert told(events) == [80, 81, 82]


@pytest.mark.parametrize("at", range(4))
async def test_a_cut_between_any_two_frames_is_resumed(run: Callable[..., Any], at: int) -> None:
    frames = [commit(3, 80), commit(4, 81, 82), commit(6, 83), FINISHED]
    first = connection(opened(), *frames[:at], TransportError("cut"))
    held = [80, 81, 82, 83][: (0, 1, 3, 4)[at]]
    second = connection(opened(3 + len(held)), *frames[at:])
    events = await run(first, second)
    assert told(events) == [80, 81, 82, 83]
    assert second.sent[0] == Resume(SESSION, EPOCH, 3 + len(held), ids_digest([*PROMPT, *held]))
    states = [event.state for event in events if isinstance(event, StateChanged)]
    assert states == [State.STREAMING, State.RECONNECTING, State.STREAMING]
    assert first.is_closed


async def test_a_replay_that_overlaps_what_is_held_is_told_once(run: Callable[..., Any]) -> None:
    first = connection(opened(), commit(3, 80, 81), TransportError("cut"))
    second = connection(opened(7), commit(4, 81, 82, accepted=2), FINISHED)
    events = await run(first, second)
    assert told(events) == [80, 81, 82]
    assert events[-1].report.usage.accepted_tokens == 1  # type: ignore[union-attr]


async def test_a_commit_that_is_held_already_changes_nothing(run: Callable[..., Any]) -> None:
    # Once wrong: a commit that ends before the held ids do is refused as if it did not continue the text.
    line = connection(opened(), commit(3, 80, 81), commit(3, 80), commit(3, 80, 81), commit(5, 82), FINISHED)
    assert told(await run(line)) == [80, 81, 82]


async def test_a_verifier_without_the_session_gets_the_whole_text(run: Callable[..., Any]) -> None:
    first = connection(opened(), commit(3, 80), TransportError("cut"))
    second = connection(Fault("resume", "SessionNotFound", "gone"), SessionNotFound("gone"))
    third = connection(opened(4), commit(4, 81), FINISHED)
    assert told(await run(first, second, third)) == [80, 81]
    reopened = third.sent[0]
    assert isinstance(reopened, Open)
    assert (reopened.ids, reopened.generated_from, reopened.seed) == ((*PROMPT, 80), 3, 9)
    assert reopened.target_id == bytes(32)
    assert reopened.is_continued


@pytest.mark.parametrize(
    "end",
    [
        PrefixMismatch("another stream resumed this session"),
        Fault("", "NumericalError", "not finite"),
        RemoteProtocolError("bad"),
    ],
    ids=["displaced", "session failed", "protocol broken"],
)
async def test_what_is_no_cut_is_not_resumed(run: Callable[..., Any], end: Turn) -> None:
    kinds = {Fault: NumericalError}
    with pytest.raises(kinds.get(type(end), type(end))):  # type: ignore[arg-type]
        await run(connection(opened(), commit(3, 80), end))


@pytest.mark.parametrize("bad", [commit(5, 80), commit(2, 99, 80)], ids=["a gap", "other ids"])
async def test_a_commit_that_does_not_continue_the_text_is_refused(run: Callable[..., Any], bad: Commit) -> None:
    with pytest.raises(RemoteProtocolError, match=r"commit\.start"):
        await run(connection(opened(), bad))


async def test_frames_of_other_epochs_are_ignored(run: Callable[..., Any]) -> None:
    stale = Commit(Epoch(4), 3, (99,), 0)
    line = connection(opened(), stale, Finished(Epoch(4), Reason.LENGTH), commit(3, 80), FINISHED)
    assert told(await run(line)) == [80]


async def test_a_refused_hint_turns_drafting_off_and_the_text_goes_on(run: Callable[..., Any]) -> None:
    line = connection(opened(), commit(3, 80), Fault("hint", "PrefixMismatch", "other ids"), commit(4, 81), FINISHED)
    events = await run(line, drafter=Always((90, 91)), pace=PaceKind.WAIT)
    assert told(events) == [80, 81]
    assert State.STREAMING in [event.state for event in events if isinstance(event, StateChanged)]
    paces = [frame for frame in line.sent if isinstance(frame, Pace)]
    assert [pace.pace for pace in paces][-1] is PaceKind.RUN_ON


async def test_a_draft_that_begins_after_drafting_was_turned_off_does_no_harm(run: Callable[..., Any]) -> None:
    # Once wrong: a draft in progress met no drafter, which the loop had taken away meanwhile.
    busy = threading.Event()

    def free(frame: UpFrame) -> None:
        if isinstance(frame, Pace):
            busy.set()
            asyncio.get_running_loop().call_later(0.2, line.turns.extend, [commit(3, 80), FINISHED])

    line = connection(opened(), Fault("hint", "PrefixMismatch", "other ids"), refuses=free)
    assert told(await run(line, busy=busy, drafter=Always((90, 91)))) == [80]


async def test_a_stop_string_ends_the_text_whatever_was_committed_behind_it(
    run: Callable[..., Any], tiny_tokenizer: TextTokenizer
) -> None:
    line = connection(opened(), commit(3, 80, 81, 82, 83))
    stop = tiny_tokenizer.decode([81])
    events = await run(line, stop=stop)
    done = events[-1]
    assert isinstance(done, Done)
    assert done.reason is FinishReason.STOP
    assert done.stop == stop
    assert told(events) == [80, 81]
    assert "".join(event.text for event in events if isinstance(event, Committed)) == tiny_tokenizer.decode([80])
    assert isinstance(line.sent[-1], Close)


class Always:
    """Proposes the same ids always."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.begun = tuple(ids), 0

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""
        self.begun += 1

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        return HintTree(self.ids, tuple(range(-1, len(self.ids) - 1)), (0.5,) * len(self.ids))


async def test_a_hint_on_its_way_is_not_followed_by_another_until_it_is_judged(run: Callable[..., Any]) -> None:
    line = connection(opened())
    drafter = Always((80, 81))

    async def hints(count: int) -> None:
        while sum(isinstance(frame, Hint) for frame in line.sent) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def verifier() -> None:
        await hints(1)
        line.turns.append(commit(3, 80))  # the hint is still good: 81 may follow
        await asyncio.sleep(0.05)
        assert sum(isinstance(frame, Hint) for frame in line.sent) == 1
        line.turns.append(commit(4, 81, 82, accepted=1, seen=2))
        await hints(2)
        line.turns.append(FINISHED)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(verifier())
        events = await tasks.create_task(run(line, drafter=drafter))
    sent = [frame for frame in line.sent if isinstance(frame, Hint)]
    assert [(hint.first_node, hint.base_position, hint.ids) for hint in sent[:2]] == [
        (1, 3, (80, 81)),
        (3, 6, (80, 81)),
    ]
    assert sent[0].base_digest is not None
    assert sent[1].base_digest is None
    assert told(events) == [80, 81, 82]
    assert drafter.begun == 1


@pytest.mark.parametrize(
    ("parents", "deltas"), [((-1, 0, 1), ()), ((-1, -1, 0, 2), (0, 0, 2, 1)), ((-1, -1), (0, 0)), ((-1,), ())]
)
def test_a_chain_is_sent_without_parents_and_a_tree_with_deltas(
    parents: tuple[int, ...], deltas: tuple[int, ...]
) -> None:
    tree = HintTree(tuple(range(len(parents))), parents, (0.5,) * len(parents))
    hint = encode_tree(EPOCH, 7, 3, tree, 3, None)
    assert hint.parents == deltas
    assert bool(hint.confidence) == bool(deltas)
