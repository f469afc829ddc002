"""Decides: which planned hint nodes stand, and the target's own id behind them.

Must not know: KV, wire, threads. Called by `worker.run_step`. Under agreement and greedy the ids of all rows of all
sessions are chosen at once on the device (`row_choice`), and each session's planned nodes are walked by them; the
rejection rule is judged row by row on the host (`shared/rejection.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from cloud_verifier.row_choice import Outcome, RowChooser, RowRequest
from cloud_verifier.scheduler import PlannedRow
from cloud_verifier.sessions import Session
from shared import rejection
from shared.errors import DraftwireError, NumericalError
from shared.hint_trie import Node
from shared.randomness import Purpose
from shared.sampling import raw_logprob, warp

NOT_FINITE, NOTHING_LEFT = Outcome.NOT_FINITE, Outcome.ALL_FORBIDDEN
PROBLEMS: dict[int, str] = {
    NOT_FINITE: "the target gave a score that is not a finite number; this session ends",
    NOTHING_LEFT: "no id may be drawn: every score is forbidden; this session ends",
}


@dataclass(frozen=True)
class Tested:
    """A node that was judged: where it stood, what the device thought of it, and what came out."""

    depth: int
    rank: int
    confidence: float | None
    is_right: bool


@dataclass
class Verdict:
    """What one session's row decided: `tokens`, of which the first `len(accepted)` are accepted nodes' ids."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[Node] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tested: list[Tested] = field(default_factory=list)
    """Every node whose parent was accepted."""
    is_clean: bool = True
    """False if some row off the way was not finite: its keys and values must not stay."""


@dataclass(frozen=True)
class _Decided:
    """One row's outcome on the host."""

    token: int
    problem: int
    logprob: float


class Judge:
    """Judges the rows of a step. `valid_ids` (V,) bool: ids that exist; others are never drawn."""

    def __init__(self, valid_ids: npt.NDArray[np.bool_], device: torch.device | str = "cpu") -> None:
        self._valid = valid_ids if not bool(valid_ids.all()) else None
        self._chooser = RowChooser(valid_ids, torch.device(device))

    def judge(self, rows: Sequence[PlannedRow], scores: torch.Tensor) -> list[Verdict | DraftwireError | None]:
        """For each row what it decided, the error that ends its session, or None if nothing was judged.

        Shapes: scores (R, V) float32: per judged row after the last committed id, then after each node.
        """
        starts: list[int] = []
        at = 0
        for row in rows:
            starts.append(at)
            at += 1 + len(row.nodes) if row.is_judged else 0
        assert at == len(scores)
        drawn = [index for index, row in enumerate(rows) if row.is_judged and row.session.is_chain]
        chosen = [index for index, row in enumerate(rows) if row.is_judged and not row.session.is_chain]
        verdicts: list[Verdict | DraftwireError | None] = [None] * len(rows)
        for index, decided in self._chosen(rows, chosen, starts, scores):
            verdicts[index] = _walk(rows[index], decided)
        for index, host in _on_host(rows, drawn, starts, scores):
            verdicts[index] = self._by_rejection(rows[index], host)
        return verdicts

    # ------------------------------------------------------------ agreement and greedy

    def _chosen(
        self, rows: Sequence[PlannedRow], indices: Sequence[int], starts: Sequence[int], scores: torch.Tensor
    ) -> Iterator[tuple[int, list[_Decided]]]:
        """The ids of all rows of these sessions, fetched at once."""
        if not indices:
            return
        picked = _picked(rows, indices, starts, scores)
        requests = [request for index in indices for request in _requests(rows[index])]
        wanted = [rows[index].session.opened_with.logprobs for index in indices for _ in range(_count(rows[index]))]
        choices = self._chooser.choose(picked, requests, wanted if any(wanted) else None).fetch()
        decided = [
            _Decided(int(token), int(problem), float(logprob))
            for token, problem, logprob in zip(choices.ids, choices.ok, choices.logprobs, strict=True)
        ]
        at = 0
        for index in indices:
            count = _count(rows[index])
            yield index, decided[at : at + count]
            at += count

    # ------------------------------------------------------------ rejection

    def _by_rejection(self, row: PlannedRow, host: npt.NDArray[np.float32]) -> Verdict | DraftwireError:
        """Walks a chain, row by row. Shapes: host (1 + nodes, V) float32."""
        session, verdict = row.session, Verdict()
        request = session.opened_with
        counts = session.counts.with_path([]) if request.sampling.has_penalties else session.counts
        while len(verdict.tokens) < session.credit:
            ahead = len(verdict.tokens)
            if not np.isfinite(host[ahead]).all():
                return NumericalError(PROBLEMS[NOT_FINITE])
            try:
                warped = warp(host[ahead], request.sampling, counts, self._valid)
            except NumericalError as error:
                return error
            position, node = session.length + ahead, row.nodes[ahead] if ahead < len(row.nodes) else None
            if node is None:
                purpose = Purpose.BONUS if verdict.accepted else Purpose.PLAIN
                token = rejection.draw_plain(warped, session.seed, request.epoch, position, purpose)
                is_accepted = False
            else:
                assert node.row is not None
                judged = rejection.judge_one(warped, node.row, node.token, session.seed, request.epoch, position)
                token, is_accepted = judged.token, judged.is_accepted
                verdict.tested.append(Tested(ahead + 1, 0, None, is_accepted))
            _add(verdict, token, node if is_accepted else None, request.logprobs, host[ahead])
            if not is_accepted or token in request.stop_ids:
                break
            if counts is not session.counts:
                counts.add(token)
        verdict.is_clean = bool(np.isfinite(host).all())
        return verdict


