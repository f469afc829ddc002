"""Chooses ids for many rows of scores at once, on the scores' device: what `warp` and `agreement.choose` say, batched.

Must not know: sessions, hint nodes, KV, wire. Called by the judge. The slow twin is `shared.sampling.warp` followed by
`shared.agreement.choose`; tests hold the two equal.

Exact, mostly without a sort of whole rows or noise for them. A row's highest scores (its prefix) and a bound on all
others are taken. If the cuts provably end inside the prefix, it decides. Beyond it an id wins only by loud noise, and
hashes tell which ids are loud. Rows not decided so are tried again with more effort, at last sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cloud_verifier.noise import loud_ids, noise, row_keys
from shared.sampling import Counts, SamplingParams

PREFIX_WIDTHS = (64, 128, 1024, 2**31)
"""How many of a row's highest scores are looked at, the last: all."""
BLOCK = 64
"""Ids whose highest score stands for them while a row's highest scores are sought."""
ROUNDS = 4
"""How often an id that top-p cuts is replaced by the next, before a row is sorted."""
MASS_ERROR = {torch.float32: 1e-5, torch.float64: 1e-9}
"""Bound on the relative error of a row's mass of up to 2^21 ids, from scores scaled in this type and summed in float64.

A score x is off by 3 * 2^-24 |x| in float32, and |x| weighted by mass is below ln 2^21 = 14.6; exp adds 2^-22: 3e-6 in
all. In float64 the order of the sum counts: 2^21 * 2^-53 = 2.4e-10. Both are tripled."""
CHUNK_BYTES = 64 << 20
"""No float64 temporary of whole rows is larger."""
CACHED_BYTES = 4 << 20
"""Nor on a CPU, where caches are small, than this, if it is used often."""


class Outcome(IntEnum):
    """What became of a row."""

    CHOSEN = 0
    NOT_FINITE = 1
    ALL_FORBIDDEN = 2
    UNDECIDED = 3
    """More effort is needed; `fetch` never gives this out."""


class Method(Enum):
    """How a row's id is found."""

    HIGHEST = "the highest score"
    LOUDEST = "the highest noised score of all"
    PREFIX = "the highest noised score of what top-k, top-p and min-p keep, if that lies in a prefix"
    SHARE = "the highest noised score of what top-p and min-p keep of the whole row"


@dataclass(frozen=True)
class RowRequest:
    """How the id after one row is chosen."""

    params: SamplingParams
    seed: int
    """64 bits, unsigned."""
    position: int
    counts: Counts | None = None
    """Counts along this row's own path; read only if `params.has_penalties`."""

    @property
    def is_touched(self) -> bool:
        """True if scores change before any are compared."""
        return bool(self.params.logit_bias) or (self.counts is not None and self.params.has_penalties)


@dataclass(frozen=True)
class RowChoices:
    """What was chosen, on the host. Shapes: all (R,)."""

    ids: npt.NDArray[np.int64]
    """-1 where nothing was chosen."""
    ok: npt.NDArray[np.int8]
    """A `Outcome`: 0 chosen, 1 some raw score is not finite, 2 no id may be drawn."""
    logprobs: npt.NDArray[np.float64]
    """The target's own log-probability of the id, before warping; NaN where not asked for or nothing was chosen."""


class PendingChoices:
    """Choices that a device may still be making."""

    def __init__(self, packed: torch.Tensor, again: Callable[[list[int]], PendingChoices]) -> None:
        """`packed` (3, R) float64: ids, outcomes, logprobs. `again` chooses the named rows with more effort."""
        self._packed, self._again = packed, again

    def fetch(self) -> RowChoices:
        """Waits for the device and copies three numbers a row. Undecided rows are rare; they are settled here."""
        packed = self._packed.cpu().numpy()
        undecided = np.flatnonzero(packed[1] == Outcome.UNDECIDED)
        if len(undecided):
            settled = self._again(undecided.tolist()).fetch()
            packed[:, undecided] = settled.ids, settled.ok, settled.logprobs
        return RowChoices(packed[0].astype(np.int64), packed[1].astype(np.int8), packed[2])


