"""The device's engine: what to draft next, what to send and when, what a commit changes. It never waits.

Pure: times are arguments, models and sockets are elsewhere. Driven by `generate` on a real clock and by
`bench/simulate` on a virtual one. One tree is grown best-first: the next draft step goes to the node most likely to be
reached in time; what it proposes leaves shortly before the verifier's next step begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_client.controller import Controller, Decision, EngineSettings, Experience
from edge_client.counters import Counters
from edge_client.draft_tree import DraftNode, DraftTree, Standing
from edge_client.drafter import Budget, Drafter, HintTree
from edge_client.hint_packer import HintPacker
from edge_client.link_clock import LinkClock
from shared.types import Commit, Hint, Limits, Open, Opened, PaceKind

LEAST_CHANCE = 0.03
"""An alternative less likely than this is not sent beside a likelier one."""
RETRIEVED_IDS, RETRIEVED_WIDTH = 12, 2
MAX_TREE_NODES = 1024
REFEED_SHARE = 1 / 3
"""What one more id to take in costs, as a share of a draft step."""
REBASE_EVERY_S = 1.0
"""A verifier that has no room is not flooded: all is sent again so often at most."""
PING_EVERY_S = 0.3
"""While no hints leave the round trip is measured so often, by a hint of one id."""
BLIND_S = 0.3
LOCAL_IDS = 512
"""How far the draft writes alone at most."""


@dataclass(frozen=True)
class DraftJob:
    """One draft step: what may follow `node`, which stands behind the committed ids and `budget.path`."""

    node: DraftNode
    budget: Budget
    length: int
    """Committed ids when it was asked for."""
    unfed: int
    """Ids that the model must take in for it, going by what it drafted before."""
    is_probe: bool


class EdgeEngine:
    """One epoch's drafting. `ids` are the committed ids held, kept by the caller, who tells when they grow."""

    def __init__(
        self,
        request: Open,
        settings: EngineSettings,
        *,
        has_model: bool,
        retrieval: Drafter | None = None,
        experience: Experience | None = None,
        context_size: int = 1 << 31,
    ) -> None:
        """`has_model`: jobs are wanted for a drafter that takes time; `retrieval`: one that takes next to none.

        `context_size`: ids that the target holds.
        """
        self.experience = experience or Experience()
        self._end = min(request.generated_from + request.max_new_tokens, context_size)
        self._is_chain = request.is_chain
        self.clock = LinkClock(self.experience.uplink)
        self.counters = Counters()
        self.limits = Limits()
        self._settings, self._request = settings, request
        self._has_model, self._retrieval = has_model, None if self._is_chain else retrieval
        self.controller = Controller(settings, self.experience, self._retrieval is not None)
        self._ids: Sequence[int] = request.ids
        self._length = len(request.ids)
        self._tree = DraftTree(request.ids[-1], self._length, self.experience.calibration, self._is_chain)
        self._job: DraftJob | None = None
        self._packer = HintPacker(request.epoch, self._is_chain, self._length)
        self._rebased_at = self._resend_at = self._sent_at = self._asked_at = -math.inf
        self._is_online, self._is_local = False, False
        self._held_position = -1
        self._source = "model"
        self._depth_right: list[int] = []
        self._depth_judged: list[int] = []
        self.decision = self._decide(0.0)

    # ------------------------------------------------------------ what happened

    def opened(self, opened: Opened, ids: Sequence[int], now: float, took_s: float) -> None:
        """A stream is open: nothing that was sent on another one counts."""
        self.limits = opened.limits
        self._ids = ids
        self._packer.begin(opened.next_node, len(ids))
        self._tree.forget_numbers()
        self._is_online, self._is_local = True, False
        self.clock.note_opened(took_s)
        self.controller.note_pause()
        self._sync_retrieval()
        self._retrieve(self._tree.root)
        self.decision = self._decide(now)

    def went_offline(self, now: float, is_local: bool) -> None:
        """The stream was cut. `is_local`: the likeliest path is drafted on meanwhile."""
        self._is_online, self._is_local = False, is_local
        self.clock.last_commit_at = None
        self.decision = self._decide(now)

    def stop_drafting(self, why: str, now: float) -> None:
        """No hints any more in this text."""
        self.controller.stop(why)
        self.decision = self._decide(now)

    def committed(self, ids: Sequence[int], commit: Commit, now: float) -> float | None:
        """`ids` have grown by this commit. Returns the round trip that it shows, if it shows one."""
        is_plain = commit.accepted == 0 and not self._was_sent_before(commit.seen_node)
        wait_s = None if commit.hint_wait_us is None else commit.hint_wait_us / 1e6
        measured = self.clock.note_commit(
            now, commit.step_us / 1e6, commit.queue_us / 1e6, commit.seen_node, wait_s, is_plain
        )
        self._ids = ids
        for depth, token in enumerate(ids[self._length :], start=self._length - commit.start + 1):
            was_sent = any(child.number for child in self._tree.root.children.values())
            self._judge(token)
            self._tree.advance(token)
            if self._source in self._tree.root.heard:
                self._held_position = self._tree.root.position
            if was_sent:
                self._count_depth(depth, depth <= commit.accepted)
        self._length = len(ids)
        self.clock.expect_step(self._was_sent_before(self.clock.newest_arrived(now, commit.seen_node)))
        self.controller.note_commit(now, len(commit.ids), is_plain)
        if commit.dropped_over_budget:
            self._tree.forget_numbers()
            self._resend_at, self._rebased_at = self._rebased_at + REBASE_EVERY_S, now
            self.counters.rebases += 1
        self._sync_retrieval()
        self._retrieve(self._tree.root)
        self._retrieve(self._tree.best_node())
        self.decision = self._decide(now)
        return measured

    def _judge(self, token: int) -> None:
        """What follows the root is known: how often drafters are right is learnt."""
        children = self._tree.root.children
        if self._source in self._tree.root.heard:
            self._note_judged(self._tree.root, self._source, token)
        if self._retrieval is not None:
            found = children.get(token)
            self.controller.note_free(found is not None and found.votes.get(self._retrieval.name, (1, 0.0))[0] == 0)

    def _note_judged(self, above: DraftNode, source: str, token: int) -> None:
        """How good the model is: by the likeliest of the ids that it proposed itself, and by the others."""
        own = [child for child in above.children.values() if source in child.votes]
        best = max(own, key=lambda child: child.chance, default=None)
        self.controller.note_judged(best is not None and best.token == token, any(c.token == token for c in own))

    def _was_sent_before(self, seen_node: int) -> bool:
        """True if the verifier had some node behind the committed ids, knowing nodes up to this number."""
        return any(0 < child.number <= seen_node for child in self._tree.root.children.values())

    def _count_depth(self, depth: int, is_right: bool) -> None:
        while len(self._depth_judged) < depth:
            self._depth_judged.append(0)
            self._depth_right.append(0)
        self._depth_judged[depth - 1] += 1
        self._depth_right[depth - 1] += is_right

    def drafted(self, job: DraftJob, proposed: HintTree, source: str, now: float, took_s: float) -> None:
        """A draft step has ended. An empty proposal means that the model can go no further here."""
        assert job is self._job
        self._job = None
        if self._held_position >= 0:  # the first step takes in the whole context
            self.clock.note_draft(took_s / (1 + REFEED_SHARE * (job.unfed - 1)))
        self._held_position = max(self._held_position, job.length - 1)
        self.counters.draft_steps += 1
        if not proposed.ids and not job.budget.path and job.length == self._length:
            self._has_model = False
            self.counters.is_context_full = True
            if self._retrieval is None:
                self.controller.stop("the draft model's context is full")
        if job.is_probe:
            self.controller.note_probe(now, took_s)
        self._source = source
        if self._tree.holds(job.node):
            self._tree.add(job.node, proposed, source)
            self._retrieve_further(job.node)
        else:
            self.counters.late_drafts += 1
            self._learn_late(job, proposed, source)
        self.decision = self._decide(now)

    def failed(self, job: DraftJob) -> None:
        """A draft step came to nothing."""
        assert job is self._job
        self._job = None

    def model_failed(self, job: DraftJob, why: str, now: float) -> None:
        """The model cannot go on. Under the rejection rule what was drawn before is sent all the same: a failure may
        follow from the id drawn."""
        self.failed(job)
        self._has_model = False
        if not self._is_chain:
            self.stop_drafting(why, now)

    def _learn_late(self, job: DraftJob, proposed: HintTree, source: str) -> None:
        """The text has passed the node meanwhile: what came there is known, so the calibration still learns."""
        stop = job.length + len(job.budget.path)
        if stop < self._length and tuple(self._ids[job.length : stop]) == job.budget.path:
            passed = DraftNode(job.node.token, job.node.position)
            self._tree.add(passed, proposed, source)
            self._tree.learn(passed, self._ids[stop])
            self._note_judged(passed, source, self._ids[stop])

    # ------------------------------------------------------------ retrieval

    def _sync_retrieval(self) -> None:
        if self._retrieval is not None and self._settings.depth > 0:
            self._retrieval.sync(self._ids)

    def _retrieve(self, node: DraftNode) -> None:
        if self._retrieval is None or self._settings.depth <= 0 or self._retrieval.name in node.heard:
            return
        above = node.position - self._tree.root.position
        depth = min(RETRIEVED_IDS, self._room(node), self._settings.depth - above)
        if depth > 0:
            budget = Budget(depth, min(RETRIEVED_WIDTH, self._settings.width), node.path())
            proposed = self._retrieval.propose(budget)
            if proposed.ids:
                self._tree.add(node, proposed, self._retrieval.name)

    def _retrieve_further(self, node: DraftNode) -> None:
        """Behind the likeliest child that nobody has looked behind yet."""
        best = max(node.children.values(), key=lambda child: child.chance, default=None)
        if best is not None and not best.heard and not self._is_stop(best):
            self._retrieve(best)

    # ------------------------------------------------------------ drafting

    def next_job(self, now: float) -> DraftJob | None:
        """The draft step to run now; None if one is running, or none is worth it."""
        if self._job is not None or not self._has_model:
            return None
        if not self._is_online:
            return self._next_local_job()
        decision = self.decision
        if not decision.uses_model:
            decision = self.decision = self._decide(now)
        best = self._best_to_expand(now) if decision.uses_model else None
        if best is not None:
            self._job = self._job_of(best.node, is_probe=False)
        elif self._is_expandable(self._tree.root) and (decision.is_probe or self._is_blind(now)):
            self._job = self._job_of(self._tree.root, is_probe=True)
        if self._job is not None:
            self._asked_at = now
        return self._job

    def _is_blind(self, now: float) -> bool:
        """Nothing seemed worth drafting for a while: what that was gone by may be wrong, or long past."""
        return self.decision.uses_model and now >= self._asked_at + BLIND_S

    def _next_local_job(self) -> DraftJob | None:
        """While the draft writes alone: the end of the likeliest path."""
        tip = self._tree.best_node()
        ahead = tip.position - self._tree.root.position
        if self._is_local and ahead < LOCAL_IDS and self._is_expandable(tip) and not self.controller.is_stopped:
            budget = Budget(1, 1, tip.path())
            self._job = DraftJob(tip, budget, self._length, self._unfed(tip), is_probe=False)
        return self._job

    def _job_of(self, node: DraftNode, is_probe: bool) -> DraftJob:
        budget = Budget(1, self.decision.width, node.path())
        return DraftJob(node, budget, self._length, self._unfed(node), is_probe)

    def _unfed(self, node: DraftNode) -> int:
        """Ids from the last one that the model has drafted from, down to a node; at least 1."""
        count, above = 0, node
        while self._source not in above.heard:
            count += 1
            if above.parent is None:
                return max(1, count - 1 + above.position - self._held_position)
            above = above.parent
        return max(1, count)

    def _best_to_expand(self, now: float) -> Standing | None:
        """The node whose continuation is likeliest to be reached in time."""
        best, best_score = None, self._settings.reach
        missed = self._missed(now + (self.clock.draft_s or 0.0))
        count = 0
        for standing in self._tree.standings():
            count += 1
            if standing.reach < best_score or standing.depth >= self.decision.depth:
                continue
            if not self._is_expandable(standing.node):
                continue
            score = standing.reach * self._in_time(standing, missed)
            if score > best_score or (best is None and score >= best_score):
                best, best_score = standing, score
        return None if count > MAX_TREE_NODES else best

    def _missed(self, sent_at: float) -> int:
        """How many steps begin, from the last commit on, before a hint of one id sent then arrives."""
        if self._settings.pace is PaceKind.WAIT:
            return int(self._is_verifier_at_work())
        return self.clock.plans_missed(sent_at + self.clock.uplink.way_s(sent_at, 1))

    def _is_expandable(self, node: DraftNode) -> bool:
        return self._source not in node.heard and self._room(node) > 0 and not self._is_stop(node)

    def _in_time(self, standing: Standing, missed: int) -> float:
        """The chance that drafting on from a node gets ahead of the verifier while the text still follows it.

        Steps that begin before a hint arrives decide an id each, beside what they know already: hints for those
        positions are of no use but as a way to later ones.
        """
        behind = standing.sent_depth + missed - (standing.depth + 1)
        if behind <= 0:
            return 1.0
        step, draft = self.clock.step_s or 0.0, self.clock.draft_s or 0.0
        if draft >= step:
            return 0.0
        return float(self.controller.acceptance.share ** (behind / (1 - draft / step)))

    def _room(self, node: DraftNode) -> int:
        """How many ids may still come behind a node."""
        return self._end - (node.position + 1)

    def _is_stop(self, node: DraftNode) -> bool:
        """Nothing follows a stop id; under the rejection rule a chain may not be cut by what was drawn."""
        is_generated = node.position >= self._request.generated_from
        return not self._is_chain and is_generated and node.token in self._request.stop_ids

    # ------------------------------------------------------------ sending

    def send_at(self, now: float) -> float | None:
        """When a hint is due; None if there is nothing to send."""
        if self._is_online and now < self._resend_at:
            return self._resend_at
        if not self._is_online:
            return None
        pending = self._pending(now) if self.decision.is_drafting else []
        if not pending:
            return now if self._ping(now) else None
        if self._settings.pace is PaceKind.WAIT and not self._is_verifier_at_work():
            return now if self._is_enough(now) else math.inf
        departure = self.clock.next_departure(now, len(pending))
        if departure is None:
            return now
        return max(now, departure - self.decision.margin_s)

    def pace(self, now: float) -> PaceKind:
        """The pace to ask for. A verifier that waits for hints is not left standing while none are to be had."""
        if self.decision.pace is not PaceKind.WAIT or self._job is not None or self._is_verifier_at_work():
            return self.decision.pace
        return PaceKind.WAIT if self._to_send(now) else PaceKind.RUN_ON

    def _is_verifier_at_work(self) -> bool:
        return any(child.number for child in self._tree.root.children.values())

    def _is_enough(self, now: float) -> bool:
        """Under pace wait the first hint starts a step: more are drafted first while that brings more ids a second."""
        best = self._best_to_expand(now) if self._has_model and self.decision.uses_model else None
        if self._job is None and best is None:
            return True
        draft, step, last = self.clock.draft_s, self.clock.step_s, self.clock.last_commit_at
        if draft is None or step is None or last is None:
            return self._job is None or len(self.preview()) >= 4
        cycle_s = now - last + (self.clock.round_trip_s or 0.0) + step
        gained = 1.0 + sum(s.reach for s in self._tree.standings() if s.depth)
        next_gain = self._settings.reach if best is None else best.reach
        if self._job is not None:
            next_gain = max(next_gain, self._reach_of(self._job.node))
        return next_gain * cycle_s < gained * draft

    def _reach_of(self, node: DraftNode) -> float:
        reach = 1.0
        while node.parent is not None:
            reach, node = reach * node.chance, node.parent
        return reach

    def _to_send(self, now: float) -> list[DraftNode]:
        """What a hint would hold now."""
        if now < self._resend_at:
            return []
        return (self._pending(now) if self.decision.is_drafting else []) or self._ping(now)

    def _ping(self, now: float) -> list[DraftNode]:
        """While there is nothing to send: one id now and then, to measure the link."""
        if now < self._sent_at + PING_EVERY_S or self._settings.depth <= 0 or self.controller.is_stopped:
            return []
        best = max(self._tree.root.children.values(), key=lambda child: child.chance, default=None)
        return [best] if best is not None and not best.number else []

    def _pending(self, now: float) -> list[DraftNode]:
        """Nodes to send, parents first: those that may come in time, and what leads to them."""
        missed = self._missed(now)
        wanted: dict[int, DraftNode] = {}
        order: list[Standing] = []
        held = 0
        for standing in self._tree.standings():
            node = standing.node
            order.append(standing)
            held += node.number > 0
            if (
                node.number
                or standing.depth > self._settings.depth
                or not standing.depth
                or standing.reach < self.decision.send_reach
            ):
                continue
            if standing.depth <= standing.sent_depth + missed or not self._is_worth_sending(node):
                continue
            above: DraftNode | None = node
            while above is not None and above.parent is not None and not above.number and id(above) not in wanted:
                wanted[id(above)] = above
                above = above.parent
        room = max(0, min(self._most_nodes, self.limits.max_held_nodes - held))
        found = [standing for standing in order if id(standing.node) in wanted]
        if len(found) > room:  # the likeliest; a parent is never less likely than its child, and stands before it
            kept = {id(s) for s in sorted(found, key=lambda s: (-s.reach, s.depth))[:room]}
            found = [standing for standing in found if id(standing) in kept]
        return [standing.node for standing in found]

    @property
    def _most_nodes(self) -> int:
        """Ids in one frame. Under the rejection rule one: the row behind an id follows from it, and a frame that held
        both would be longer or shorter, and so come later or sooner, by what was drawn."""
        return 1 if self._is_chain else self.limits.max_frame_nodes

    def _is_worth_sending(self, node: DraftNode) -> bool:
        assert node.parent is not None
        better = sum(child.chance > node.chance for child in node.parent.children.values())
        return better == 0 or (better < self._settings.width and node.chance >= LEAST_CHANCE)

    def take_hint(self, now: float) -> Hint | None:
        """The hint to send now, with all that is worth it; its nodes count as sent."""
        nodes = self._to_send(now)
        if not nodes:
            return None
        hint = self._packer.pack(nodes, self._ids[: self._length], self.limits)
        self._sent_at = now
        self.clock.note_sent(self._packer.last_node, now, len(nodes))
        self.counters.hints += 1
        self.counters.hint_nodes += len(nodes)
        return hint

    # ------------------------------------------------------------ reading

    @property
    def length(self) -> int:
        """Committed ids that the engine knows of."""
        return self._length

    @property
    def unacknowledged(self) -> int:
        """Committed ids that no frame has acknowledged yet."""
        return self._length - self._packer.acked

    def acknowledged(self) -> None:
        """Another frame carried the committed length."""
        self._packer.acked = self._length

    def preview(self) -> tuple[int, ...]:
        """Where the text probably goes, as far as drafted."""
        return self._tree.best_node().path()

    def usage(self) -> Counters:
        """Counters so far."""
        self.counters.rests, self.counters.slow_rests = self.controller.rests, self.controller.slow_rests
        self.counters.judged_by_depth = tuple(self._depth_judged)
        self.counters.right_by_depth = tuple(self._depth_right)
        return self.counters

    def explain(self) -> str:
        """The present choice and what it goes by, in one line."""
        return self.decision.why

    def _decide(self, now: float) -> Decision:
        return self.controller.decide(now, self.clock, self._has_model)
