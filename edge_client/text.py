"""Committed ids to final text: whole characters only, and nothing of a stop string.

Must not know: models, sessions, the tokenizers library. Called by the generation loop, once per commit.

The space at the start: tokenizers with ▁ put a space before the first word of a text and take one away when they
decode a whole text. Ids that go on after a prompt keep their space; `at_text_start=True` drops one, as SentencePiece.
Invalid bytes become U+FFFD as in Python's `bytes.decode(errors="replace")`, whatever the tokenizer.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.errors import ConfigError
from shared.vocabulary import Vocabulary


class Detokenizer:
    """Ids in, final text out; joined, its pieces are the one-shot decoding of all bytes. Constant cost per id."""

    def __init__(self, vocabulary: Vocabulary, *, keep_special: bool = False, at_text_start: bool = False) -> None:
        """`keep_special`: special tokens give their own text, instead of none."""
        self._vocabulary = vocabulary
        self._keep_special = keep_special
        self._drop_space = at_text_start and vocabulary.drops_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now; bytes of an unfinished character wait. Ids that do not exist give nothing."""
        data = b"".join(self._bytes(token_id) for token_id in ids)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def twin(self) -> Detokenizer:
        """Another that stands where this one does; what it is given changes nothing here."""
        twin = copy.copy(self)
        twin._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        twin._decoder.setstate(self._decoder.getstate())
        return twin

    def finish(self) -> str:
        """U+FFFD for a character that was never finished, once; mostly nothing."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if not self._keep_special and self._vocabulary.is_special(token_id):
            return b""
        return self._vocabulary.token_bytes(token_id) or b""


class StopStrings:
    """Finds the first stop string in a stream of text and lets none of its characters through.

    The stop that completes first wins; of those that complete at the same character, the longest. The text ends where
    that stop begins. What could still become a stop is held back. How the text is cut into pieces does not matter.
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        """Raises: ConfigError for an empty stop or one that is not a string."""
        stops = [stops] if isinstance(stops, str) else list(stops)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ConfigError(f"stop: must be a string of at least one character, not {stop!r}", field="stop")
        self._matchers = [_StopMatcher(stop) for stop in stops]
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop that ended it; after a stop nothing is shown any more."""
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        for index in range(len(self._held), len(text)):
            completed = self._step(text[index])
            if completed:
                self._matched, self._held = completed, ""
                return text[: index + 1 - len(completed)], completed
        safe = len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """The rest of the text, when no stop came."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, character: str) -> str:
        """The longest stop that this character completes, or an empty string."""
        completed = [matcher.stop for matcher in self._matchers if matcher.step(character)]
        return max(completed, key=len, default="")


class _StopMatcher:
    """One stop string. Source: Knuth, Morris and Pratt, Fast pattern matching in strings (1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """How many characters of the stop the text ends with."""
        self._shorter = _borders(stop)

    def step(self, character: str) -> bool:
        """True when this character completes the stop; not to be called after that."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders


class TextDelta(NamedTuple):
    """What some ids added to the text."""

    text: str
    """Final: never taken back."""
    stop_matched: str | None
    """The stop string that ended the text."""
    tokens_used: int
    """How many of the ids count, the one that completed the stop included; all when there was none."""


class TextStream:
    """Committed ids in, text to show out, up to the first stop string."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: str | Sequence[str] = (),
        *,
        keep_special: bool = False,
        at_text_start: bool = False,
    ) -> None:
        """Raises: ConfigError for an empty stop."""
        self._detokenizer = Detokenizer(vocabulary, keep_special=keep_special, at_text_start=at_text_start)
        self._stops = StopStrings(stops)
        self._stopped: str | None = None

    def push(self, ids: Sequence[int]) -> TextDelta:
        """The text that these ids made final. After a stop: no text, and none of the ids used."""
        if self._stopped is not None:
            return TextDelta("", self._stopped, 0)
        shown: list[str] = []
        for used, token_id in enumerate(ids, start=1):
            text, self._stopped = self._stops.push(self._detokenizer.push((token_id,)))
            shown.append(text)
            if self._stopped is not None:
                return TextDelta("".join(shown), self._stopped, used)
        return TextDelta("".join(shown), None, len(ids))

    def preview(self, ids: Sequence[int]) -> str:
        """The text that would follow what was shown if these ids came, up to a stop; nothing changes."""
        twin = copy.copy(self)
        twin._detokenizer, twin._stops = self._detokenizer.twin(), copy.deepcopy(self._stops)
        return twin.push(ids).text + twin._stops.finish()

    def finish(self) -> TextDelta:
        """What was held back, once: an unfinished character as U+FFFD (which may complete a stop), a false start."""
        if self._stopped is not None:
            return TextDelta("", self._stopped, 0)
        text, self._stopped = self._stops.push(self._detokenizer.finish())
        return TextDelta(text + self._stops.finish(), self._stopped, 0)
