"""The verifier as a process: settings, grpc.aio server with health and reflection, start, drain, end.

Must not know: scheduling, tensors. Called by `cli`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from cloud_verifier.engine import Engine, TorchEngine
from cloud_verifier.judge import Judge
from cloud_verifier.loading import LoadedTarget, load_target
from cloud_verifier.service import VerifierService
from shared.config import check_ranges
from shared.errors import ConfigError, DeviceFailure
from shared.model_store import resolve
from shared.pb import verifier_pb2 as pb
from shared.pb import verifier_pb2_grpc
from shared.types import Limits

log = logging.getLogger("draftwire.server")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Verifier"].full_name
GRACE_S = 2.0
MIN_PING_INTERVAL_MS = 5_000
"""Clients may ping as often as this without being sent away; the device pings every 10 s."""


@dataclass(frozen=True)
class VerifierConfig:
    """Settings of a verifier; the environment names are DRAFTWIRE_VERIFIER_<FIELD>."""

    model: str = "smollm2-135m"
    """A bundle name, a folder with config.json and safetensors, or a Hugging Face hub id."""
    host: str = "127.0.0.1"
    """Address to listen on. Plain text, no access control yet: keep it on loopback or a private network."""
    port: int = 50151
    """0 takes a free one; the start-up line says which."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto is float32 on CPU, bfloat16 on CUDA."""
    threads: int = 0
    """CPU threads of PyTorch; 0 leaves its default."""
    max_sessions: int = 64
    """Sessions held at once, absent ones included; more are refused with retry-after."""
    max_context_tokens: int = 8192
    """Context and generated tokens of a session; the model's own limit if that is lower."""
    max_wait_ms: int = 500
    """Pace wait: a session without hints runs after this long."""
    lease_ms: int = 60_000
    """How long an absent device's session is kept for resume."""
    step_nodes: int = 64
    """Hint nodes verified in one step at most."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {
                "port": (0, 65535),
                "threads": (0, 1024),
                "max_sessions": (1, 100_000),
                "max_context_tokens": (16, 10_000_000),
                "max_wait_ms": (1, 600_000),
                "lease_ms": (0, 86_400_000),
                "step_nodes": (1, 4096),
            },
        )
        if self.device != "cpu" and not self.device.startswith("cuda"):
            raise ConfigError(f"device must be cpu, cuda or cuda:N, got {self.device!r}", field="device")

    @property
    def limits(self) -> Limits:
        """What a session may do."""
        return Limits(
            max_context_tokens=self.max_context_tokens,
            max_new_tokens=self.max_context_tokens,
            max_step_nodes=self.step_nodes,
            max_wait_ms=self.max_wait_ms,
            lease_ms=self.lease_ms,
        )


class Server:
    """A grpc.aio server over an engine. `start`, then `stop`; the port is known after `start`."""

    def __init__(self, engine: Engine, valid_ids: object) -> None:
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", engine.describe().limits.max_frame_bytes),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        self._engine = engine
        self._grpc = grpc.aio.server(options=options)
        self.health = HealthServicer()
        verifier_pb2_grpc.add_VerifierServicer_to_server(VerifierService(engine, valid_ids), self._grpc)  # type: ignore[arg-type]
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._grpc)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises: ConfigError if the port cannot be had."""
        check_free(host, port)
        try:
            bound = self._grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: the port is in use or not allowed") from error
        await self._grpc.start()
        await self.set_serving(True)
        return int(bound)

    async def set_serving(self, is_serving: bool) -> None:
        """Turns health to SERVING or NOT_SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self.health.set(name, status)

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """NOT_SERVING at once; devices are told, streams end with a retryable status, within `grace_s`."""
        await self.set_serving(False)
        try:
            async with asyncio.timeout(grace_s):
                await self._engine.drain(int(grace_s * 1000))
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


def load(config: VerifierConfig) -> LoadedTarget:
    """The target that the settings name."""
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if config.device == "cpu" else "bfloat16"
    folder = resolve(config.model, "target")
    return load_target(folder, Path(config.model).name, dtype, config.device, config.limits)


async def serve(config: VerifierConfig, loaded: LoadedTarget, announce: Callable[[str], None]) -> int:
    """Serves until a signal or a device failure; returns the exit code. `announce` gets the start-up line."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def on_failure(failure: DeviceFailure) -> None:
        loop.call_soon_threadsafe(end, 1)

    engine = TorchEngine(
        loaded.model,
        Judge(loaded.valid_ids),
        loaded.card,
        max_sessions=config.max_sessions,
        on_failure=on_failure,
    )
    server = Server(engine, loaded.valid_ids)
    port = await server.start(config.host, config.port)
    engine.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, 0)
    lm = loaded.model.lm.model
    announce(
        f"draftwire verifier: {loaded.card.model_name} on {lm.device}, {str(lm.dtype).removeprefix('torch.')}, "
        f"context {loaded.card.context_size}, at most {config.max_sessions} sessions, "
        f"listening on {config.host}:{port}"
    )
    code = await ended
    log.info("draining")
    await server.stop()
    engine.stop()
    return code
