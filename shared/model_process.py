"""Child processes of a model build: output to a log, one line when one fails, none left behind by Ctrl-C.

Must not know: the cache's layout. Used by `model_fetch` and `model_build`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ModelLoadError
from shared.model_folder import Progress

_TICK_S = 0.2
_LINE_LIMIT = 240
_GUARD = (sys.executable, "-I", str(Path(__file__).resolve().with_name("model_guard.py")))
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_QUIET = {"TQDM_DISABLE": "1", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class Job:
    """One build under way."""

    folder: Path
    """The staging folder; everything that the build writes lies below it."""
    log: Path
    lock: int
    """The lock's descriptor, inherited by the children (see `model_folder.locked`), which end with this process."""
    progress: Progress

    def download(self, command: Sequence[str], label: str, expected_bytes: int, dest: Path, remedy: str) -> None:
        """Runs a download; progress is the bytes that have arrived, of those expected.

        Raises: ModelLoadError ending with `remedy`.
        """

        def tick() -> None:
            arrived = _folder_bytes(dest) + _folder_bytes(self.folder / "tmp")
            self.progress(label, min(arrived, expected_bytes), expected_bytes)

        self._run(command, label, tick, {}, None, remedy)
        self.progress(label, expected_bytes, expected_bytes)

    def step(self, command: Sequence[str], label: str) -> None:
        """Runs a step that needs no network; its progress is 0 of 1 until it is done.

        Raises: ModelLoadError with the last useful line of the output.
        """
        self._run(command, label, lambda: self.progress(label, 0, 1), _OFFLINE, _PACKAGE_ROOT, "")
        self.progress(label, 1, 1)

    def _run(
        self,
        command: Sequence[str],
        label: str,
        tick: Callable[[], None],
        settings: dict[str, str],
        cwd: Path | None,
        remedy: str,
    ) -> None:
        scratch = self.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            start = log.tell()
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            child = subprocess.Popen(
                [*_GUARD, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_QUIET, **settings, "TMPDIR": str(scratch)},
                cwd=cwd,
                pass_fds=(self.lock,),
                start_new_session=True,
            )
            status = _wait(child, tick)
        if status != 0:
            raise ModelLoadError(_failure(label, status, self.log, start, remedy))


def _wait(child: subprocess.Popen[bytes], tick: Callable[[], None]) -> int:
    """Waits for a child, calling `tick` meanwhile. Whatever interrupts the wait (Ctrl-C) kills the child's group."""
    try:
        while True:
            tick()
            try:
                return child.wait(timeout=_TICK_S)
            except subprocess.TimeoutExpired:
                continue
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    finally:
        if child.stdin:
            child.stdin.close()


def _failure(label: str, status: int, log: Path, start: int, remedy: str) -> str:
    """One line: what failed, why by its own words, what to do, where the rest is."""
    reason = last_useful_line(log.read_bytes()[start:].decode(errors="replace"))
    if status < 0:
        reason = f"killed by signal {-status}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    return f"{label} failed: {reason or f'exit status {status}'}{'; ' if remedy else ''}{remedy} (log: {log})"


def last_useful_line(text: str) -> str:
    """The line of a program's output that says best why it failed: the last error, else the last line."""
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n")]
    lines = [x for x in lines if x and not x.startswith(("$ ", "WARNING", "[notice]", "Traceback", "File "))]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:_LINE_LIMIT]


def _folder_bytes(folder: Path) -> int:
    """The bytes in a folder now; files that vanish while it is read are not counted."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total


def not_installed(modules: Sequence[str]) -> list[str]:
    """Those of the modules that cannot be imported here."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def require(modules: Sequence[str], doing: str) -> None:
    """Refuses at once what would fail for want of an installed package.

    Raises: ModelLoadError naming the extra to install.
    """
    if missing := not_installed(modules):
        raise ModelLoadError(
            f"{doing} needs {', '.join(missing)}: pip install 'draftwire[export]', or do it on another machine"
        )
