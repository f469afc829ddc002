"""The seam below the service: what any engine offers. `torch_engine.TorchEngine` is ours.

Must not know: grpc, protobuf, tensors, pages, batches. Called by `service` on the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from shared.types import Close, DownFrame, Edit, Fault, Hint, ModelCard, Open, Opened, Pace, Resume, Score


class EngineStream(Protocol):
    """One device's attachment to one session. Calls return at once; what they cause comes back as frames."""

    opened: Opened

    def frames(self) -> AsyncIterator[DownFrame]:
        """Frames in order until the stream ends; raises the DraftwireError that ended it, if one did."""
        ...

    async def send(self, frame: Hint | Edit | Score | Pace | Close) -> None:
        """Hands a frame from the device to the engine; a refusal comes back as a Fault.

        Waits while too many of this stream's frames are still unhandled, so that a flood meets gRPC's flow control.
        """
        ...

    def finish_writing(self) -> None:
        """The device sends no more frames; it still reads what comes until its epoch has ended."""
        ...

    def refuse(self, fault: Fault) -> None:
        """Tells the device of a frame that never reached the engine, in order with the other frames."""
        ...

    def detach(self) -> None:
        """The device is gone; its session is kept for its lease."""
        ...


class Engine(Protocol):
    """What the service needs; knows nothing of tensors above this line."""

    def describe(self) -> ModelCard:
        """What is served."""
        ...

    async def open(self, frame: Open, principal: str, share_key: bytes = b"") -> EngineStream:
        """A new session; may wait for a place. `principal`: whose it is, for limits.

        What it computes is shared with sessions of the same principal and key only, without a key with none.

        Raises: RemoteProtocolError, ModelMismatch, Overloaded, VerifierUnavailable, DeviceFailure.
        """
        ...

    async def resume(self, frame: Resume, principal: str, share_key: bytes = b"") -> EngineStream:
        """An old session, opened with the same key. Raises: SessionNotFound, PrefixMismatch, DeviceFailure."""
        ...

    async def drain(self, within_ms: int) -> None:
        """Takes nobody new, tells every device to go elsewhere, lets texts end for so long, then ends all streams.

        Streams that are cut end with a retryable error.
        """
        ...
