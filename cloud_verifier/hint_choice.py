"""Which nodes of a session's hint trie to verify in one step.

Must not know: models, wire, time. Called by `scheduler`. Under agreement and greedy the likeliest to be reached come
first; under the rejection rule the chain as far as it goes, since a choice by the ids would bias the text.
"""

from __future__ import annotations

import heapq
from itertools import count

from shared.hint_trie import HintTrie, Node

FIRST_CHILD_PROBABILITY = 0.8
OTHER_CHILD_PROBABILITY = 0.3
"""What an untold node is taken to be worth, until acceptance is measured."""


def choose_nodes(trie: HintTrie, max_nodes: int, max_depth: int) -> list[Node]:
    """The nodes to verify, parents before children, at most `max_nodes`, none deeper than `max_depth` (1: next id)."""
    tie = count()
    frontier: list[tuple[float, int, int, Node]] = []

    def offer(children: dict[int, Node], reach: float, depth: int) -> None:
        if depth > max_depth:
            return
        for rank, child in enumerate(children.values()):
            heapq.heappush(frontier, (-reach * _worth(child, rank), next(tie), depth, child))

    chosen: list[Node] = []
    offer(trie.children, 1.0, 1)
    while frontier and len(chosen) < max_nodes:
        reach, _, depth, node = heapq.heappop(frontier)
        chosen.append(node)
        offer(node.children, -reach, depth + 1)
    return chosen


def _worth(node: Node, rank: int) -> float:
    if node.probability is not None:
        return node.probability
    return FIRST_CHILD_PROBABILITY if rank == 0 else OTHER_CHILD_PROBABILITY
