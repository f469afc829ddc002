"""What two vocabularies must share, as a few hundred bytes: a digest per 1,024 ids and the special ids.

Must not know: files, the wire's frames. Called by both sides before a session opens; a mismatch names its first ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

from shared.errors import ModelMismatch, RemoteProtocolError
from shared.vocabulary import ABSENT, ADDED, MAX_IDS, SPECIAL, Vocabulary

BLOCK_IDS = 1024
BLOCK_DIGEST_BYTES = 8
MAX_SPECIAL_IDS = 1 << 16


@dataclass(frozen=True)
class Fingerprint:
    """Equal for two vocabularies exactly when every id means the same bytes; padding rows and holes count as absent."""

    blocks: tuple[bytes, ...]
    """The digest of each block of 1,024 ids, 8 bytes each, up to the last block that holds an id."""
    special_ids: tuple[int, ...]
    """Ascending."""

    @property
    def digest(self) -> bytes:
        """32 bytes for the whole."""
        head, *blocks = self.to_wire()
        count = len(head).to_bytes(4, "little")
        return hashlib.sha256(b"draftwire.fingerprint.1\0" + count + head + b"".join(blocks)).digest()

    def to_wire(self) -> list[bytes]:
        """First the special ids as little-endian uint32, then the digest of each block."""
        return [np.array(self.special_ids, dtype="<u4").tobytes(), *self.blocks]

    @classmethod
    def from_wire(cls, parts: Sequence[bytes]) -> Fingerprint:
        """The reverse of `to_wire`.

        Raises: RemoteProtocolError when the parts are not a fingerprint.
        """
        if not parts:
            raise _bad("it is empty")
        head, *blocks = parts
        if len(head) % 4 or len(head) > 4 * MAX_SPECIAL_IDS:
            raise _bad(f"its special ids take {len(head)} bytes")
        if len(blocks) > MAX_IDS // BLOCK_IDS or any(len(block) != BLOCK_DIGEST_BYTES for block in blocks):
            raise _bad(f"its blocks must be at most {MAX_IDS // BLOCK_IDS} digests of {BLOCK_DIGEST_BYTES} bytes")
        special_ids = tuple(np.frombuffer(head, dtype="<u4").tolist())
        ascending = all(left < right for left, right in pairwise(special_ids))
        if not ascending or (special_ids and special_ids[-1] >= len(blocks) * BLOCK_IDS):
            raise _bad("its special ids must ascend and lie within its blocks")
        return cls(tuple(blocks), special_ids)


def fingerprint(vocabulary: Vocabulary) -> Fingerprint:
    """The fingerprint that the handshake compares."""
    existing = np.flatnonzero(vocabulary.flags != ABSENT)
    size = int(existing[-1]) + 1 if len(existing) else 0
    blocks = tuple(_block_digest(vocabulary, start) for start in range(0, size, BLOCK_IDS))
    return Fingerprint(blocks, vocabulary.special_ids)


def first_difference(a: Fingerprint, b: Fingerprint) -> str | None:
    """Where two vocabularies first differ, in words that end a sentence; None when they are equal."""
    for index, (left, right) in enumerate(zip_longest(a.blocks, b.blocks)):
        if left != right:
            return f"ids {index * BLOCK_IDS}-{(index + 1) * BLOCK_IDS - 1} differ"
    on_one_side = set(a.special_ids) ^ set(b.special_ids)
    if on_one_side:
        return f"special ids differ: {min(on_one_side)} is special on one side only"
    return None


def check_compatible(draft: Fingerprint, target: Fingerprint, draft_name: str, target_name: str) -> None:
    """Nothing when ids mean the same on both sides.

    Raises: ModelMismatch naming both models and the first difference.
    """
    difference = first_difference(draft, target)
    if difference is not None:
        message = f"draft {draft_name} and target {target_name} do not share a vocabulary: {difference}"
        raise ModelMismatch(message, field="fingerprint")


def _block_digest(vocabulary: Vocabulary, start: int) -> bytes:
    """Flags, lengths and bytes of 1,024 ids; the lengths make the split of the bytes unambiguous."""
    stop = min(start + BLOCK_IDS, vocabulary.size)
    flags = np.full(BLOCK_IDS, ABSENT, dtype=np.uint8)
    flags[: stop - start] = vocabulary.flags[start:stop]
    flags[flags == SPECIAL] = ADDED  # which ids are special is told apart, so that it can be named
    offsets = vocabulary.offsets[start : stop + 1]
    lengths = np.zeros(BLOCK_IDS, dtype="<u4")
    lengths[: stop - start] = np.diff(offsets)
    text = vocabulary.blob[offsets[0] : offsets[-1]]
    whole = b"draftwire.vocabulary.1\0" + flags.tobytes() + lengths.tobytes() + text
    return hashlib.sha256(whole).digest()[:BLOCK_DIGEST_BYTES]


def _bad(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"fingerprint: {reason}", field="fingerprint")
