"""A device and a verifier without time, models or sockets: a script of bytes says what happens next.

The device's `EdgeEngine` is the product's, as is the verifier's session (`interleaved_verifier`); the link is two
queues that can be cut anywhere. `check` holds after every event.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from edge_client.controller import EngineSettings, Experience
from edge_client.drafter import Budget, DraftTask, HintTree
from edge_client.edge_engine import DraftJob, EdgeEngine
from edge_client.retrieval import RetrievalDrafter
from shared.hint_trie import Node
from shared.rejection import QRow, quantise
from shared.sampling import GREEDY, SamplingParams, Warped
from shared.types import Commit, Epoch, Finished, Hint, Limits, Open, Pace, Rule
from tests.pure.interleaved_verifier import VOCABULARY, Script, VerifierEnd, text_after, truth

PROMPT = (1, 2, 3)
PAUSES_S = (0.0, 0.001, 0.004, 0.02, 0.06)
CONFIDENCES = (0.02, 0.3, 0.6, 0.95)
MANNERS, RIGHT_MANNERS = 40, 28
"""Of so many manners of a draft step so many put the right id first; the last one has nothing to say."""
LAST_EPOCH = 3


@dataclass(frozen=True)
class Setting:
    """What an interleaving runs under."""

    is_chain: bool = False
    limits: Limits = field(default_factory=Limits)
    run_ahead: int = 256
    max_new_tokens: int = 20
    stop_ids: tuple[int, ...] = ()
    has_retrieval: bool = False
    engine: EngineSettings = field(default_factory=EngineSettings)


@lru_cache
def draft_row(kind: int) -> QRow:
    """A quantised row in which every id has some weight."""
    return quantise(Warped(np.arange(VOCABULARY), np.arange(VOCABULARY) * kind / 2.0))


class Interleaving:
    """One text, or several epochs of one. `seen` counts what happened, so that a test can tell that it did."""

    def __init__(self, setting: Setting, choices: bytes, seen: Counter[str]) -> None:
        self.setting, self.script, self.seen = setting, Script(choices), seen
        self.verifier = VerifierEnd(setting.limits, self.script, seen)
        self.now = 0.0
        self.ids: list[int] = list(PROMPT)
        self.experience = Experience()
        self.up: deque[Hint | Pace] = deque()
        self._open_epoch(Epoch(0))

    def _open_epoch(self, epoch: Epoch) -> None:
        """A new engine and a new session over the ids held: what an edit comes to."""
        setting = self.setting
        self.request = Open(
            ids=tuple(self.ids),
            generated_from=len(self.ids),
            fingerprint=b"",
            sampling=SamplingParams(1.0) if setting.is_chain else GREEDY,
            max_new_tokens=setting.max_new_tokens,
            epoch=epoch,
            seed=1,
            rule=Rule.REJECTION if setting.is_chain else Rule.AGREEMENT,
            stop_ids=setting.stop_ids,
            pace=setting.engine.pace,
            run_ahead=setting.run_ahead,
        )
        self.end = len(self.ids) + setting.max_new_tokens
        self.text = text_after(self.ids, setting.max_new_tokens, setting.stop_ids)
        retrieval = RetrievalDrafter() if setting.has_retrieval else None
        if retrieval is not None:
            stops, start = frozenset(setting.stop_ids), len(self.ids)
            retrieval.begin(DraftTask(self.request.sampling, 1, self.request.rule, epoch, start, stops))
        self.engine = EdgeEngine(
            self.request, setting.engine, has_model=True, retrieval=retrieval, experience=self.experience
        )
        self.job: DraftJob | None = None
        self.is_online, self.is_finished = True, False
        self._drawn: dict[tuple[int, ...], tuple[int, QRow]] = {}
        self._named: dict[int, tuple[int, ...]] = {}
        self.verifier.open(self.request, self.now)
        self.engine.opened(self.verifier.session.opened(), self.ids, self.now, 0.02)

    # ------------------------------------------------------------ events

    def run(self) -> None:
        """The whole script, then whatever it takes to get the text."""
        events: list[Callable[[], None]] = [self._draft] * 12
        events += [self._hint, self._deliver_up, self._deliver_down] * 3
        events += [self._step] * 2
        events += [self._ack, self._pass_time, self._rarely]
        self.check()
        while not self.script.is_over:
            events[self.script.one_of(len(events))]()
            self.check()
        self._finish()

    def _rarely(self) -> None:
        rare = [self._lose_draft, self._cut_or_return, self._cut_or_return, self._edit, self._stop]
        rare[self.script.one_of(len(rare))]()

    def _pass_time(self) -> None:
        self.now += PAUSES_S[self.script.one_of(len(PAUSES_S))]

    def _draft(self) -> None:
        """Begins a draft step, or ends the one under way."""
        if self.job is None:
            self.job = self.engine.next_job(self.now)
            if self.job is not None:
                assert self.job.length == len(self.ids)
                self._prefix = (*self.ids, *self.job.budget.path)
                assert len(self._prefix) < self.end, "a draft step past the last id that may come"
            return
        job, self.job = self.job, None
        self.now += 0.001
        proposed = self._proposed(self._prefix, job.budget)
        self.engine.drafted(job, proposed, "model", self.now, 0.001)
        self.seen["draft" if proposed.ids else "nothing to say"] += 1
        self.seen["late draft"] += self.engine.counters.late_drafts > 0

    def _proposed(self, prefix: tuple[int, ...], budget: Budget) -> HintTree:
        manner = self.script.one_of(MANNERS)
        if manner == MANNERS - 1:
            return HintTree()
        right, wrong = truth(prefix), [token for token in range(VOCABULARY) if token != truth(prefix)]
        if self.setting.is_chain:
            chosen = right if manner < RIGHT_MANNERS else wrong[manner % len(wrong)]
            token, row = self._drawn.setdefault(prefix, (chosen, draft_row(manner % 3)))
            return HintTree((token,), (-1,), (row.probability(token),), (row,))
        rank = max(0, manner - RIGHT_MANNERS) // 2  # past the width: not among them
        ids = [*wrong[:rank], right, *wrong[rank:]][: budget.width]
        first = CONFIDENCES[manner % len(CONFIDENCES)]
        rest = [(1 - first) / 2**place for place in range(1, len(ids))]
        return HintTree(tuple(ids), (-1,) * len(ids), (first, *rest))

    def _lose_draft(self) -> None:
        if self.job is not None:
            self.engine.failed(self.job)
            self.job = None
            self.seen["draft lost"] += 1

    def _stop(self) -> None:
        if self.script.one_of(3) == 1:
            self.engine.stop_drafting("told to", self.now)
            self.seen["stopped"] += 1

    def _hint(self) -> None:
        """Sends what there is, due or not."""
        hint = self.engine.take_hint(self.now) if self.is_online else None
        if hint is None:
            return
        assert 0 < len(hint.ids) <= self.setting.limits.max_frame_nodes
        for index, token in enumerate(hint.ids):
            number = hint.first_node + index
            delta = hint.parents[index] if hint.parents else int(index > 0)
            base = self._named[hint.base_node] if hint.base_node else tuple(self.ids[: hint.base_position])
            self._named[number] = path = (*(self._named[number - delta] if delta else base), token)
            assert len(path) <= self.end
            if (
                self.setting.is_chain
            ):  # the first that was drawn at a prefix, and its very row, however often it is sent
                assert (token, hint.rows[index]) == self._drawn[path[:-1]]
        self.up.append(hint)
        self.seen["hint"] += 1

    def _ack(self) -> None:
        if self.is_online:
            self.engine.acknowledged()
            pace, length = self.engine.decision.pace, self.engine.length
            self.up.append(Pace(self.request.epoch, pace, self.setting.run_ahead, length))

    def _deliver_up(self) -> None:
        if self.is_online and self.up:
            self.verifier.take(self.up.popleft(), self.now)

    def _step(self) -> None:
        if self.is_online:
            self.verifier.step(self.now)

    def _deliver_down(self) -> None:
        if not self.is_online or not self.verifier.down:
            return
        frame = self.verifier.down.popleft()
        if isinstance(frame, Finished):
            self.is_finished = self.is_finished or frame.epoch == self.request.epoch
        elif isinstance(frame, Commit) and frame.epoch == self.request.epoch:
            held = len(self.ids) - frame.start
            assert held >= 0, "a commit is missing"
            assert tuple(self.ids[frame.start : frame.end]) == frame.ids[:held], "commits contradict each other"
            self.ids.extend(frame.ids[held:])
            self.engine.committed(self.ids, frame, self.now)
            self.verifier.arrived(frame)

    # ------------------------------------------------------------ cuts and edits

    def _cut_or_return(self) -> None:
        """Cuts the stream, and what is under way is lost; or opens the next one, at the same verifier or another."""
        if self.is_online:
            self.is_online = False
            self.engine.went_offline(self.now, is_local=self.script.one_of(2) == 0)
            self.up.clear()
            self.verifier.down.clear()
            self.verifier.session.sink = None
            return
        if self.script.one_of(2):
            self._lose_draft()
        if self.script.one_of(3) == 1:
            self.verifier.open(replace(self.request, ids=tuple(self.ids)), self.now)
            self.seen["reopened"] += 1
        else:
            self.verifier.resume(self.ids)
            self.seen["resumed"] += 1
        self.is_online = True
        self.engine.opened(self.verifier.session.opened(), self.ids, self.now, 0.02)

    def _edit(self) -> None:
        """Keeps a part, appends some ids. Frames of the old epoch are still on their way in both directions."""
        if self.is_online and self.request.epoch < LAST_EPOCH:
            kept = self.ids[: max(1, len(self.ids) - self.script.one_of(8))]
            self.ids = [*kept, *(self.script.one_of(VOCABULARY) for _ in range(1 + self.script.one_of(3)))]
            self._open_epoch(Epoch(self.request.epoch + 1))
            self.seen["edit"] += 1

    def _finish(self) -> None:
        """Everything arrives; by then the device holds what the target alone would have written."""
        if not self.is_online:
            self._cut_or_return()
        for _ in range(2 * self.setting.max_new_tokens + len(self.up) + len(self.verifier.down)):
            if self.is_finished:
                break
            for event in (*[self._draft] * 3, self._hint, self._deliver_up, self._step, self._deliver_down):
                event()
            if self.engine.unacknowledged >= max(1, self.setting.run_ahead // 2):
                self._ack()
            self.now += 0.01
            self.check()
        assert self.is_finished
        assert self.ids == self.text

    # ------------------------------------------------------------ what always holds

    def check(self) -> None:
        """The invariants that test_engine_interleavings.py tells of."""
        session, trie = self.verifier.session, self.verifier.session.trie
        assert self.ids == session.ids[: len(self.ids)]
        assert session.ids == self.text[: session.length]
        assert self.engine.length == len(self.ids)
        trie.check_integrity()
        if not self.is_online or session.finished is not None:
            return  # the next stream begins with what was sent counting for nothing
        hints = [frame for frame in self.up if isinstance(frame, Hint) and frame.epoch == self.request.epoch]
        excused = {number for hint in hints for number in range(hint.first_node, hint.first_node + len(hint.ids))}
        excused |= self.verifier.over_budget
        for standing in self.engine._tree.standings():
            number = standing.node.number
            if not number or number in excused or not standing.depth:
                continue
            whole = [*self.ids, *standing.node.path()]
            assert self._named[number] == tuple(whole)
            if len(whole) > session.length and whole[: session.length] == session.ids:
                held = trie._names.get(number)
                assert isinstance(held, Node), f"the verifier does not hold node {number}: {whole}"
                assert held.path() == whole[session.length :]
