"""The bytes behind every token id, read from a tokenizer.json.

Must not know: the tokenizers library, models, the network. One blob and one offsets array, so that 150,000 ids cost a
phone about 2 MB. Called by the fingerprint on both sides and by the device's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import ModelLoadError

NORMAL, ADDED, SPECIAL, ABSENT = 0, 1, 2, 255
"""What an id is: of the model's own table, added, added and special, or not there (a hole or a padding row)."""

MAX_IDS = 1 << 24

TokenDecoder = Callable[[str], bytes]

# A tokenizer.json is mostly merges, which decoding does not need: cutting them out before parsing halves the time and
# the peak memory. A quote inside a JSON string is escaped and the table's values are numbers, so
# `"merges": [` can only be the key.
_MERGES = re.compile(
    rb'"merges"\s*:\s*\[(?:[^"\[\]]++|"(?:[^"\\]++|\\.)*+"|\[(?:[^"\[\]]++|"(?:[^"\\]++|\\.)*+")*+\])*+\]',
    re.DOTALL,
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The clean-up of the WordPiece decoder, in its order, applied token by token.
_WORDPIECE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Every id with its bytes and what it is; compare two by their fingerprints."""

    blob: bytes
    """The bytes of all ids, one after the other."""
    offsets: npt.NDArray[np.uint32]
    """Shape (size + 1,): id i owns blob[offsets[i]:offsets[i + 1]]."""
    flags: npt.NDArray[np.uint8]
    """Shape (size,): NORMAL, ADDED, SPECIAL or ABSENT."""
    drops_leading_space: bool = False
    """True where the tokenizer puts a space before the first word of a text and takes it away when decoding."""

    @classmethod
    def from_tokenizer_json(cls, path: Path | str) -> Vocabulary:
        """The vocabulary of a Hugging Face tokenizer.json.

        Raises: ModelLoadError when the file is missing or corrupt, or decodes in a way not known here (it is named).
        """
        try:
            raw = Path(path).read_bytes()
            spec = json.loads(_MERGES.sub(b'"merges":[]', raw, count=1))
            return _build(spec)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error.message}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{path}: not a tokenizer.json: {type(error).__name__}: {error}") from error

    @property
    def size(self) -> int:
        """The highest id that exists, plus one; padding rows beyond it do not count."""
        return len(self.flags)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of added special tokens, ascending."""
        return tuple(np.flatnonzero(self.flags == SPECIAL).tolist())

    def token_bytes(self, token_id: int) -> bytes | None:
        """What this id adds to the text; None for a hole, a padding row or an id out of range."""
        if not 0 <= token_id < len(self.flags) or self.flags[token_id] == ABSENT:
            return None
        return self.blob[self.offsets[token_id] : self.offsets[token_id + 1]]

    def is_special(self, token_id: int) -> bool:
        """True for added special tokens (turn markers, end of text), which give no text."""
        return 0 <= token_id < len(self.flags) and bool(self.flags[token_id] == SPECIAL)

    def valid_mask(self, n: int) -> npt.NDArray[np.bool_]:
        """True where an id exists, for a row of logits. Shape (n,): n is the model's width, padding rows included."""
        mask = np.zeros(n, dtype=np.bool_)
        kept = min(n, self.size)
        mask[:kept] = self.flags[:kept] != ABSENT
        return mask


def _build(spec: Mapping[str, Any]) -> Vocabulary:
    decode, drops_leading_space = _token_decoder(spec)
    tokens, flags = _rows(spec)
    blob = bytearray()
    offsets = np.zeros(len(tokens) + 1, dtype=np.uint32)
    for token_id, token in enumerate(tokens):
        if token is not None:
            blob += decode(token)
        offsets[token_id + 1] = len(blob)
    return Vocabulary(bytes(blob), offsets, flags, drops_leading_space)


def _rows(spec: Mapping[str, Any]) -> tuple[list[str | None], npt.NDArray[np.uint8]]:
    """The token of each id (None: absent) and its flag, without absent ids at the end."""
    table = spec["model"]["vocab"]
    added = spec.get("added_tokens") or []
    ids = [token_id for _, token_id in _own_tokens(table)] + [entry["id"] for entry in added]
    if ids and not 0 <= min(ids) <= max(ids) < MAX_IDS:
        raise ModelLoadError(f"token ids must be from 0 to {MAX_IDS - 1}, found {min(ids)} to {max(ids)}")
    size = max(ids, default=-1) + 1
    tokens: list[str | None] = [None] * size
    flags = np.full(size, ABSENT, dtype=np.uint8)
    for token, token_id in _own_tokens(table):
        tokens[token_id] = token
        flags[token_id] = NORMAL
    for entry in added:
        tokens[entry["id"]] = entry["content"]
        flags[entry["id"]] = SPECIAL if entry.get("special") else ADDED
    return tokens, flags


def _own_tokens(table: Mapping[str, int] | list[tuple[str, float]]) -> Iterator[tuple[str, int]]:
    """The model's own tokens with their ids, without padding rows; Unigram lists (token, score) in the order of ids."""
    if isinstance(table, Mapping):
        pairs: Iterable[tuple[str, int]] = table.items()
    else:
        pairs = ((entry[0], token_id) for token_id, entry in enumerate(table))
    return ((token, token_id) for token, token_id in pairs if not _is_padding_row(token, token_id))


def _is_padding_row(token: str, token_id: int) -> bool:
    """True for rows that the conversion from or to GGUF invents to fill the embedding: `[PAD<id>]`, named by own id."""
    return token.startswith("[PAD") and token == f"[PAD{token_id}]"


def _token_decoder(spec: Mapping[str, Any]) -> tuple[TokenDecoder, bool]:
    """How a token's string becomes bytes, and whether a text's first space is dropped."""
    steps = list(_flat(spec.get("decoder"), "decoders")) or list(_implied_steps(spec))
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level, False
    if kinds == {"WordPiece"}:
        return _word_piece(steps[0].get("prefix", "##"), bool(steps[0].get("cleanup", True))), True
    if kinds and kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return _replacing(steps)
    raise ModelLoadError(f"unknown kind of token decoder: {' + '.join(sorted(kinds)) or spec['model'].get('type')}")


def _flat(node: Mapping[str, Any] | None, children: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder or pre-tokenizer, sequences opened."""
    if node is None:
        return
    if node["type"] == "Sequence":
        for child in node[children]:
            yield from _flat(child, children)
    else:
        yield node


def _implied_steps(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The decoder that the pre-tokenizer and the model call for, in a file that names none."""
    model = spec["model"]
    for step in _flat(spec.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] in ("ByteLevel", "Metaspace"):
            yield step
    if model.get("byte_fallback"):
        yield {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        yield {"type": "ByteFallback"}
    if model.get("type") == "WordPiece":
        yield {"type": "WordPiece", "prefix": model.get("continuing_subword_prefix", "##")}


def _byte_alphabet() -> dict[int, int]:
    """Character to byte of GPT-2's byte-level alphabet; other characters below its end map out of latin-1."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = dict.fromkeys(range(0x100), 0xFFFF)
    table.update((byte, byte) for byte in printable)
    table.update((0x100 + rank, byte) for rank, byte in enumerate(b for b in range(0x100) if b not in printable))
    return table


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """A token with any character outside the alphabet is text as it stands, as in the tokenizers library."""
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _word_piece(prefix: str, cleanup: bool) -> TokenDecoder:
    def decode(token: str) -> bytes:
        text = token[len(prefix) :] if token.startswith(prefix) else " " + token
        for old, new in _WORDPIECE_CLEANUP if cleanup else ():
            text = text.replace(old, new)
        return text.encode()

    return decode


def _replacing(steps: list[Mapping[str, Any]]) -> tuple[TokenDecoder, bool]:
    """▁ to space, `<0xE2>` to its byte: Llama 2, Gemma, Mistral, T5."""
    replacements: list[tuple[str, str]] = []
    drops_leading_space = False
    for step in steps:
        if step["type"] == "Replace":
            replacements.append((_plain_pattern(step), step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step.get("replacement", "▁"), " "))
            drops_leading_space |= step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Strip":
            drops_leading_space |= _strips_start(step, steps)
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)

    def decode(token: str) -> bytes:
        if has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return decode, drops_leading_space


def _plain_pattern(step: Mapping[str, Any]) -> str:
    pattern = step["pattern"].get("String")
    if not isinstance(pattern, str) or not pattern:
        raise ModelLoadError(f"unknown kind of token decoder: Replace with pattern {step['pattern']}")
    return pattern


def _strips_start(step: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> bool:
    """Only one blank at the start of the whole text can be taken away in a stream."""
    fused = "Fuse" in [earlier["type"] for earlier in steps[: steps.index(step)]]
    if (step["content"], step["start"], step["stop"], fused) != (" ", 1, 0, True):
        raise ModelLoadError(f"unknown kind of token decoder: {dict(step)}")
    return True
