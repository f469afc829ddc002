"""The target run alone: transformers' own forward and cache, no project code but the warping reference.

What every identity is measured against. The shared noise is written out here once more from its definition
(docs/sampling.md), in plain integers, so that it does not vouch for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.sampling import Counts, SamplingParams, warp_reference

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class PlainStep:
    """One id of a plain run and how clear the choice was."""

    token: int
    gap: float
    """Best (noised) score minus the second best; inf if only one id was kept."""


class PlainTarget:
    """A target decoded one id at a time."""

    def __init__(self, folder: Path, valid_ids: npt.NDArray[np.bool_]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._valid = np.zeros(int(self._model.config.vocab_size), dtype=bool)
        self._valid[: len(valid_ids)] = valid_ids[: len(self._valid)]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What the model's own configuration ends a text with."""
        eos = self._model.generation_config.eos_token_id
        return tuple(eos) if isinstance(eos, list) else (eos,)

    @torch.inference_mode()
    def generate(
        self, ids: list[int], sampling: SamplingParams, seed: int, max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> list[PlainStep]:
        """The text after `ids`, up to and with a stop id."""
        from transformers import DynamicCache

        cache, fed = DynamicCache(config=self._model.config), list(ids)
        steps: list[PlainStep] = []
        sequence = list(ids)
        while len(steps) < max_new_tokens:
            output = self._model(torch.tensor([fed]), past_key_values=cache)
            row = output.logits[0, -1].float().numpy()
            steps.append(self._choose(row, sampling, seed, sequence, len(ids)))
            fed = [steps[-1].token]
            sequence += fed
            if fed[0] in stop_ids:
                break
        return steps

    def _choose(
        self, row: npt.NDArray[np.float32], sampling: SamplingParams, seed: int, sequence: list[int], context: int
    ) -> PlainStep:
        counts = Counts.of(sequence, context) if sampling.has_penalties else None
        if sampling.is_greedy and counts is None:
            scores = np.where(self._valid, row, -np.inf)
            second, first = np.partition(scores, -2)[-2:]
            return PlainStep(int(np.argmax(scores)), float(first - second))
        warped = warp_reference(row, sampling, counts, self._valid)
        if sampling.is_greedy:
            return PlainStep(int(warped.ids[0]), math.inf)
        noised = sorted(
            (-(float(score) + gumbel(seed, len(sequence), int(token))), int(token))
            for token, score in zip(warped.ids, warped.scores, strict=True)
        )
        gap = noised[1][0] - noised[0][0] if len(noised) > 1 else math.inf
        return PlainStep(noised[0][1], gap)


def gumbel(seed: int, position: int, token: int) -> float:
    """The shared noise g(seed, t, v), from its definition."""
    key = _mix((_mix(seed) + 0x9E3779B97F4A7C15 * (position + 1)) & MASK)
    hashed = _mix((key + 0xD1B54A32D192ED03 * (token + 1)) & MASK)
    return -math.log(-math.log(((hashed >> 12) + 0.5) / 2**52))


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
