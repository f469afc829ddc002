"""The verifier's end of `interleaved`: a real `Session` with its trie; the target is a hash of the prefix.

Must not know: the device's engine. Frames down are kept in a queue; what is lost of them is `interleaved`'s affair.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cloud_verifier.sessions import Session
from shared.hint_trie import Drop, Node
from shared.randomness import ids_digest
from shared.types import Commit, DownFrame, Hint, Limits, Open, Pace, Resume, SessionId

VOCABULARY = 6


def truth(prefix: Sequence[int]) -> int:
    """The id that the target writes after a prefix."""
    return zlib.crc32(bytes(prefix)) % VOCABULARY


def text_after(context: Sequence[int], count: int, stop_ids: Sequence[int]) -> list[int]:
    """The context, and what the target alone would write after it."""
    ids = list(context)
    while len(ids) < len(context) + count and (len(ids) == len(context) or ids[-1] not in stop_ids):
        ids.append(truth(ids))
    return ids


class Script:
    """Choices, one byte each; zeros when it is used up."""

    def __init__(self, choices: bytes) -> None:
        self._choices, self._at = choices, 0

    @property
    def is_over(self) -> bool:
        """True once every byte was used."""
        return self._at >= len(self._choices)

    def one_of(self, count: int) -> int:
        """A number below `count`."""
        self._at += 1
        return 0 if self._at > len(self._choices) else self._choices[self._at - 1] % count


class NoSlot:
    """A Slot without keys and values."""

    length = 0


class VerifierEnd:
    """One verifier, as one device sees it.

    `over_budget`: numbers of nodes that there was no room for, until a commit that says so has reached the device.
    """

    def __init__(self, limits: Limits, script: Script, seen: Counter[str]) -> None:
        self._limits, self._script, self._seen = limits, script, seen
        self._opened = 0
        self.down: deque[DownFrame] = deque()
        self.over_budget: set[int] = set()
        self._told: dict[int, set[int]] = {}
        self.session: Session

    def open(self, request: Open, now: float) -> None:
        """A session that no verifier has seen before; `request` may be continued."""
        self._opened += 1
        name = SessionId(self._opened.to_bytes(16, "big"))
        slot: Any = NoSlot()
        self.session = Session(name, request, 1, slot, self._limits, 1 << 20, b"", now)
        self.session.sink = self
        self.over_budget.clear()
        self.session.finish_if_ended()

    def resume(self, ids: list[int]) -> None:
        """The device is back with what it holds; it is told the rest."""
        session = self.session
        session.check_resume(Resume(session.id, session.opened_with.epoch, len(ids), ids_digest(ids)))
        session.sink = self
        self.down.extend(session.replay(len(ids)))

    def arrived(self, commit: Commit) -> None:
        """The device has this commit, and so knows of all that was over budget by then."""
        if commit.dropped_over_budget:
            self.over_budget -= self._told[commit.end]

    def send(self, frame: DownFrame) -> None:
        """See Sink."""
        self.down.append(frame)

    def end(self, error: Exception | None) -> None:
        """See Sink."""
        raise AssertionError("a verifier ended the stream")

    def take(self, frame: Hint | Pace, now: float) -> None:
        """A frame of the device has come. A hint that is refused raises, and fails the test."""
        session = self.session
        if isinstance(frame, Pace):
            session.set_pace(frame)
            return
        is_old, before = frame.epoch != session.opened_with.epoch, session.trie.highest_number
        fresh = session.hint(frame, self._script.one_of(12) != 11, now)
        if is_old:
            assert (fresh, session.trie.highest_number) == (0, before)
            return
        numbers = range(frame.first_node, frame.first_node + len(frame.ids))
        why: dict[int, Drop] = session.trie._dropped_names
        lost = {number for number in numbers if why.get(number) is Drop.OVER_BUDGET}
        self.over_budget = (self.over_budget - set(numbers)) | lost
        self._seen["over budget"] += bool(lost)
        self._seen["late hint"] += not fresh and not lost

    def step(self, now: float) -> None:
        """Decides as many ids as credit allows and the hints of so many positions foretell."""
        session = self.session
        if session.finished is not None or not session.credit:
            return
        depth = min(session.credit, (session.credit, 0, 1, 3)[self._script.one_of(4)])
        seen_node, wait_us = session.trie.highest_number, session.hint_wait_us(now)
        children: dict[int, Node] = session.trie.children
        tokens: list[int] = []
        accepted = 0
        while len(tokens) < session.credit and not (tokens and tokens[-1] in session.opened_with.stop_ids):
            tokens.append(truth([*session.ids, *tokens]))
            found = children.get(tokens[-1]) if len(tokens) <= depth else None
            if found is None:
                break
            accepted, children = accepted + 1, found.children
        start = session.length
        dropped = session.commit(tokens, accepted, [])
        self._told[session.length] = set(self.over_budget)
        session.timed_node, session.idle_since = seen_node, now
        commit = Commit(session.opened_with.epoch, start, tuple(tokens), accepted, seen_node, step_us=100_000)
        self.send(replace(commit, dropped_over_budget=dropped[Drop.OVER_BUDGET], hint_wait_us=wait_us))
        session.finish_if_ended()
        self._seen["accepted"] += accepted
        self._seen["several at once"] += accepted > 1
