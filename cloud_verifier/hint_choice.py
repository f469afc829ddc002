"""Which hint nodes to verify in one step, over all its sessions: those that bring more ids than they cost time.

Must not know: models, wire, time. Called by `scheduler`. Under agreement and greedy a node's worth is the estimated
probability that the text reaches it; under the rejection rule it follows from its depth alone, since a choice by the
ids or their probabilities would bias the text (DESIGN section 3). `choose_nodes_slowly` is the readable twin.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
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


def choose_nodes(
    candidates: Sequence[Candidate], max_nodes: int, gained: float, tokens: int, token_share: float
) -> list[list[Node]]:
    """The nodes to verify for each candidate, parents before children, at most `max_nodes` in all.

    Without hints the step would bring `gained` ids from `tokens` tokens. The likeliest node is taken next, as long as
    what it brings for its time is not less than what the step so far brings for its own: so a full batch takes fewer.
    `token_share`: what a token costs, as a share of an empty step.
    """
    tie = count()
    chosen: list[list[Node]] = [[] for _ in candidates]
    frontier: list[tuple[float, int, int, int, Node]] = []

    def offer(index: int, children: Iterable[Node], reach: float, depth: int) -> None:
        candidate = candidates[index]
        if depth <= candidate.max_depth:
            for rank, child in enumerate(children):
                value = reach * worth(candidate, child, depth, rank)
                heapq.heappush(frontier, (-value, next(tie), depth, index, child))

    for index, candidate in enumerate(candidates):
        offer(index, candidate.trie.children.values(), 1.0, 1)
    cost = 1 + tokens * token_share
    for _ in range(max_nodes):
        while frontier and len(chosen[frontier[0][3]]) >= candidates[frontier[0][3]].max_nodes:
            heapq.heappop(frontier)
        if not frontier or not pays(-frontier[0][0], gained, cost, token_share):
            break
        negative, _, depth, index, node = heapq.heappop(frontier)
        chosen[index].append(node)
        gained, cost = gained - negative, cost + token_share
        offer(index, node.children.values(), -negative, depth + 1)
    return chosen


def pays(reach: float, gained: float, cost: float, token_share: float) -> bool:
    """Whether one more node brings at least as many ids for its time as the step so far."""
    return reach * cost >= gained * token_share


def choose_nodes_slowly(
    candidates: Sequence[Candidate], max_nodes: int, gained: float, tokens: int, token_share: float
) -> list[list[Node]]:
    """The twin: each round looks at every node whose parent is chosen, and takes the best."""
    chosen: list[list[Node]] = [[] for _ in candidates]
    reach: dict[int, float] = {}
    cost = 1 + tokens * token_share
    for _ in range(max_nodes):
        best: tuple[float, int, Node] | None = None
        for index, candidate in enumerate(candidates):
            if len(chosen[index]) >= candidate.max_nodes:
                continue
            parents: list[Node | None] = [None, *chosen[index]]
            for parent in parents:
                children = candidate.trie.children if parent is None else parent.children
                depth = 1 if parent is None else len(parent.path()) + 1
                for rank, node in enumerate(children.values()):
                    before = 1.0 if parent is None else reach[id(parent)]
                    value = before * worth(candidate, node, depth, rank)
                    is_open = depth <= candidate.max_depth and id(node) not in reach
                    if is_open and (best is None or value > best[0]):
                        best = (value, index, node)
        if best is None or not pays(best[0], gained, cost, token_share):
            break
        value, index, node = best
        chosen[index].append(node)
        reach[id(node)] = value
        gained, cost = gained + value, cost + token_share
    return chosen
