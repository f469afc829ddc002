"""One short session in virtual time: the real session, scheduler, judge, worker, codec and drafter, a toy pair, a link.

Must not know: which cases there are, statistics. Called by `distribution.measure`.
All timing is drawn from a stream of its own, so in the product's own ways it cannot depend on tokens. Times in ms.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.distribution_setting import TEXT_IDS, Outcome, Setting
from bench.toy_pair import ENDED, ToyDraft, ToyPair, ToyTarget
from cloud_verifier.judge import Judge
from cloud_verifier.scheduler import Scheduler, StepBudget, StepPlan
from cloud_verifier.sessions import Session
from cloud_verifier.target_model import RowInput, Timing
from cloud_verifier.worker import Worker
from edge_client.controller import Experience
from shared import codec
from shared.errors import DraftwireError
from shared.hint_trie import HintTrie
from shared.pb import verifier_pb2 as pb
from shared.randomness import mix64
from shared.types import DownFrame, Hint, Open, Pace, Resume, SessionId, UpFrame


class TimedTarget(ToyTarget):
    """Its forward takes time: `now_ms` stands still during a step, so it is kept here until the step ends."""

    def __init__(self, pair: ToyPair) -> None:
        super().__init__(pair)
        self.step_ms = self.forward_ms = 0.0

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        self.forward_ms = self.step_ms
        return super().forward(rows)

    def timing(self) -> Timing:
        """See TargetModel. Of a prefill no other time is known: a free one would make hints look dear."""
        return Timing(forward_s=self.forward_ms / 1000)


class World:
    """The verifier of one case; `run` lives one session through."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.now_ms = setting, 0.0
        self.experience = Experience()
        self.tally: Counter[str] = Counter()
        """What the product's device did, over all sessions."""
        self.valid_ids = setting.pair.valid_ids
        self.target = TimedTarget(setting.pair)
        self.scheduler = Scheduler(
            StepBudget(prefill_tokens=1)
        )  # so that a hint can be there before the first id is judged
        self.worker = Worker(self.target, Judge(self.valid_ids), self.scheduler, clock=self._verifier_s)
        self.rim = codec.Rim(setting.limits, self.valid_ids)
        self._base = mix64(seed)

    def _verifier_s(self) -> float:
        return (self.now_ms + self.target.forward_ms) / 1000

    def keys(self, number: int) -> tuple[int, int, int]:
        """Session seed, device secret and timing seed of a session."""
        return mix64(self._base + 3 * number), mix64(self._base + 3 * number + 1), mix64(self._base + 3 * number + 2)

    def run(self, number: int) -> Outcome:
        """The session `number`, with its own seed, device secret and timing."""
        seed, secret, timing = self.keys(number)
        life = Life(self, seed, self.setting.secret_of(seed, secret), random.Random(timing))
        try:
            return life.run()
        finally:
            self.worker.drop(life.session, "over")


