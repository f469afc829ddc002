"""The one tree of errors, with what each means on the wire.

Must not know: grpc (codes are names), models, files. Raised by both sides, translated once per side at the rim.

    DraftwireError
    ├── ConfigError              a setting or argument is wrong                    INVALID_ARGUMENT
    ├── ProtocolError
    │   ├── LocalProtocolError   we broke the protocol: our bug                    INTERNAL
    │   ├── RemoteProtocolError  the peer broke it, or sent a bad value            INVALID_ARGUMENT
    │   └── Unimplemented        asked for what this version does not do yet       UNIMPLEMENTED
    ├── SessionError
    │   ├── SessionNotFound      the verifier does not hold this session           NOT_FOUND
    │   ├── PrefixMismatch       the two sides hold different ids                  ABORTED
    │   ├── SessionDisplaced     another stream of the device took the session     ABORTED
    │   └── ModelMismatch        vocabularies or targets differ                    FAILED_PRECONDITION
    ├── Overloaded               no room now                                       RESOURCE_EXHAUSTED
    ├── TransportError
    │   ├── VerifierUnavailable  nobody answers at the address                     UNAVAILABLE
    │   └── Timeout              somebody is there but does not answer in time     DEADLINE_EXCEEDED
    └── ModelError
        ├── ModelLoadError       files missing, corrupt, or refused by self-check  FAILED_PRECONDITION
        ├── NumericalError       non-finite scores: this session ends              INTERNAL
        └── DeviceFailure        the accelerator is gone: the process ends         UNAVAILABLE
"""

from __future__ import annotations

from typing import ClassVar

VERIFIER_SAYS = "the verifier "


class DraftwireError(Exception):
    """Anything Draftwire raises on purpose; `str()` is one line that a user can act on."""

    grpc_status: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        """`field` names the input at fault ("" if none); `retry_after_ms` is a hint for retryable errors (0: none)."""
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


class ConfigError(DraftwireError):
    """A setting or argument is wrong: correct it and call again."""

    grpc_status = "INVALID_ARGUMENT"


class ProtocolError(DraftwireError):
    """A frame that must not occur."""

    grpc_status = "INVALID_ARGUMENT"


class LocalProtocolError(ProtocolError):
    """This side is about to break the protocol: a bug here, report it."""

    grpc_status = "INTERNAL"


class RemoteProtocolError(ProtocolError):
    """The peer sent what it must not; the frame had no effect."""

    grpc_status = "INVALID_ARGUMENT"


class Unimplemented(ProtocolError):
    """The peer asked for something that this version does not do yet."""

    grpc_status = "UNIMPLEMENTED"


class SessionError(DraftwireError):
    """Something about one session; others are unharmed."""

    grpc_status = "FAILED_PRECONDITION"


class SessionNotFound(SessionError):
    """The verifier does not hold this session: reopen with `continued`."""

    grpc_status = "NOT_FOUND"
    retryable = True


class PrefixMismatch(SessionError):
    """The two sides hold different ids: resume from the last common point or reopen."""

    grpc_status = "ABORTED"


class SessionDisplaced(SessionError):
    """A newer stream resumed this session: this one ends and must not resume."""

    grpc_status = "ABORTED"


class ModelMismatch(SessionError):
    """Draft and target do not share a vocabulary, or another target answers: choose a matching pair."""

    grpc_status = "FAILED_PRECONDITION"


class Overloaded(DraftwireError):
    """No room now: try again after `retry_after_ms`."""

    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class TransportError(DraftwireError):
    """The network failed between the two sides."""

    grpc_status = "UNAVAILABLE"
    retryable = True


class VerifierUnavailable(TransportError):
    """Nobody answers at the address: start a verifier, or wait and retry.

    What a verifier itself says so begins with `VERIFIER_SAYS`: its words reach the user, a network's do not.
    """

    grpc_status = "UNAVAILABLE"


class Timeout(TransportError):
    """Somebody is there but does not answer in time: retry."""

    grpc_status = "DEADLINE_EXCEEDED"


class ModelError(DraftwireError):
    """Something about a model or its files."""

    grpc_status = "FAILED_PRECONDITION"


class ModelLoadError(ModelError):
    """Model files are missing, corrupt, or refused by the self-check: the message names the file."""

    grpc_status = "FAILED_PRECONDITION"


class NumericalError(ModelError):
    """A model gave non-finite scores: this session ends, the others go on."""

    grpc_status = "INTERNAL"


class DeviceFailure(ModelError):
    """The accelerator is gone: the process drains and ends. The only fatal error."""

    grpc_status = "UNAVAILABLE"
    retryable = True


def error_class(name: str) -> type[DraftwireError]:
    """The error class with this name, for faults that arrived by wire; an unknown name gives DraftwireError."""
    found: dict[str, type[DraftwireError]] = {}
    pending: list[type[DraftwireError]] = [DraftwireError]
    while pending:
        current = pending.pop()
        found[current.__name__] = current
        pending.extend(current.__subclasses__())
    return found.get(name, DraftwireError)
