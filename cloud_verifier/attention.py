"""Attention of one step: many sessions' tokens in one packed row, each attending to its own pages by its own mask.

Must not know: sessions, transformers. Prepared by `target_model` for each forward, called from the model's layers
through `hf`. Linear layers see all tokens of a step as one row of N, without padding; only here do sessions part, in
groups whose rows are padded to one length.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cloud_verifier.kv_pool import KvPool


@dataclass(frozen=True)
class Group:
    """Sessions whose attention runs as one batch: tokens `start`..`stop` of the packed row.

    Shapes: `pages` (B, P) int64; `masks` per layer kind (B, 1, n, P * 16), additive in the model's dtype;
    `pad` (B * n,) int64, which of the group's tokens stands where, and `unpad` (stop - start,), where each token went;
    both None if every session brings exactly n.
    """

    start: int
    stop: int
    pages: torch.Tensor
    masks: Mapping[str, torch.Tensor]
    pad: torch.Tensor | None = None
    unpad: torch.Tensor | None = None


class RaggedAttention:
    """The attention of one forward over N packed tokens. Made anew for each step.

    Shapes: `write_rows` (N,) int64, where each token's keys and values go in the pool.
    """

    def __init__(
        self, pool: KvPool, write_rows: torch.Tensor, groups: Sequence[Group], layer_kinds: Sequence[str]
    ) -> None:
        self.gather_s = 0.0
        """Seconds spent gathering pages; measured on CPU only."""
        self._pool, self._write_rows, self._groups, self._kinds = pool, write_rows, groups, layer_kinds
        self._is_timed = write_rows.device.type == "cpu"
        self._folded: dict[tuple[int, str, int], torch.Tensor] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores the new tokens' rows. Shapes: keys, values (1, H, N, D)."""
        self._pool.write(layer, self._write_rows, keys[0].transpose(0, 1), values[0].transpose(0, 1))

    def attend(self, layer: int, query: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
        """What each token reads from its own session. Shapes: query (1, Hq, N, D); result (1, N, Hq, Dv)."""
        tokens = query[0].transpose(0, 1)
        parts = [self._attend_group(layer, index, tokens, scale, softcap) for index in range(len(self._groups))]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _attend_group(
        self, layer: int, index: int, tokens: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Query heads that share a key head are laid along the query axis: keys are not repeated.

        Shapes: tokens (N, Hq, D); result (stop - start, Hq, Dv).
        """
        group = self._groups[index]
        keys, values = self._gather(layer, group.pages)
        batch, heads = keys.shape[:2]
        mine = tokens[group.start : group.stop]
        padded = mine if group.pad is None else mine[group.pad]
        count, ways = padded.shape[0] // batch, padded.shape[1] // heads
        folded = (
            padded.view(batch, count, heads, ways, -1).permute(0, 2, 3, 1, 4).reshape(batch, heads, ways * count, -1)
        )
        read = _attention(folded, keys, values, self._mask(index, self._kinds[layer], ways), scale, softcap)
        read = read.view(batch, heads, ways, count, -1).permute(0, 3, 1, 2, 4).reshape(batch * count, heads * ways, -1)
        return read if group.unpad is None else read[group.unpad]

    def _gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_timed:
            return self._pool.gather(layer, pages)
        started = time.perf_counter()
        found = self._pool.gather(layer, pages)
        self.gather_s += time.perf_counter() - started
        return found

    def _mask(self, index: int, kind: str, ways: int) -> torch.Tensor:
        """The group's mask, once per query head that shares a key head. Shapes: (B, 1, ways * n, L)."""
        key = (index, kind, ways)
        if key not in self._folded:
            self._folded[key] = self._groups[index].masks[kind].repeat(1, 1, ways, 1)
        return self._folded[key]


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Shapes: query (B, H, n, D); keys, values (B, H, L, D); mask (B, 1, n, L) additive; result (B, H, n, Dv)."""
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)
