"""The loop of one generation: reads commits, drafts on a worker thread, sends hints; none waits for another.

Must not know: gRPC, protobuf, model files. Called by `client.stream`. What to draft and when to send is said by
`edge_engine`, cuts are bridged by `session_stream`; this file moves results between them and tells the caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from edge_client.draft_worker import DraftWorker
from edge_client.drafter import Drafter, DraftTask
from edge_client.edge_engine import EdgeEngine
from edge_client.events import (
    Committed,
    Done,
    Event,
    FinishReason,
    OfflinePolicy,
    Piece,
    Preview,
    Report,
    State,
    StateChanged,
)
from edge_client.session_stream import SessionStream, cut_or_error
from edge_client.text import TextStream
from edge_client.trace import TraceSink
from shared.errors import DraftwireError, Overloaded, RemoteProtocolError, TransportError
from shared.types import Commit, DownFrame, Fault, Finished, Hint, Opened, Pace, PaceKind, Reason, Usage

log = logging.getLogger("draftwire.engine")

_REASONS = {
    Reason.STOP_ID: FinishReason.STOP,
    Reason.LENGTH: FinishReason.LENGTH,
    Reason.CONTEXT_FULL: FinishReason.CONTEXT_FULL,
    Reason.CANCELLED: FinishReason.CANCELLED,
}


@dataclass(frozen=True)
class Manner:
    """How a caller wants a generation to go."""

    offline: OfflinePolicy = OfflinePolicy.WAIT
    previews: bool = False
    """Tell where the text probably goes, whenever that changes."""
    secret: int = 0
    """Keys the draft draws of the rejection rule."""


class Generation:
    """One epoch from Open to Finished, through cuts of the network."""

    def __init__(
        self,
        stream: SessionStream,
        engine: EdgeEngine,
        drafter: Drafter | None,
        text: TextStream,
        *,
        executor: Executor,
        manner: Manner | None = None,
        trace: TraceSink | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafter` None: no model drafts here; `engine` knows whether another way does."""
        self._stream, self._engine, self._text = stream, engine, text
        self._stream.on_opened = self._begin
        self._drafter, self._worker = drafter, DraftWorker(drafter, executor, clock)
        self._manner, self._trace, self._clock = manner or Manner(), trace or TraceSink(), clock
        self._pace = stream.request.pace
        self._state: State | None = None
        self._preview: tuple[tuple[int, ...], bool] = ((), False)
        self._sending: asyncio.Task[None] | None = None
        self._has_begun = False
        self._stop: str | None = None
        self._steps = self._accepted = 0
        self._started = self._first_token_at = 0.0

    @property
    def ids(self) -> list[int]:
        """The whole sequence held: context and committed."""
        return self._stream.ids

    @property
    def is_open(self) -> bool:
        """True once the verifier has answered."""
        return self._stream.opened is not None

    @property
    def seed(self) -> int:
        """The session's seed, as the verifier said it. 0 before it is open."""
        return self._stream.opened.seed if self._stream.opened else 0

    # ------------------------------------------------------------ the loop

    async def run(self) -> AsyncGenerator[Event, None]:
        """Events until Done. Raises: DraftwireError when it cannot go on."""
        self._started = self._clock()
        cut: DraftwireError | None = None
        try:
            if self._engine.decision.is_drafting:
                self._worker.prepare(self._stream.ids)
            try:
                await self._stream.open()
            except (TransportError, Overloaded) as error:  # no verifier at the moment, or one without room
                cut = error
            while True:
                if cut is not None:
                    async with aclosing(self._bridge(cut)) as events:
                        async for event in events:
                            yield event
                try:
                    async with aclosing(self._follow()) as events:
                        async for event in events:
                            yield event
                            if isinstance(event, Done):
                                return
                except TransportError as error:
                    cut = error
        finally:
            self._worker.interrupt()
            try:
                await self._stream.say_goodbye()  # the verifier stops first
            finally:
                await self._worker.ended(self._engine)

    async def _follow(self) -> AsyncGenerator[Event, None]:
        """Serves one connection: whichever is ready first, a frame, a draft, a frame sent, or the time to send."""
        if self._stream.reconnects:  # a change of pace may have been lost with the stream
            self._pace = self._stream.request.pace
            await self._send_pace(self._engine.pace(self._clock()))
        try:
            while True:
                for event in self._changes():
                    yield event
                self._worker.start(self._engine, self._stream.ids, self._clock())
                timeout_s = self._start_sending()
                await self._one_of(timeout_s)
                self._take_draft()
                cut = await self._sent()
                if self._stream.has_frame:
                    for event in self._apply(self._stream.take()):
                        yield event
                        if isinstance(event, Done):
                            return
                if self._stop is not None:
                    await self._settle()
                    await self._stream.say_goodbye()
                    yield self._done(FinishReason.STOP, self._stop)
                    return
                if cut is not None:
                    raise cut
        finally:
            await self._settle()

    async def _one_of(self, timeout_s: float | None) -> None:
        waiting: set[asyncio.Future[Any]] = {self._stream.receiving()}
        waiting |= {each for each in (self._worker.running, self._sending) if each is not None}
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _settle(self) -> None:
        """Ends what is being sent on this connection. A draft step under way goes on: it is good on the next one."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.cancel()
            await asyncio.wait({sending})
            if not sending.cancelled():
                sending.exception()

    async def _bridge(self, cut: DraftwireError) -> AsyncGenerator[Event, None]:
        """From a cut to the next stream. Under `local` the draft goes on writing, marked as unverified.

        Raises: the failure that lasted too long.
        """
        if self._manner.offline is OfflinePolicy.FAIL and isinstance(cut, TransportError):
            raise cut
        is_local = self._manner.offline is OfflinePolicy.LOCAL and self._drafter is not None and self.is_open
        self._engine.went_offline(self._clock(), is_local=is_local)
        yield self._enter(State.UNVERIFIED if is_local else State.OFFLINE, cut.message)
        reconnecting = asyncio.ensure_future(self._stream.reconnect(cut))
        try:
            while not reconnecting.done():
                self._worker.start(self._engine, self._stream.ids, self._clock())
                running = self._worker.running
                await asyncio.wait(
                    {reconnecting} | ({running} if running is not None else set()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._take_draft()
                if (preview := self._changed_preview()) is not None:
                    yield preview
            reconnecting.result()
        finally:
            reconnecting.cancel()
            await asyncio.wait({reconnecting})
            if not reconnecting.cancelled():
                reconnecting.exception()

    # ------------------------------------------------------------ what the caller is told

    def _changes(self) -> list[Event]:
        """A change of state or preview since the last look."""
        decision = self._engine.decision
        state = State.DRAFTING if decision.is_drafting else State.VERIFIED
        events: list[Event] = []
        if state is not self._state:
            log.debug("%s", decision.why)
            events.append(self._enter(state, "" if self._state is None else decision.reason))
        preview = self._changed_preview()
        return [*events, preview] if preview is not None else events

    def _enter(self, state: State, detail: str) -> StateChanged:
        self._state = state
        self._trace.state(self._clock(), state.value, detail)
        return StateChanged(state, detail)

    def _changed_preview(self) -> Preview | None:
        if not self._manner.previews:
            return None
        ids, is_unverified = self._engine.preview(), self._state is State.UNVERIFIED
        if (ids, is_unverified) == self._preview:
            return None
        self._preview = ids, is_unverified
        return Preview(self._text.preview(ids), ids, is_unverified)

    # ------------------------------------------------------------ drafts

    def _take_draft(self) -> None:
        """A drafter that fails costs its hints, never the text."""
        finished = self._worker.take()
        if finished is None:
            return
        if finished.error is not None:
            log.warning("no drafts any more in this text: %s", finished.error)
            self._engine.model_failed(finished.job, f"drafting failed: {finished.error}", self._clock())
            return
        assert self._drafter is not None
        path_length, nodes = len(finished.job.budget.path), len(finished.tree.ids)
        self._trace.drafted(finished.started_at, finished.ended_at, path_length, nodes, self._drafter.name)
        took_s = finished.ended_at - finished.started_at
        self._engine.drafted(finished.job, finished.tree, self._drafter.name, self._clock(), took_s)

    def _stop_drafting(self, why: str) -> None:
        log.warning("no hints any more in this text: %s", why)
        self._engine.stop_drafting(why, self._clock())

    # ------------------------------------------------------------ frames up

    def _start_sending(self) -> float | None:
        """Begins to send what is due; returns how long until something may be due, None if only an event can tell."""
        if self._sending is not None:
            return None
        now = self._clock()
        pace = self._engine.pace(now)
        if pace is not self._pace or self._owes_ack():
            self._sending = asyncio.ensure_future(self._send_pace(pace))
            return None
        due = self._engine.send_at(now)
        if due is None:
            return None
        if due > now:
            return due - now
        hint = self._engine.take_hint(now)
        if hint is not None:
            self._sending = asyncio.ensure_future(self._send_hint(hint))
        return None

    def _owes_ack(self) -> bool:
        return self._engine.unacknowledged >= max(1, self._stream.request.run_ahead // 2)

    async def _send_hint(self, hint: Hint) -> None:
        before = self._stream.traffic.hint_bytes
        await self._stream.send(hint)
        size = self._stream.traffic.hint_bytes - before
        self._trace.hint_sent(self._clock(), hint.first_node, len(hint.ids), size)

    async def _send_pace(self, pace: PaceKind) -> None:
        request = self._stream.request = replace(self._stream.request, pace=pace)
        self._pace = pace
        self._engine.acknowledged()
        await self._stream.send(Pace(request.epoch, pace, request.run_ahead, self._engine.length))

    async def _sent(self) -> DraftwireError | None:
        """Clears a frame that was sent; what kept it from being sent, so that what came is told first."""
        if self._sending is None or not self._sending.done():
            return None
        sending, self._sending = self._sending, None
        try:
            sending.result()
        except (TransportError, Overloaded) as error:
            return error
        return None

    # ------------------------------------------------------------ frames down

    def _apply(self, frame: DownFrame | None) -> list[Event]:
        match frame:
            case Commit():
                return self._apply_commit(frame)
            case Finished():
                if frame.epoch != self._stream.request.epoch:
                    return []
                delta = self._text.finish()
                last = [Committed(delta.text, (), (Piece(delta.text, -1, False),))] if delta.text else []
                return [*last, self._done(_REASONS[frame.reason], delta.stop_matched)]
            case Fault(answers="hint" | "pace"):
                self._stop_drafting(f"the verifier refused a {frame.answers}: {frame.message}")
                return []
            case Fault():
                raise cut_or_error(frame)
            case None:
                raise TransportError("the verifier ended the stream")
            case _:
                return []

    def _apply_commit(self, commit: Commit) -> list[Event]:
        if commit.epoch != self._stream.request.epoch:
            return []
        now, ids = self._clock(), self._stream.ids
        fresh = len(ids) - commit.start  # ids of this commit that are held already, after a resume
        if fresh < 0 or tuple(ids[commit.start : commit.end]) != commit.ids[:fresh]:
            raise RemoteProtocolError(f"commit.start {commit.start} does not continue the text", field="commit.start")
        self._steps += 1
        self._first_token_at = self._first_token_at or now
        pieces: list[Piece] = []
        for index in range(fresh, len(commit.ids)):
            delta = self._text.push([commit.ids[index]])
            ids.append(commit.ids[index])
            pieces.append(Piece(delta.text, commit.ids[index], index < commit.accepted))
            self._accepted += index < commit.accepted
            if delta.stop_matched is not None:
                self._stop = delta.stop_matched
                break
        committed = self._committed(commit, fresh, pieces)
        self._preview = ((), False)  # a commit ends the preview before it
        self._tell_engine(commit, committed.text, now)
        return [committed]

    def _tell_engine(self, commit: Commit, text: str, now: float) -> None:
        round_trip_s = self._engine.committed(self._stream.ids, commit, now)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("+%d %s", len(commit.ids), self._engine.explain())
        self._trace.commit_received(
            now,
            commit.start,
            commit.ids,
            commit.accepted,
            step_us=commit.step_us,
            queue_us=commit.queue_us,
            round_trip_s=round_trip_s if round_trip_s is not None else self._engine.clock.round_trip_s or 0.0,
            text=text,
            seen_node=commit.seen_node,
        )

    def _committed(self, commit: Commit, first: int, pieces: list[Piece]) -> Committed:
        ids = tuple(piece.token for piece in pieces)
        logprobs = commit.logprobs[first : first + len(pieces)]
        return Committed("".join(piece.text for piece in pieces), ids, tuple(pieces), logprobs)

    def _done(self, reason: FinishReason, stop: str | None = None) -> Done:
        now, clock, counters = self._clock(), self._engine.clock, self._engine.usage()
        usage = replace(
            self._stream.finished.usage if self._stream.finished else Usage(),
            steps=self._steps,
            accepted_tokens=self._accepted,
            context_tokens=self._stream.request.generated_from,
            generated_tokens=len(self._stream.ids) - self._stream.request.generated_from,
        )
        report = Report(
            usage=usage,
            traffic=self._stream.traffic,
            wall_s=now - self._started,
            first_token_s=(self._first_token_at or now) - self._started,
            draft_s=self._worker.busy_s,
            hints=counters.hints,
            reconnects=self._stream.reconnects,
            engine=counters,
            round_trip_s=clock.round_trip_s,
            step_s=clock.step_s,
            draft_step_s=clock.draft_s,
        )
        return Done(FinishReason.STOP if stop else reason, report, stop)

    # ------------------------------------------------------------ a new stream

    def _begin(self, opened: Opened) -> None:
        now, request = self._clock(), self._stream.request
        if self._drafter is not None and not self._has_begun:
            self._worker.begin(DraftTask.of(request, opened.seed, self._manner.secret))
        self._has_begun = True
        self._engine.opened(opened, self._stream.ids, now, self._stream.answered_s)
