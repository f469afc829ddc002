"""C31: cores that a process may use, on made-up trees of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.cores import cpu_quota, usable_cores

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
SET = "34 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
DISK = "25 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"


def tree(root: Path, mounts: list[str], groups: list[str], files: dict[str, str] | None = None) -> Path:
    """A root folder; `files` by path below sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("\n".join([DISK, *mounts]) + "\n")
    (root / "proc/self/cgroup").write_text("\n".join(groups) + "\n")
    for name, content in (files or {}).items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    return root


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("max 100000", None),
        ("150000 100000", 2),
        ("200000 100000", 2),
        ("200001 100000", 3),
        ("1000 100000", 1),
        ("100000 100000", 1),
        ("50000 20000", 3),
        ("100000000000000000000 100000", 10**15),
        ("", None),
        ("max", None),
        ("150000", None),
        ("150000 0", None),
        ("0 100000", None),
        ("-1 100000", None),
        ("1.5 1", None),
        ("two 100000", None),
        ("² 100000", None),
        ("150000 100000 7", None),
    ],
)
def test_a_quota_of_version_2_is_rounded_up_and_nonsense_is_none(
    tmp_path: Path, content: str, cores: int | None
) -> None:
    assert cpu_quota(tree(tmp_path, [V2], ["0::/app"], {"app/cpu.max": content})) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("-1", "100000", None), ("150000", "100000", 2), ("50000", "100000", 1), ("x", "1", None), ("100000", "0", None)],
)
def test_a_quota_of_version_1_is_read_from_two_files(
    tmp_path: Path, quota: str, period: str, cores: int | None
) -> None:
    files = {
        "cpu,cpuacct/app/cpu.cfs_quota_us": quota,
        "cpu,cpuacct/app/cpu.cfs_period_us": period,
        "cpuset/cpu.cfs_quota_us": "1",
        "cpuset/cpu.cfs_period_us": "1",
        "cpu,cpuacct/pinned/cpu.cfs_quota_us": "1",
        "cpu,cpuacct/pinned/cpu.cfs_period_us": "1",
    }
    groups = ["5:cpuset:/pinned", "4:cpu,cpuacct:/app", "0::/"]
    assert cpu_quota(tree(tmp_path, [SET, V1], groups, files)) == cores


def test_the_smallest_quota_of_all_groups_above_counts(tmp_path: Path) -> None:
    """A group without a limit inside one with a limit, and the other way round; a sibling's does not count."""
    files = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "800000 100000"}
    root = tree(tmp_path / "1", [V2], ["0::/a/b/c"], {**files, "a/sibling/cpu.max": "1 1", "a/b/c/d/cpu.max": "1 1"})
    assert cpu_quota(root) == 3
    files["a/b/c/cpu.max"] = "200000 100000"
    assert cpu_quota(tree(tmp_path / "2", [V2], ["0::/a/b/c"], files)) == 2


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """With a namespace of control groups, and without: then the mount shows a part of the host's tree only."""
    namespaced = tree(tmp_path / "1", [V2], ["0::/"], {"cpu.max": "400000 100000"})
    assert cpu_quota(namespaced) == 4
    mount = V1.replace(" / /sys", " /docker/abc /sys")
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "500000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    assert cpu_quota(tree(tmp_path / "2", [mount], ["4:cpu,cpuacct:/docker/abc"], files)) == 5
    inner = {"cpu,cpuacct/x/cpu.cfs_quota_us": "100000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}
    assert cpu_quota(tree(tmp_path / "3", [mount], ["4:cpu,cpuacct:/docker/abc/x"], {**files, **inner})) == 1
    for number, elsewhere in enumerate(("/docker/other", "/../../x")):
        root = tree(tmp_path / f"4{number}", [mount], [f"4:cpu,cpuacct:{elsewhere}"], {**files, **inner})
        assert cpu_quota(root) == 5, "what is mounted is a group above it, or its own"
    outside = {"cpu.max": "500000 100000", "../x/cpu.max": "100000 100000"}
    assert cpu_quota(tree(tmp_path / "5", [V2], ["0::/../x"], outside)) == 5


def test_where_both_versions_are_mounted_the_smaller_quota_counts(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    groups = ["4:cpu,cpuacct:/", "0::/"]
    assert cpu_quota(tree(tmp_path / "1", [V1, UNIFIED], groups, files)) == 3
    assert cpu_quota(tree(tmp_path / "2", [V1, UNIFIED], groups, {**files, "unified/cpu.max": "200000 100000"})) == 2


@pytest.mark.parametrize(
    ("mountinfo", "cgroup"),
    [
        (None, None),
        ("", ""),
        ("garbage\n - \n1 2 3 4 5 -\n1 2 3 - cgroup2 a b\n", "garbage\n::\n0\n0:\n0::relative\n"),
        (V2, ""),
        ("", "0::/app"),
        ("\0\xff", "\0\xff"),
    ],
)
def test_without_readable_groups_there_is_no_quota(tmp_path: Path, mountinfo: str | None, cgroup: str | None) -> None:
    """Other systems have no proc at all."""
    root = tree(
        tmp_path, [], [], {"app/cpu.max": "100000 100000", "cpu.max": "100000 100000", "relative/cpu.max": "1 1"}
    )
    for name, content in (("mountinfo", mountinfo), ("cgroup", cgroup)):
        file = root / "proc/self" / name
        file.unlink() if content is None else file.write_bytes(content.encode("latin-1"))
    assert cpu_quota(root) is None


@pytest.mark.parametrize(("affinity", "quota", "cores"), [(8, "250000", 3), (2, "800000", 2), (4, "max", 4)])
def test_the_usable_cores_are_the_fewer_of_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affinity: int, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    assert usable_cores(tree(tmp_path, [V2], ["0::/app"], {"app/cpu.max": f"{quota} 100000"})) == cores


def test_without_affinity_the_hosts_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1
