"""A drafter without a model: it proposes what followed where the text stood as it stands now.

Must not know: wire, verifier, onnxruntime, files. Called by `edge_engine`, in the event loop.
It looks in the session's own ids and in what the user accepted before; a proposal costs well under a millisecond.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from edge_client.drafter import Budget, DraftTask, HintTree
from edge_client.suffix_index import MAX_MATCH, Continuation, SuffixIndex
from edge_client.user_text import UserText

SESSION_SHORTEST = 2
"""Shortest match that counts in the session's ids. What followed a match of one id was mostly wrong."""
USER_SHORTEST = 3
"""The same for the user's text, which is larger and of many subjects."""
MOST_PLACES = 16
"""Places that have a say, of either source."""
FADING = 0.6
"""What a place weighs for each id that its match is shorter than the longest."""


class RetrievalDrafter:
    """Continuations of the best earlier matches, merged in one tree."""

    name = "retrieval"

    def __init__(self, user_text: UserText | None = None) -> None:
        """`user_text` may be shared by many drafters; None: the session's own ids only."""
        self._user_text = user_text
        self._index = SuffixIndex()
        self._task: DraftTask | None = None

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""
        self._task = task

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter. Costs a comparison, and little for each id that is new."""
        common = self._index.common_length(ids)
        self._index.truncate(common)
        self._index.extend(ids[common:])

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter. At most depth x width ids, those likeliest to be reached; nothing under the rejection rule."""
        assert self._task is not None, "begin() comes first"
        if budget.depth <= 0 or budget.width <= 0 or not self._may_go_on(self._task, budget.path):
            return HintTree()
        tail = [*self._index.ids(max(0, self._index.end - MAX_MATCH), self._index.end), *budget.path][-MAX_MATCH:]
        found = self._from_session(tail, budget)
        if self._user_text is not None:
            found += self._user_text.find(tail, budget.depth, USER_SHORTEST, MOST_PLACES)
        return grown([_until_stop(each, self._task.stop_ids) for each in found], budget)

    def _may_go_on(self, task: DraftTask, path: tuple[int, ...]) -> bool:
        """False where nothing may follow, and under the rejection rule, which judges by the rows of a distribution."""
        if task.is_chain:
            return False
        last = self._index.ids(max(task.generated_from, self._index.end - 1), self._index.end)
        return task.stop_ids.isdisjoint((*last, *path))

    def _from_session(self, tail: list[int], budget: Budget) -> list[Continuation]:
        found: list[Continuation] = []
        for place in self._index.find(tail, SESSION_SHORTEST, MOST_PLACES):
            ids = self._index.ids(place.position, place.position + budget.depth)
            if len(ids) < budget.depth:  # it runs into the end: the text repeats itself, and goes on to
                ids += budget.path
                ids = [ids[index % len(ids)] for index in range(budget.depth)]
            found.append(Continuation(place.length, tuple(ids)))
        return found


def _until_stop(continuation: Continuation, stop_ids: frozenset[int]) -> Continuation:
    """Without what stands beyond a stop id."""
    for index, token in enumerate(continuation.ids):
        if token in stop_ids:
            return Continuation(continuation.length, continuation.ids[: index + 1])
    return continuation


# ---------------------------------------------------------------- the tree


def grown(continuations: list[Continuation], budget: Budget) -> HintTree:
    """One tree of all continuations: always takes the id next that is likeliest to be reached, until it is full."""
    ids: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    count = 0
    heap: list[tuple[float, int, int, int, float, list[Continuation], int]] = []
    above, reach, members, depth = -1, 1.0, continuations, 0
    while len(ids) < budget.depth * budget.width:
        if depth < budget.depth:
            for token, chance, supporters in branches(members, depth, budget.width):
                heapq.heappush(heap, (-reach * chance, count, above, token, chance, supporters, depth + 1))
                count += 1
        if not heap:
            break
        negative, _, parent, token, chance, members, depth = heapq.heappop(heap)
        above, reach = len(ids), -negative
        ids.append(token)
        parents.append(parent)
        confidence.append(chance)
    return HintTree(tuple(ids), tuple(parents), tuple(confidence))


def branches(members: list[Continuation], depth: int, width: int) -> list[tuple[int, float, list[Continuation]]]:
    """The likeliest ids at this depth of the continuations, each with its probability and those that say so.

    What all of them have foretold so far is taken to be right, so their matches are longer by the depth. A place weighs
    `odds` of its match, less if others match longer; not following any place weighs as much as there are ids proposed.
    """
    heard = [each for each in members if len(each.ids) > depth]
    longest = max((each.length for each in heard), default=0)
    supporters: dict[int, list[Continuation]] = {}
    weights: dict[int, float] = {}
    for each in heard:
        token = each.ids[depth]
        supporters.setdefault(token, []).append(each)
        weight = odds(each.length + depth) * FADING ** (longest - each.length)
        weights[token] = weights.get(token, 0.0) + weight
    total = sum(weights.values()) + len(weights)
    ranked = sorted(weights, key=lambda token: -weights[token])[:width]  # ties: the longest match, then the newest
    return [(token, weights[token] / total, supporters[token]) for token in ranked]


def odds(length: int) -> float:
    """How often the only place with a match of this length was right, over how often wrong.

    Fitted by eye to recorded texts of Qwen2.5-Coder-1.5B (bench/recorded); the calibration learns what is off.
    """
    return length / 2 * (1 + (length / 12) ** 2)
