"""Text to ids, by the model's own tokenizer.json. The only module that imports the tokenizers library.

Must not know: models, sessions, templates. Called by the client for prompts and by the chat template for its pieces.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from shared.errors import ModelLoadError
from shared.vocabulary import Vocabulary


@dataclass(frozen=True)
class SpecialLiteral:
    """A special token as it stands in text, with what it does to the text beside it."""

    token_id: int
    text: str
    lstrip: bool
    """Blanks before it belong to it."""
    rstrip: bool
    """Blanks after it belong to it."""
    single_word: bool
    """It counts only where no letter or digit touches it."""


class TextTokenizer:
    """The tokenizer of a model folder (tokenizer.json, and tokenizer_config.json where there is one); thread-safe."""

    def __init__(self, folder: Path | str) -> None:
        """Raises: ModelLoadError when a file is missing or corrupt."""
        self._path = Path(folder) / "tokenizer.json"
        self._config = _read_config(Path(folder) / "tokenizer_config.json")
        if not self._path.is_file():
            raise ModelLoadError(f"{self._path}: no such file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._path))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{self._path}: not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._first_piece_steps = list(_metaspace_first(self._tokenizer.pre_tokenizer))
        self._lock = threading.Lock()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every id."""
        return Vocabulary.from_tokenizer_json(self._path)

    @cached_property
    def special_literals(self) -> tuple[SpecialLiteral, ...]:
        """Every special token that text could spell out."""
        return tuple(
            SpecialLiteral(token_id, token.content, token.lstrip, token.rstrip, token.single_word)
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        )

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The named tokens of tokenizer_config.json (`bos_token`, `eos_token`, …), as a chat template wants them."""
        named = {name: _token_text(value) for name, value in self._config.items() if name.endswith("_token")}
        return {name: text for name, text in named.items() if text is not None}

    @cached_property
    def bos_id(self) -> int | None:
        """The id of `bos_token`; None where the model has none."""
        text = self.special_tokens.get("bos_token")
        return None if text is None else self._tokenizer.token_to_id(text)

    def encode(self, text: str, *, parse_special: bool = False, at_start: bool = True) -> list[int]:
        """The ids of a text, with nothing added before or after.

        Special tokens spelt out in it are plain text unless `parse_special`. `at_start` False: the text goes on after
        other ids, so a tokenizer that puts a space before the first word of a text does not do so here.
        """
        with self._lock:
            self._tokenizer.encode_special_tokens = not parse_special
            try:
                for step in self._first_piece_steps:
                    step.prepend_scheme = "first" if at_start else "never"
                ids: list[int] = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False).ids
            finally:
                for step in self._first_piece_steps:
                    step.prepend_scheme = "first"
        return ids

    def encode_prompt(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The ids of a raw prompt: as `encode`, after one BOS where the model wants it, and never two."""
        ids = self.encode(text, parse_special=parse_special)
        bos_id = self.bos_id
        if bos_id is None or not self._adds_bos or ids[:1] == [bos_id]:
            return ids
        return [bos_id, *ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The library's own decoding, all at once: the slow reference for `text.Detokenizer`."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    @cached_property
    def _adds_bos(self) -> bool:
        """What `add_bos_token` says; where it is silent (Llama 3), whether the post-processor starts with BOS."""
        stated = self._config.get("add_bos_token")
        if stated is not None:
            return bool(stated)
        return bool(self._tokenizer.encode("", add_special_tokens=True).ids[:1] == [self.bos_id])


def without_surrogates(text: str) -> str:
    """The text as UTF-8 can hold it: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return config


def _token_text(value: object) -> str | None:
    """A token is written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _metaspace_first(step: Any) -> Iterator[Any]:
    """The steps that put ▁ before the first piece of a text only; the library lets that be switched in place."""
    if isinstance(step, pre_tokenizers.Sequence):
        parts: Any = step  # iterable, though its stub does not say so
        for part in parts:
            yield from _metaspace_first(part)
    elif isinstance(step, pre_tokenizers.Metaspace) and step.prepend_scheme == "first":
        yield step
