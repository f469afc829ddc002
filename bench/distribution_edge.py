"""The device of `distribution_world` that is the product's own: `EdgeEngine` over the real drafter, in virtual time.

It does what `edge_client/generate.py` does, without asyncio: it drafts ahead one job at a time, sends when the engine
says, rests, probes, acknowledges, goes offline and comes back. Times in ms; the engine's in seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.distribution_device import Device
from edge_client.controller import EngineSettings
from edge_client.drafter import DraftTask, HintTree, ModelDrafter
from edge_client.edge_engine import DraftJob, EdgeEngine
from shared import codec
from shared.rejection import QRow
from shared.types import Commit, DownFrame, Finished, Hint, Opened, Pace

if TYPE_CHECKING:
    from bench.distribution_world import Life


class EdgeDevice(Device):
    """One generation by the product's engine. What was learnt of the pair outlives it, as in the product."""

    engine: EdgeEngine

    def __init__(self, life: Life, drafter: ModelDrafter, secret: int) -> None:
        super().__init__(life, drafter, secret)
        self._jobs = 0
        self._job: DraftJob | None = None
        self._asked_ms = 0.0
        self._timer_ms = -1.0
        self._prefixes: dict[int, tuple[int, ...]] = {}
        self._said: dict[tuple[int, ...], tuple[int, QRow | None]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def _now_s(self) -> float:
        return self.life.world.now_ms / 1000

    # ------------------------------------------------------------ frames down

    def read(self, frame: DownFrame) -> bool:
        """See Device."""
        match frame:
            case Opened():
                self._open(frame)
            case Commit():
                fresh = len(self.ids) - frame.start
                assert fresh >= 0
                assert tuple(self.ids[frame.start :]) == frame.ids[:fresh]
                self.ids.extend(frame.ids[fresh:])
                self.engine.committed(self.ids, frame, self._now_s)
            case Finished():
                self._report()
                return True
            case _:
                raise AssertionError(f"not expected: {frame}")
        self._turn()
        return False

    def _open(self, opened: Opened) -> None:
        request, setting = self.life.request, self.setting
        if not self._has_begun:
            self._has_begun = True
            settings = EngineSettings(depth=setting.depth, width=setting.width, pace=setting.pace)
            self.engine = setting.engine(request, settings, has_model=True, experience=self.life.world.experience)
            task = DraftTask.of(request, opened.seed, self.secret)
            self.drafter.begin(replace(task, sampling=setting.draft_sampling or setting.sampling))
            self._pace = request.pace
        self.is_connected = True
        self.engine.opened(opened, self.ids, self._now_s, self._now_s - self._asked_ms / 1000)
        self._drop_job()
        if self._counts["cuts"]:
            self._say_pace()

    def cut_off(self) -> None:
        """See Device. The draft step under way comes to nothing; the draft writes on alone if the setting says so."""
        super().cut_off()
        if not self._has_begun:
            return
        self._counts["cuts"] += 1
        self._drop_job()
        self.engine.went_offline(self._now_s, is_local=self.setting.is_local)
        self._turn()

    def asks(self) -> None:
        """See Device."""
        self._asked_ms = self.life.world.now_ms

    # ------------------------------------------------------------ the loop's turn

    def _turn(self) -> None:
        """Whatever may begin now: a draft step, a frame, a timer."""
        self._start_job()
        if not self.is_connected:
            return
        engine = self.engine
        if engine.pace(self._now_s) is not self._pace or engine.unacknowledged >= max(1, self.setting.run_ahead // 2):
            self._say_pace()
        while (due := engine.send_at(self._now_s)) is not None:
            if due > self._now_s:
                self._wake_at(due * 1000)
                return
            hint = engine.take_hint(self._now_s)
            assert hint is not None
            self._note_said(hint)
            self.life.up(codec.encode_up(hint).SerializeToString())

    def _wake_at(self, due_ms: float) -> None:
        if due_ms < 1e12 and due_ms != self._timer_ms:
            self._timer_ms = due_ms
            self.life.post(max(0.0, due_ms - self.life.world.now_ms) + 1e-6, self._turn)

    def _say_pace(self) -> None:
        self._pace = self.engine.pace(self._now_s)
        self.engine.acknowledged()
        pace = Pace(self.life.request.epoch, self._pace, self.setting.run_ahead, self.engine.length)
        self.life.up(codec.encode_up(pace).SerializeToString())

    # ------------------------------------------------------------ drafting

    def _start_job(self) -> None:
        job = self.engine.next_job(self._now_s)
        if job is None:
            return
        self._jobs, self._job = self._jobs + 1, job
        self._counts["probes"] += job.is_probe
        self._counts["drafted offline"] += not self.is_connected
        self.drafter.sync(self.ids[: job.length])
        tree = self.drafter.propose(job.budget)
        number, took_ms = self._jobs, self.life.scattered(self.setting.draft_ms)
        self.life.post(took_ms, lambda: self._job_ended(number, job, tree, took_ms))

    def _job_ended(self, number: int, job: DraftJob, tree: HintTree, took_ms: float) -> None:
        if job is not self._job or number != self._jobs:
            return
        self._job = None
        self.engine.drafted(job, tree, self.drafter.name, self._now_s, took_ms / 1000)
        self._turn()

    def _drop_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            self.engine.failed(job)

    # ------------------------------------------------------------ what is looked at

    def _note_said(self, hint: Hint) -> None:
        """Asserts that what is said again of a prefix is the same id with the same row."""
        if not hint.rows:
            return
        assert not hint.parents
        assert not hint.confidence
        at = self._prefixes[hint.base_node] if hint.base_node else tuple(self.ids[: hint.base_position])
        for index, (token, row) in enumerate(zip(hint.ids, hint.rows, strict=True)):
            known = self._said.get(at)
            self._counts["said again"] += known is not None
            assert known in (None, (token, row)), f"after {at}: {known}, then {token, row}"
            self._said[at] = token, row
            at = self._prefixes[hint.first_node + index] = (*at, token)

    def _report(self) -> None:
        used = self.engine.usage()
        self.life.world.tally.update(
            self._counts
            + Counter(
                hints=used.hints,
                nodes=used.hint_nodes,
                drafts=used.draft_steps,
                late=used.late_drafts,
                rests=used.rests,
                rebases=used.rebases,
            )
        )
