"""What the target alone would write: transformers' own forward over the whole text for each id, no cache.

Knows of the project only the rules themselves: `shared.sampling.warp` and `shared.agreement.choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers

from shared import agreement
from shared.sampling import Counts, SamplingParams, raw_logprob, warp

Row = npt.NDArray[np.float32]
RowOf = Callable[[Sequence[int]], Row]


def plain_ids(
    row_of: RowOf,
    prompt: Sequence[int],
    count: int,
    params: SamplingParams,
    seed: int = 0,
    stop_ids: Iterable[int] = (),
    valid: npt.NDArray[np.bool_] | None = None,
) -> list[int]:
    """The ids that follow `prompt`, one full forward for each; a stop id is the last."""
    ids, stops = list(prompt), set(stop_ids)
    while len(ids) < len(prompt) + count:
        warped = warp(row_of(ids), params, Counts.of(ids, len(prompt)), valid)
        ids.append(agreement.choose(warped, seed, len(ids)))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


class PlainTarget:
    """A target folder as transformers alone runs it."""

    def __init__(self, folder: Path, vocabulary_size: int) -> None:
        """`vocabulary_size`: ids from here on are padding rows."""
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.valid = np.arange(self.model.config.vocab_size) < vocabulary_size
        self._known: dict[tuple[object, ...], list[int]] = {}

    @torch.inference_mode()
    def rows(self, ids: Sequence[int]) -> Row:
        """Scores after every id. Shapes: (n, V)."""
        return np.asarray(self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy())

    def row(self, ids: Sequence[int]) -> Row:
        """Scores after the last id. Shapes: (V,)."""
        return np.asarray(self.rows(ids)[-1])

    def ids(
        self,
        prompt: Sequence[int],
        count: int,
        params: SamplingParams,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> list[int]:
        """See `plain_ids`; remembered, for many tests compare with the same text."""
        key = (tuple(prompt), repr(params), seed, tuple(stop_ids))
        known = self._known.get(key, [])
        ended = bool(known) and known[-1] in stop_ids
        if len(known) < count and not ended:
            self._known[key] = known = plain_ids(self.row, prompt, count, params, seed, stop_ids, self.valid)
        return known[:count]

    def logprobs(self, prompt: Sequence[int], generated: Sequence[int]) -> list[float]:
        """Raw log-probability of each generated id, from one forward over the whole."""
        rows = self.rows([*prompt, *generated])
        return [raw_logprob(rows[len(prompt) - 1 + n], token) for n, token in enumerate(generated)]
