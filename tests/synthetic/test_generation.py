"""The loop of one generation against a verifier that is a script: every id is told once, whatever fails when."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest

from edge_client.controller import EngineSettings
from edge_client.drafter import Budget, Drafter, DraftTask, HintTree
from edge_client.edge_engine import EdgeEngine
from edge_client.events import Committed, Done, Event, FinishReason, OfflinePolicy, Preview, State, StateChanged
from edge_client.generate import Generation, Manner
from edge_client.session_stream import SessionStream
from edge_client.text import TextStream
from edge_client.tokenizer import TextTokenizer
from edge_client.transport import Traffic
from shared.errors import (
    DraftwireError,
    NumericalError,
    Overloaded,
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
PLAIN = Manner()


@pytest.fixture
async def run(tiny_tokenizer: TextTokenizer) -> AsyncIterator[Callable[..., Any]]:
    """Runs a generation on scripted connections; gives its events."""
    with ThreadPoolExecutor(1) as executor:

        def generation(
            transport: ScriptedTransport,
            busy: threading.Event | None = None,
            drafter: Drafter | None = None,
            manner: Manner = PLAIN,
            **changes: Any,
        ) -> Generation:
            values = {"max_new_tokens": 8, "run_ahead": 4, "pace": PaceKind.RUN_ON, **changes}
            stop = values.pop("stop", ())
            if busy is not None:
                executor.submit(busy.wait, 20)
            request = Open(PROMPT, 3, bytes(32), GREEDY, **values)
            settings = EngineSettings(depth=3 if drafter else 0, pace=request.pace)
            return Generation(
                SessionStream(transport, request),
                EdgeEngine(request, settings, has_model=drafter is not None),
                drafter,
                TextStream(tiny_tokenizer.vocabulary, stop),
                executor=executor,
                manner=manner,
            )

        async def events(*scripts: Any, **parts: Any) -> list[Event]:
            async with asyncio.timeout(20):
                return [event async for event in generation(ScriptedTransport(*scripts), **parts).run()]

        async def watch(transport: ScriptedTransport, **parts: Any) -> AsyncIterator[Event]:
            async with asyncio.timeout(20), aclosing(generation(transport, **parts).run()) as running:
                async for event in running:
                    yield event

        events.watch = watch  # type: ignore[attr-defined]
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
    assert states == [State.VERIFIED, State.OFFLINE, State.VERIFIED]
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
    assert State.VERIFIED in [event.state for event in events if isinstance(event, StateChanged)]
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
    assert told(await run(line, busy=busy, drafter=Always((90, 91)), pace=PaceKind.WAIT)) == [80]


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
    """Proposes the same ids at every place."""

    name = "always"

    def __init__(self, ids: Sequence[int], tells: Callable[[], None] = lambda: None) -> None:
        self.ids, self.begun, self.asked = tuple(ids), 0, 0
        self._tells = tells

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""
        self.begun += 1

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        self.asked += 1
        self._tells()
        return HintTree(self.ids, (-1,) * len(self.ids), (0.9, *[0.05] * (len(self.ids) - 1)))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 (a script, not a queue)
        await asyncio.sleep(0.001)


async def test_the_device_drafts_and_sends_ahead_of_what_is_committed(run: Callable[..., Any]) -> None:
    """Nothing comes from the verifier until three positions were hinted: nobody waits for a commit."""
    line = connection(opened())
    drafter = Always((80, 81))

    def hinted() -> list[Hint]:
        return [frame for frame in line.sent if isinstance(frame, Hint)]

    async def verifier() -> None:
        await until(lambda: sum(len(hint.ids) for hint in hinted()) >= 3)
        line.turns.extend([commit(3, 80, 80, 80, accepted=3, seen=3), commit(6, 81), FINISHED])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(verifier())
        events = await tasks.create_task(run(line, drafter=drafter))
    first, *others = hinted()
    assert (first.first_node, first.base_position) == (1, 3)
    assert first.base_digest is not None
    assert all(hint.base_digest is None for hint in others)
    assert told(events) == [80, 80, 80, 81]
    assert drafter.begun == 1


async def test_previews_run_ahead_of_committed_text_and_are_not_told_unless_asked_for(
    run: Callable[..., Any], tiny_tokenizer: TextTokenizer
) -> None:
    previews: dict[bool, list[Preview]] = {}
    for is_asked in (False, True):
        line = connection(opened())

        async def verifier(line: Any = line) -> None:
            await until(lambda: sum(len(f.ids) for f in line.sent if isinstance(f, Hint)) >= 3)
            line.turns.extend([commit(3, 80), FINISHED])

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(verifier())
            manner = Manner(previews=is_asked)
            events = await tasks.create_task(run(line, drafter=Always((80, 81)), manner=manner))
        previews[is_asked] = [event for event in events if isinstance(event, Preview)]
    assert previews[False] == []
    assert previews[True][0].ids[0] == 80
    assert previews[True][0].text == tiny_tokenizer.decode(list(previews[True][0].ids))
    assert not any(preview.is_unverified for preview in previews[True])


async def test_a_cut_under_local_goes_on_unverified_and_the_target_has_the_last_word(run: Callable[..., Any]) -> None:
    may_return = asyncio.Event()
    first, second = connection(opened(), commit(3, 80), TransportError("cut")), connection(opened(4))
    drafter = Always((80, 81))
    waiting = ScriptedTransport(first, second)
    events: list[Event] = []

    async def connect(traffic: Traffic, plain: Any = waiting.connect) -> Any:
        if waiting.used:
            await may_return.wait()
        return await plain(traffic)

    waiting.connect = connect  # type: ignore[method-assign]
    async for event in run.watch(waiting, drafter=drafter, manner=Manner(OfflinePolicy.LOCAL, previews=True)):  # type: ignore[attr-defined]
        events.append(event)
        if isinstance(event, Preview) and event.is_unverified and len(event.ids) >= 5 and not may_return.is_set():
            may_return.set()
            second.turns.extend([commit(4, 80, 99), FINISHED])
    states = [event.state for event in events if isinstance(event, StateChanged)]
    assert states == [State.DRAFTING, State.UNVERIFIED, State.DRAFTING]
    assert told(events) == [80, 80, 99]
    resent = [frame for frame in second.sent if isinstance(frame, Hint)]
    assert not resent or resent[0].base_position == 4


async def test_a_cut_under_fail_is_raised_at_once(run: Callable[..., Any]) -> None:
    with pytest.raises(TransportError, match="cut"):
        await run(connection(opened(), commit(3, 80), TransportError("cut")), manner=Manner(OfflinePolicy.FAIL))


async def test_a_drafter_that_fails_costs_its_hints_and_not_the_text(run: Callable[..., Any]) -> None:
    def fail() -> None:
        raise NumericalError("no finite score")

    line = connection(opened(), commit(3, 80))
    drafter = Always((80,), fail)

    async def verifier() -> None:
        await until(lambda: any(isinstance(frame, Pace) for frame in line.sent))
        line.turns.extend([commit(4, 81), FINISHED])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(verifier())
        events = await tasks.create_task(run(line, drafter=drafter, pace=PaceKind.WAIT))
    assert told(events) == [80, 81]
    last = [event for event in events if isinstance(event, StateChanged)][-1]
    assert last.state is State.VERIFIED
    assert "no finite score" in last.detail


async def test_leaving_early_closes_the_session_and_ends_the_draft(run: Callable[..., Any]) -> None:
    line = connection(opened(), commit(3, 80))
    drafter = Always((80, 81))
    async with aclosing(run.watch(ScriptedTransport(line), drafter=drafter)) as events:  # type: ignore[attr-defined]
        async for event in events:
            if isinstance(event, Committed):
                break
    asked = drafter.asked
    await asyncio.sleep(0)
    assert isinstance(line.sent[-1], Close)
    assert line.is_closed
    assert drafter.asked == asked


async def test_a_verifier_without_room_after_a_cut_is_waited_for(run: Callable[..., Any]) -> None:
    first = connection(opened(), commit(3, 80), TransportError("cut"))
    second = connection(Fault("resume", "Overloaded", "no room", retry_after_ms=1))
    third = connection(opened(4), commit(4, 81), FINISHED)
    events = await run(first, second, third)
    assert told(events) == [80, 81]
    assert third.sent[0] == Resume(SESSION, EPOCH, 4, ids_digest([*PROMPT, 80]))
    states = [event.state for event in events if isinstance(event, StateChanged)]
    assert states == [State.VERIFIED, State.OFFLINE, State.VERIFIED]
    assert isinstance(events[-1], Done)
    assert events[-1].reason is FinishReason.LENGTH


async def test_a_verifier_that_ends_a_text_for_want_of_room_is_not_asked_for_it_again(run: Callable[..., Any]) -> None:
    # It would prefill the whole text and end it again, for ever.
    with pytest.raises(Overloaded, match="no memory"):
        await run(connection(opened(), commit(3, 80), Overloaded("no memory for this step")))


async def test_a_drafter_that_fails_while_offline_under_local_is_not_asked_again_and_again(
    run: Callable[..., Any],
) -> None:
    # Once wrong: the tip of the text stayed the next thing to draft, and the loop spun until the network was back.
    is_cut, may_return = threading.Event(), asyncio.Event()

    def fail() -> None:
        if is_cut.is_set():
            raise NumericalError("no finite score")

    first, second = connection(opened(), commit(3, 80)), connection(opened(4), commit(4, 81), FINISHED)
    drafter, waiting = Always((80, 81), fail), ScriptedTransport(first, second)
    plain = waiting.connect

    async def connect(traffic: Traffic) -> ScriptedConnection:
        if waiting.used:
            await may_return.wait()
        return await plain(traffic)

    waiting.connect = connect  # type: ignore[method-assign]
    events: list[Event] = []
    asked: list[int] = []

    async def network() -> None:
        await until(lambda: drafter.asked > 1)
        is_cut.set()
        asked.append(drafter.asked)
        first.turns.append(TransportError("cut"))
        await asyncio.sleep(0.4)
        may_return.set()

    async def device() -> None:
        manner = Manner(OfflinePolicy.LOCAL, previews=True)
        events.extend([event async for event in run.watch(waiting, drafter=drafter, manner=manner)])  # type: ignore[attr-defined]

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(network())
        tasks.create_task(device())
    assert State.UNVERIFIED in [event.state for event in events if isinstance(event, StateChanged)]
    assert told(events) == [80, 81]
    assert drafter.asked <= asked[0] + 2


class Slow(Always):
    """A draft step lasts until the test lets it end."""

    def __init__(self) -> None:
        super().__init__((80, 81), self._wait)
        self.is_at_work, self.may_end = threading.Event(), threading.Event()
        self.has_ended = False

    def _wait(self) -> None:
        self.is_at_work.set()
        assert self.may_end.wait(20)
        self.has_ended = True


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_who_leaves_early_says_so_before_the_draft_step_under_way_has_ended(
    run: Callable[..., Any], cancellations: int
) -> None:
    """The verifier may stop at once; the device's step can wait. However often the reader is cancelled."""
    line, drafter = connection(opened(), commit(3, 80)), Slow()

    def has_closed() -> bool:
        return any(isinstance(frame, Close) for frame in line.sent)

    async def read() -> None:
        async for _ in run.watch(ScriptedTransport(line), drafter=drafter):  # type: ignore[attr-defined]
            pass

    reading = asyncio.ensure_future(read())
    try:
        await until(drafter.is_at_work.is_set)
        for _ in range(cancellations):
            reading.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await until(has_closed)
        assert not drafter.has_ended
        assert not reading.done(), "whoever leaves waits for the step to end"
    finally:
        drafter.may_end.set()
        await asyncio.wait({reading})
    assert reading.cancelled()
    assert drafter.has_ended
    assert line.is_closed
