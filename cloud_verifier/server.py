"""The grpc.aio server: Verifier, health and reflection on one port; listens at once, serves when there is an engine.

Must not know: models, scheduling. Started and stopped by `verifier_process`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import grpc
import numpy as np
import numpy.typing as npt
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from cloud_verifier.engine import Engine
from cloud_verifier.service import StreamLimits, VerifierService
from shared.errors import ConfigError, DeviceFailure
from shared.pb import verifier_pb2 as pb
from shared.pb import verifier_pb2_grpc
from shared.types import Limits

log = logging.getLogger("draftwire.server")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Verifier"].full_name
GRACE_S = 2.0
MIN_PING_INTERVAL_MS = 5_000
"""Clients may ping as often as this without being sent away; the device pings every 10 s."""


class Server:
    """A grpc.aio server: `start`, then `begin` with an engine, then `stop`. The port is known after `start`."""

    def __init__(
        self,
        max_frame_bytes: int = Limits.max_frame_bytes,
        streams: StreamLimits | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", max_frame_bytes),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        self._engine: Engine | None = None
        self._grpc = grpc.aio.server(options=options)
        self._service = VerifierService(streams, on_refused)
        self.health = HealthServicer()
        verifier_pb2_grpc.add_VerifierServicer_to_server(self._service, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._grpc)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)

    async def start(self, host: str, port: int) -> int:
        """Listens, not serving yet; returns the port. Raises: ConfigError if the port cannot be had."""
        check_free(host, port)
        try:
            bound = self._grpc.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: the port is in use or not allowed") from error
        await self.set_serving(False)
        await self._grpc.start()
        return int(bound)

    async def begin(self, engine: Engine, valid_ids: npt.NDArray[np.bool_]) -> None:
        """Serves."""
        self._engine = engine
        self._service.begin(engine, valid_ids)
        await self.set_serving(True)

    async def set_serving(self, is_serving: bool) -> None:
        """Turns health to SERVING or NOT_SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self.health.set(name, status)

    async def stop(self, drain_s: float = 0.0, grace_s: float = GRACE_S) -> None:
        """NOT_SERVING at once; devices are told, texts may end within `drain_s`; then streams end, retryably."""
        await self.set_serving(False)
        if self._engine is not None:
            try:
                async with asyncio.timeout(drain_s + grace_s):
                    await self._engine.drain(int(drain_s * 1000))
            except (TimeoutError, DeviceFailure) as error:
                log.warning("streams are cut: %s", error or "the device thread is busy")
        await self._grpc.stop(grace_s)


def check_free(host: str, port: int) -> None:
    """Asks the system before gRPC does, which would log its own lines. Raises: ConfigError naming host and port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", field="port") from error
