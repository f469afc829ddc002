"""How many cores this process may keep busy: by its affinity and by the CPU quota of its control groups.

Must not know: who asks. Called by both sides where they choose a number of threads themselves. A container's quota
does not show in the number of cores: threads sized by the host wait most of the time for their turn.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, at least 1. `root`: where proc and the control groups are looked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, cpu_quota(root) or cores)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """The quota of this process in whole cores, rounded up, at least 1; None if there is none.

    The smallest of all control groups that it is in, of either version. What cannot be read or understood is no quota.
    """
    quotas = [quota for folder in _groups(root) for quota in _quotas(folder)]
    return max(1, math.ceil(min(quotas))) if quotas else None


def _quotas(folder: Path) -> Iterator[Fraction]:
    """Cores that a control group may use, by cpu.max (version 2) or cpu.cfs_quota_us (version 1)."""
    for words in (
        _words(folder / "cpu.max"),
        _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"),
    ):
        if len(words) == 2 and all(word.isascii() and word.isdecimal() for word in words):
            quota, period = map(int, words)
            if quota > 0 and period > 0:
                yield Fraction(quota, period)


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, each with those above it, as far as they are mounted."""
    for kind, top, point in _mounts(root):
        for line in _lines(root / "proc/self/cgroup"):
            number, controllers, path = [*line.split(":", 2), "", ""][:3]
            is_meant = number == "0" if kind == "cgroup2" else "cpu" in controllers.split(",")
            if is_meant:
                yield from _below(root / point.lstrip("/"), PurePosixPath(path), PurePosixPath(top))


def _below(folder: Path, path: PurePosixPath, top: PurePosixPath) -> Iterator[Path]:
    """A mount's folder and those below it down to a group's; the mount alone if it does not show the group."""
    parts = path.relative_to(top).parts if path.is_relative_to(top) and ".." not in path.parts else ()
    yield folder
    for part in parts:
        folder /= part
        yield folder


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Kind, root and mount point of each hierarchy of control groups that may hold CPU quotas."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, of_system = left.split(), right.split()
        if len(fields) < 5 or not of_system:
            continue
        kind = of_system[0]
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in of_system[-1].split(",")):
            yield kind, fields[3], fields[4]


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
