"""Ways to break the rejection rule that drafting ahead makes possible: engines that look at what was drawn.

None of this is reachable from the product. Called by `distribution_edge_cases`, which says what each must lead to.
"""

from __future__ import annotations

from collections.abc import Iterable

from edge_client.draft_tree import DraftNode, DraftTree
from edge_client.drafter import HintTree
from edge_client.edge_engine import EdgeEngine
from shared.rejection import ROW_TOTAL

UNLIKELY, UNSURE = 0.3, 0.45


def _told(node: DraftNode) -> float:
    """The draft's probability of the id that was drawn."""
    assert node.row is not None
    return node.row.probability(node.token)


class ToldTree(DraftTree):
    """A node of a chain is worth what the draft's probability of the id drawn says."""

    def add(self, below: DraftNode, proposed: HintTree, source: str) -> None:
        """See DraftTree."""
        super().add(below, proposed, source)
        for child in below.children.values():
            child.chance = _told(child)


class OnlyLikely(EdgeEngine):
    """Sends ids only while they are likely."""

    def _pending(self, now: float) -> list[DraftNode]:
        likely: set[int] = set()
        kept = []
        for node in super()._pending(now):
            parent = node.parent
            is_behind = parent is None or parent.parent is None or parent.number > 0 or id(parent) in likely
            if is_behind and _told(node) >= UNLIKELY:
                likely.add(id(node))
                kept.append(node)
        return kept


class WholeFrames(EdgeEngine):
    """Sends all that is due in one frame, which is as long as its rows."""

    @property
    def _most_nodes(self) -> int:
        return self.limits.max_frame_nodes


class UnlikelySooner(EdgeEngine):
    """Sends at once when an unlikely id was drawn; else at the last moment."""

    def send_at(self, now: float) -> float | None:
        """See EdgeEngine."""
        due = super().send_at(now)
        unsent = [s.node for s in self._tree.standings() if s.depth and not s.node.number]
        return now if due is not None and self._is_urgent(unsent) else due

    def _is_urgent(self, nodes: Iterable[DraftNode]) -> bool:
        return any(_told(node) < UNLIKELY for node in nodes)


class UnsureSooner(UnlikelySooner):
    """Sends at once when a row behind another looks unsure."""

    def _is_urgent(self, nodes: Iterable[DraftNode]) -> bool:
        rows = [node.row for node in nodes][1:]
        return any(row is not None and max(row.weights) < UNSURE * ROW_TOTAL for row in rows)


class EndsAtStop(EdgeEngine):
    """Drafts nothing behind a stop id, as under the other rules."""

    def _is_stop(self, node: DraftNode) -> bool:
        return node.position >= self._request.generated_from and node.token in self._request.stop_ids
