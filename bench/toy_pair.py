"""A target and a draft over eight ids whose every probability is known: scores are tables of the last two ids.

Must not know: sessions, wire, cases. `ToyTarget` stands where `TorchTarget` does, `ToyDraft` where the ONNX model does;
`text_shares` is the truth: the target's distribution of whole texts, by enumeration. Called by `distribution_world`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cloud_verifier.slot import Slot
from cloud_verifier.target_model import KvUse, RowInput, Timing
from shared.sampling import Counts, SamplingParams, warp_reference

N = TypeVar("N", int, float)

IDS = 8
ENDED = -1
"""Stands in a text after its stop id, so that all texts have one length."""
Table = npt.NDArray[np.float32]

PLAIN_IDS = tuple(range(IDS))
SPREAD_IDS = (0, 1, 2, 3, 130, 131, 132, 133)
"""Half of these take two bytes on the wire; between them lie holes, whose scores are high and must never count."""


def _tables(seed: int) -> dict[str, Table]:
    """The target's logits and those of drafts of several qualities. Shapes: (8, 8, 8), by the last two ids."""
    rng = np.random.default_rng(seed)
    shape = (IDS, IDS, IDS)
    target = rng.standard_normal(shape) * 1.2
    near, far = target + rng.standard_normal(shape) * 0.6, target * 0.3 + rng.standard_normal(shape) * 1.3
    tables = {"target": target, "same": target, "near": near, "far": far, "opposite": -target}
    return {name: table.astype(np.float32) for name, table in tables.items()}


_TABLES = _tables(66)
QUALITIES = tuple(name for name in _TABLES if name != "target")


@dataclass(frozen=True)
class ToyPair:
    """A target and a draft that share a vocabulary. `ids` are the eight that exist."""

    quality: str = "far"
    ids: tuple[int, ...] = PLAIN_IDS

    @property
    def context(self) -> tuple[int, ...]:
        """The ids before the first generated one."""
        return self.ids[1], self.ids[4]

    @property
    def valid_ids(self) -> npt.NDArray[np.bool_]:
        """Which ids exist. Shapes: (V,)."""
        valid = np.zeros(self.ids[-1] + 1, dtype=np.bool_)
        valid[list(self.ids)] = True
        return valid

    def target_rows(self) -> Table:
        """All rows of the target, by `row_index`. Shapes: (64, V)."""
        return _spread("target", self.ids)

    def draft_rows(self) -> Table:
        """All rows of the draft, by `row_index`. Shapes: (64, V)."""
        return _spread(self.quality, self.ids)

    @property
    def ranks(self) -> dict[int, int]:
        """The rank of each id."""
        return {token: rank for rank, token in enumerate(self.ids)}


@cache
def _spread(name: str, ids: tuple[int, ...]) -> Table:
    rows = np.full((IDS * IDS, ids[-1] + 1), 9.0, dtype=np.float32)
    rows[:, list(ids)] = _TABLES[name].reshape(IDS * IDS, IDS)
    return rows


def row_index(ranks: dict[int, int], before: int, last: int) -> int:
    """Where the row after these two ids stands in a table."""
    return ranks[before] * IDS + ranks[last]


