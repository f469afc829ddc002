"""Numbers the nodes that leave and makes hints of them, as short as they can be said.

Pure. Must not know: time, drafting. Owned by `edge_engine`. Nodes are numbered in the order sent (DESIGN section 4); a
line needs no parents, a node below one that was sent needs no base, and an ack is said once.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_client.draft_tree import DraftNode
from shared.randomness import short_digest
from shared.types import Epoch, Hint, Limits

FEW_REMEMBERED = 256
"""A verifier that remembers fewer committed nodes is told positions instead."""


class HintPacker:
    """What was numbered and acknowledged on the present stream."""

    def __init__(self, epoch: Epoch, is_chain: bool, length: int) -> None:
        """`length`: ids of the context."""
        self._epoch, self._is_chain = epoch, is_chain
        self._next_node, self._needs_digest = 1, True
        self.acked = length
        """Committed ids that some frame has acknowledged."""

    def begin(self, next_node: int, length: int) -> None:
        """A new stream: numbers go on from `next_node`, and the base is to be proven once."""
        self._next_node, self._needs_digest, self.acked = next_node, True, length

    @property
    def last_node(self) -> int:
        """The highest number given."""
        return self._next_node - 1

    def pack(self, nodes: Sequence[DraftNode], ids: Sequence[int], limits: Limits) -> Hint:
        """A hint of these nodes, parents first, behind the committed `ids`; they are numbered now."""
        first, length = self._next_node, len(ids)
        for number, node in enumerate(nodes, start=first):
            node.number = number
        self._next_node += len(nodes)
        parents = tuple(_delta(node, limits) for node in nodes)
        is_line = set(parents[1:]) <= {1}
        base_node = first - parents[0] if is_line and parents[0] else 0
        is_at_base = not base_node and 0 in parents
        digest = short_digest(list(ids)) if self._needs_digest and is_at_base else None
        self._needs_digest = self._needs_digest and digest is None
        ack, self.acked = length if length > self.acked else 0, max(self.acked, length)
        return Hint(
            epoch=self._epoch,
            first_node=first,
            ids=tuple(node.token for node in nodes),
            ack=ack,
            base_node=base_node,
            base_position=length if is_at_base else 0,
            base_digest=digest,
            parents=() if is_line else parents,
            confidence=() if self._is_chain else tuple(node.chance for node in nodes),
            rows=tuple(node.row for node in nodes if node.row is not None),
        )


def _delta(node: DraftNode, limits: Limits) -> int:
    """Backward to the parent's number; 0: it stands at the base, behind the committed ids."""
    assert node.parent is not None
    is_committed = node.parent.parent is None
    if not node.parent.number or (is_committed and limits.remembered_nodes < FEW_REMEMBERED):
        return 0
    return node.number - node.parent.number
