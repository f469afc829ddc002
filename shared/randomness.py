"""Counter-based draws: every draw is a pure function of what it is for, so replays and retries draw the same.

Must not know: sessions, models. Called by `agreement`, `rejection` and the drafters; the torch twin is
`cloud_verifier/noise.py`.
Test vectors: tests/pure/vectors/randomness.json. mix64 is the finaliser of splitmix64.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
constants of Stafford's Mix13.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
STEP = 0xD1B54A32D192ED03
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a draw of the rejection rule is for; different purposes never share a draw."""

    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3
    PLAIN = 4
    DRAFT = 5


def mix64(value: int) -> int:
    """A bijection of 64-bit numbers whose output bits depend on all input bits."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def row_key(seed: int, position: int) -> int:
    """The 64-bit key of all noise at one position of a session."""
    return mix64(mix64(seed) + GOLDEN * (position + 1))


def noise_hash(seed: int, position: int, token: int) -> int:
    """The 64-bit hash h(seed, t, v) behind the noise of one id."""
    return mix64(row_key(seed, position) + STEP * (token + 1))


def unit(hashed: int) -> float:
    """A float64 strictly between 0 and 1 from a 64-bit hash: ((h >> 12) + 0.5) * 2^-52, exact."""
    return ((hashed >> 12) + 0.5) * 2.0**-52


def noise(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Gumbel noise g(seed, t, v) for each id v. Shapes: ids (k,) int64 >= 0; result (k,) float64, finite."""
    with np.errstate(over="ignore"):
        hashed = np.uint64(row_key(seed, position)) + np.uint64(STEP) * (ids.astype(np.uint64) + np.uint64(1))
        hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(MIX_1)
        hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(MIX_2)
        hashed = hashed ^ (hashed >> np.uint64(31))
    units = ((hashed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(units)), dtype=np.float64)


def judge_unit(seed: int, epoch: int, position: int, purpose: Purpose) -> float:
    """The verifier's draw under the rejection rule, in (0, 1), keyed by (seed, epoch, position, purpose)."""
    key = mix64(mix64(seed) + GOLDEN * (epoch + 1))
    return unit(mix64(mix64(key + GOLDEN * (position + 1)) + STEP * int(purpose)))


def draft_unit(secret: int, epoch: int, prefix_digest: bytes) -> float:
    """The device's draw under the rejection rule, in (0, 1): same prefix, same draw; other prefix, fresh draw.

    `secret` is the device's own, independent of the session seed. `prefix_digest`: 16 bytes, see `ids_digest`.
    """
    low, high = int.from_bytes(prefix_digest[:8], "little"), int.from_bytes(prefix_digest[8:16], "little")
    key = mix64(mix64(secret) + GOLDEN * (epoch + 1))
    return unit(mix64(mix64(mix64(key ^ low) ^ high) + STEP * int(Purpose.DRAFT)))


def ids_digest(ids: list[int] | tuple[int, ...]) -> bytes:
    """The first 16 bytes of SHA-256 over the ids as little-endian uint32."""
    return hashlib.sha256(np.asarray(ids, dtype="<u4").tobytes()).digest()[:16]


def short_digest(ids: list[int] | tuple[int, ...]) -> int:
    """The low 32 bits of the digest, as a Hint's base carries them."""
    return int.from_bytes(ids_digest(ids)[:4], "little")
