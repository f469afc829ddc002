"""The shared noise of the agreement rule in torch: bit-equal to `shared/randomness.py` up to the last logarithm.

Must not know: sessions, models. torch has no unsigned arithmetic to speak of, so 64-bit words live in int64: products
wrap alike, and a right shift is followed by a mask that clears the copies of the sign.
"""

from __future__ import annotations

import torch

from shared.randomness import MIX_1, MIX_2, STEP, row_key


def noise_hashes(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """The 64-bit hashes h(seed, t, v), as int64 with the same bits. Shapes: ids (k,) int64 >= 0; result (k,)."""
    words = ids.to(torch.int64) + 1
    return _mix(words * _signed(STEP) + _signed(row_key(seed, position)))


def noise_units(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1), bit-equal to numpy's. Shapes: ids (k,); result (k,) float64."""
    return (_shifted(noise_hashes(seed, position, ids), 12).to(torch.float64) + 0.5) * 2.0**-52


def noise(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise g(seed, t, v). Shapes: ids (k,); result (k,) float64, finite."""
    return -torch.log(-torch.log(noise_units(seed, position, ids)))


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(MIX_1)
    words = (words ^ _shifted(words, 27)) * _signed(MIX_2)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
