"""A verifier in a process of its own, pinned to cores, ended with the benchmark whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from shared import model_guard
from shared.errors import DraftwireError

START_TIMEOUT_S = 300
MARK = "listening on "
METRICS_MARK = "metrics on "


class VerifierProcess:
    """`with VerifierProcess("smollm2-135m", cores={0}) as verifier:` gives `verifier.address`."""

    def __init__(
        self, model: str, cores: set[int] | None = None, threads: int = 0, options: Sequence[str] = ()
    ) -> None:
        """`options`: more arguments of cloud-verifier."""
        self._command = [
            *(sys.executable, model_guard.__file__),  # ends the verifier with this process, even after a kill -9
            *(sys.executable, "-m", "cloud_verifier.cli", "--model", model, "--port", "0"),
            *("--threads", str(threads), *options),
        ]
        self._cores = cores
        self.address = self.metrics_address = ""

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile(mode="w+")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            preexec_fn=self._pin if self._cores else None,
        )
        timer = threading.Timer(START_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        except BaseException:
            self._end()
            raise
        finally:
            timer.cancel()
        if MARK not in line:
            self._end()
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise DraftwireError(f"the verifier did not start: {lines[-1] if lines else 'no message'}")
        self.start_line = line.strip()
        self.address = line.split(MARK)[1].strip()
        self.metrics_address = line.split(METRICS_MARK)[1].split(",")[0] if METRICS_MARK in line else ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _pin(self) -> None:
        os.sched_setaffinity(0, self._cores or set())

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()


def pin_self(cores: set[int]) -> None:
    """Pins this process, where the machine has such cores."""
    available = os.sched_getaffinity(0)
    if cores <= available:
        os.sched_setaffinity(0, cores)


def machine() -> str:
    """One line about this machine, for bench/LOG.md."""
    model = "unknown CPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{len(os.sched_getaffinity(0))} cores of {model}"