class Life:
    """One session: events in order of time, the verifier's end of the stream, and the network between."""

    def __init__(self, world: World, seed: int, secret: int, rng: random.Random) -> None:
        self.world, self.setting, self.rng = world, world.setting, rng
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._posted = 0
        self._stream = 0
        self._arrived_up = self._arrived_down = 0.0
        self._is_busy = self._is_over = False
        self._wake_ms = -1.0
        self._inbox: list[tuple[float, bytes]] = []
        self._up_free_ms = 0.0
        self._outbox: list[DownFrame] = []
        self._judged: list[tuple[tuple[int, ...], bool]] = []
        world.now_ms = 0.0
        pair, setting = self.setting.pair, self.setting
        drafter = setting.drafter(ToyDraft(pair), world.valid_ids)
        self.device = setting.device(self, drafter, secret)
        self.request = Open(
            ids=pair.context,
            generated_from=len(pair.context),
            fingerprint=bytes(32),
            sampling=setting.sampling,
            max_new_tokens=setting.new_ids,
            seed=seed,
            rule=setting.rule,
            stop_ids=setting.stop_ids,
            pace=setting.pace,
            run_ahead=setting.run_ahead,
        )
        self.session = self._open(self.request)

    def run(self) -> Outcome:
        """Until the device has read Finished."""
        self._greet()
        if self.setting.link.cut_ms is not None:
            self.post(self._between(self.setting.link.cut_ms), self._cut)
        while not self._is_over:
            self.world.now_ms, _, action = heapq.heappop(self._events)
            action()
        text = self.device.ids[self.request.generated_from :][:TEXT_IDS]
        padded = (*text, *[ENDED] * (TEXT_IDS - len(text)))
        return Outcome(padded, tuple(self._judged), tuple(self.device.ids))

    # ------------------------------------------------------------ time

    def post(self, delay_ms: float, action: Callable[[], None]) -> None:
        """`action` happens `delay_ms` from now."""
        self._posted += 1
        heapq.heappush(self._events, (self.world.now_ms + delay_ms, self._posted, action))

    def _between(self, bounds: tuple[float, float]) -> float:
        return bounds[0] if bounds[0] == bounds[1] else self.rng.uniform(*bounds)

    def scattered(self, ms: float) -> float:
        """A duration with the setting's scatter."""
        share = self.setting.scatter
        return ms * self.rng.uniform(1 - share, 1 + share) if share else ms

    # ------------------------------------------------------------ network

    def up(self, message: bytes) -> None:
        """The device hands a hint or a pace to the network."""
        link, copies = self.setting.link, 1
        if link.loss or link.loses:
            frame = self._decoded(message)
            assert isinstance(frame, Hint)
            loss = link.loss if link.loses is None else link.loses(frame)
            copies -= self.rng.random() < loss
        if link.duplicate:
            copies += self.rng.random() < link.duplicate
        leaves = self.world.now_ms
        for _ in range(copies):
            if link.up_bytes_per_ms is not None:
                leaves = self._up_free_ms = max(leaves, self._up_free_ms) + self._size(message) / link.up_bytes_per_ms
            arrives = leaves + self._between(link.up_ms)
            if not link.overtakes:
                arrives = self._arrived_up = max(arrives, self._arrived_up)
            self.post(arrives - self.world.now_ms, partial(self._arrive, self._stream, message))

    def _size(self, message: bytes) -> int:
        padded, frame = self.setting.link.padded_node_bytes, self._decoded(message)
        return padded * len(frame.ids) if padded and isinstance(frame, Hint) else len(message)

    def _decoded(self, message: bytes) -> UpFrame:
        return codec.decode_up(pb.Up.FromString(message), self.world.rim)

    def _arrive(self, stream: int, message: bytes) -> None:
        if stream != self._stream:
            return
        self._inbox.append((self.world.now_ms / 1000, message))
        self._serve()

    def _flush_down(self) -> None:
        frames, self._outbox = self._outbox, []
        for frame in frames:
            arrives = max(self._arrived_down, self.world.now_ms + self._between(self.setting.link.down_ms))
            self._arrived_down = arrives
            message = codec.encode_down(frame).SerializeToString()
            self.post(arrives - self.world.now_ms, partial(self._deliver, self._stream, message))

    def _deliver(self, stream: int, message: bytes) -> None:
        if stream == self._stream:
            self._is_over = self.device.read(codec.decode_down(pb.Down.FromString(message), self.world.rim))

    def _cut(self) -> None:
        self._stream += 1
        self._up_free_ms = 0.0
        self._inbox.clear()
        self._outbox.clear()
        self.session.sink = None
        self.device.cut_off()
        self.post(15.0, self._reopen if self.setting.link.verifier_dies else self._resume)

    def _resume(self) -> None:
        self.device.asks()
        asked = self._received(self.device.resume(self.session.id))
        assert isinstance(asked, Resume)
        self.session.check_resume(asked)
        self._greet(asked.have)

    def _reopen(self) -> None:
        self.device.asks()
        self.world.worker.drop(self.session, "lost")
        request = self.device.reopening(self.request)
        self.session = self._open(request)
        self._greet()

    # ------------------------------------------------------------ the verifier's end

    def send(self, frame: DownFrame) -> None:
        """See Sink."""
        self._outbox.append(frame)

    def end(self, error: DraftwireError | None) -> None:
        """See Sink."""
        raise AssertionError(f"the session ended: {error}")

    def _received(self, frame: UpFrame) -> UpFrame:
        return codec.decode_up(pb.Up.FromString(codec.encode_up(frame).SerializeToString()), self.world.rim)

    def _open(self, request: Open) -> Session:
        frame, setting = self._received(request), self.setting
        assert isinstance(frame, Open)
        assert frame.seed is not None
        session = Session(
            id=SessionId(bytes(16)),
            opened_with=frame,
            seed=frame.seed,
            slot=self.world.target.new_slot(),
            limits=setting.limits,
            context_size=self.world.target.context_size,
            target_id=bytes(32),
            now=self.world.now_ms / 1000,
        )
        if setting.trie is not HintTrie:
            limits = setting.limits
            session.trie = setting.trie(
                session.length, limits.max_held_nodes, limits.remembered_nodes, is_chain=session.is_chain
            )
        self.world.scheduler.add(session)
        return session

    def _greet(self, have: int | None = None) -> None:
        """Opened; after a Resume also what the device lacks; after a Finish that was carried on, Finished."""
        self.session.sink = self
        self.send(self.session.opened())
        if have is not None:
            self._outbox += self.session.replay(have)
        else:
            self.session.finish_if_ended()
        self._serve()

    def _serve(self) -> None:
        """What the worker's thread does between steps: takes frames, sends frames, plans, steps."""
        if self._is_busy or self.session.sink is None:
            return
        for received_at, message in self._inbox:
            self._take(self._decoded(message), received_at)
        self._inbox.clear()
        self._flush_down()
        now = self.world.now_ms / 1000
        plan = self.world.scheduler.plan(now)
        if plan is not None:
            self._step(plan)
            return
        wake = self.world.scheduler.wake_at(now)
        if wake is not None and wake * 1000 > self._wake_ms:
            self._wake_ms = wake * 1000 + 0.001
            self.post(self._wake_ms - self.world.now_ms, self._serve)

    def _take(self, frame: UpFrame, received_at: float) -> None:
        if isinstance(frame, Pace):
            self.session.set_pace(frame)
            return
        assert isinstance(frame, Hint)
        self.session.hint(frame, received_at=received_at)

    def _step(self, plan: StepPlan) -> None:
        self._is_busy = True
        before, target = tuple(self.session.ids), self.world.target
        target.step_ms = self.scattered(self.setting.step_ms)
        self.world.worker.run_step(plan)
        target.forward_ms = 0.0
        if plan.rows[0].nodes:
            self._judged.append((before, self.session.accepted_flags[len(before) - self.session.generated_from]))
        self.post(target.step_ms, self._end_step)

    def _end_step(self) -> None:
        self._is_busy = False
        self._serve()
