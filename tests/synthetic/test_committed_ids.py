"""C15, on the device: ids of the prompt and of commits stay ids; none is made anew from the text they stand for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest

from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.drafter import Budget, DraftTask, HintTree
from edge_client.events import Result
from edge_client.tokenizer import TextTokenizer
from edge_client.transport import Traffic
from shared.errors import SessionNotFound, TransportError
from shared.fingerprint import fingerprint
from shared.randomness import ids_digest, short_digest
from shared.sampling import GREEDY
from shared.types import (
    Commit,
    DownFrame,
    Epoch,
    Finished,
    Hint,
    Limits,
    ModelCard,
    Open,
    Opened,
    PaceKind,
    Reason,
    Resume,
    SessionId,
    UpFrame,
)

EPOCH = Epoch(0)
TEXTS = ["你好，世界。", "🙂👩‍👩‍👧 then 你好", "if x:\n        return  1\n", "the quick brown fox", "e\u0301 the\u200b"]


class Recording:
    """Proposes nothing sensible; keeps what it was synced to."""

    name = "recording"

    def __init__(self) -> None:
        self.synced: list[tuple[int, ...]] = []

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""
        self.synced.append(tuple(ids))

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        return HintTree((70,), (-1,), (0.9,))


class Scripted:
    """A transport whose verifier commits `answer` id by id, each after a hint, and is cut off in the middle."""

    def __init__(self, tokenizer: TextTokenizer, answer: Sequence[int]) -> None:
        self.tokenizer, self.answer, self.cut_at = tokenizer, list(answer), len(answer) // 2
        self.streams: list[Stream] = []
        self.length = 0

    async def describe(self) -> ModelCard:
        """See Transport."""
        mark = fingerprint(self.tokenizer.vocabulary)
        return ModelCard("scripted", bytes(32), mark.digest, tuple(mark.to_wire()), 300, 512, Limits())

    async def connect(self, traffic: Traffic) -> Stream:
        """See Transport."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    async def close(self) -> None:
        """See Transport."""


class Stream:
    """The first stream is cut in mid text, the second knows nothing of the session, the third writes to the end."""

    def __init__(self, verifier: Scripted) -> None:
        self.verifier, self.number = verifier, len(verifier.streams)
        self.sent: list[UpFrame] = []
        self.answers: deque[DownFrame | Exception | None] = deque()
        self.has_more = asyncio.Event()

    async def send(self, frame: UpFrame) -> None:
        """See Connection."""
        self.sent.append(frame)
        if isinstance(frame, Resume):
            self._give(SessionNotFound("gone"))
        elif isinstance(frame, Open):
            self.verifier.length = len(frame.ids)
            self._give(
                Opened(SessionId(b"s" * 16), 9, EPOCH, frame.generated_from, len(frame.ids), 1, bytes(32), Limits())
            )
        elif isinstance(frame, Hint):
            self._commit(frame)

    def _commit(self, hint: Hint) -> None:
        verifier = self.verifier
        if not verifier.answer:
            return
        token = verifier.answer.pop(0)
        seen = hint.first_node + len(hint.ids) - 1
        self._give(Commit(EPOCH, verifier.length, (token,), 0, seen_node=seen))
        verifier.length += 1
        if self.number == 0 and len(verifier.answer) <= verifier.cut_at:
            self._give(TransportError("cut"))
        elif not verifier.answer:
            self._give(Finished(EPOCH, Reason.LENGTH))
            self._give(None)

    def _give(self, answer: DownFrame | Exception | None) -> None:
        self.answers.append(answer)
        self.has_more.set()

    async def receive(self) -> DownFrame | None:
        """See Connection."""
        while not self.answers:
            self.has_more.clear()
            await self.has_more.wait()
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        """See Connection."""


def ids_of_single_bytes(tokenizer: TextTokenizer, text: str) -> list[int]:
    """The text in as many ids as it has bytes: what a model may well write, and `encode` never gives."""
    vocabulary = tokenizer.vocabulary
    of_byte = {
        value: token for token in reversed(range(300)) if len(value := vocabulary.token_bytes(token) or b"") == 1
    }
    return [of_byte[bytes([byte])] for byte in text.encode()]


async def written(
    tokenizer: TextTokenizer, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[Result, Scripted, Recording]:
    """One text, through a cut and a new session."""
    transport, drafter = Scripted(tokenizer, answer), Recording()
    config = ClientConfig(drafter="model", hint_tokens=1, hint_reach=0.0)
    async with asyncio.timeout(30):
        async with SpeculativeClient(config, transport=transport, drafter=drafter, tokenizer=tokenizer) as client:
            result = await client.generate(
                prompt, max_new_tokens=len(answer), sampling=GREEDY, stop_ids=(), pace=PaceKind.WAIT
            )
    return result, transport, drafter


@pytest.mark.parametrize("text", TEXTS)
async def test_what_the_device_holds_sends_and_drafts_from_are_the_ids_that_it_was_given(
    tiny_tokenizer: TextTokenizer, text: str
) -> None:
    """C15: a prompt and an answer in ids that encoding their text would not give, before and after a cut."""
    prompt, answer = ids_of_single_bytes(tiny_tokenizer, text[::-1]), ids_of_single_bytes(tiny_tokenizer, text)
    result, transport, drafter = await written(tiny_tokenizer, prompt, answer)
    assert result.text == text
    assert list(result.ids) == answer
    whole = (*prompt, *answer)
    assert tiny_tokenizer.encode(text) != answer, "the case that this is about"

    first, second, third = transport.streams
    committed = len(answer) - transport.cut_at
    assert isinstance(first.sent[0], Open)
    assert first.sent[0].ids == whole[: len(prompt)]
    assert isinstance(second.sent[0], Resume)
    assert second.sent[0].digest == ids_digest(whole[: len(prompt) + committed])
    assert isinstance(third.sent[0], Open)
    assert third.sent[0].ids == whole[: len(prompt) + committed]
    assert third.sent[0].generated_from == len(prompt)

    assert {len(ids) for ids in drafter.synced} >= set(range(len(prompt), len(whole))) - {len(prompt) + committed}
    assert all(ids == whole[: len(ids)] for ids in drafter.synced)
    hints = [frame for stream in transport.streams for frame in stream.sent if isinstance(frame, Hint)]
    bases = [hint for hint in hints if hint.base_digest is not None]
    assert len(bases) >= 2, "the first of each session"
    assert all(hint.base_digest == short_digest(whole[: hint.base_position]) for hint in bases)