class ToySlot:
    """Holds ids instead of keys and values: what was fed, up to `length`; past it, scratch of the last forward."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.fed: list[int] = []
        self.scratch: list[int] = []

    @property
    def length(self) -> int:
        """See Slot."""
        return len(self.fed)

    def try_reserve(self, count: int) -> bool:
        """See Slot: there is always room."""
        return True

    def keep(self, offsets: Sequence[int], is_checked: bool = True) -> None:
        """See Slot."""
        self.fed += [self.scratch[offset] for offset in offsets]

    def roll_back(self, length: int) -> None:
        """See Slot."""
        assert 0 <= length <= self.length
        del self.fed[length:]

    def seal(self, ids: Sequence[int]) -> None:
        """See Slot: nothing is shared."""

    def adopt(self, ids: Sequence[int]) -> int:
        """See Slot: nothing is shared."""
        return 0

    def scrub(self, from_row: int) -> None:
        """See Slot: all rows are finite."""

    def clear(self) -> int:
        """See Slot."""
        self.fed = []
        return 0


class ToyTarget:
    """A TargetModel whose rows come from the table, for chains and trees alike."""

    context_size = 64

    def __init__(self, pair: ToyPair) -> None:
        self._ranks = pair.ranks
        self._rows = torch.from_numpy(pair.target_rows())

    def new_slot(self, principal: str = "") -> Slot:
        """See TargetModel."""
        return ToySlot()

    def release(self, slot: Slot) -> None:
        """See TargetModel."""
        slot.clear()

    def forward(self, rows: Sequence[RowInput]) -> torch.Tensor:
        """See TargetModel."""
        return torch.cat([self._rows[self._indices(row)] for row in rows])

    def settle(self) -> None:
        """See TargetModel: nothing is left to do."""

    def timing(self) -> Timing:
        """See TargetModel."""
        return Timing()

    def recover(self) -> None:
        """See TargetModel."""

    def kv_use(self) -> KvUse:
        """See TargetModel."""
        return KvUse()

    def kv_room(self, slots: Sequence[Slot]) -> int:
        """See TargetModel: there is always room."""
        return 1_000_000

    def _indices(self, row: RowInput) -> list[int]:
        slot = row.slot
        assert isinstance(slot, ToySlot)
        slot.scratch = list(row.ids)
        indices = []
        for index in row.wanted:
            parent = row.parents[index]
            before = row.ids[parent] if parent >= 0 else slot.fed[-1] if slot.fed else row.ids[0]  # not judged then
            indices.append(row_index(self._ranks, before, row.ids[index]))
        return indices


class ToyDraft:
    """A NextTokenModel whose rows come from the table."""

    context_size = 64

    def __init__(self, pair: ToyPair) -> None:
        self._ranks = pair.ranks
        self._rows = pair.draft_rows()
        self._fed: list[int] = []

    @property
    def length(self) -> int:
        """See NextTokenModel."""
        return len(self._fed)

    def rewind(self, length: int) -> None:
        """See NextTokenModel."""
        del self._fed[length:]

    def feed(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """See NextTokenModel."""
        self._fed.extend(ids)
        row: npt.NDArray[np.float32] = self._rows[row_index(self._ranks, *self._fed[-2:])]
        return row

    def save_rows(self, start: int) -> npt.NDArray[np.int64]:
        """See NextTokenModel: the ids themselves. Shapes: (1, 1, length - start, 1)."""
        return np.array(self._fed[start:], dtype=np.int64).reshape(1, 1, -1, 1)

    def append_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """See NextTokenModel."""
        self._fed.extend(int(token) for token in rows.ravel())


# ---------------------------------------------------------------- the truth


def next_shares(pair: ToyPair, sampling: SamplingParams, ids: Sequence[int], table: Table) -> dict[int, float]:
    """What the next id is drawn from after `ids` (context first), by the slow twin of `warp`."""
    counts = Counts.of(ids, len(pair.context))
    row = table[row_index(pair.ranks, *ids[-2:])]
    warped = warp_reference(row, sampling, counts, pair.valid_ids)
    return dict(zip(warped.ids.tolist(), warped.probabilities().tolist(), strict=True))


Text = tuple[int, ...]
View = tuple[int, ...]
"""Places of a text that are looked at together."""


def text_shares(
    pair: ToyPair, sampling: SamplingParams, stop_ids: tuple[int, ...], length: int, views: tuple[View, ...]
) -> dict[View, dict[Text, float]]:
    """The probability of what stands at each view's places in texts of `length` ids by the target alone.

    `ENDED` stands behind a stop id.
    """
    return _text_shares(pair.ids, _Hashed(sampling), stop_ids, length, views)


def seen_through(table: Mapping[Text, N], view: View) -> dict[Text, N]:
    """A table of whole texts, summed over all places but those of the view."""
    marginal: dict[Text, N] = {}
    for text, value in table.items():
        key = tuple(text[place] for place in view)
        marginal[key] = marginal[key] + value if key in marginal else value
    return marginal


class _Hashed:
    """Sampling parameters as a key: they hold a mapping, so they have no hash of their own."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling

    def __hash__(self) -> int:
        return hash(repr(self.sampling))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.sampling == other.sampling


@cache
def _text_shares(
    ids: tuple[int, ...], sampling: _Hashed, stop_ids: tuple[int, ...], length: int, views: tuple[View, ...]
) -> dict[View, dict[Text, float]]:
    pair = ToyPair(ids=ids)
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Text, float] = {}
        for text, share in texts.items():
            if text and (text[-1] in stop_ids or text[-1] == ENDED):
                longer[*text, ENDED] = share
                continue
            for token, chance in next_shares(pair, sampling.sampling, pair.context + text, pair.target_rows()).items():
                longer[*text, token] = share * chance
        texts = longer
    return {view: seen_through(texts, view) for view in views}
