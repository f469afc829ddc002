"""The hint trie: what a verifier knows of where a session's text may go, merged from hints, re-rooted by commits.

Must not know: wire, models, time. Owned by a session (`cloud_verifier/sessions.py`), read by the hint choice.
Invariants (checked by `check_integrity`): every live node stands after the committed ids; every name points to a live
node or to a committed position; under `is_chain` no node has two children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shared.rejection import QRow
from shared.types import Hint

MAX_ALIASES = 16
"""Numbers that one node may bear: a device that renames for ever costs nothing more."""


class Drop(Enum):
    """Why a hint node was not kept."""

    LATE = "late"
    DISAGREEING = "disagreeing"
    OVER_BUDGET = "over_budget"


@dataclass(eq=False)
class Node:
    """One hinted id at one position, with its alternatives' continuations below."""

    token: int
    position: int
    numbers: list[int]
    probability: float | None = None
    row: QRow | None = None
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)

    def path(self) -> list[int]:
        """The ids from the root to this node."""
        ids: list[int] = []
        node: Node | None = self
        while node is not None:
            ids.append(node.token)
            node = node.parent
        return ids[::-1]

    def walk(self) -> Iterator[Node]:
        """This node and all below, parents first."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())


Anchor = Node | int
"""Where a new node would stand: below a live node, or at a committed position (an int)."""


class HintTrie:
    """Hints of one epoch. Losing any of it costs time, never correctness."""

    def __init__(self, committed_length: int, max_held: int, remembered: int, is_chain: bool = False) -> None:
        """`max_held` nodes at most; `remembered` names of committed nodes; `is_chain` for the rejection rule."""
        self.committed_length = committed_length
        self.children: dict[int, Node] = {}
        self.held = 0
        self.highest_number = 0
        self.dropped = dict.fromkeys(Drop, 0)
        self._max_held = max_held
        self._remembered = remembered
        self._is_chain = is_chain
        self._names: dict[int, Anchor] = {}
        self._committed_names: dict[int, None] = {}
        self._dropped_names: dict[int, Drop] = {}

    # ------------------------------------------------------------ hints in

    def insert(self, hint: Hint, committed: Sequence[int]) -> int:
        """Merges a hint; returns how many nodes are new. `committed` is the whole committed sequence.

        Nodes that agree with committed ids are skipped; those that disagree or hang on unknown nodes are dropped.
        """
        held_before = self.held
        base = self._base(hint)
        for index, token in enumerate(hint.ids):
            number = hint.first_node + index
            delta = hint.parents[index] if hint.parents else (1 if index else 0)
            anchor = base if delta == 0 else self._find(number - delta)
            if number not in self._names:  # a duplicate is a no-op
                self._dropped_names.pop(number, None)
                self._place(number, token, anchor, hint, index, committed)
            self.highest_number = max(self.highest_number, number)
        return self.held - held_before

    def refuse(self, hint: Hint) -> None:
        """Takes no node of a hint: all that are not known are dropped as over budget."""
        for number in range(hint.first_node, hint.first_node + len(hint.ids)):
            if number not in self._names:
                self._drop(number, Drop.OVER_BUDGET)
            self.highest_number = max(self.highest_number, number)

    def _base(self, hint: Hint) -> Anchor | Drop:
        return self._find(hint.base_node) if hint.base_node else hint.base_position

    def _find(self, number: int) -> Anchor | Drop:
        return self._names.get(number) or self._dropped_names.get(number, Drop.DISAGREEING)

    def _place(
        self, number: int, token: int, anchor: Anchor | Drop, hint: Hint, index: int, committed: Sequence[int]
    ) -> None:
        if isinstance(anchor, Drop):
            self._drop(number, anchor)
        elif isinstance(anchor, Node):
            self._hang(number, token, anchor, anchor.children, hint, index)
        elif anchor == self.committed_length:
            self._hang(number, token, None, self.children, hint, index)
        elif anchor < self.committed_length and committed[anchor] == token:
            self.dropped[Drop.LATE] += 1
            self._remember_committed(number, anchor + 1)
        else:
            self._drop(number, Drop.DISAGREEING)

    def _hang(
        self, number: int, token: int, parent: Node | None, siblings: dict[int, Node], hint: Hint, index: int
    ) -> None:
        known = siblings.get(token)
        if known is not None and len(known.numbers) < MAX_ALIASES:
            known.numbers.append(number)
            self._names[number] = known
        elif known is not None:
            self._drop(number, Drop.OVER_BUDGET)
        elif self._is_chain and siblings:
            self._drop(number, Drop.DISAGREEING)
        elif self.held >= self._max_held:
            self._drop(number, Drop.OVER_BUDGET)
        else:
            siblings[token] = self._names[number] = Node(
                token=token,
                position=parent.position + 1 if parent else self.committed_length,
                numbers=[number],
                probability=hint.confidence[index] if hint.confidence else None,
                row=hint.rows[index] if hint.rows else None,
                parent=parent,
            )
            self.held += 1

    def _drop(self, number: int, why: Drop) -> None:
        self.dropped[why] += 1
        self._dropped_names[number] = why
        _trim(self._dropped_names, self._remembered)

    def _remember_committed(self, number: int, next_position: int) -> None:
        self._names[number] = next_position
        self._committed_names[number] = None
        if len(self._committed_names) > self._remembered:
            oldest = next(iter(self._committed_names))
            del self._committed_names[oldest], self._names[oldest]

    # ------------------------------------------------------------ commits

    def advance(self, ids: Sequence[int]) -> None:
        """The verifier committed `ids`: what agrees moves up, what disagrees goes."""
        for token in ids:
            survivor = self.children.pop(token, None)
            for loser in self.children.values():
                self._prune(loser)
            self.committed_length += 1
            self.children = survivor.children if survivor else {}
            if survivor is None:
                continue
            self.held -= 1
            for number in survivor.numbers:
                self._remember_committed(number, self.committed_length)
            for child in self.children.values():
                child.parent = None

    def _prune(self, node: Node) -> None:
        for lost in node.walk():
            self.held -= 1
            for number in lost.numbers:
                del self._names[number]
                self._drop(number, Drop.DISAGREEING)

    def take_dropped(self) -> dict[Drop, int]:
        """Counts since the last call, for the next Commit."""
        counts, self.dropped = self.dropped, dict.fromkeys(Drop, 0)
        return counts

    # ------------------------------------------------------------ reading

    def nodes(self) -> Iterator[Node]:
        """All live nodes, parents first."""
        for child in self.children.values():
            yield from child.walk()

    def check_integrity(self) -> None:
        """Asserts the invariants at the top of this file."""
        live = {id(node) for node in self.nodes()}
        assert len(live) == self.held <= self._max_held
        for node in self.nodes():
            assert node.position == (node.parent.position + 1 if node.parent else self.committed_length)
            assert not self._is_chain or len(node.children) <= 1
            assert all(self._names[number] is node for number in node.numbers)
        for number, anchor in self._names.items():
            committed = isinstance(anchor, int) and anchor <= self.committed_length
            assert committed == (number in self._committed_names)
            assert isinstance(anchor, int) or id(anchor) in live


def _trim(names: dict[int, Drop], limit: int) -> None:
    if len(names) > limit:
        del names[next(iter(names))]
