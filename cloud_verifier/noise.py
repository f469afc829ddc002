"""The shared noise of the agreement rule in torch: bit-equal to `shared/randomness.py` up to the last logarithm.

Must not know: sessions, models, scores. Called by `row_choice`. torch has no unsigned arithmetic to speak of, so 64-bit
words live in int64: products wrap alike, and a right shift is followed by a mask that clears the copies of the sign.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from shared.randomness import GOLDEN, MIX_1, MIX_2, STEP

LOUDEST = 36.74
"""No noise reaches this: the highest is -log(-log(1 - 2^-53)) = 36.7368."""


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The keys of all noise at these positions. Shapes: int64 of one shape; seeds and result hold 64 unsigned bits."""
    return _mix_(_mix_(seeds.clone()) + (positions + 1) * _signed(GOLDEN))


def noise_hashes(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The 64-bit hashes h(seed, t, v), as int64 with the same bits.

    Shapes: keys (R, 1) and ids (k,) or (R, k), or any that broadcast; result as broadcast, int64.
    """
    return _mix_((ids + 1) * _signed(STEP) + keys)


def noise_units(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1), bit-equal to numpy's. Shapes: as `noise_hashes`; result float64."""
    return _shifted(noise_hashes(keys, ids), 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise g(seed, t, v). Shapes: as `noise_hashes`; result float64, finite."""
    return noise_units(keys, ids).log_().neg_().log_().neg_()


def loud_ids(keys: torch.Tensor, needed: torch.Tensor, size: int) -> torch.Tensor:
    """All ids below `size` with noise of at least `needed`, and a few more; short rows are filled up with id 0.

    Hashes alone, no logarithm. CPU only: how many there are has to be known on the host.
    Shapes: keys, needed (R, 1); result (R, c) int64.
    """
    buffers = np.empty((2, size), dtype=np.uint64)
    found = [
        _ids_above(np.uint64(key), _lowest_word(need), buffers) if need <= LOUDEST else np.zeros(0, dtype=np.int64)
        for key, need in zip(keys[:, 0].numpy().view(np.uint64), needed[:, 0].tolist(), strict=True)
    ]
    ids = np.zeros((len(found), max(map(len, found), default=0)), dtype=np.int64)
    for row, some in zip(ids, found, strict=True):
        row[: len(some)] = some
    return torch.from_numpy(ids)


def _lowest_word(need: float) -> int:
    """A lower bound on the last but one word of any hash whose noise is at least `need`.

    u >= exp(-exp(-need)), so the hash's upper 52 bits are among the highest 2^52 * (1 - exp(-exp(-need))); one part in
    10^9 and two more pay for rounding, here and in the noise (about 10^-14). The last step of the hash leaves the upper
    31 bits alone, so its word before that is no lower than the bound with the other 33 bits cleared.
    """
    share = -math.expm1(-math.exp(min(-need, 700.0)))
    slots = int(2.0**52 * share * (1 + 1e-9)) + 2
    return (max(0, (1 << 52) - 1 - slots) << 12) >> 33 << 33


def _ids_above(key: np.uint64, lowest: int, buffers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """numpy, since torch on a CPU takes twice as long for unsigned words. Shapes: buffers (2, size)."""
    words, shifted = buffers
    np.add(_steps(len(words)), key, out=words)
    np.right_shift(words, np.uint64(30), out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    np.multiply(words, np.uint64(MIX_1), out=words)
    np.right_shift(words, np.uint64(27), out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    np.multiply(words, np.uint64(MIX_2), out=words)
    return np.flatnonzero(words >= np.uint64(lowest))


@lru_cache(maxsize=4)
def _steps(size: int) -> npt.NDArray[np.uint64]:
    return np.arange(1, size + 1, dtype=np.uint64) * np.uint64(STEP)


def _mix_(words: torch.Tensor) -> torch.Tensor:
    """shared.randomness.mix64, in place."""
    words.bitwise_xor_(_shifted(words, 30)).mul_(_signed(MIX_1))
    words.bitwise_xor_(_shifted(words, 27)).mul_(_signed(MIX_2))
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
