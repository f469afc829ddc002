"""The verifier's settings, with their defaults and ranges.

Must not know: torch, grpc. Made by `cli` from file, environment and arguments; read by `server`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cloud_verifier.admission import AdmissionLimits
from cloud_verifier.scheduler import StepBudget
from shared.config import check_ranges
from shared.errors import ConfigError
from shared.types import Limits


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
    """CPU threads of PyTorch; 0 is its own choice, no more than the process may use by its control group's quota."""
    kv_memory: str = "auto"
    """Memory for keys and values, such as 800MiB, 2GiB or a number of bytes; auto is 1 GiB on CPU, on CUDA 85 % of what
    the weights leave free. What does not fit is computed again when it is wanted."""
    compile: bool = False
    """Compile the model's layers with torch.compile: minutes at the start, some speed after."""
    max_sessions: int = 64
    """Sessions held at once, absent ones included; more wait in the queue."""
    max_queue: int = 64
    """Opens that wait for a place; more are refused with retry-after."""
    max_queue_ms: int = 10_000
    """How long an open waits for a place before it is refused with retry-after."""
    principal_sessions: int = 0
    """Sessions of one connection; 0 is no limit of its own."""
    principal_streams: int = 0
    """Open streams of one connection; 0 is no limit of its own."""
    max_streams: int = 4096
    """Open streams in all."""
    hint_nodes_per_second: int = 0
    """Hint nodes of one connection, with bursts of four seconds' worth; more are dropped; 0 is no limit."""
    max_context_tokens: int = 8192
    """Context and generated tokens of a session; the model's own limit if that is lower."""
    max_new_tokens: int = 0
    """Generated tokens of a session; 0 is as many as the context holds."""
    max_wait_ms: int = 500
    """Pace wait: a session without hints runs after this long."""
    lease_ms: int = 60_000
    """How long an absent device's session is kept for resume."""
    step_nodes: int = 64
    """Hint nodes of one session verified in one step at most."""
    batch_nodes: int = 256
    """Hint nodes of all sessions verified in one step at most."""
    batch_sessions: int = 64
    """Sessions served in one step at most; pace auto turns from run_on to wait from half of it on."""
    prefill_tokens: int = 256
    """Context tokens fed in one step at most."""
    drain_ms: int = 10_000
    """At the first signal texts may still end for so long; the second signal ends at once."""
    metrics_port: int = -1
    """Port of the Prometheus metrics on the same host; 0 takes a free one, -1 is off."""
    step_log: str = ""
    """File that gets one JSON line a step, with the time of each part; empty is off."""
    log_format: Literal["text", "json"] = "text"
    """How log lines look."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {
                "port": (0, 65535),
                "threads": (0, 1024),
                "max_sessions": (1, 100_000),
                "max_queue": (0, 100_000),
                "max_queue_ms": (1, 600_000),
                "principal_sessions": (0, 100_000),
                "principal_streams": (0, 100_000),
                "max_streams": (1, 1_000_000),
                "hint_nodes_per_second": (0, 10_000_000),
                "max_new_tokens": (0, 10_000_000),
                "max_context_tokens": (16, 10_000_000),
                "max_wait_ms": (1, 600_000),
                "lease_ms": (0, 86_400_000),
                "step_nodes": (1, 4096),
                "batch_nodes": (0, 65_536),
                "batch_sessions": (1, 4096),
                "prefill_tokens": (1, 65_536),
                "drain_ms": (0, 600_000),
                "metrics_port": (-1, 65535),
            },
        )
        memory_bytes(self.kv_memory)
        if self.device != "cpu" and not self.device.startswith("cuda"):
            raise ConfigError(f"device must be cpu, cuda or cuda:N, got {self.device!r}", field="device")

    @property
    def limits(self) -> Limits:
        """What a session may do."""
        return Limits(
            max_context_tokens=self.max_context_tokens,
            max_new_tokens=self.max_new_tokens or self.max_context_tokens,
            max_step_nodes=self.step_nodes,
            max_wait_ms=self.max_wait_ms,
            lease_ms=self.lease_ms,
        )

    @property
    def dtype_name(self) -> str:
        """The dtype that `auto` stands for, or the one asked for."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def speculation(self) -> str:
        """Whether hints are verified, or why not."""
        return "on" if self.batch_nodes else "off (batch_nodes is 0)"

    @property
    def admission(self) -> AdmissionLimits:
        """Whom the verifier takes on."""
        return AdmissionLimits(self.max_sessions, self.max_queue, self.principal_sessions, self.hint_nodes_per_second)

    @property
    def budget(self) -> StepBudget:
        """What one step may hold."""
        return StepBudget(self.batch_sessions, self.prefill_tokens, self.batch_nodes)


def memory_bytes(text: str) -> int:
    """Bytes of a memory size such as 800MiB, 2GiB, 1.5GB or 1000000; "auto" is 0.

    Raises: ConfigError naming kv_memory.
    """
    if text == "auto":
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b)?", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"kv_memory must be auto or a size such as 800MiB or 2GiB, got {text!r}", field="kv_memory")
    unit = found[2] or "b"
    base = 1024 if "i" in unit or unit in ("k", "m", "g", "t") else 1000
    return max(1, int(float(found[1]) * base ** (" kmgt".index(unit[0]) if unit != "b" else 0)))
