"""The loop of one generation: reads commits, drafts on a worker thread, sends hints. It waits for neither.

Must not know: gRPC, protobuf, model files. Called by `client.stream`; calls the Drafter, the Connection and the text.
In this version a new hint is drafted when the last one has been judged; hints and commits are independent frames all
the same: a commit may come without a hint, a hint may come to nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from edge_client.drafter import Budget, Drafter, DraftTask, HintTree
from edge_client.events import Committed, Done, Event, FinishReason, Piece, Report, State, StateChanged
from edge_client.hint_length import HintLength
from edge_client.session_stream import OVERLOAD_WAIT_S, RECONNECT_FOR_S, SessionStream, cut_or_error
from edge_client.text import TextStream
from edge_client.transport import Transport
from shared.errors import Overloaded, RemoteProtocolError, TransportError
from shared.randomness import short_digest
from shared.types import (
    Commit,
    DownFrame,
    Epoch,
    Fault,
    Finished,
    Hint,
    Open,
    Opened,
    Pace,
    PaceKind,
    Reason,
    Usage,
)

_REASONS = {
    Reason.STOP_ID: FinishReason.STOP,
    Reason.LENGTH: FinishReason.LENGTH,
    Reason.CONTEXT_FULL: FinishReason.CONTEXT_FULL,
    Reason.CANCELLED: FinishReason.CANCELLED,
}


@dataclass
class _Outstanding:
    """The hint on its way: its nodes by path, to see from commits whether any of it may still be judged."""

    last_node: int
    base: int
    paths: set[tuple[int, ...]]

    def is_open(self, ids: Sequence[int], seen_node: int) -> bool:
        """False once it was judged, or once the committed ids have left all its paths or passed them."""
        if seen_node >= self.last_node:
            return False
        walked = tuple(ids[self.base :])
        return any(len(path) > len(walked) and path[: len(walked)] == walked for path in self.paths)


class Generation:
    """One epoch from Open to Finished, through cuts of the network."""

    def __init__(
        self,
        transport: Transport,
        request: Open,
        drafter: Drafter | None,
        text: TextStream,
        *,
        budget: Budget,
        executor: Executor,
        secret: int,
        reach: float = 0.0,
        reconnect_for_s: float = RECONNECT_FOR_S,
        overload_wait_s: float = OVERLOAD_WAIT_S,
    ) -> None:
        """`drafter` None: plain streaming. `secret` keys the draft draws of the rejection rule; `reach`: HintLength."""
        self._length = HintLength(reach)
        self._stream = SessionStream(transport, request, self._begin, reconnect_for_s, overload_wait_s)
        self._drafter, self._text = drafter, text
        self._budget, self._executor, self._secret = budget, executor, secret
        self._outstanding: _Outstanding | None = None
        self._next_node, self._seen_node = 1, 0
        self._needs_digest, self._has_begun = True, False
        self._acked = len(request.ids)
        self._steps = self._accepted = self._hints = 0
        self._cut: TransportError | None = None
        self._draft_s = 0.0
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
        self._started = time.perf_counter()
        try:
            try:
                await self._stream.open()
            except (TransportError, Overloaded) as error:  # no verifier at the moment, or one without room
                yield StateChanged(State.RECONNECTING, error.message)
                await self._stream.reconnect(error)
            yield self._state()
            while True:
                try:
                    async with aclosing(self._follow()) as events:  # a draft in progress ends before this does
                        async for event in events:
                            yield event
                            if isinstance(event, Done):
                                return
                except TransportError as error:
                    yield StateChanged(State.RECONNECTING, error.message)
                    await self._stream.reconnect(error)
                    yield self._state()
        finally:
            await self._stream.say_goodbye()

    async def _follow(self) -> AsyncGenerator[Event, None]:
        """Serves one connection: whichever is ready first, a frame or a draft."""
        draft: asyncio.Future[tuple[int, HintTree]] | None = None
        if self._stream.reconnects:  # a change of pace may have been lost with the stream
            await self._send_pace(self._stream.request.pace)
        try:
            while True:
                if draft is None and self._wants_hint():
                    draft = self._start_draft()
                receive = self._stream.receiving()
                waiting: set[asyncio.Future[Any]] = {receive} if draft is None else {receive, draft}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if draft is not None and draft.done():
                    finished, draft = draft, None
                    if event := await self._take_draft(finished):
                        yield event
                if receive.done():
                    for event in await self._apply(self._stream.take()):
                        yield event
                        if isinstance(event, Done):
                            return
                if self._cut is not None:
                    cut, self._cut = self._cut, None
                    raise cut
        finally:
            if draft is not None:
                await _ended(draft)  # the drafter is in use until then

    def _state(self) -> StateChanged:
        return StateChanged(State.DRAFTING if self._drafter else State.STREAMING)

    # ------------------------------------------------------------ hints up

    def _wants_hint(self) -> bool:
        ids, request = self._stream.ids, self._stream.request
        is_stopped = len(ids) > request.generated_from and ids[-1] in request.stop_ids
        if self._drafter is None or self._room() <= 0 or is_stopped:
            return False
        outstanding = self._outstanding
        return outstanding is None or not outstanding.is_open(self._stream.ids, self._seen_node)

    def _room(self) -> int:
        """How many ids may still come."""
        return self._stream.request.generated_from + self._stream.request.max_new_tokens - len(self._stream.ids)

    def _start_draft(self) -> asyncio.Future[tuple[int, HintTree]]:
        assert self._stream.opened is not None
        ids, most = list(self._stream.ids), self._stream.opened.limits.max_frame_nodes // self._budget.width
        depth = self._length.depth(self._budget.depth)
        budget = replace(self._budget, depth=max(1, min(depth, self._room(), most)))
        assert self._drafter is not None
        return asyncio.get_running_loop().run_in_executor(self._executor, self._draft, self._drafter, ids, budget)

    def _draft(self, drafter: Drafter, ids: list[int], budget: Budget) -> tuple[int, HintTree]:
        """(worker thread)"""
        started = time.perf_counter()
        drafter.sync(ids)
        tree = drafter.propose(budget)
        self._draft_s += time.perf_counter() - started
        return len(ids), tree

    async def _take_draft(self, draft: asyncio.Future[tuple[int, HintTree]]) -> Event | None:
        """Sends what was drafted. A drafter that fails costs its hints, never the text."""
        try:
            base, tree = draft.result()
        except Exception as error:
            return await self._stream_alone(f"drafting failed: {error}")
        return await self._send_hint(base, tree)

    async def _send_hint(self, base: int, tree: HintTree) -> Event | None:
        """Sends a drafted tree unless the text has left it meanwhile; without a tree the verifier streams alone."""
        if self._drafter is None:  # turned off while this was drafted
            return None
        if not tree.ids:
            return await self._stream_alone("the draft model's context is full")
        outstanding = _Outstanding(self._next_node + len(tree.ids) - 1, base, _paths(tree))
        if not outstanding.is_open(self._stream.ids, 0):
            return None
        self._outstanding = outstanding
        digest = short_digest(self._stream.ids[:base]) if self._needs_digest else None
        hint = encode_tree(self._stream.request.epoch, self._next_node, base, tree, len(self._stream.ids), digest)
        self._next_node += len(tree.ids)
        self._needs_digest = False
        self._hints += 1
        self._acked = len(self._stream.ids)
        await self._stream.send(hint)
        return None

    async def _stream_alone(self, why: str) -> Event:
        self._drafter = None
        await self._send_pace(PaceKind.RUN_ON)
        return StateChanged(State.STREAMING, why)

    async def _send_pace(self, pace: PaceKind) -> None:
        self._stream.request = replace(self._stream.request, pace=pace)
        self._acked = len(self._stream.ids)
        await self._stream.send(Pace(self._stream.request.epoch, pace, self._stream.request.run_ahead, self._acked))

    # ------------------------------------------------------------ commits down

    async def _apply(self, frame: DownFrame | None) -> list[Event]:
        match frame:
            case Commit():
                return await self._apply_commit(frame)
            case Finished():
                if frame.epoch != self._stream.request.epoch:
                    return []
                delta = self._text.finish()
                last = [Committed(delta.text, (), (Piece(delta.text, -1, False),))] if delta.text else []
                return [*last, self._done(_REASONS[frame.reason], delta.stop_matched)]
            case Fault(answers="hint" | "pace"):
                return [await self._stream_alone(f"the verifier refused a {frame.answers}: {frame.message}")]
            case Fault():
                raise cut_or_error(frame)
            case None:
                raise TransportError("the verifier ended the stream")
            case _:
                return []

    async def _apply_commit(self, commit: Commit) -> list[Event]:
        if commit.epoch != self._stream.request.epoch:
            return []
        fresh = len(self._stream.ids) - commit.start  # ids of this commit that are held already, after a resume
        if fresh < 0 or tuple(self._stream.ids[commit.start : commit.end]) != commit.ids[:fresh]:
            raise RemoteProtocolError(f"commit.start {commit.start} does not continue the text", field="commit.start")
        if self._outstanding is not None and self._seen_node < self._outstanding.last_node <= commit.seen_node:
            self._length.learn(commit.accepted, commit.last_accepted_node == self._outstanding.last_node)
        self._seen_node = max(self._seen_node, commit.seen_node)
        self._steps += 1
        if self._first_token_at == 0.0:
            self._first_token_at = time.perf_counter()
        pieces: list[Piece] = []
        for index in range(fresh, len(commit.ids)):
            delta = self._text.push([commit.ids[index]])
            self._stream.ids.append(commit.ids[index])
            pieces.append(Piece(delta.text, commit.ids[index], index < commit.accepted))
            self._accepted += index < commit.accepted
            if delta.stop_matched is not None:
                return [self._committed(commit, fresh, pieces), await self._stopped(delta.stop_matched)]
        if len(self._stream.ids) - self._acked >= max(1, self._stream.request.run_ahead // 2):
            try:
                await self._send_pace(self._stream.request.pace)
            except TransportError as error:  # what came is told first
                self._cut = error
        return [self._committed(commit, fresh, pieces)]

    def _committed(self, commit: Commit, first: int, pieces: list[Piece]) -> Committed:
        ids = tuple(piece.token for piece in pieces)
        logprobs = commit.logprobs[first : first + len(pieces)]
        return Committed("".join(piece.text for piece in pieces), ids, tuple(pieces), logprobs)

    async def _stopped(self, stop: str) -> Done:
        """A stop string is complete: the text ends here, whatever the verifier has committed beyond."""
        await self._stream.say_goodbye()
        return self._done(FinishReason.STOP, stop)

    def _done(self, reason: FinishReason, stop: str | None = None) -> Done:
        now = time.perf_counter()
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
            draft_s=self._draft_s,
            hints=self._hints,
            reconnects=self._stream.reconnects,
        )
        return Done(FinishReason.STOP if stop else reason, report, stop)

    # ------------------------------------------------------------ a new stream

    def _begin(self, opened: Opened) -> None:
        self._outstanding, self._needs_digest = None, True
        self._next_node, self._seen_node = opened.next_node, opened.next_node - 1
        self._acked = len(self._stream.ids)
        request = self._stream.request
        if self._drafter is not None and not self._has_begun:
            self._has_begun = True
            self._drafter.begin(
                DraftTask(
                    sampling=request.sampling,
                    seed=opened.seed,
                    rule=request.rule,
                    epoch=request.epoch,
                    generated_from=request.generated_from,
                    stop_ids=frozenset(request.stop_ids),
                    secret=self._secret,
                )
            )


def encode_tree(epoch: Epoch, first_node: int, base: int, tree: HintTree, ack: int, digest: int | None) -> Hint:
    """A drafted tree as a Hint that stands at position `base`; a chain carries neither parents nor confidence."""
    is_chain = tree.is_chain
    return Hint(
        epoch=epoch,
        first_node=first_node,
        ids=tree.ids,
        ack=ack,
        base_position=base,
        base_digest=digest,
        parents=() if is_chain else tuple(n - p if p >= 0 else 0 for n, p in enumerate(tree.parents)),
        confidence=() if is_chain else tree.confidence,
        rows=tree.rows,
    )


async def _ended(draft: asyncio.Future[Any]) -> None:
    """Waits for a draft in progress, however often the caller is cancelled: its thread cannot be."""
    cancelled: asyncio.CancelledError | None = None
    while not draft.done():
        try:
            await asyncio.wait({draft})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _paths(tree: HintTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.ids, tree.parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return set(paths)
