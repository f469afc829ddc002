"""The verifier as a process: listen, load, serve, drain, end. Exit code and start-up line.

Must not know: scheduling, tensors, frames. Called by `cli`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from cloud_verifier.judge import Judge
from cloud_verifier.loading import LoadedTarget, load_target
from cloud_verifier.logs import event
from cloud_verifier.metrics import PrometheusObserver, serve_metrics, watch_loop_lag
from cloud_verifier.reports import GuardedObserver
from cloud_verifier.server import Server
from cloud_verifier.service import StreamLimits
from cloud_verifier.settings import VerifierConfig, memory_bytes
from cloud_verifier.step_cost import StepCost
from cloud_verifier.step_log import StepLog
from cloud_verifier.torch_engine import TorchEngine
from shared.cores import usable_cores
from shared.errors import DeviceFailure
from shared.model_store import resolve

log = logging.getLogger("draftwire.process")

TOKEN_SHARE = {"cpu": 0.06, "cuda": 0.002}
"""What one more token costs, as a share of an empty step, until it is measured: SmolLM2 on one core, 1.5B on a GPU."""
SECOND_SIGNAL_CODE = 130

T = TypeVar("T")


def set_threads(threads: int) -> None:
    """As many CPU threads for PyTorch as the setting says; 0 is its own choice within the control group's quota.

    PyTorch goes by affinity and OMP_NUM_THREADS: who sets that has chosen.
    """
    if threads:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))


def load(config: VerifierConfig) -> LoadedTarget:
    """The target that the settings name."""
    set_threads(config.threads)
    folder = resolve(config.model, "target")
    kv_bytes = memory_bytes(config.kv_memory)
    return load_target(
        folder, Path(config.model).name, config.dtype_name, config.device, config.limits, kv_bytes, config.compile
    )


def start_up_line(config: VerifierConfig, loaded: LoadedTarget, port: int, metrics_port: int | None) -> str:
    """One line that says what is served, where, and how much fits."""
    metrics = "" if metrics_port is None else f", metrics on {config.host}:{metrics_port}"
    return (
        f"draftwire verifier: {loaded.card.model_name} on {loaded.model.lm.model.device}, {config.dtype_name}, "
        f"context {loaded.card.context_size}, KV for {loaded.model.pool.capacity_tokens} tokens, "
        f"at most {config.max_sessions} sessions, hints {config.speculation}{metrics}, "
        f"listening on {config.host}:{port}"
    )


async def serve(config: VerifierConfig, announce: Callable[[str], None]) -> int:
    """Listens, loads, serves until a signal or a device failure; returns the exit code.

    Health says NOT_SERVING until the model is loaded. `announce` gets the start-up line. The first signal drains, the
    second ends the process at once. Raises: ConfigError, ModelLoadError.
    """
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    counted = PrometheusObserver(
        model=Path(config.model).name,
        device=config.device,
        dtype=config.dtype_name,
        version=version("draftwire"),
        speculation=config.speculation,
    )
    with ExitStack() as stack:
        observer = _observer(config, counted, stack)
        metrics_port = None
        if config.metrics_port >= 0:
            metrics, metrics_port = serve_metrics(counted, config.host, config.metrics_port)
            stack.callback(metrics.close)
        streams = StreamLimits(config.max_streams, config.principal_streams)
        server = Server(config.limits.max_frame_bytes, streams, observer.refused)
        port = await server.start(config.host, config.port)
        _watch_signals(ended)
        try:
            loaded = await _unless_ended(asyncio.to_thread(load, config), ended)
        except BaseException:
            await server.stop(grace_s=0)
            raise
        engine = _engine(config, loaded, observer, ended)
        engine.start()
        await server.begin(engine, loaded.valid_ids)
        lag = asyncio.create_task(watch_loop_lag(counted))
        announce(start_up_line(config, loaded, port, metrics_port))
        code = await ended
        event(log, logging.INFO, "draining", within_ms=config.drain_ms)
        await server.stop(config.drain_ms / 1000 if code == 0 else 0)
        await asyncio.to_thread(engine.stop)
        lag.cancel()
        with suppress(asyncio.CancelledError):
            await lag
    return code


def _observer(config: VerifierConfig, counted: PrometheusObserver, stack: ExitStack) -> GuardedObserver:
    """The metrics, and the step log if one is asked for; closed with the stack."""
    if not config.step_log:
        return GuardedObserver(counted)
    steps = StepLog(Path(config.step_log))
    stack.callback(steps.close)
    return GuardedObserver(counted, steps)


def _engine(
    config: VerifierConfig, loaded: LoadedTarget, observer: GuardedObserver, ended: asyncio.Future[int]
) -> TorchEngine:
    loop = asyncio.get_running_loop()

    def on_failure(failure: DeviceFailure) -> None:
        loop.call_soon_threadsafe(_end, ended, 1)

    device = loaded.model.lm.model.device
    return TorchEngine(
        loaded.model,
        Judge(loaded.valid_ids, device),
        loaded.card,
        admission=config.admission,
        max_queue_ms=config.max_queue_ms,
        budget=config.budget,
        cost=StepCost(TOKEN_SHARE[device.type]),
        observer=observer,
        on_failure=on_failure,
    )


def _watch_signals(ended: asyncio.Future[int]) -> None:
    def on_signal() -> None:
        if ended.done():
            os._exit(SECOND_SIGNAL_CODE)
        _end(ended, 0)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _end(ended: asyncio.Future[int], code: int) -> None:
    if not ended.done():
        ended.set_result(code)


async def _unless_ended(work: Coroutine[Any, Any, T], ended: asyncio.Future[int]) -> T:
    """The work's result; a signal meanwhile ends the process at once: a load cannot be interrupted."""
    task = asyncio.ensure_future(work)
    waited: set[asyncio.Future[Any]] = {task, ended}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        os._exit(ended.result())
    return task.result()
