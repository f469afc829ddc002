"""A verifier on a free port of this machine, and the two ways to speak to it: the client, and frames by hand.

Everything below the test is the product's: service, engine, worker, grpc.aio on both sides.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc

from cloud_verifier.admission import AdmissionLimits
from cloud_verifier.judge import Judge
from cloud_verifier.loading import LoadedTarget
from cloud_verifier.server import Server
from cloud_verifier.service import StreamLimits
from cloud_verifier.target_model import TargetModel, TorchTarget
from cloud_verifier.torch_engine import TorchEngine
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.drafter import Budget, Drafter, DraftTask, HintTree
from shared import codec
from shared.errors import DeviceFailure
from shared.pb import verifier_pb2 as pb
from shared.pb import verifier_pb2_grpc
from shared.sampling import GREEDY
from shared.types import SHARE_KEY_METADATA, Commit, DownFrame, Fault, Finished, Open, Opened, PaceKind, UpFrame
from tests.tiny_pair import TinyPair

PATIENCE_S = 20.0
"""What takes longer than this hangs."""


@dataclass
class Running:
    """A verifier at work."""

    port: int
    engine: TorchEngine
    server: Server
    model: Any

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @property
    def sessions(self) -> int:
        """Sessions held."""
        return self.engine.sessions

    async def commands_done(self) -> None:
        """Waits until the device's thread has run what was submitted before."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self.engine.submit(lambda: loop.call_soon_threadsafe(done.set_result, None) and None)
        async with asyncio.timeout(PATIENCE_S):
            await done

    async def settled(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds; fails if it never does."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 (what is waited for happens on another thread)
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def standing_still(self, commands: int = 0) -> AsyncIterator[None]:
        """Meanwhile the device's thread stands still; it goes on when so many commands wait for it, all at once."""
        stands, gate = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            gate.wait(PATIENCE_S)

        self.engine.submit(stand)
        await asyncio.to_thread(stands.wait, PATIENCE_S)
        try:
            yield
            await self.settled(lambda: self.engine.worker._commands.qsize() >= commands)
        finally:
            gate.set()


@asynccontextmanager
async def serving(
    loaded: LoadedTarget,
    *,
    port: int = 0,
    max_sessions: int = 64,
    model: TargetModel | None = None,
    on_failure: Callable[[DeviceFailure], None] = lambda failure: None,
    grace_s: float = 0.5,
    max_queue: int = 0,
    kv_bytes: int = 16 << 20,
    engine_options: dict[str, Any] | None = None,
    streams: StreamLimits | None = None,
    **limits: int,
) -> AsyncIterator[Running]:
    """A verifier with its own KV pool; `limits` change those of the card."""
    card = replace(loaded.card, limits=replace(loaded.card.limits, **{"max_wait_ms": 20, **limits}))
    target = model or TorchTarget(loaded.model.lm, loaded.model.context_size, kv_bytes)
    admission = AdmissionLimits(max_sessions=max_sessions, max_queue=max_queue)
    options = {"absent_grace_ms": 0, "admission": admission, "on_failure": on_failure, **(engine_options or {})}
    engine = TorchEngine(target, Judge(loaded.valid_ids), card, **options)
    server = Server(card.limits.max_frame_bytes, streams, engine._observer.refused)
    bound = await server.start("127.0.0.1", port)
    engine.start()
    await server.begin(engine, loaded.valid_ids)
    try:
        yield Running(bound, engine, server, target)
    finally:
        await server.stop(0, grace_s)
        await asyncio.to_thread(engine.stop)


def held_after(running: Running, forwards: int) -> threading.Event:
    """The verifier's forwards past so many wait until the event is set."""
    gate, forward, count = threading.Event(), running.model.forward, itertools.count(1)

    def held(*args: Any, **named: Any) -> Any:
        if next(count) > forwards:
            assert gate.wait(3 * PATIENCE_S)
        return forward(*args, **named)

    running.model.forward = held
    return gate


def client(running: Running | str, pair: TinyPair, draft: str = "same", **parts: Any) -> SpeculativeClient:
    """A client; `draft` is same, noisy, none, or bad (a drafter that knows nothing). `parts`: settings or parts."""
    address = running if isinstance(running, str) else running.address
    folders = {"noisy": pair.noisy_draft}
    given = {name: parts.pop(name) for name in ("transport", "drafter", "tokenizer") if name in parts}
    if draft == "bad":
        given["drafter"] = RandomDrafter(pair.vocabulary_size)
    settings = {"hint_tokens": 4, "hint_reach": 0.0, **parts, **({"hint_tokens": 0} if draft == "none" else {})}
    return SpeculativeClient(
        ClientConfig(verifier=address, draft=str(folders.get(draft, pair.same_draft)), **settings), **given
    )


class RandomDrafter:
    """Proposes anything: trees of any shape, now and then nothing useful at all."""

    name = "random"

    def __init__(self, vocabulary_size: int) -> None:
        import random

        self._random, self._size = random.Random(13), vocabulary_size

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        count = self._random.randint(1, budget.depth * budget.width)
        ids = tuple(self._random.randrange(self._size) for _ in range(count))
        parents = tuple(self._random.randint(-1, index - 1) for index in range(count))
        return HintTree(ids, parents, tuple(self._random.random() for _ in range(count)))


class ScriptedDrafter:
    """Knows the whole text and proposes it, as long as the budget allows."""

    name = "scripted"

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth = list(truth)
        self.tasks: list[DraftTask] = []
        self._length = 0

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""
        self.tasks.append(task)

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""
        self._length = len(ids)

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        start = self._length + len(budget.path)
        ids = tuple(self.truth[start : start + budget.depth])
        return HintTree(ids, tuple(range(-1, len(ids) - 1)), (1.0,) * len(ids))


_: type[Drafter] = RandomDrafter


class RawStream:
    """Frames by hand. `send` takes frames or messages; `receive` gives frames."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierStub, share_key: bytes = b"the same for all") -> None:
        """`share_key`: empty for none."""
        self.call: Any = stub.Session(metadata=((SHARE_KEY_METADATA, share_key),) if share_key else None)
        self.received: list[DownFrame] = []

    async def send(self, frame: UpFrame | pb.Up) -> None:
        """Sends one frame."""
        await self.call.write(frame if isinstance(frame, pb.Up) else codec.encode_up(frame))

    async def receive(self) -> DownFrame | None:
        """The next frame; None at an orderly end. Raises: AioRpcError, TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self.call.read()
        if message is grpc.aio.EOF:
            return None
        frame = codec.decode_down(message, codec.Rim())
        self.received.append(frame)
        return frame

    async def open(self, frame: UpFrame | pb.Up) -> Opened:
        """Sends the first frame and takes its answer."""
        await self.send(frame)
        opened = await self.receive()
        assert isinstance(opened, Opened), opened
        return opened

    async def until(self, kind: type[Any]) -> Any:
        """The next frame of a kind; what comes before it is in `received`."""
        while True:
            frame = await self.receive()
            assert frame is not None, "the stream ended"
            if isinstance(frame, kind):
                return frame

    async def fault(self) -> Fault:
        """The next Fault."""
        found = await self.until(Fault)
        assert isinstance(found, Fault)
        return found

    async def status(self) -> grpc.StatusCode:
        """The status that the stream ends with."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.call.code()

    @property
    def ids(self) -> list[int]:
        """Committed ids so far; asserts that they connect."""
        ids: list[int] = []
        commits = [frame for frame in self.received if isinstance(frame, Commit)]
        for commit in commits:
            assert commit.start == commits[0].start + len(ids)
            ids += commit.ids
        return ids

    async def rest(self) -> list[int]:
        """All committed ids, after Finished."""
        await self.until(Finished)
        return self.ids


@asynccontextmanager
async def raw(running: Running | str, *, is_alone: bool = False) -> AsyncIterator[verifier_pb2_grpc.VerifierStub]:
    """A stub on a channel of its own; `is_alone`: on a connection of its own too, so a principal of its own.

    Channels to one address share a connection otherwise.
    """
    address = running if isinstance(running, str) else running.address
    options = [("grpc.use_local_subchannel_pool", 1)] if is_alone else []
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield verifier_pb2_grpc.VerifierStub(channel)


def open_frame(loaded: LoadedTarget, ids: Sequence[int] = (70, 71, 72), **changes: Any) -> Open:
    """An Open of a greedy session of 16 ids that runs on, without stop ids."""
    values = {
        "generated_from": len(ids),
        "fingerprint": loaded.card.fingerprint,
        "sampling": GREEDY,
        "max_new_tokens": 16,
        "seed": 5,
        "pace": PaceKind.RUN_ON,
        **changes,
    }
    return Open(ids=tuple(ids), **values)
