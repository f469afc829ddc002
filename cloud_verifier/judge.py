"""Decides: which planned hint nodes stand, and the target's own id behind them. One row of scores after another.

Must not know: KV, wire, threads. Called by `worker.run_step`. Rules are those of `shared/agreement.py` and
`shared/rejection.py`; this file walks a session's planned nodes by them. Only rows on the way are read from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from cloud_verifier.scheduler import PlannedRow
from cloud_verifier.sessions import Session
from shared import agreement, rejection
from shared.errors import NumericalError
from shared.hint_trie import Node
from shared.randomness import Purpose
from shared.sampling import Counts, Warped, raw_logprob, warp


@dataclass
class Verdict:
    """What one row of a step decided: `tokens`, of which the first `len(accepted)` are the accepted nodes' ids."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[Node] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Judge:
    """Judges rows of scores. `valid_ids` (V,) bool: ids that exist; others are never drawn."""

    def __init__(self, valid_ids: npt.NDArray[np.bool_]) -> None:
        self._valid = valid_ids if not bool(valid_ids.all()) else None

    def judge(self, planned: PlannedRow, scores: torch.Tensor) -> Verdict:
        """Walks from the last committed id along accepted nodes until the target says otherwise.

        Shapes: scores (1 + len(planned.nodes), V) float32: after the last committed id, then after each node.
        Raises: NumericalError if a row on the way is not finite.
        """
        session = planned.session
        row_of: dict[int, int] = {id(node): index for index, node in enumerate(planned.nodes, start=1)}
        verdict = Verdict()
        counts = session.counts.with_path([]) if session.opened_with.sampling.has_penalties else session.counts
        children, at = session.trie.children, 0
        while len(verdict.tokens) < session.credit:
            hinted = [child for child in children.values() if id(child) in row_of]
            token, node = self._decide(session, _to_host(scores, at), counts, hinted, len(verdict.tokens), verdict)
            verdict.tokens.append(token)
            if node is not None:
                verdict.accepted.append(node)
            if node is None or token in session.opened_with.stop_ids:
                break
            if counts is not session.counts:
                counts.add(token)
            children, at = node.children, row_of[id(node)]
        return verdict

    def _decide(
        self,
        session: Session,
        row: npt.NDArray[np.float32],
        counts: Counts,
        hinted: Sequence[Node],
        ahead: int,
        verdict: Verdict,
    ) -> tuple[int, Node | None]:
        """The id at committed length + `ahead`, and the hinted node that it is, if any."""
        if not np.isfinite(row).all():
            raise NumericalError("the target gave a score that is not a finite number; this session ends")
        request = session.opened_with
        warped = warp(row, request.sampling, counts, self._valid)
        position = session.length + ahead
        if session.is_chain:
            token, node = _by_rejection(session, warped, hinted, position, bool(verdict.accepted))
        else:
            token = agreement.choose(warped, session.seed, position)
            node = next((child for child in hinted if child.token == token), None)
        if request.logprobs:
            verdict.logprobs.append(raw_logprob(row, token))
        return token, node


def _by_rejection(
    session: Session, warped: Warped, hinted: Sequence[Node], position: int, after_accepted: bool
) -> tuple[int, Node | None]:
    epoch = session.opened_with.epoch
    if not hinted:
        purpose = Purpose.BONUS if after_accepted else Purpose.PLAIN
        return rejection.draw_plain(warped, session.seed, epoch, position, purpose), None
    node = hinted[0]
    assert node.row is not None
    judged = rejection.judge_one(warped, node.row, node.token, session.seed, epoch, position)
    return judged.token, node if judged.is_accepted else None


def _to_host(scores: torch.Tensor, index: int) -> npt.NDArray[np.float32]:
    return np.asarray(scores[index].cpu().numpy(), dtype=np.float32)
