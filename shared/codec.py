"""Between frames and protobuf: the only place where values from outside are checked.

Must not know: grpc, sessions, models. Called by `edge_client/transport.py` and `cloud_verifier/service.py`.
What decodes is a frame whose every value is in range; anything else raises RemoteProtocolError naming the field.
A frame's meaning within its session (positions, epochs, unknown parents) is the session's to judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shared import types as t
from shared.errors import ConfigError, DraftwireError, RemoteProtocolError, error_class
from shared.pb import verifier_pb2 as pb
from shared.rejection import ROW_TOTAL, QRow
from shared.sampling import SamplingParams

E = TypeVar("E")

_RULES = {pb.RULE_AGREEMENT: t.Rule.AGREEMENT, pb.RULE_REJECTION: t.Rule.REJECTION}
_PACES = {pb.PACE_AUTO: t.PaceKind.AUTO, pb.PACE_WAIT: t.PaceKind.WAIT, pb.PACE_RUN_ON: t.PaceKind.RUN_ON}
_REASONS = {
    pb.REASON_STOP_ID: t.Reason.STOP_ID,
    pb.REASON_LENGTH: t.Reason.LENGTH,
    pb.REASON_CONTEXT_FULL: t.Reason.CONTEXT_FULL,
    pb.REASON_CANCELLED: t.Reason.CANCELLED,
}
_CONFIDENCE_STEP = 16
MAX_BIASES = 1024
_LIMIT_FIELDS = tuple(t.Limits.__dataclass_fields__)


@dataclass(frozen=True)
class Rim:
    """What a frame from outside is checked against.

    `valid_ids` (V,) bool says which ids exist (None: any below 2^32); `limits` bound the sizes.
    """

    limits: t.Limits = field(default_factory=t.Limits)
    valid_ids: npt.NDArray[np.bool_] | None = None


# ---------------------------------------------------------------- checks


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise RemoteProtocolError(f"{field} {message}", field=field)


def _ids(values: Sequence[int], field: str, rim: Rim, most: int) -> tuple[int, ...]:
    _require(len(values) <= most, field, f"holds {len(values)} ids, more than the limit of {most}")
    ids = tuple(values)
    if rim.valid_ids is not None and ids:
        size = len(rim.valid_ids)
        bad = next((i for i in ids if i >= size or not rim.valid_ids[i]), None)
        _require(bad is None, field, f"holds id {bad}, which is not in the vocabulary of {size} ids")
    return ids


def _enum(table: dict[Any, E], value: int, field: str) -> E:
    found = table.get(value)
    if found is None:
        raise RemoteProtocolError(f"{field} has the unknown value {value}", field=field)
    return found


def _code(table: dict[Any, E], value: E) -> Any:
    return next(code for code, meaning in table.items() if meaning is value)


def _parents(values: Sequence[int], first: int, count: int, field: str = "hint.parents") -> tuple[int, ...]:
    parents = tuple(values)
    _require(len(parents) in (0, count), field, f"has {len(parents)} entries for {count} ids")
    bad = next((p for n, p in enumerate(parents) if p >= first + n), None)
    _require(bad is None, field, f"reaches back by {bad}, before the first node")
    return parents


# ---------------------------------------------------------------- sampling parameters


def encode_sampling(params: SamplingParams) -> pb.Sampling:
    """Sampling parameters as a message; values that are off take no bytes."""
    message = pb.Sampling(
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=dict(params.logit_bias),
    )
    for name in ("temperature", "top_p", "repetition_penalty"):
        if getattr(params, name) != 1.0:
            setattr(message, name, getattr(params, name))
    return message


def decode_sampling(message: pb.Sampling, rim: Rim) -> SamplingParams:
    """Raises RemoteProtocolError naming the field that is out of range."""
    optional = {
        name: getattr(message, name)
        for name in ("temperature", "top_p", "repetition_penalty")
        if message.HasField(name)
    }
    _ids(list(message.logit_bias), "sampling.logit_bias", rim, MAX_BIASES)
    try:
        return SamplingParams(
            **optional,
            top_k=message.top_k,
            min_p=message.min_p,
            frequency_penalty=message.frequency_penalty,
            presence_penalty=message.presence_penalty,
            logit_bias=dict(message.logit_bias),
        )
    except ConfigError as error:
        raise RemoteProtocolError(error.message, field=f"sampling.{error.field}") from error


# ---------------------------------------------------------------- up


def encode_open(frame: t.Open) -> pb.Up:
    """Open as a message."""
    message = pb.Open(
        lowest_version=frame.lowest_version,
        highest_version=frame.highest_version,
        fingerprint=frame.fingerprint,
        ids=frame.ids,
        generated_from=frame.generated_from,
        epoch=frame.epoch,
        sampling=encode_sampling(frame.sampling),
        rule=_code(_RULES, frame.rule),
        stop_ids=frame.stop_ids,
        max_new_tokens=frame.max_new_tokens,
        pace=_code(_PACES, frame.pace),
        target_id=frame.target_id,
        logprobs=frame.logprobs,
    )
    if frame.seed is not None:
        message.seed = frame.seed
    if frame.run_ahead != t.DEFAULT_RUN_AHEAD:
        message.run_ahead = frame.run_ahead
    return pb.Up(open=message)


def _decode_open(message: pb.Open, rim: Rim) -> t.Open:
    ids = _ids(message.ids, "open.ids", rim, rim.limits.max_context_tokens)
    _require(len(ids) > 0, "open.ids", "is empty: at least one id of context is needed")
    _require(1 <= message.generated_from <= len(ids), "open.generated_from", f"must be from 1 to {len(ids)}")
    most = rim.limits.max_new_tokens
    _require(1 <= message.max_new_tokens <= most, "open.max_new_tokens", f"must be from 1 to {most}")
    _require(len(message.fingerprint) == 32, "open.fingerprint", "must be 32 bytes")
    _require(len(message.target_id) in (0, 32), "open.target_id", "must be 32 bytes, or absent")
    _require(message.lowest_version <= message.highest_version, "open.lowest_version", "is above highest_version")
    return t.Open(
        ids=ids,
        generated_from=message.generated_from,
        fingerprint=message.fingerprint,
        sampling=decode_sampling(message.sampling, rim),
        max_new_tokens=message.max_new_tokens,
        epoch=t.Epoch(message.epoch),
        seed=message.seed if message.HasField("seed") else None,
        rule=_enum(_RULES, message.rule, "open.rule"),
        stop_ids=_ids(message.stop_ids, "open.stop_ids", rim, 64),
        pace=_enum(_PACES, message.pace, "open.pace"),
        run_ahead=message.run_ahead if message.HasField("run_ahead") else t.DEFAULT_RUN_AHEAD,
        target_id=message.target_id,
        logprobs=message.logprobs,
        lowest_version=message.lowest_version,
        highest_version=message.highest_version,
    )


def encode_resume(frame: t.Resume) -> pb.Up:
    """Resume as a message."""
    return pb.Up(resume=pb.Resume(session_id=frame.session_id, epoch=frame.epoch, have=frame.have, digest=frame.digest))


def _decode_resume(message: pb.Resume, rim: Rim) -> t.Resume:
    _require(len(message.session_id) == 16, "resume.session_id", "must be 16 bytes")
    _require(len(message.digest) == 16, "resume.digest", "must be 16 bytes")
    return t.Resume(t.SessionId(message.session_id), t.Epoch(message.epoch), message.have, message.digest)


def encode_hint(frame: t.Hint) -> pb.Up:
    """Hint as a message: about 2 to 3 bytes an id, and about 12 of frame."""
    message = pb.Hint(
        epoch=frame.epoch,
        first_node=frame.first_node,
        base_node=frame.base_node,
        base_position=frame.base_position,
        ids=frame.ids,
        parents=frame.parents,
        confidence=bytes(_confidence_byte(value) for value in frame.confidence),
        rows=[pb.QRow(ids=row.ids, weights=row.weights) for row in frame.rows],
        ack=frame.ack,
    )
    if frame.base_digest is not None:
        message.base_digest = frame.base_digest
    return pb.Up(hint=message)


def _confidence_byte(probability: float) -> int:
    return 255 if probability <= 0 else min(255, max(0, round(-_CONFIDENCE_STEP * math.log2(probability))))


def _decode_hint(message: pb.Hint, rim: Rim) -> t.Hint:
    ids = _ids(message.ids, "hint.ids", rim, rim.limits.max_frame_nodes)
    most = 2**32 - 1 - len(ids)
    _require(1 <= message.first_node <= most, "hint.first_node", f"must be from 1 to {most}")
    _require(
        not (message.base_node and message.base_position), "hint.base_node", "and base_position exclude each other"
    )
    _require(message.base_node < message.first_node, "hint.base_node", "must be a node before first_node")
    confidence = message.confidence
    _require(len(confidence) in (0, len(ids)), "hint.confidence", f"has {len(confidence)} entries for {len(ids)} ids")
    _require(len(message.rows) in (0, len(ids)), "hint.rows", f"has {len(message.rows)} entries for {len(ids)} ids")
    rows = tuple(_decode_row(row, rim) for row in message.rows)
    bad = next((n for n, row in enumerate(rows) if ids[n] not in row.ids), None)
    _require(bad is None, "hint.rows", f"give the hinted id no weight at node {bad}")
    _require(not (confidence and message.rows), "hint.confidence", "is never sent with draft rows")
    _require(not (message.parents and message.rows), "hint.parents", "are never sent with draft rows: chains only")
    return t.Hint(
        epoch=t.Epoch(message.epoch),
        first_node=message.first_node,
        ids=ids,
        ack=message.ack,
        base_node=message.base_node,
        base_position=message.base_position,
        base_digest=message.base_digest if message.HasField("base_digest") else None,
        parents=_parents(message.parents, message.first_node, len(ids)),
        confidence=tuple(2.0 ** (-byte / _CONFIDENCE_STEP) for byte in confidence),
        rows=rows,
    )


def _decode_row(message: pb.QRow, rim: Rim) -> QRow:
    ids = _ids(message.ids, "hint.rows.ids", rim, rim.limits.max_row_ids)
    weights = tuple(message.weights)
    _require(len(weights) == len(ids), "hint.rows.weights", f"has {len(weights)} entries for {len(ids)} ids")
    _require(len(set(ids)) == len(ids), "hint.rows.ids", "names an id twice")
    _require(
        all(weights) and sum(weights) == ROW_TOTAL, "hint.rows.weights", f"must be positive and sum to {ROW_TOTAL}"
    )
    return QRow(ids, weights)


def encode_edit(frame: t.Edit) -> pb.Up:
    """Edit as a message."""
    message = pb.Edit(epoch=frame.epoch, keep=frame.keep, append_ids=frame.append_ids)
    if frame.seed is not None:
        message.seed = frame.seed
    if frame.sampling is not None:
        message.sampling.CopyFrom(encode_sampling(frame.sampling))
    return pb.Up(edit=message)


def _decode_edit(message: pb.Edit, rim: Rim) -> t.Edit:
    return t.Edit(
        epoch=t.Epoch(message.epoch),
        keep=message.keep,
        append_ids=_ids(message.append_ids, "edit.append_ids", rim, rim.limits.max_context_tokens),
        seed=message.seed if message.HasField("seed") else None,
        sampling=decode_sampling(message.sampling, rim) if message.HasField("sampling") else None,
    )


def encode_score(frame: t.Score) -> pb.Up:
    """Score as a message."""
    return pb.Up(
        score=pb.Score(
            request=frame.request,
            epoch=frame.epoch,
            base_position=frame.base_position,
            ids=frame.ids,
            parents=frame.parents,
        )
    )


def _decode_score(message: pb.Score, rim: Rim) -> t.Score:
    ids = _ids(message.ids, "score.ids", rim, rim.limits.max_frame_nodes)
    parents = _parents(message.parents, 1, len(ids), "score.parents")
    return t.Score(message.request, t.Epoch(message.epoch), message.base_position, ids, parents)


def encode_pace(frame: t.Pace) -> pb.Up:
    """Pace as a message."""
    return pb.Up(
        pace=pb.Pace(epoch=frame.epoch, pace=_code(_PACES, frame.pace), run_ahead=frame.run_ahead, ack=frame.ack)
    )


def _decode_pace(message: pb.Pace, rim: Rim) -> t.Pace:
    return t.Pace(t.Epoch(message.epoch), _enum(_PACES, message.pace, "pace.pace"), message.run_ahead, message.ack)


def encode_close(frame: t.Close) -> pb.Up:
    """Close as a message."""
    return pb.Up(close=pb.Close(epoch=frame.epoch, position=frame.position))


def _decode_close(message: pb.Close, rim: Rim) -> t.Close:
    return t.Close(t.Epoch(message.epoch), message.position)


_UP_ENCODERS: dict[type, Callable[[Any], pb.Up]] = {
    t.Open: encode_open,
    t.Resume: encode_resume,
    t.Hint: encode_hint,
    t.Edit: encode_edit,
    t.Score: encode_score,
    t.Pace: encode_pace,
    t.Close: encode_close,
}
_UP_DECODERS: dict[str, Callable[[Any, Rim], t.UpFrame]] = {
    "open": _decode_open,
    "resume": _decode_resume,
    "hint": _decode_hint,
    "edit": _decode_edit,
    "score": _decode_score,
    "pace": _decode_pace,
    "close": _decode_close,
}


def encode_up(frame: t.UpFrame) -> pb.Up:
    """Any frame from the device as a message."""
    return _UP_ENCODERS[type(frame)](frame)


def decode_up(message: pb.Up, rim: Rim) -> t.UpFrame:
    """A message from a device as a frame. Raises RemoteProtocolError; never anything else."""
    kind = message.WhichOneof("frame")
    if kind is None:
        raise RemoteProtocolError("frame is empty or of an unknown kind", field="frame")
    _require(message.ByteSize() <= rim.limits.max_frame_bytes, kind, f"is over {rim.limits.max_frame_bytes} bytes")
    return _UP_DECODERS[kind](getattr(message, kind), rim)


# ---------------------------------------------------------------- down


def encode_opened(frame: t.Opened) -> pb.Down:
    """Opened as a message."""
    return pb.Down(
        opened=pb.Opened(
            version=frame.version,
            session_id=frame.session_id,
            seed=frame.seed,
            epoch=frame.epoch,
            generated_from=frame.generated_from,
            committed_length=frame.committed_length,
            next_node=frame.next_node,
            reused_tokens=frame.reused_tokens,
            target_id=frame.target_id,
            limits=_encode_limits(frame.limits),
        )
    )


def _encode_limits(limits: t.Limits) -> pb.Limits:
    return pb.Limits(**{name: getattr(limits, name) for name in _LIMIT_FIELDS})


def _decode_limits(message: pb.Limits) -> t.Limits:
    return t.Limits(**{name: getattr(message, name) for name in _LIMIT_FIELDS})


def _decode_opened(message: pb.Opened, rim: Rim) -> t.Opened:
    _require(len(message.session_id) == 16, "opened.session_id", "must be 16 bytes")
    _require(message.generated_from <= message.committed_length, "opened.committed_length", "is below generated_from")
    return t.Opened(
        session_id=t.SessionId(message.session_id),
        seed=message.seed,
        epoch=t.Epoch(message.epoch),
        generated_from=message.generated_from,
        committed_length=message.committed_length,
        next_node=message.next_node,
        reused_tokens=message.reused_tokens,
        target_id=message.target_id,
        limits=_decode_limits(message.limits),
        version=message.version,
    )


def encode_commit(frame: t.Commit) -> pb.Down:
    """Commit as a message."""
    message = pb.Commit(
        epoch=frame.epoch,
        start=frame.start,
        ids=frame.ids,
        accepted=frame.accepted,
        seen_node=frame.seen_node,
        last_accepted_node=frame.last_accepted_node,
        dropped_late=frame.dropped_late,
        dropped_disagreeing=frame.dropped_disagreeing,
        dropped_over_budget=frame.dropped_over_budget,
        queue_us=frame.queue_us,
        step_us=frame.step_us,
        batch_size=frame.batch_size,
        logprobs=frame.logprobs,
    )
    if frame.hint_wait_us is not None:
        message.hint_wait_us = frame.hint_wait_us
    return pb.Down(commit=message)


def _decode_commit(message: pb.Commit, rim: Rim) -> t.Commit:
    ids = _ids(message.ids, "commit.ids", rim, rim.limits.max_context_tokens)
    _require(message.accepted <= len(ids), "commit.accepted", f"is {message.accepted} of {len(ids)} ids")
    _require(len(message.logprobs) in (0, len(ids)), "commit.logprobs", f"are {len(message.logprobs)} of {len(ids)}")
    is_wait_told = message.HasField("hint_wait_us")
    _require(message.seen_node > 0 or not is_wait_told, "commit.hint_wait_us", "is told of no node")
    return t.Commit(
        epoch=t.Epoch(message.epoch),
        start=message.start,
        ids=ids,
        accepted=message.accepted,
        seen_node=message.seen_node,
        last_accepted_node=message.last_accepted_node,
        dropped_late=message.dropped_late,
        dropped_disagreeing=message.dropped_disagreeing,
        dropped_over_budget=message.dropped_over_budget,
        queue_us=message.queue_us,
        step_us=message.step_us,
        batch_size=message.batch_size,
        logprobs=tuple(message.logprobs),
        hint_wait_us=message.hint_wait_us if is_wait_told else None,
    )


def encode_scores(frame: t.Scores) -> pb.Down:
    """Scores as a message."""
    return pb.Down(scores=pb.Scores(request=frame.request, epoch=frame.epoch, logprobs=frame.logprobs))


def _decode_scores(message: pb.Scores, rim: Rim) -> t.Scores:
    return t.Scores(message.request, t.Epoch(message.epoch), tuple(message.logprobs))


def encode_finished(frame: t.Finished) -> pb.Down:
    """Finished as a message."""
    usage = pb.Usage(**{name: getattr(frame.usage, name) for name in t.Usage.__dataclass_fields__})
    return pb.Down(finished=pb.Finished(epoch=frame.epoch, reason=_code(_REASONS, frame.reason), usage=usage))


def _decode_finished(message: pb.Finished, rim: Rim) -> t.Finished:
    usage = t.Usage(**{name: getattr(message.usage, name) for name in t.Usage.__dataclass_fields__})
    return t.Finished(t.Epoch(message.epoch), _enum(_REASONS, message.reason, "finished.reason"), usage)


def encode_fault(frame: t.Fault) -> pb.Down:
    """Fault as a message."""
    return pb.Down(
        fault=pb.Fault(
            answers=frame.answers,
            error=frame.error,
            field=frame.field,
            message=frame.message,
            retry=frame.retry,
            retry_after_ms=frame.retry_after_ms,
        )
    )


def _decode_fault(message: pb.Fault, rim: Rim) -> t.Fault:
    return t.Fault(
        message.answers, message.error, message.message, message.field, message.retry, message.retry_after_ms
    )


def _encode_draining(frame: t.Draining) -> pb.Down:
    return pb.Down(draining=pb.Draining(within_ms=frame.within_ms))


def _decode_draining(message: pb.Draining, rim: Rim) -> t.Draining:
    return t.Draining(message.within_ms)


_DOWN_ENCODERS: dict[type, Callable[[Any], pb.Down]] = {
    t.Opened: encode_opened,
    t.Commit: encode_commit,
    t.Scores: encode_scores,
    t.Finished: encode_finished,
    t.Fault: encode_fault,
    t.Draining: _encode_draining,
}
_DOWN_DECODERS: dict[str, Callable[[Any, Rim], t.DownFrame]] = {
    "opened": _decode_opened,
    "commit": _decode_commit,
    "scores": _decode_scores,
    "finished": _decode_finished,
    "fault": _decode_fault,
    "draining": _decode_draining,
}


def encode_down(frame: t.DownFrame) -> pb.Down:
    """Any frame from the verifier as a message."""
    return _DOWN_ENCODERS[type(frame)](frame)


def decode_down(message: pb.Down, rim: Rim) -> t.DownFrame:
    """A message from a verifier as a frame. Raises RemoteProtocolError; never anything else."""
    kind = message.WhichOneof("frame")
    if kind is None:
        raise RemoteProtocolError("frame is empty or of an unknown kind", field="frame")
    return _DOWN_DECODERS[kind](getattr(message, kind), rim)


# ---------------------------------------------------------------- describe, faults


def encode_card(card: t.ModelCard) -> pb.DescribeReply:
    """A model card as a message."""
    return pb.DescribeReply(
        lowest_version=card.lowest_version,
        highest_version=card.highest_version,
        model_name=card.model_name,
        target_id=card.target_id,
        fingerprint=card.fingerprint,
        fingerprint_blocks=card.fingerprint_blocks,
        vocabulary_size=card.vocabulary_size,
        context_size=card.context_size,
        chat_template=card.chat_template,
        special_tokens=card.special_tokens,
        stop_ids=card.stop_ids,
        generation_defaults=encode_sampling(card.generation_defaults),
        rules=[_code(_RULES, rule) for rule in card.rules],
        limits=_encode_limits(card.limits),
    )


def decode_card(message: pb.DescribeReply) -> t.ModelCard:
    """A message as a model card. Raises RemoteProtocolError."""
    return t.ModelCard(
        model_name=message.model_name,
        target_id=message.target_id,
        fingerprint=message.fingerprint,
        fingerprint_blocks=tuple(message.fingerprint_blocks),
        vocabulary_size=message.vocabulary_size,
        context_size=message.context_size,
        limits=_decode_limits(message.limits),
        chat_template=message.chat_template,
        special_tokens=dict(message.special_tokens),
        stop_ids=tuple(message.stop_ids),
        generation_defaults=decode_sampling(message.generation_defaults, Rim()),
        rules=tuple(_enum(_RULES, rule, "describe.rules") for rule in message.rules),
        lowest_version=message.lowest_version,
        highest_version=message.highest_version,
    )


def fault_of(error: DraftwireError, answers: str) -> t.Fault:
    """An error as the Fault that tells the peer of it."""
    return t.Fault(answers, type(error).__name__, error.message, error.field, error.retryable, error.retry_after_ms)


def error_of(fault: t.Fault) -> DraftwireError:
    """A Fault from the peer as the error that the caller sees."""
    return error_class(fault.error)(fault.message, field=fault.field, retry_after_ms=fault.retry_after_ms)