class RowChooser:
    """Chooses among the ids that exist: `valid_ids` (V,) bool is False for padding rows and holes."""

    def __init__(
        self, valid_ids: npt.NDArray[np.bool_], device: torch.device, seeks_loud_ids: bool | None = None
    ) -> None:
        """`seeks_loud_ids`: hashes before it draws; the host must wait for the hashes, so None means on a CPU only."""
        existing = np.flatnonzero(valid_ids)
        self._size = int(existing[-1]) + 1 if len(existing) else 1
        holes = ~valid_ids[: self._size]
        self._holes = torch.from_numpy(holes).to(device) if holes.any() else None
        self._seeks_loud_ids = device.type == "cpu" if seeks_loud_ids is None else seeks_loud_ids

    def choose(
        self,
        scores: torch.Tensor,
        requests: Sequence[RowRequest],
        want_logprobs: Sequence[bool] | None = None,
        *,
        attempt: int = 0,
    ) -> PendingChoices:
        """Starts to choose an id after each row; does not wait for a GPU. Scores must stay as they are until `fetch`.

        `attempt`: how many with less effort were made. Shapes: scores (R, V) float32; requests, want_logprobs R long.
        """
        packed = scores.new_full((3, len(requests)), math.nan, dtype=torch.float64)
        for group, rows in _grouped(requests, self._size, attempt).items():
            for chunk in _chunks(rows, self._size, group.is_wide and scores.is_cpu):
                at = _at(chunk, scores)
                alike = [requests[n] for n in chunk]
                packed[:2, at] = self._choose_alike(scores[at, : self._size], alike, group, attempt)
        is_finite = (scores.amin(1) > -math.inf) & (scores.amax(1) < math.inf)  # both pass a NaN on
        packed[1].masked_fill_(~is_finite, Outcome.NOT_FINITE)
        packed[0].masked_fill_(packed[1] != Outcome.CHOSEN, -1)
        wanted = [n for n, is_wanted in enumerate(want_logprobs or ()) if is_wanted]
        for chunk in _chunks(wanted, scores.shape[1]):
            at = _at(chunk, scores)
            packed[2, at] = _raw_logprobs(scores[at], packed[0, at].to(torch.int64))

        def again(rows: list[int]) -> PendingChoices:
            some = want_logprobs and [want_logprobs[n] for n in rows]
            return self.choose(scores[_at(rows, scores)], [requests[n] for n in rows], some, attempt=attempt + 1)

        return PendingChoices(packed, again)

    def _choose_alike(
        self, values: torch.Tensor, requests: Sequence[RowRequest], group: _Group, attempt: int
    ) -> torch.Tensor:
        """Shapes: values (R, V) float32, left as they are; result (2, R) float64, ids and outcomes."""
        if group.is_touched:
            values = values.to(torch.float64).contiguous()
            _penalise(values, requests)
        if self._holes is not None:
            values = values.masked_fill(self._holes, -math.inf)
        if group.method is Method.HIGHEST:
            return _outcomes(*_first_of_highest(values))
        rows = _Rows.of(values, requests)
        if group.method is Method.LOUDEST:
            return _choose_loudest(rows, self._seeks_loud_ids)
        if group.method is Method.SHARE:
            return _choose_within_share(rows, self._seeks_loud_ids, is_full=attempt > 0)
        return _choose_in_prefix(rows, _Prefix.of(rows, group.width))


class _Group(NamedTuple):
    """Rows that are treated alike."""

    method: Method
    width: int
    is_touched: bool

    @property
    def is_wide(self) -> bool:
        """True if whole rows of float64 are made."""
        return self.is_touched or self.width == PREFIX_WIDTHS[-1]


def _grouped(requests: Sequence[RowRequest], size: int, attempt: int) -> Mapping[_Group, list[int]]:
    groups: dict[_Group, list[int]] = {}
    for n, request in enumerate(requests):
        method, width = _method(request.params, size, attempt)
        groups.setdefault(_Group(method, width, request.is_touched), []).append(n)
    return groups