def _walk(row: PlannedRow, decided: Sequence[_Decided]) -> Verdict | DraftwireError:
    """From the last committed id along the nodes that the target chose, until it chose something else."""
    session, verdict = row.session, Verdict()
    request = session.opened_with
    place = {id(node): index for index, node in enumerate(row.nodes, start=1)}
    children, at = session.trie.children, 0
    while len(verdict.tokens) < session.credit:
        found = decided[at]
        if found.problem:
            return NumericalError(PROBLEMS[found.problem])
        node: Node | None = None
        for rank, child in enumerate(children.values()):
            if id(child) in place:
                is_right = child.token == found.token
                verdict.tested.append(Tested(len(verdict.tokens) + 1, rank, child.probability, is_right))
                node = child if child.token == found.token else node
        verdict.tokens.append(found.token)
        if request.logprobs:
            verdict.logprobs.append(found.logprob)
        if node is not None:
            verdict.accepted.append(node)
        if node is None or found.token in request.stop_ids:
            break
        children, at = node.children, place[id(node)]
    verdict.is_clean = not any(found.problem == NOT_FINITE for found in decided)
    return verdict


def _add(verdict: Verdict, token: int, node: Node | None, logprobs: bool, row: npt.NDArray[np.float32]) -> None:
    verdict.tokens.append(token)
    if node is not None:
        verdict.accepted.append(node)
    if logprobs:
        verdict.logprobs.append(raw_logprob(row, token))


def _count(row: PlannedRow) -> int:
    return 1 + len(row.nodes)


def _requests(row: PlannedRow) -> Iterator[RowRequest]:
    """One request per row of scores: after the last committed id, then after each node."""
    session: Session = row.session
    params, seed, length = session.opened_with.sampling, session.seed, session.length
    if not params.has_penalties:
        yield RowRequest(params, seed, length, None)
        for node in row.nodes:
            yield RowRequest(params, seed, node.position + 1, None)
        return
    yield RowRequest(params, seed, length, session.counts)
    for node in row.nodes:
        yield RowRequest(params, seed, node.position + 1, session.counts.with_path(node.path()))


def _picked(
    rows: Sequence[PlannedRow], indices: Sequence[int], starts: Sequence[int], scores: torch.Tensor
) -> torch.Tensor:
    """The scores of these rows, in order; a view if that is all of them."""
    if sum(_count(rows[index]) for index in indices) == len(scores):
        return scores
    return torch.cat([scores[starts[index] : starts[index] + _count(rows[index])] for index in indices])


def _on_host(
    rows: Sequence[PlannedRow], indices: Sequence[int], starts: Sequence[int], scores: torch.Tensor
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    if not indices:
        return
    host = _picked(rows, indices, starts, scores).cpu().numpy()
    at = 0
    for index in indices:
        yield index, host[at : at + _count(rows[index])]
        at += _count(rows[index])
