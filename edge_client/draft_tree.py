"""The device's tree of where the text may go: what drafters proposed after the committed ids, and what was sent of it.

Pure. Must not know: models, wire, time. Owned by `edge_engine`. Every node bears the chance that the target chooses it
where its parent stands; the product of chances down to it is its reach. A commit moves the root down, and everything
that it contradicts is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edge_client.calibration import Calibration
from edge_client.drafter import HintTree
from shared.rejection import QRow

ROW_CONFIDENCE = 0.8
"""Under the rejection rule a node's worth may not depend on the id that was drawn: all are told alike."""


@dataclass(eq=False)
class DraftNode:
    """One id that may come at `position`. The root stands for the last committed id."""

    token: int
    position: int
    parent: DraftNode | None = None
    votes: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Rank and confidence that each drafter gave it."""
    chance: float = 1.0
    row: QRow | None = None
    children: dict[int, DraftNode] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)
    """Drafters that have said what follows this node."""
    number: int = 0
    """Its number on the wire; 0: not sent."""

    def path(self) -> tuple[int, ...]:
        """The ids from behind the root to this node."""
        ids: list[int] = []
        node = self
        while node.parent is not None:
            ids.append(node.token)
            node = node.parent
        return tuple(reversed(ids))


@dataclass(slots=True)
class Standing:
    """Where a node stands in the tree at the moment."""

    node: DraftNode
    reach: float
    depth: int
    """Ids from the root; its children's depth is one more."""
    sent_depth: int
    """How many of its ancestors and itself, from the root on, were sent."""


class DraftTree:
    """What was drafted after the committed ids of one epoch."""

    def __init__(self, last_id: int, length: int, calibration: Calibration, is_chain: bool) -> None:
        """`length`: committed ids, of which `last_id` is the last. `is_chain`: the rejection rule."""
        self.root = DraftNode(last_id, length - 1)
        self._calibration, self._is_chain = calibration, is_chain

    # ------------------------------------------------------------ growing

    def add(self, below: DraftNode, proposed: HintTree, source: str) -> None:
        """Merges what a drafter says may follow a node; the union of what all of them said."""
        nodes: list[DraftNode] = []
        touched: dict[int, DraftNode] = {id(below): below}
        for index, (token, parent) in enumerate(zip(proposed.ids, proposed.parents, strict=True)):
            above = below if parent < 0 else nodes[parent]
            node = above.children.get(token)
            if node is None:
                node = DraftNode(token, above.position + 1, above)
                if not self._is_chain or not above.children:
                    above.children[token] = node
            node.row = proposed.rows[index] if proposed.rows and node.row is None else node.row
            if source not in node.votes:
                rank = sum(source in child.votes for child in above.children.values())
                confidence = ROW_CONFIDENCE if self._is_chain or not proposed.confidence else proposed.confidence[index]
                node.votes[source] = (rank, confidence)
            touched[id(above)] = above
            nodes.append(node)
        for node in touched.values():
            if source not in node.heard:
                node.heard.append(source)
            self._weigh(node)

    def _weigh(self, above: DraftNode) -> None:
        """Chances of a node's children, by whoever proposed them and whoever did not; together at most 1."""
        children = above.children.values()
        for child in children:
            child.chance = self._calibration.chance(*self._told(above, child))
        total = sum(child.chance for child in children)
        if total > 1:
            for child in children:
                child.chance /= total

    def _told(self, above: DraftNode, child: DraftNode) -> tuple[str, int, float]:
        """The kind of proposal, its rank and confidence: those of the drafter heard last of all that proposed it."""
        kind = ",".join(name if name in child.votes else f"-{name}" for name in above.heard)
        rank, confidence = next(child.votes[name] for name in reversed(above.heard) if name in child.votes)
        return kind, rank, confidence

    # ------------------------------------------------------------ commits

    def learn(self, above: DraftNode, token: int) -> bool | None:
        """The target chose `token` after a node: the calibration learns. Whether the likeliest was right; None if
        nothing was proposed there."""
        for child in above.children.values():
            self._calibration.learn(*self._told(above, child), child.token == token)
        best = max(above.children.values(), key=lambda child: child.chance, default=None)
        return None if best is None else best.token == token

    def advance(self, token: int) -> bool | None:
        """One more committed id; as `learn`."""
        was_right = self.learn(self.root, token)
        survivor = self.root.children.get(token) or DraftNode(token, self.root.position + 1)
        survivor.parent = None
        self.root = survivor
        return was_right

    def forget_numbers(self) -> None:
        """Nothing counts as sent: a new stream, or nodes that the verifier had no room for."""
        for standing in self.standings():
            standing.node.number = 0

    # ------------------------------------------------------------ reading

    def holds(self, node: DraftNode) -> bool:
        """True while the committed ids have neither contradicted nor passed a node."""
        while node.parent is not None:
            if node.parent.children.get(node.token) is not node:
                return False
            node = node.parent
        return node is self.root

    def standings(self) -> Iterator[Standing]:
        """The root and all nodes, parents first."""
        pending = [Standing(self.root, 1.0, 0, 0)]
        while pending:
            here = pending.pop()
            yield here
            for child in reversed(here.node.children.values()):
                is_sent = child.number > 0 and here.sent_depth == here.depth
                reach = here.reach * child.chance
                pending.append(Standing(child, reach, here.depth + 1, here.sent_depth + is_sent))

    def best_node(self) -> DraftNode:
        """The end of the likeliest continuation, as far as it was drafted; the root if nothing was."""
        node = self.root
        while node.children:
            node = max(node.children.values(), key=lambda child: child.chance)
        return node
