"""Runs a command that ends when this process's parent does: no orphan goes on converting after a kill -9.

Must not know: anything of the project (it is run by its path, isolated). Started by `model_process` with a pipe as its
standard input, as the leader of a process group: when the pipe closes, the parent is gone and the group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _end_with_parent() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Runs the command of the arguments and ends as it ended."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    status = child.wait()
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    # Not sys.exit: at shutdown the interpreter would meet the thread that is still reading standard input.
    os._exit(main())
