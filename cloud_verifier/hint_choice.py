"""Which hint nodes to verify in one step, over all its sessions: as many as bring most ids for the time they cost.

Must not know: models, wire, time. Called by `scheduler`. Under agreement and greedy a node's worth is the estimated
probability that the text reaches it; under the rejection rule it follows from its depth alone, since a choice by the
ids or their probabilities would bias the text (DESIGN section 3). `choose_nodes_slowly` is the readable twin.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from shared.hint_trie import HintTrie, Node

DEPTHS, RANKS = 8, 4
FIRST_CHILD_PROBABILITY = 0.8
OTHER_CHILD_PROBABILITY = 0.3
"""What an untold node is taken to be worth, until acceptance is measured."""
PRIOR_TRIES = 4.0
DECAY = 0.95


class Acceptance:
    """How often a session's hints were right, by depth and by rank among the alternatives."""

    def __init__(self) -> None:
        priors = [FIRST_CHILD_PROBABILITY] + [OTHER_CHILD_PROBABILITY] * (RANKS - 1)
        self._tries = [[PRIOR_TRIES] * RANKS for _ in range(DEPTHS)]
        self._right = [[prior * PRIOR_TRIES for prior in priors] for _ in range(DEPTHS)]

    def note(self, depth: int, rank: int, is_right: bool) -> None:
        """A node at `depth` (1: the next id) was judged after its parent had been accepted."""
        row, column = _cell(depth, rank)
        self._tries[row][column] = self._tries[row][column] * DECAY + 1
        self._right[row][column] = self._right[row][column] * DECAY + is_right

    def probability(self, depth: int, rank: int) -> float:
        """How likely such a node is accepted once its parent is."""
        row, column = _cell(depth, rank)
        return self._right[row][column] / self._tries[row][column]


def _cell(depth: int, rank: int) -> tuple[int, int]:
    return min(depth, DEPTHS) - 1, min(rank, RANKS - 1)


@dataclass(frozen=True)
class Candidate:
    """One session that could verify hints in this step, at most `max_nodes` and none deeper than `max_depth`."""

    trie: HintTrie
    acceptance: Acceptance
    max_depth: int
    max_nodes: int
    is_chain: bool


def worth(candidate: Candidate, node: Node, depth: int, rank: int) -> float:
    """The probability that a node is accepted once its parent is."""
    if node.probability is not None and not candidate.is_chain:
        return node.probability
    return candidate.acceptance.probability(depth, 0 if candidate.is_chain else rank)


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
            for rank, child in enumerate(children):
                value = reach * worth(candidate, child, depth, rank)
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
        if rate >= best_rate:
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
            for rank, node in enumerate(children.values()):
                if depth <= candidate.max_depth:
                    reach = before * worth(candidate, node, depth, rank)
                    own.append((reach, node))
                    pending.append((reach, depth + 1, node.children))
        own.sort(key=lambda each: (-each[0], each[1].position))
        ranked += [(reach, index, node) for reach, node in own[: candidate.max_nodes]]
    ranked.sort(key=lambda each: (-each[0], each[2].position))
    rates = [
        (gained + sum(reach for reach, _, _ in ranked[:size])) / cost(tokens + size)
        for size in range(min(max_nodes, len(ranked)) + 1)
    ]
    best = max(range(len(rates)), key=lambda size: (rates[size], size))
    chosen: list[list[Node]] = [[] for _ in candidates]
    for _, index, node in ranked[:best]:
        chosen[index].append(node)
    return chosen
