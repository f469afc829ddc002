from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_AGREEMENT: _ClassVar[Rule]
    RULE_REJECTION: _ClassVar[Rule]

class PaceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PACE_AUTO: _ClassVar[PaceKind]
    PACE_WAIT: _ClassVar[PaceKind]
    PACE_RUN_ON: _ClassVar[PaceKind]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNKNOWN: _ClassVar[Reason]
    REASON_STOP_ID: _ClassVar[Reason]
    REASON_LENGTH: _ClassVar[Reason]
    REASON_CONTEXT_FULL: _ClassVar[Reason]
    REASON_CANCELLED: _ClassVar[Reason]
RULE_AGREEMENT: Rule
RULE_REJECTION: Rule
PACE_AUTO: PaceKind
PACE_WAIT: PaceKind
PACE_RUN_ON: PaceKind
REASON_UNKNOWN: Reason
REASON_STOP_ID: Reason
REASON_LENGTH: Reason
REASON_CONTEXT_FULL: Reason
REASON_CANCELLED: Reason

class Up(_message.Message):
    __slots__ = ("open", "resume", "hint", "edit", "score", "pace", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    EDIT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    resume: Resume
    hint: Hint
    edit: Edit
    score: Score
    pace: Pace
    close: Close
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ..., edit: _Optional[_Union[Edit, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("lowest_version", "highest_version", "fingerprint", "ids", "generated_from", "epoch", "sampling", "seed", "rule", "stop_ids", "max_new_tokens", "pace", "run_ahead", "target_id", "logprobs")
    LOWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FROM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    lowest_version: int
    highest_version: int
    fingerprint: bytes
    ids: _containers.RepeatedScalarFieldContainer[int]
    generated_from: int
    epoch: int
    sampling: Sampling
    seed: int
    rule: Rule
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    pace: PaceKind
    run_ahead: int
    target_id: bytes
    logprobs: bool
    def __init__(self, lowest_version: _Optional[int] = ..., highest_version: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., ids: _Optional[_Iterable[int]] = ..., generated_from: _Optional[int] = ..., epoch: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., rule: _Optional[_Union[Rule, str]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., pace: _Optional[_Union[PaceKind, str]] = ..., run_ahead: _Optional[int] = ..., target_id: _Optional[bytes] = ..., logprobs: _Optional[bool] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("session_id", "epoch", "have", "digest")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    have: int
    digest: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., have: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class QRow(_message.Message):
    __slots__ = ("ids", "weights")
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class Hint(_message.Message):
    __slots__ = ("epoch", "first_node", "base_node", "base_position", "base_digest", "ids", "parents", "confidence", "rows", "ack")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_NODE_FIELD_NUMBER: _ClassVar[int]
    BASE_NODE_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_node: int
    base_node: int
    base_position: int
    base_digest: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    confidence: bytes
    rows: _containers.RepeatedCompositeFieldContainer[QRow]
    ack: int
    def __init__(self, epoch: _Optional[int] = ..., first_node: _Optional[int] = ..., base_node: _Optional[int] = ..., base_position: _Optional[int] = ..., base_digest: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., confidence: _Optional[bytes] = ..., rows: _Optional[_Iterable[_Union[QRow, _Mapping]]] = ..., ack: _Optional[int] = ...) -> None: ...

class Edit(_message.Message):
    __slots__ = ("epoch", "keep", "append_ids", "seed", "sampling")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    APPEND_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    keep: int
    append_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    sampling: Sampling
    def __init__(self, epoch: _Optional[int] = ..., keep: _Optional[int] = ..., append_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("request", "epoch", "base_position", "ids", "parents")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    request: int
    epoch: int
    base_position: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., epoch: _Optional[int] = ..., base_position: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("epoch", "pace", "run_ahead", "ack")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    pace: PaceKind
    run_ahead: int
    ack: int
    def __init__(self, epoch: _Optional[int] = ..., pace: _Optional[_Union[PaceKind, str]] = ..., run_ahead: _Optional[int] = ..., ack: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("epoch", "position")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class Down(_message.Message):
    __slots__ = ("opened", "commit", "scores", "finished", "fault", "draining")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    commit: Commit
    scores: Scores
    finished: Finished
    fault: Fault
    draining: Draining
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_context_tokens", "max_new_tokens", "max_frame_nodes", "max_held_nodes", "max_step_nodes", "remembered_nodes", "max_row_ids", "max_frame_bytes", "max_wait_ms", "lease_ms")
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_HELD_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_NODES_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    max_context_tokens: int
    max_new_tokens: int
    max_frame_nodes: int
    max_held_nodes: int
    max_step_nodes: int
    remembered_nodes: int
    max_row_ids: int
    max_frame_bytes: int
    max_wait_ms: int
    lease_ms: int
    def __init__(self, max_context_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., max_frame_nodes: _Optional[int] = ..., max_held_nodes: _Optional[int] = ..., max_step_nodes: _Optional[int] = ..., remembered_nodes: _Optional[int] = ..., max_row_ids: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., max_wait_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("version", "session_id", "seed", "epoch", "generated_from", "committed_length", "next_node", "reused_tokens", "target_id", "limits")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FROM_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NEXT_NODE_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    version: int
    session_id: bytes
    seed: int
    epoch: int
    generated_from: int
    committed_length: int
    next_node: int
    reused_tokens: int
    target_id: bytes
    limits: Limits
    def __init__(self, version: _Optional[int] = ..., session_id: _Optional[bytes] = ..., seed: _Optional[int] = ..., epoch: _Optional[int] = ..., generated_from: _Optional[int] = ..., committed_length: _Optional[int] = ..., next_node: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., target_id: _Optional[bytes] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("epoch", "start", "ids", "accepted", "seen_node", "last_accepted_node", "dropped_late", "dropped_disagreeing", "dropped_over_budget", "queue_us", "step_us", "batch_size", "logprobs", "hint_wait_us")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SEEN_NODE_FIELD_NUMBER: _ClassVar[int]
    LAST_ACCEPTED_NODE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_LATE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_DISAGREEING_FIELD_NUMBER: _ClassVar[int]
    DROPPED_OVER_BUDGET_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HINT_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    start: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    seen_node: int
    last_accepted_node: int
    dropped_late: int
    dropped_disagreeing: int
    dropped_over_budget: int
    queue_us: int
    step_us: int
    batch_size: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    hint_wait_us: int
    def __init__(self, epoch: _Optional[int] = ..., start: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., seen_node: _Optional[int] = ..., last_accepted_node: _Optional[int] = ..., dropped_late: _Optional[int] = ..., dropped_disagreeing: _Optional[int] = ..., dropped_over_budget: _Optional[int] = ..., queue_us: _Optional[int] = ..., step_us: _Optional[int] = ..., batch_size: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., hint_wait_us: _Optional[int] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("request", "epoch", "logprobs")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request: int
    epoch: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request: _Optional[int] = ..., epoch: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("context_tokens", "generated_tokens", "accepted_tokens", "steps", "dry_steps", "hint_nodes")
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRY_STEPS_FIELD_NUMBER: _ClassVar[int]
    HINT_NODES_FIELD_NUMBER: _ClassVar[int]
    context_tokens: int
    generated_tokens: int
    accepted_tokens: int
    steps: int
    dry_steps: int
    hint_nodes: int
    def __init__(self, context_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., dry_steps: _Optional[int] = ..., hint_nodes: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("epoch", "reason", "usage")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: Reason
    usage: Usage
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("answers", "error", "field", "message", "retry", "retry_after_ms")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    answers: str
    error: str
    field: str
    message: str
    retry: bool
    retry_after_ms: int
    def __init__(self, answers: _Optional[str] = ..., error: _Optional[str] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., retry: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("within_ms",)
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    within_ms: int
    def __init__(self, within_ms: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("lowest_version", "highest_version", "model_name", "target_id", "fingerprint", "fingerprint_blocks", "vocabulary_size", "context_size", "chat_template", "special_tokens", "stop_ids", "generation_defaults", "rules", "limits")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LOWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    lowest_version: int
    highest_version: int
    model_name: str
    target_id: bytes
    fingerprint: bytes
    fingerprint_blocks: _containers.RepeatedScalarFieldContainer[bytes]
    vocabulary_size: int
    context_size: int
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    generation_defaults: Sampling
    rules: _containers.RepeatedScalarFieldContainer[Rule]
    limits: Limits
    def __init__(self, lowest_version: _Optional[int] = ..., highest_version: _Optional[int] = ..., model_name: _Optional[str] = ..., target_id: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., fingerprint_blocks: _Optional[_Iterable[bytes]] = ..., vocabulary_size: _Optional[int] = ..., context_size: _Optional[int] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., generation_defaults: _Optional[_Union[Sampling, _Mapping]] = ..., rules: _Optional[_Iterable[_Union[Rule, str]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...
