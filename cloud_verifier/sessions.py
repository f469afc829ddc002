"""A session: the committed ids (the truth), its hint trie, its sampling state and its credit.

Pure but for the KV slot that it holds. Must not know: wire messages, models, threads, clocks (time is handed in).
Changed by the worker's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cloud_verifier.hint_choice import Acceptance
from cloud_verifier.slot import Slot
from shared.errors import DraftwireError, PrefixMismatch, RemoteProtocolError
from shared.hint_trie import Drop, HintTrie
from shared.randomness import ids_digest, short_digest
from shared.sampling import Counts
from shared.types import (
    Commit,
    DownFrame,
    Finished,
    Hint,
    Limits,
    Open,
    Opened,
    Pace,
    Reason,
    Resume,
    SessionId,
    Usage,
)

MOST_TOLD_WAIT_US = 2**32 - 1


class Sink(Protocol):
    """Where a session's frames go while a stream is attached. Never blocks."""

    def send(self, frame: DownFrame) -> None:
        """Hands over one frame."""
        ...

    def end(self, error: DraftwireError | None) -> None:
        """No frame follows; the stream ends, with this error if one is given."""
        ...


@dataclass(eq=False)
class Session:
    """One epoch's truth. `ids` only ever grow; `slot.length` < len(ids) rows of it have keys and values."""

    id: SessionId
    opened_with: Open
    seed: int
    slot: Slot
    limits: Limits
    context_size: int
    target_id: bytes
    now: float
    ids: list[int] = field(init=False)
    trie: HintTrie = field(init=False)
    counts: Counts = field(init=False)
    sink: Sink | None = None
    finished: Finished | None = None
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        request = self.opened_with
        self.ids = list(request.ids)
        self.generated_from = request.generated_from
        self.pace, self.run_ahead, self.ack = request.pace, request.run_ahead, len(request.ids)
        self.counts = Counts.of(request.ids, request.generated_from)
        self.is_chain = request.is_chain
        self.trie = HintTrie(
            len(self.ids), self.limits.max_held_nodes, self.limits.remembered_nodes, is_chain=self.is_chain
        )
        self.usage = Usage(context_tokens=request.generated_from)
        self.accepted_flags: list[bool] = [False] * (len(self.ids) - self.generated_from)
        self.logprobs: list[float] = [0.0] * len(self.accepted_flags)
        self.principal, self.share_key = "", b""
        self.acceptance = Acceptance()
        self.reused_tokens = self.untried_steps = 0
        self.idle_since = self.now
        self.hint_lag_s: float | None = None
        self.timed_node = 0
        self._newest_hint_at: float | None = None
        self.runnable_since: float | None = None
        self.detached_at: float | None = None
        self.paused_since: float | None = None
        self.is_dropped = False
        self.is_base_unchecked = True

    # ------------------------------------------------------------ reading

    @property
    def length(self) -> int:
        """Committed length."""
        return len(self.ids)

    @property
    def end(self) -> int:
        """No id is committed at or past this position."""
        return min(self.generated_from + self.opened_with.max_new_tokens, self.context_size)

    @property
    def credit(self) -> int:
        """How many ids may be committed now: bounded by run_ahead past the last ack, and by the end."""
        return max(0, min(self.ack + self.run_ahead, self.end) - self.length)

    @property
    def is_at_work(self) -> bool:
        """True if a device is attached and ids may be committed now."""
        return self.finished is None and self.sink is not None and self.credit > 0

    @property
    def hint_expected_at(self) -> float | None:
        """When the next hint should come, going by the last ones; None if that is not known."""
        return None if self.hint_lag_s is None else self.idle_since + self.hint_lag_s

    def hint_wait_us(self, now: float) -> int | None:
        """How long ago the frame of the highest node number came.

        None if a commit has told that (it was for `timed_node`), and if it is not known or past what a commit can tell.
        """
        if self._newest_hint_at is None or self.trie.highest_number <= self.timed_node:
            return None
        wait_us = int(max(0.0, now - self._newest_hint_at) * 1e6)
        return wait_us if wait_us <= MOST_TOLD_WAIT_US else None

    @property
    def unfed(self) -> int:
        """Committed ids that have no keys and values yet; at least 1."""
        return self.length - self.slot.length

    def take_shared(self) -> None:
        """Takes what the KV pool has of the beginning of the text, if the slot is empty."""
        if not self.slot.length:
            self.reused_tokens = self.slot.adopt(self.ids)

    def opened(self, reused: int = 0) -> Opened:
        """What answers Open and Resume."""
        return Opened(
            session_id=self.id,
            seed=self.seed,
            epoch=self.opened_with.epoch,
            generated_from=self.generated_from,
            committed_length=self.length,
            next_node=self.trie.highest_number + 1,
            target_id=self.target_id,
            limits=self.limits,
            reused_tokens=reused,
        )

    def note_credit(self, now: float) -> None:
        """While there is no credit the wait for hints stands still: a pause is not idleness."""
        if self.credit == 0:
            self.paused_since = now if self.paused_since is None else self.paused_since
        elif self.paused_since is not None:
            self.idle_since += now - self.paused_since
            self.paused_since = None

    # ------------------------------------------------------------ frames in

    def note_hint(self, now: float) -> None:
        """A hint came after the session had none: how long after its last commit that was."""
        lag = max(0.0, now - self.idle_since)
        self.hint_lag_s = lag if self.hint_lag_s is None else 0.5 * self.hint_lag_s + 0.5 * lag

    def hint(self, frame: Hint, is_welcome: bool = True, received_at: float | None = None) -> int:
        """Merges a hint into the trie; returns how many nodes are new. Hints of other epochs are ignored.

        Of a hint that is not welcome (over its principal's rate) only the ack counts: its nodes are over budget.
        `received_at`: when the frame came in, in seconds; None if nobody is to be told how long it waited.

        Raises: RemoteProtocolError or PrefixMismatch; the session is unharmed.
        """
        if frame.epoch != self.opened_with.epoch or self.finished:
            return 0
        if self.is_chain != bool(frame.rows) and frame.ids:
            raise RemoteProtocolError(
                f"hint.rows must {'be given' if self.is_chain else 'be absent'} under this session's rule",
                field="hint.rows",
            )
        if self.is_chain and frame.parents:
            raise RemoteProtocolError("hint.parents: the rejection rule takes chains only", field="hint.parents")
        self._check_ack(frame.ack, "hint.ack")
        if frame.base_digest is not None and not frame.base_node and self.is_base_unchecked:
            self._check_base(frame.base_position, frame.base_digest)
        self.ack = max(self.ack, frame.ack)
        fresh, highest = 0, self.trie.highest_number
        if is_welcome:
            fresh = self.trie.insert(frame, self.ids)
        else:
            self.trie.refuse(frame)
        if self.trie.highest_number > highest:
            self._newest_hint_at = received_at
        self.usage = replace(self.usage, hint_nodes=self.usage.hint_nodes + len(frame.ids))
        return fresh

    def _check_base(self, position: int, digest: int) -> None:
        """Right once for each Opened is enough: hashing a long prefix is not to be had for the asking."""
        if position > self.length or short_digest(self.ids[:position]) != digest:
            raise PrefixMismatch(
                f"hint.base_digest: the ids before position {position} differ from the verifier's",
                field="hint.base_digest",
            )
        self.is_base_unchecked = False

    def set_pace(self, frame: Pace) -> None:
        """Changes pace and credit."""
        if frame.epoch == self.opened_with.epoch and self.finished is None:
            self._check_ack(frame.ack, "pace.ack")
            self.pace, self.run_ahead, self.ack = frame.pace, frame.run_ahead, max(self.ack, frame.ack)

    def _check_ack(self, ack: int, field: str) -> None:
        if ack > self.length:
            raise RemoteProtocolError(f"{field} {ack} is past the committed length {self.length}", field=field)

    # ------------------------------------------------------------ commits

    def commit(self, tokens: Sequence[int], accepted: int, logprobs: Sequence[float]) -> dict[Drop, int]:
        """Makes tokens final; the first `accepted` were hinted. Returns hint nodes dropped since the last commit."""
        for index, token in enumerate(tokens):
            self.ids.append(token)
            self.counts.add(token)
            self.accepted_flags.append(index < accepted)
        self.logprobs.extend(logprobs or [0.0] * len(tokens))
        self.trie.advance(tokens)
        self.usage = replace(
            self.usage,
            generated_tokens=len(self.ids) - self.generated_from,
            accepted_tokens=self.usage.accepted_tokens + accepted,
            steps=self.usage.steps + 1,
        )
        return self.trie.take_dropped()

    def finish(self, reason: Reason) -> Finished:
        """Closes the epoch."""
        self.finished = Finished(self.opened_with.epoch, reason, self.usage)
        return self.finished

    def finish_if_ended(self) -> None:
        """Closes the epoch if nothing may follow, and says so."""
        reason = self.ended_reason()
        if reason is not None and self.sink is not None:
            self.sink.send(self.finish(reason))

    def ended_reason(self) -> Reason | None:
        """Why nothing may follow the last committed id; None if something may."""
        if self.length > self.generated_from and self.ids[-1] in self.opened_with.stop_ids:
            return Reason.STOP_ID
        if self.length >= self.end:
            is_full = self.generated_from + self.opened_with.max_new_tokens > self.context_size
            return Reason.CONTEXT_FULL if is_full else Reason.LENGTH
        return None

    # ------------------------------------------------------------ resume

    def check_resume(self, frame: Resume) -> None:
        """Raises: PrefixMismatch if the device holds other ids than the verifier committed."""
        if frame.epoch != self.opened_with.epoch:
            raise PrefixMismatch(f"resume.epoch {frame.epoch} is not this session's", field="resume.epoch")
        if frame.have > self.length or ids_digest(self.ids[: frame.have]) != frame.digest:
            raise PrefixMismatch(
                f"resume.digest: the device's first {frame.have} ids differ from the verifier's", field="resume.digest"
            )

    def replay(self, have: int) -> list[DownFrame]:
        """Commits for the ids from `have` on, cut so that accepted ids come first in each; and Finished again."""
        self.ack, self.is_base_unchecked = max(self.ack, min(have, self.length)), True
        frames: list[DownFrame] = []
        start = max(have, self.generated_from)
        while start < self.length:
            stop = start
            while stop < self.length and self.accepted_flags[stop - self.generated_from]:
                stop += 1
            accepted, stop = stop - start, min(stop + 1, self.length)
            while stop < self.length and not self.accepted_flags[stop - self.generated_from]:
                stop += 1
            frames.append(self._replayed(start, stop, accepted))
            start = stop
        return frames + ([self.finished] if self.finished else [])

    def _replayed(self, start: int, stop: int, accepted: int) -> Commit:
        span = slice(start - self.generated_from, stop - self.generated_from)
        return Commit(
            epoch=self.opened_with.epoch,
            start=start,
            ids=tuple(self.ids[start:stop]),
            accepted=accepted,
            seen_node=self.trie.highest_number,
            logprobs=tuple(self.logprobs[span]) if self.opened_with.logprobs else (),
        )
