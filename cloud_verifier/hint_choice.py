"""Which hint nodes to verify in one step, over all its sessions: as many as bring most ids for the time they cost.

Must not know: models, wire, time. Called by `scheduler`. Under agreement and greedy a node's worth is the estimated
probability that the text reaches it; under the rejection rule it follows from its depth alone, since a choice by the
ids or their probabilities would bias the text (DESIGN section 3). `choose_nodes_slowly` is the readable twin.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice

from shared.fading_share import FadingShare
from shared.hint_trie import HintTrie, Node

DEPTHS, RANKS = 8, 4
FIRST_CHILD_PROBABILITY = 0.8
OTHER_CHILD_PROBABILITY = 0.3
"""What an untold node is taken to be worth, until acceptance is measured."""
BIN_EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
"""Confidence in bins, each with its own measured acceptance."""
PRIOR_TRIES = 4.0
DECAY, COMMON_DECAY = 0.95, 0.998
LEAST_PRIOR = 0.25
"""What others' hints were worth says no less than this of a session that has shown nothing yet."""
TRY_AGAIN_STEPS = 8
"""A session whose hints were not worth verifying for so many steps gets one verified all the same: things change."""
MOST_SIBLINGS = 16
"""Alternatives of one node that are looked at."""


class Acceptance:
    """How often hints were right: by the device's confidence where it tells it, else by depth and rank.

    A draft's probability of an id is not the probability that the target chooses it: under greedy a draft that is half
    sure may nearly always be right. So confidence is taken at its word only until something was measured: in this
    session, or before that in others (`common`).
    """

    def __init__(self, common: Acceptance | None = None, decay: float = DECAY) -> None:
        self.common = common
        self._by_place = [[FadingShare(decay, PRIOR_TRIES) for _ in range(RANKS)] for _ in range(DEPTHS)]
        self._by_confidence = [[FadingShare(decay, PRIOR_TRIES) for _ in range(len(BIN_EDGES) + 1)] for _ in range(2)]

    def note(self, depth: int, rank: int, is_right: bool, confidence: float | None = None) -> None:
        """A node at `depth` (1: the next id) was judged after its parent had been accepted."""
        self._share(depth, rank, confidence).note(is_right)
        if self.common is not None:
            self.common.note(depth, rank, is_right, confidence)

    def probability(self, depth: int, rank: int, confidence: float | None = None) -> float:
        """How likely such a node is accepted once its parent is."""
        if self.common is not None:
            told = self.common.probability(depth, rank, confidence)
            prior = max(told, LEAST_PRIOR) if rank == 0 else told
        elif confidence is not None:
            prior = confidence
        else:
            prior = FIRST_CHILD_PROBABILITY if rank == 0 else OTHER_CHILD_PROBABILITY
        return self._share(depth, rank, confidence).mixed_with(prior)

    def _share(self, depth: int, rank: int, confidence: float | None) -> FadingShare:
        if confidence is not None:
            return self._by_confidence[min(rank, 1)][bisect_right(BIN_EDGES, confidence)]
        return self._by_place[min(depth, DEPTHS) - 1][min(rank, RANKS - 1)]


@dataclass(frozen=True)
class Candidate:
    """One session that could verify hints in this step, at most `max_nodes` and none deeper than `max_depth`."""

    trie: HintTrie
    acceptance: Acceptance
    max_depth: int
    max_nodes: int
    is_chain: bool
    is_tried: bool = False
    """Its first node is verified whatever it seems worth and whatever that seems to cost."""

    def worth(self, node: Node, depth: int, rank: int) -> float:
        """The probability that a node is accepted once its parent is."""
        if self.is_tried and depth == 1 and rank == 0:
            return 1.0
        if self.is_chain:
            return self.acceptance.probability(depth, 0)
        return self.acceptance.probability(depth, rank, node.probability)

    def is_due(self, node: Node) -> bool:
        """True for the node that is to be tried."""
        return self.is_tried and node is next(iter(self.trie.children.values()))


Cost = Callable[[int], float]
"""What a step over so many tokens costs, in whatever unit."""


def choose_nodes(
    candidates: Sequence[Candidate], max_nodes: int, gained: float, tokens: int, cost: Cost
) -> list[list[Node]]:
    """The nodes to verify for each candidate, parents before children, at most `max_nodes` in all.

    Without hints the step would bring `gained` ids from `tokens` tokens. Nodes are taken likeliest first, and as many
    of them as make the step bring most ids for its time: so a full batch takes fewer for each session.
    """
    tie = count()
    taken: list[tuple[int, Node]] = []
    in_use = [0] * len(candidates)
    frontier: list[tuple[float, int, int, int, Node]] = []

    def offer(index: int, children: Iterable[Node], reach: float, depth: int) -> None:
        candidate = candidates[index]
        if depth <= candidate.max_depth:
            for rank, child in enumerate(islice(children, MOST_SIBLINGS)):
                value = reach * candidate.worth(child, depth, rank)
                heapq.heappush(frontier, (-value, next(tie), depth, index, child))

    for index, candidate in enumerate(candidates):
        offer(index, candidate.trie.children.values(), 1.0, 1)
    best, best_rate = 0, gained / cost(tokens)
    while frontier and len(taken) < max_nodes:
        negative, _, depth, index, node = heapq.heappop(frontier)
        if in_use[index] >= candidates[index].max_nodes:
            continue
        in_use[index] += 1
        taken.append((index, node))
        gained -= negative
        rate = gained / cost(tokens + len(taken))
        if rate >= best_rate or candidates[index].is_due(node):
            best, best_rate = len(taken), rate
        offer(index, node.children.values(), -negative, depth + 1)
    chosen: list[list[Node]] = [[] for _ in candidates]
    for index, node in taken[:best]:
        chosen[index].append(node)
    return chosen


def choose_nodes_slowly(
    candidates: Sequence[Candidate], max_nodes: int, gained: float, tokens: int, cost: Cost
) -> list[list[Node]]:
    """The twin: every node with its reach, sorted; every cut of that list tried."""
    ranked: list[tuple[float, int, Node]] = []
    for index, candidate in enumerate(candidates):
        own: list[tuple[float, Node]] = []
        pending = [(1.0, 1, candidate.trie.children)]
        while pending:
            before, depth, children = pending.pop()
            for rank, node in enumerate(list(children.values())[:MOST_SIBLINGS]):
                if depth <= candidate.max_depth:
                    reach = before * candidate.worth(node, depth, rank)
                    own.append((reach, node))
                    pending.append((reach, depth + 1, node.children))
        own.sort(key=lambda each: (-each[0], each[1].position))
        ranked += [(reach, index, node) for reach, node in own[: candidate.max_nodes]]
    ranked.sort(key=lambda each: (-each[0], each[2].position))
    rates = [
        (gained + sum(reach for reach, _, _ in ranked[:size])) / cost(tokens + size)
        for size in range(min(max_nodes, len(ranked)) + 1)
    ]
    due = [size for size, (_, index, node) in enumerate(ranked, 1) if candidates[index].is_due(node)]
    least = max((size for size in due if size < len(rates)), default=0)
    best = max(range(least, len(rates)), key=lambda size: (rates[size], size))
    chosen: list[list[Node]] = [[] for _ in candidates]
    for _, index, node in ranked[:best]:
        chosen[index].append(node)
    return chosen