def _method(params: SamplingParams, size: int, attempt: int) -> tuple[Method, int]:
    """With the width of the prefix."""
    narrowest, widest = PREFIX_WIDTHS[0], PREFIX_WIDTHS[-1]
    if params.is_greedy or params.top_k == 1 or params.top_p == 0:
        return Method.HIGHEST, 0
    if 0 < params.top_k < size:
        fitting = [width for width in PREFIX_WIDTHS if width >= params.top_k * 5 // 4]  # with room for ties
        return Method.PREFIX, fitting[attempt] if attempt < len(fitting) else widest
    if params.top_p == 1:
        return Method.LOUDEST, narrowest
    return (Method.SHARE, narrowest) if attempt < 2 else (Method.PREFIX, widest)


# ---------------------------------------------------------------- penalties and biases: few ids a row


def _penalise(values: torch.Tensor, requests: Sequence[RowRequest]) -> None:
    """`shared.sampling.penalised` in place. Shapes: values (R, V) float64, contiguous."""
    factors, falls, biases = _Changes(values), _Changes(values), _Changes(values)
    for n, request in enumerate(requests):
        params, counts = request.params, request.counts
        if counts is not None and params.has_penalties:
            generated = np.fromiter(counts.generated, dtype=np.int64)
            times = np.fromiter(counts.generated.values(), dtype=np.float64)
            falls.add(n, generated, params.frequency_penalty * times + params.presence_penalty)
            if params.repetition_penalty != 1:
                factors.add(n, _ids_of(counts.context), params.repetition_penalty)
                factors.add(n, generated, params.repetition_penalty)
        biases.add(n, np.fromiter(params.logit_bias, dtype=np.int64), list(params.logit_bias.values()))
    factors.apply(lambda old, factor: torch.where(old > 0, old / factor, old * factor))
    falls.apply(lambda old, fall: old - fall)
    biases.apply(lambda old, bias: old + bias)


class _Changes:
    """One change to each of some places of a matrix; a place named twice, as by context and text, is changed once."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._places: list[npt.NDArray[np.int64]] = []
        self._amounts: list[npt.NDArray[np.float64]] = []

    def add(self, row: int, ids: npt.NDArray[np.int64], amounts: npt.ArrayLike) -> None:
        """Ids beyond the row are left out. Shapes: ids (k,); amounts (k,) or one for all."""
        size = self._values.shape[1]
        is_within = ids < size
        self._places.append(ids[is_within] + row * size)
        self._amounts.append(np.broadcast_to(np.asarray(amounts, dtype=np.float64), ids.shape)[is_within])

    def apply(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """`change` makes new values of old values and amounts; every old value is read before any is written."""
        if not any(map(len, self._places)):
            return
        flat = self._values.view(-1)
        places = _on_device(np.concatenate(self._places), flat)
        flat[places] = change(flat[places], _on_device(np.concatenate(self._amounts), flat))


@lru_cache(maxsize=128)
def _ids_of(context: frozenset[int]) -> npt.NDArray[np.int64]:
    """A session's context is the same object at every step, and a frozenset keeps its hash."""
    return np.fromiter(context, dtype=np.int64, count=len(context))


# ---------------------------------------------------------------- rows and their highest scores


class _Rows(NamedTuple):
    """Rows and what is drawn by. Shapes: values (R, V) float32 or, with penalties, float64; the others (R, 1)."""

    values: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    """int64; 0 keeps all."""
    top_p: torch.Tensor
    floor: torch.Tensor
    """The lowest scaled score that min-p keeps."""
    keys: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor, requests: Sequence[RowRequest]) -> _Rows:
        params = [request.params for request in requests]
        floats = [
            [p.temperature for p in params],
            [p.top_p for p in params],
            [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params],
        ]
        words = [[r.seed for r in requests], [r.position for r in requests], [p.top_k for p in params]]
        temperature, top_p, floor = _on_device(np.array(floats, dtype=np.float64), values)[..., None]
        seeds, positions, top_k = _on_device(np.array(words, dtype=np.uint64).view(np.int64), values)[..., None]
        return _Rows(values, temperature, top_k, top_p, floor, row_keys(seeds, positions))

    def scaled(self, values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Scores after temperature, the best at 0. Shapes: values (R, k); best (R, 1) float64; result float64."""
        return (values.to(torch.float64) - best).div_(self.temperature)

    def noised(self, scaled: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """With noise; -inf where scaled is or min-p cuts. Shapes: scaled, result (R, k); ids (R, k) or (k,)."""
        return (noise(self.keys, ids) + scaled).masked_fill_(scaled < self.floor, -math.inf)


class _Prefix(NamedTuple):
    """The w highest scores of each row by (-scaled score, id). Shapes: ids, scaled (R, w); beyond, best (R, 1)."""

    ids: torch.Tensor
    scaled: torch.Tensor
    beyond: torch.Tensor
    """No id outside has a higher scaled score. Of the ids with just this, any may be outside. -inf: all are inside."""
    best: torch.Tensor
    """The highest score, not scaled."""

    @staticmethod
    def of(rows: _Rows, width: int) -> _Prefix:
        size = rows.values.shape[1]
        if width >= size:
            best = rows.values.amax(1, keepdim=True).to(torch.float64)
            scaled, ids = rows.scaled(rows.values, best).sort(dim=1, descending=True, stable=True)
            return _Prefix(ids, scaled, torch.full_like(best, -math.inf), best)
        values, ids = _highest(rows.values, width + 1)
        best = values[:, :1].to(torch.float64)
        ids, order = ids.sort(dim=1)
        scaled, order = rows.scaled(values.gather(1, order), best).sort(dim=1, descending=True, stable=True)
        return _Prefix(ids.gather(1, order)[:, :width], scaled[:, :width], scaled[:, width:], best)


def _highest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest of each row, falling, and their ids; any of equals. Shapes: values (R, V); (R, count) each.

    No block is needed but those with the `count` highest maxima: these alone are as many as any score elsewhere.
    """
    size, blocks = values.shape[1], values.shape[1] // BLOCK
    if blocks < 2 * count:
        return torch.topk(values, count, dim=1)
    maxima = values[:, : blocks * BLOCK].view(len(values), blocks, BLOCK).amax(2)
    chosen = torch.topk(maxima, count, dim=1, sorted=False).indices
    inner = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(1)
    last = torch.arange(blocks * BLOCK, size, device=values.device).expand(len(values), -1)
    ids = torch.cat((inner, last), dim=1)
    highest, at = torch.topk(values.gather(1, ids), count, dim=1)
    return highest, ids.gather(1, at)


# ---------------------------------------------------------------- choosing. Results: (2, R) float64, ids and outcomes


def _first_of_highest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id with the highest value, and the value. Shapes: values (R, V); (R, 1) each.

    torch.argmax promises the first of equals; over whole rows it takes eight times as long as over maxima of blocks.
    """
    size, blocks = values.shape[1], values.shape[1] // BLOCK
    maxima = values[:, : blocks * BLOCK].view(len(values), blocks, BLOCK).amax(2)
    if blocks * BLOCK < size:
        maxima = torch.cat((maxima, values[:, blocks * BLOCK :].amax(1, keepdim=True)), dim=1)
    starts = maxima.argmax(1, keepdim=True) * BLOCK
    ids = (starts + torch.arange(BLOCK, device=values.device)).clamp_(max=size - 1)
    inner = values.gather(1, ids)
    return ids.gather(1, inner.argmax(1, keepdim=True)), inner.amax(1, keepdim=True)


def _first_of_loudest(ids: torch.Tensor, noised: torch.Tensor) -> torch.Tensor:
    """The lowest id with the highest noised score. Shapes: noised (R, k); ids (R, k) in any order; result (R, 1)."""
    return ids.masked_fill(noised < noised.amax(1, keepdim=True), 2**62).amin(1, keepdim=True)


def _outcomes(ids: torch.Tensor, best: torch.Tensor, is_decided: torch.Tensor | None = None) -> torch.Tensor:
    """Shapes: ids, best, is_decided (R, 1). `best` is -inf where no id may be drawn."""
    outcomes = torch.zeros_like(best, dtype=torch.float64)
    if is_decided is not None:
        outcomes.masked_fill_(~is_decided, Outcome.UNDECIDED)
    outcomes.masked_fill_(best == -math.inf, Outcome.ALL_FORBIDDEN)
    return torch.stack((ids[:, 0].to(torch.float64), outcomes[:, 0]))


def _choose_in_prefix(rows: _Rows, prefix: _Prefix) -> torch.Tensor:
    """Decided if top-k, min-p or the row ends in the prefix. Top-p is a share of what top-k keeps, summed in order.

    That sum is known even if ids of equal scores at the end of top-k are not: those that min-p cuts do not matter.
    """
    scaled, beyond = prefix.scaled, prefix.beyond
    ranks = torch.arange(scaled.shape[1], device=scaled.device)
    is_in_top_k = (rows.top_k == 0) | (ranks < rows.top_k)
    last = scaled.gather(1, (rows.top_k - 1).clamp(0, scaled.shape[1] - 1))
    is_all_here = (beyond == -math.inf) | ((rows.top_k > 0) & (last > beyond))
    masses = torch.exp(scaled).mul_(is_in_top_k).cumsum(1)
    share = (rows.top_p * masses[:, -1:]).masked_fill_(rows.top_p == 1, math.inf)
    is_cut = ~is_in_top_k | (_before(masses) >= share)
    noised = rows.noised(scaled, prefix.ids).masked_fill_(is_cut, -math.inf)
    return _outcomes(_first_of_loudest(prefix.ids, noised), prefix.best, is_all_here | (rows.floor > beyond))


def _choose_loudest(rows: _Rows, seeks_loud_ids: bool) -> torch.Tensor:
    """Neither top-k nor top-p."""
    if not seeks_loud_ids:
        best = rows.values.amax(1, keepdim=True).to(torch.float64)
        return _outcomes(_first_of_highest(_all_contenders(rows, best)[1])[0], best)
    prefix = _Prefix.of(rows, PREFIX_WIDTHS[0])
    noised = rows.noised(prefix.scaled, prefix.ids)
    ids, noised = _loud_contenders(rows, prefix, noised, noised.amax(1, keepdim=True))
    return _outcomes(_first_of_loudest(ids, noised), prefix.best)


def _loud_contenders(
    rows: _Rows, prefix: _Prefix, noised: torch.Tensor, reached: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prefix with its `noised` scores, then all ids beyond whose noised scores may be as high as `reached`.

    Shapes: noised (R, w); reached (R, 1); results (R, k).
    """
    needed = (reached - prefix.beyond).masked_fill_(rows.floor > prefix.beyond, math.inf)
    loud = loud_ids(rows.keys, needed, rows.values.shape[1])
    scaled = rows.scaled(rows.values.gather(1, loud), prefix.best)
    return torch.cat((prefix.ids, loud), dim=1), torch.cat((noised, rows.noised(scaled, loud)), dim=1)


def _all_contenders(rows: _Rows, best: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every id, and its noised score. Shapes: best (R, 1); results (R, V)."""
    ids = torch.arange(rows.values.shape[1], device=best.device)
    return ids.expand(len(best), -1), rows.noised(rows.scaled(rows.values, best), ids)


def _choose_within_share(rows: _Rows, seeks_loud_ids: bool, is_full: bool) -> torch.Tensor:
    """Top-p without top-k: the loudest contender whose mass before it, by (-scaled score, id), is below the share.

    Sums over the prefix tell this for its own ids, sums over the row for others. `is_full`: every id contends. If False
    and no loud ids are sought, only the prefix does, and a share that ends beyond it leaves the row undecided.
    """
    prefix = _Prefix.of(rows, PREFIX_WIDTHS[0])
    low, high = _share_bounds(rows, prefix.best)
    masses = torch.exp(prefix.scaled).cumsum(1)
    is_above = prefix.scaled > prefix.beyond  # of those at `beyond`, some with lower ids may be outside
    is_in = is_above & (_before(masses) < low)
    ends_here = (masses * is_above).amax(1, keepdim=True) >= high
    noised = rows.noised(prefix.scaled, prefix.ids).masked_fill_(_before(masses) >= high, -math.inf)
    if not (is_full or seeks_loud_ids):
        token = _first_of_loudest(prefix.ids, noised)
        return _outcomes(token, prefix.best, ends_here & (is_in & (prefix.ids == token)).any(1, keepdim=True))
    if is_full:
        ids, noised = _all_contenders(rows, prefix.best)
    else:
        reached = noised.amax(1, keepdim=True).masked_fill_(ends_here, math.inf)  # if its id is out, so is all beyond
        ids, noised = _loud_contenders(rows, prefix, noised, reached)
    token = _first_of_loudest(ids, noised)
    is_decided = (is_in & (prefix.ids == token)).any(1, keepdim=True)
    others = torch.nonzero(~is_decided[:, 0])[:, 0] if ids.is_cpu else slice(None)
    some = _Rows(*(each[others] for each in rows))
    token[others], is_decided[others] = _first_within_share(
        some, prefix.best[others], (low[others], high[others]), ids[others], noised[others]
    )
    return _outcomes(token, prefix.best, is_decided)


def _first_within_share(
    rows: _Rows, best: torch.Tensor, share: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor, noised: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loudest contender that a sum over the row shows to be in the share, and whether one was found in time.

    Shapes: ids, noised (R, k); others (R, 1).
    """
    low, high = share
    chosen, is_decided = torch.zeros_like(ids[:, :1]), torch.zeros_like(best, dtype=torch.bool)
    is_open = ~is_decided
    for _ in range(ROUNDS):
        token = _first_of_loudest(ids, noised)
        least, most = _mass_before(rows, best, token)
        chosen = torch.where(is_open, token, chosen)
        is_decided |= is_open & (most < low)
        is_open &= least >= high
        if ids.is_cpu and not is_open.any():
            break
        noised = noised.masked_fill(ids == token, -math.inf)
    return chosen, is_decided


# ---------------------------------------------------------------- masses: sums of exp(scaled score)


def _before(masses: torch.Tensor) -> torch.Tensor:
    """Sums before each id from sums up to it. Shapes: masses, result (R, w)."""
    return torch.nn.functional.pad(masses[:, :-1], (1, 0))


def _share_bounds(rows: _Rows, best: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most that top-p's share of the row's mass, summed in order, can be. Shapes: (R, 1) each."""
    dtype = rows.values.dtype
    mass = rows.top_p * _mass(rows.values, best.to(dtype), rows.temperature)
    is_unfit = rows.temperature < torch.finfo(torch.float32).tiny  # the error bound does not hold
    low, high = mass * (1 - MASS_ERROR[dtype]), mass * (1 + MASS_ERROR[dtype])
    return low.masked_fill_(is_unfit, 0.0), high.masked_fill_(is_unfit, math.inf)


def _mass_before(rows: _Rows, best: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most mass before an id, by (-scaled score, id). Shapes: (R, 1) each.

    Of ids with the same scaled score, by rounding maybe, the least counts none and the most all others.
    """
    dtype = rows.values.dtype
    value, infinity = rows.values.gather(1, token), torch.full_like(best, math.inf, dtype=dtype)
    near = 1e-15 * (best.abs() + value.abs())  # scores that lie 2^-51 of this apart, or more, do not round to one
    above = torch.nextafter((value + near).to(dtype), infinity)
    below = torch.nextafter((value - near).to(dtype), -infinity)
    least, most = (_mass(rows.values, best.to(dtype), rows.temperature, bound) for bound in (above, below))
    own = rows.scaled(value, best).exp_()
    return least * (1 - MASS_ERROR[dtype]), most * (1 + MASS_ERROR[dtype]) - own


def _mass(
    values: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, above: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums of exp((values - best) / temperature), in best's type until summed, over all values or those above a bound.

    Shapes: values (R, V); others and result (R, 1).
    """
    if not len(values):
        return torch.zeros_like(temperature)
    step = max(1, CACHED_BYTES // 4 // (8 * values.shape[1])) if values.is_cpu else len(values)
    sums = []
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        masses = (values[part] - best[part]).div_(temperature[part].to(best.dtype)).exp_()
        if above is not None:
            masses.masked_fill_(values[part] <= above[part], 0.0)
        sums.append(masses.sum(1, keepdim=True, dtype=torch.float64))
    return torch.cat(sums)


# ---------------------------------------------------------------- the target's own log-probabilities; places


def _raw_logprobs(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`shared.sampling.raw_logprob`; NaN where the id is -1. Shapes: scores (R, V) float32; ids, result (R,)."""
    best = scores.amax(1, keepdim=True).to(torch.float64)
    chosen = scores.gather(1, ids[:, None].clamp(min=0)) - best
    return (chosen - _mass(scores, best, torch.ones_like(best)).log_())[:, 0].masked_fill_(ids < 0, math.nan)


def _chunks(rows: Sequence[int], size: int, is_cached: bool = False) -> Iterator[Sequence[int]]:
    count = max(1, (CACHED_BYTES if is_cached else CHUNK_BYTES) // (8 * size))
    return (rows[start : start + count] for start in range(0, len(rows), count))


def _at(rows: Sequence[int], like: torch.Tensor) -> slice | torch.Tensor:
    """An index for rising rows: a slice, which copies nothing, if they are neighbours."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return _on_device(np.array(rows, dtype=np.int64), like)


def _on_device(values: npt.NDArray[np.float64] | npt.NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    """Does not wait: what is not page-locked is copied out before the call returns."""
    return torch.from_numpy(values).to(like.device, non_blocking=True)
