"""C31: threads go by the settings and by the cores that the process may use, never by those of the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import shared.cores
from cloud_verifier.verifier_process import set_threads
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.onnx_drafter import OnnxModel
from tests.tiny_pair import TinyPair

ROOT = Path(__file__).resolve().parents[2]
ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import json, sys
from pathlib import Path
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.drafter import Budget, DraftTask
from edge_client.onnx_drafter import OnnxModel
from shared.sampling import GREEDY
from shared.types import Epoch, Rule

def threads():
    return len(os.listdir("/proc/self/task"))

folder, told = Path(sys.argv[1]), {}
before = threads()
kept = []
for count in (1, 2, 3):
    kept.append(OnnxModel(folder, count))
    kept[-1].feed([1, 2, 3])
    told[f"model with {count}"] = threads() - before
    before = threads()

config = ClientConfig(draft=str(folder), threads=int(sys.argv[2]))
client = SpeculativeClient(config, concurrency=8)
client._load_text()
drafters = client._build_drafters()
task = DraftTask(GREEDY, 1, Rule.AGREEMENT, Epoch(1), generated_from=0)

def draft(drafter, first):
    drafter.begin(task)
    ids = [first, 70, 71]
    for _ in range(20):
        drafter.sync(ids)
        ids += drafter.propose(Budget(4)).ids
    return len(ids)

jobs = [client._executor.submit(draft, drafter, 80 + place) for place, drafter in enumerate(drafters)]
told["drafted"] = [job.result() for job in jobs]
told["client"] = threads() - before
print(json.dumps(told))
"""
"""Counts the threads of a process that may use one core, whatever its host has; `argv[2]` is the `threads` setting."""


IDLE = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from edge_client.onnx_drafter import OnnxModel

model, drawn = OnnxModel(Path(sys.argv[1]), int(sys.argv[2])), [70]
models, busy_s, idle_s = (model, model.another()), 0.0, 0.0
with ThreadPoolExecutor(2) as executor:
    for _ in range(40):
        jobs = [executor.submit(each.feed, drawn[-1:]) for each in models]
        drawn += [int(job.result().argmax()) for job in jobs][:1]
        began, spent = time.monotonic(), time.process_time()
        time.sleep(0.02)  # being idle is what is looked at
        busy_s, idle_s = busy_s + time.process_time() - spent, idle_s + time.monotonic() - began
print(json.dumps({"busy": busy_s / idle_s, "ids": len(drawn)}))
"""
"""Processor time over time while nothing is drafted, between drafts on two threads; `argv[2]` threads in each."""


def told_by(script: str, folder: Path, threads: int) -> dict[str, Any]:
    """What a script told, with nothing in the log."""
    process = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(threads)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stderr == "", "no complaint of a thread that could not be bound to a core"
    return dict(json.loads(process.stdout))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_draft_is_opened_with_the_threads_asked_for_and_none_of_them_spins(tiny_pair: TinyPair, threads: int) -> None:
    """C31: an explicit number, so that ONNX Runtime never counts the host's cores; idle threads sleep."""
    options = OnnxModel(tiny_pair.same_draft, threads)._session.get_session_options()
    assert options.intra_op_num_threads == threads
    assert options.inter_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_one_thread_is_what_a_draft_gets_unless_a_setting_says_otherwise(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C31: the client hands its setting on, the default of which is 1 on any host."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for settings, expected in (({}, 1), ({"threads": 3}, 3)):
        client = SpeculativeClient(ClientConfig(draft=str(tiny_pair.same_draft), **settings), concurrency=2)
        client._load_text()
        sessions = {id(drafter.model._session): drafter.model._session for drafter in client._build_drafters()}  # type: ignore[attr-defined]
        assert [each.get_session_options().intra_op_num_threads for each in sessions.values()] == [expected]


def test_a_client_has_no_more_threads_than_the_cores_that_its_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """C31: all that fit, at least one; an explicit `threads` wins over the number of cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for cores, threads, concurrency in product((1, 2, 3, 8, 64), (1, 2, 4), (1, 2, 5, 8, 256)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        client = SpeculativeClient(ClientConfig(threads=threads), concurrency=concurrency)
        workers = client._executor._max_workers
        assert 1 <= workers <= concurrency
        assert workers * threads <= max(cores, threads)
        assert workers == concurrency or (workers + 1) * threads > cores


@pytest.mark.parametrize(("cores", "quota", "workers"), [(64, 3, 3), (2, 3, 2), (64, None, 8), (64, 1, 1)])
def test_a_client_in_a_container_goes_by_its_quota_of_processor_time(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: int | None, workers: int
) -> None:
    """C31. Once wrong: affinity alone was asked, and under a quota of 3 of 64 cores 8 threads waited for their turn."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(shared.cores, "cpu_quota", lambda root: quota)
    assert SpeculativeClient(concurrency=8)._executor._max_workers == workers
    explicit = SpeculativeClient(ClientConfig(threads=16), concurrency=8)
    assert explicit.config.threads == 16, "an explicit setting wins"
    assert explicit._executor._max_workers == max(1, min(quota or cores, cores) // 16)


@pytest.mark.parametrize(
    ("setting", "of_torch", "quota", "environment", "expected"),
    [
        (0, 64, 3, "", 3),
        (0, 2, 3, "", 2),
        (0, 8, None, "", 8),
        (5, 64, 3, "", 5),
        (5, 2, 3, "16", 5),
        (0, 16, 3, "16", 16),
    ],
)
def test_a_verifier_goes_by_its_quota_unless_a_setting_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, setting: int, of_torch: int, quota: int | None, environment: str, expected: int
) -> None:
    """C31: `--threads`, then OMP_NUM_THREADS, then PyTorch's choice within the quota, of which it does not know."""
    threads = [of_torch]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(shared.cores, "cpu_quota", lambda root: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    else:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_threads(setting)
    assert threads[-1] == expected


def test_between_drafts_no_thread_looks_for_work(tiny_pair: TinyPair) -> None:
    """C31: 40 rests of 20 ms. Threads that spin are busy all that time; those that sleep use next to nothing of it."""
    told = told_by(IDLE, tiny_pair.same_draft, 2)
    assert told["ids"] == 41
    assert told["busy"] < 0.2


@pytest.mark.parametrize("threads", [1, 2])
def test_on_one_core_of_a_larger_host_eight_texts_draft_on_one_thread(tiny_pair: TinyPair, threads: int) -> None:
    """C31: counted in a process that may use one core. `threads` drafts with that many: the worker is one of them."""
    told = told_by(ON_ONE_CORE, tiny_pair.same_draft, threads)
    assert [told[f"model with {count}"] for count in (1, 2, 3)] == [0, 1, 2]
    assert told["drafted"] == [3 + 20 * 4] * 8
    assert told["client"] == threads
