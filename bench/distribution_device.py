"""The virtual device of `distribution_world`: reads commits, drafts with the real drafter, sends hints.

A stand-in for the product's (`distribution_edge` is that one): it says one thing at a time, and may also lose, repeat
and overtake. Cases that break a rule override one method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_client.drafter import Budget, DraftTask, HintTree, ModelDrafter
from shared import codec
from shared.randomness import ids_digest, short_digest
from shared.types import Commit, DownFrame, Epoch, Finished, Hint, Open, Opened, Resume, SessionId

if TYPE_CHECKING:
    from bench.distribution_world import Life

EPOCH = Epoch(0)


@dataclass(frozen=True)
class Sent:
    """A hint as it left: where it stands, its paths, and its frames as bytes with their last node's number."""

    base: int
    tree: HintTree
    frames: tuple[tuple[int, bytes], ...]

    def is_open(self, ids: list[int], seen_node: int) -> bool:
        """False once it was judged, or once the committed ids have left all its paths or passed them."""
        if seen_node >= self.frames[-1][0]:
            return False
        return stands(self.tree, ids[self.base :])


def stands(tree: HintTree, walked: list[int]) -> bool:
    """True if a path of the tree begins with the ids walked and goes on."""
    at, children = -1, list(zip(tree.parents, tree.ids, strict=True))
    for token in walked:
        found = next((n for n, child in enumerate(children) if child == (at, token)), None)
        if found is None:
            return False
        at = found
    return at in tree.parents


class Device:
    """One generation. Timers and delays come from the life's own random stream."""

    def __init__(self, life: Life, drafter: ModelDrafter, secret: int) -> None:
        self.life, self.setting, self.drafter, self.secret = life, life.setting, drafter, secret
        self.ids = list(self.setting.pair.context)
        self.is_connected = False
        self._has_begun = self._is_drafting = False
        self._sent: Sent | None = None
        self._next_node, self._seen_node = 1, 0
        self._needs_digest = True

    # ------------------------------------------------------------ frames down

    def read(self, frame: DownFrame) -> bool:
        """True if it was the last frame."""
        match frame:
            case Opened():
                self._begin(frame)
            case Commit():
                fresh = len(self.ids) - frame.start
                assert fresh >= 0
                assert tuple(self.ids[frame.start :]) == frame.ids[:fresh]
                self.ids.extend(frame.ids[fresh:])
                self._seen_node = max(self._seen_node, frame.seen_node)
            case Finished():
                return True
            case _:
                raise AssertionError(f"not expected: {frame}")
        self.think()
        return False

    def _begin(self, opened: Opened) -> None:
        self.is_connected, self._needs_digest = True, True
        self._next_node, self._seen_node = opened.next_node, opened.next_node - 1
        if self._has_begun:
            self._say_again(opened)
            return
        self._has_begun = True
        setting = self.setting
        self.drafter.begin(
            DraftTask(
                sampling=setting.draft_sampling or setting.sampling,
                seed=opened.seed,
                rule=setting.rule,
                epoch=EPOCH,
                generated_from=opened.generated_from,
                stop_ids=frozenset(setting.stop_ids),
                secret=self.secret,
            )
        )
        if setting.resend_ms:
            self.life.post(setting.resend_ms, self._on_timer)
        if setting.overlap_ms:
            self._overlap()

    def _say_again(self, opened: Opened) -> None:
        """After a cut: the same bytes from `next_node` on, or a draft of the kept draws."""
        sent, is_new_verifier = self._sent, self.setting.link.verifier_dies
        if sent is None or is_new_verifier or not self.setting.resends_bytes:
            self._sent = None
            return
        for last, message in sent.frames:
            if last >= opened.next_node:
                self.life.up(message)
        self._next_node = max(self._next_node, sent.frames[-1][0] + 1)

    # ------------------------------------------------------------ drafting

    def think(self) -> None:
        """Drafts if no hint of ours may still be judged."""
        if self._sent is None or not self._sent.is_open(self.ids, self._seen_node):
            self._draft()

    def _overlap(self) -> None:
        assert self.setting.overlap_ms is not None
        self._draft()
        self.life.post(self.life.rng.uniform(*self.setting.overlap_ms), self._overlap)

    def _draft(self) -> None:
        room = len(self.setting.pair.context) + self.setting.new_ids - len(self.ids)
        if self._is_drafting or not self.is_connected or room <= 0:
            return
        self._is_drafting = True
        base = len(self.ids)
        self.drafter.sync(self.ids)
        tree = self.drafter.propose(Budget(min(self.setting.depth, room), self.setting.width))
        self.life.post(self.draft_ms(tree), lambda: self._drafted(base, tree))

    def _drafted(self, base: int, tree: HintTree) -> None:
        self._is_drafting = False
        if not self.is_connected:
            return
        if not stands(tree, self.ids[base:]):
            self.think()
            return
        self.send(base, tree)

    def send(self, base: int, tree: HintTree) -> None:
        """Numbers a tree, keeps its frames and sends them."""
        tree = self.cut(tree)
        if not tree.ids:
            return
        frames = []
        for hint in self._frames(base, tree):
            last = hint.first_node + len(hint.ids) - 1
            frames.append((last, codec.encode_up(hint).SerializeToString()))
        self._next_node = frames[-1][0] + 1
        self._needs_digest = False
        self._sent = Sent(base, tree, tuple(frames))
        for _, message in frames:
            self.life.up(message)

    def _frames(self, base: int, tree: HintTree) -> Iterator[Hint]:
        most, first = self.setting.frame_nodes, self._next_node
        digest = short_digest(self.ids[:base]) if self._needs_digest else None
        if len(tree.ids) <= most:
            yield encode_tree(EPOCH, first, base, tree, len(self.ids), digest)
            return
        for start in range(0, len(tree.ids), most):  # chains only
            span = slice(start, start + most)
            part = HintTree(tree.ids[span], tuple(range(-1, len(tree.ids[span]) - 1)), (), tree.rows[span])
            hint = encode_tree(EPOCH, first + start, base, part, len(self.ids), digest)
            yield hint if start == 0 else replace(hint, base_node=first + start - 1, base_position=0, base_digest=None)

    def _on_timer(self) -> None:
        sent = self._sent
        if self.is_connected and sent is not None and sent.is_open(self.ids, self._seen_node):
            if self.setting.resends_bytes:
                for _, message in sent.frames:
                    self.life.up(message)
            else:
                self._draft()
        self.life.post(self.setting.resend_ms, self._on_timer)

    # ------------------------------------------------------------ what a broken device does otherwise

    def draft_ms(self, tree: HintTree) -> float:
        """How long after the start of a draft it is sent. By count only: never by what was drawn."""
        return self.setting.draft_ms * self.setting.depth

    def cut(self, tree: HintTree) -> HintTree:
        """What of a tree is sent. By count only."""
        return tree

    # ------------------------------------------------------------ after a cut

    def cut_off(self) -> None:
        """The stream is gone."""
        self.is_connected = False

    def asks(self) -> None:
        """A new stream is asked for."""

    def resume(self, session_id: SessionId) -> Resume:
        """Takes the session up again."""
        return Resume(session_id, EPOCH, len(self.ids), ids_digest(self.ids))

    def reopening(self, request: Open) -> Open:
        """Carries the text over to a verifier that never saw it."""
        return replace(request, ids=tuple(self.ids))


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
