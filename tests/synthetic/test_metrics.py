"""What is counted adds up at every scrape, only rises, and no failure in it reaches a session (C39)."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
import urllib.request
from dataclasses import fields, replace

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cloud_verifier.metrics import DEEPEST, DEPTHS, PARTS, PrometheusObserver, serve_metrics, watch_loop_lag
from cloud_verifier.reports import Gauges, GuardedObserver, NoObserver, Observer, StepReport
from shared.errors import ConfigError

Values = dict[tuple[str, tuple[str, ...]], float]

PLAIN = StepReport(
    sessions=1,
    prefill_tokens=0,
    nodes=0,
    committed=1,
    accepted=0,
    dry_rows=1,
    offered_by_depth=(),
    accepted_by_depth=(),
    plan_s=0.001,
    stage_s=0.002,
    forward_s=0.03,
    gather_s=0.004,
    judge_s=0.005,
    commit_s=0.006,
    judged_rows=1,
)
GAUGES = Gauges(
    sessions_attached=3,
    sessions_absent=1,
    queue_length=2,
    kv_pages_used=30,
    kv_pages_shared=8,
    kv_pages_total=100,
    kv_pages_cached=50,
    sessions_finished=4,
)
CALLS: dict[str, tuple[object, ...]] = {
    "step": (PLAIN,),
    "session_opened": (10, 4),
    "session_ended": ("lease",),
    "refused": ("queue_full",),
    "hints": (5, 3),
    "dropped": (1, 2, 3),
    "evicted": (7,),
    "out_of_memory": (),
    "gauges": (GAUGES,),
}


def observer(**given: object) -> PrometheusObserver:
    return PrometheusObserver(model="tiny", device="cpu", dtype="float32", **given)  # type: ignore[arg-type]


def read(text: str) -> Values:
    return {
        (sample.name.removeprefix("draftwire_"), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(counted: PrometheusObserver) -> Values:
    return read(generate_latest(counted.registry).decode())


def summed(values: Values, name: str) -> float:
    found = [value for (sample, _), value in values.items() if sample == name]
    assert found, name
    return sum(found)


def random_report(rng: random.Random) -> StepReport:
    """A step of random rows, each with a chain of hints that stands up to a random depth; prefill rows among them."""
    offered, accepted = [0] * (DEEPEST + 8), [0] * (DEEPEST + 8)
    judged, prefill_rows = rng.randrange(5), rng.randrange(3)
    nodes = committed = stood = dry = 0
    for _ in range(judged):
        length = rng.choice((0, 1, 4, DEEPEST + 8))
        good = rng.randint(0, length)
        for depth in range(length):
            offered[depth] += depth <= good
            accepted[depth] += depth < good
        nodes, dry, stood, committed = nodes + length, dry + (length == 0), stood + good, committed + good + 1
    seconds = [rng.expovariate(100) for _ in PARTS]
    return StepReport(
        judged + prefill_rows,
        prefill_rows * 256,
        nodes,
        committed,
        stood,
        dry,
        tuple(offered),
        tuple(accepted),
        *seconds,
        judged_rows=judged,
    )


def assert_adds_up(values: Values) -> None:
    steps, committed, accepted = (values[f"{name}_total", ()] for name in ("steps", "committed", "accepted"))
    assert committed == accepted + values["corrections_total", ()]
    assert summed(values, "accepted_by_depth_total") == accepted
    for depth in DEPTHS:
        assert values["accepted_by_depth_total", (depth,)] <= values["offered_by_depth_total", (depth,)]
    assert values["batch_size_count", ()] == values["step_seconds_count", ()] == steps
    for part in PARTS:
        assert values["step_part_seconds_count", (part,)] == steps
    whole = sum(values["step_part_seconds_sum", (part,)] for part in PARTS if part != "gather")
    assert values["step_seconds_sum", ()] == pytest.approx(whole)
    assert all(value >= 0 for value in values.values())


@pytest.mark.parametrize("seed", range(5))
def test_figures_add_up_at_every_scrape_and_counters_only_rise(seed: int) -> None:
    rng = random.Random(seed)
    counted = observer()
    told: list[StepReport] = []
    before = scrape(counted)
    for _ in range(20):
        for _ in range(rng.randrange(4)):
            told.append(random_report(rng))
            counted.step(told[-1])
        counted.dropped(rng.randrange(3), rng.randrange(3), rng.randrange(3))
        counted.hints(rng.randrange(9), rng.randrange(5))
        now = scrape(counted)
        assert_adds_up(now)
        for key, value in before.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert now[key] >= value, key
        before = now
    assert before["steps_total", ()] == len(told)
    for name, field in (("verified_nodes", "nodes"), ("committed", "committed"), ("dry_rows", "dry_rows")):
        assert before[f"{name}_total", ()] == sum(getattr(report, field) for report in told)
    assert before["batch_size_sum", ()] == sum(report.sessions for report in told)
    assert before["judged_rows_total", ()] == sum(report.judged_rows for report in told)
    assert summed(before, "offered_by_depth_total") == sum(sum(report.offered_by_depth) for report in told)
    deep = sum(sum(report.offered_by_depth[DEEPEST - 1 :]) for report in told)
    assert before["offered_by_depth_total", (DEPTHS[-1],)] == deep > 0


def test_every_call_shows_in_its_own_figures() -> None:
    counted = observer(speculation="off: no room")
    for name, told in CALLS.items():
        getattr(counted, name)(*told)
    values = scrape(counted)
    expected: Values = {
        ("sessions_opened_total", ()): 1,
        ("context_tokens_total", ()): 10,
        ("reused_tokens_total", ()): 4,
        ("sessions_ended_total", ("lease",)): 1,
        ("sessions_ended_total", ("finished",)): 0,
        ("refused_total", ("queue_full",)): 1,
        ("hint_nodes_total", ()): 5,
        ("hint_nodes_fresh_total", ()): 3,
        ("hint_nodes_dropped_total", ("late",)): 1,
        ("hint_nodes_dropped_total", ("disagreeing",)): 2,
        ("hint_nodes_dropped_total", ("over_budget",)): 3,
        ("kv_evicted_pages_total", ()): 7,
        ("out_of_memory_total", ()): 1,
        ("queue_length", ()): 2,
        ("sessions", ("attached",)): 3,
        ("sessions", ("absent",)): 1,
        ("sessions", ("finished",)): 4,
        ("kv_pages", ("used",)): 30,
        ("kv_pages", ("shared",)): 8,
        ("kv_pages", ("cached",)): 50,
        ("kv_pages", ("free",)): 20,
        ("step_part_seconds_sum", ("gather",)): 0.004,
        ("step_seconds_sum", ()): 0.044,
        ("step_seconds_bucket", ("0.025",)): 0,
        ("step_seconds_bucket", ("0.05",)): 1,
        ("judged_rows_total", ()): 1,
    }
    assert {key: values[key] for key in expected} == pytest.approx(expected)
    assert 'speculation="off: no room"' in generate_latest(counted.registry).decode()


def test_amounts_that_cannot_be_are_clamped_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    counted = observer()
    bad = replace(
        PLAIN, committed=-1, accepted=3, nodes=-4, plan_s=float("nan"), judge_s=-1.0, accepted_by_depth=(2, 1)
    )
    for _ in range(3):
        counted.step(bad)
        counted.hints(-5, 2)
        counted.dropped(-1, 4, 0)
        counted.evicted(-7)
    counted.step(replace(PLAIN, committed=2, accepted=5, offered_by_depth=(3,), accepted_by_depth=(-1,)))
    values = scrape(counted)
    assert values["committed_total", ()] == values["accepted_total", ()] == 2
    assert values["corrections_total", ()] == values["verified_nodes_total", ()] == values["hint_nodes_total", ()] == 0
    assert values["hint_nodes_fresh_total", ()] == 6
    assert values["hint_nodes_dropped_total", ("late",)] == values["kv_evicted_pages_total", ()] == 0
    assert values["hint_nodes_dropped_total", ("disagreeing",)] == 12
    assert summed(values, "accepted_by_depth_total") == 0
    assert values["step_part_seconds_sum", ("plan",)] == pytest.approx(0.001)
    assert values["step_part_seconds_count", ("plan",)] == 4
    names = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert {"committed", "accepted", "hint_nodes", "kv_evicted_pages", "step_seconds"} <= set(names)
    assert len(names) == len(set(names))


def test_a_report_that_is_no_report_changes_nothing() -> None:
    counted = observer()
    before = scrape(counted)
    with pytest.raises(TypeError):
        counted.step(replace(PLAIN, commit_s="late"))  # type: ignore[arg-type]
    after = scrape(counted)
    assert {key: value for key, value in after.items() if not key[0].startswith("process_")} == {
        key: value for key, value in before.items() if not key[0].startswith("process_")
    }


def test_reasons_without_end_share_one_label() -> None:
    counted = observer()
    for number in range(1000):
        counted.refused(f"reason {number}")
    values = scrape(counted)
    assert summed(values, "refused_total") == 1000
    assert len([key for key in values if key[0] == "refused_total"]) <= 33
    assert values["refused_total", ("other",)] > 900


def test_a_scrape_in_mid_flight_never_sees_half_a_step() -> None:
    counted, stop = observer(), threading.Event()
    report = replace(
        PLAIN, committed=5, accepted=4, dry_rows=0, nodes=6, offered_by_depth=(2, 2, 1), accepted_by_depth=(2, 1, 1)
    )

    def work() -> None:
        while not stop.is_set():
            counted.step(report)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            values = scrape(counted)
            assert_adds_up(values)
            assert values["committed_total", ()] == 5 * values["steps_total", ()]
            assert values["verified_nodes_total", ()] == 6 * values["steps_total", ()]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_no_update_is_lost_between_threads() -> None:
    counted = observer()

    def work() -> None:
        for _ in range(2000):
            counted.step(PLAIN)
            counted.refused("draining")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = scrape(counted)
    assert values["steps_total", ()] == values["refused_total", ("draining",)] == 8000


# ---------------------------------------------------------------- observers that fail


class Raising:
    """Fails at whatever it is told."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"no {name} today")


@pytest.mark.parametrize("name", CALLS)
def test_what_a_failing_observer_raises_goes_no_further_and_is_logged_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = GuardedObserver(Raising())  # type: ignore[arg-type]
    for _ in range(3):
        getattr(guarded, name)(*CALLS[name])
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert name in caplog.text


def test_one_failing_method_does_not_silence_the_others(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    class Half(NoObserver):
        def step(self, report: StepReport) -> None:
            raise ValueError("not this one")

        def evicted(self, pages: int) -> None:
            seen.append(pages)

    guarded = GuardedObserver(Half())
    guarded.step(PLAIN)
    guarded.evicted(3)
    guarded.step(PLAIN)
    assert seen == [3]
    assert len(caplog.records) == 1


def test_all_observers_take_all_calls() -> None:
    told = {name for name in vars(Observer) if not name.startswith("_")}
    assert told == set(CALLS)
    for kind in (NoObserver, GuardedObserver, PrometheusObserver):
        assert told <= set(vars(kind)), kind
    for name, arguments in CALLS.items():
        getattr(NoObserver(), name)(*arguments)
    assert {field.name.removesuffix("_s") for field in fields(StepReport) if field.name.endswith("_s")} == set(PARTS)


# ---------------------------------------------------------------- the endpoint


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        return str(reply.read().decode())


def test_a_scrape_over_http_gives_these_figures_and_none_of_another_observer() -> None:
    counted, other = observer(), observer()
    counted.step(PLAIN)
    other.step(PLAIN)
    other.step(PLAIN)
    server, port = serve_metrics(counted, "127.0.0.1", 0)
    try:
        values = read(get(port))
    finally:
        server.close()
    assert values["steps_total", ()] == 1
    assert values["model_info", ("cpu", "float32", "tiny", "on", "")] == 1
    assert "process_resident_memory_bytes" in {name for name, _ in values}
    assert "draftwire_steps_total" not in generate_latest(REGISTRY).decode()


def test_a_closed_endpoint_gives_its_port_back() -> None:
    counted = observer()
    server, port = serve_metrics(counted, "127.0.0.1", 0)
    server.close()
    with pytest.raises(OSError, match="refused"):
        get(port)
    again, same_port = serve_metrics(counted, "127.0.0.1", port)
    again.close()
    assert same_port == port


def test_a_port_in_use_is_a_setting_to_correct() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port.*127.0.0.1:{port}") as caught:
            serve_metrics(observer(), "127.0.0.1", port)
    assert caught.value.field == "metrics_port"


def test_a_peer_that_says_nothing_or_leaves_keeps_nobody_waiting() -> None:
    counted = observer()
    server, port = serve_metrics(counted, "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", port)):
            gone = socket.create_connection(("127.0.0.1", port))
            gone.sendall(b"GET / HT")
            gone.close()
            assert "draftwire_steps_total 0.0" in get(port)
            server.close()  # comes back
    finally:
        server.server_close()


def test_a_scrape_that_fails_is_no_traceback_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    counted = observer()
    counted.gauges("nonsense")  # type: ignore[arg-type]
    server, port = serve_metrics(counted, "127.0.0.1", 0)
    try:
        with pytest.raises((OSError, ValueError)):
            get(port)
        counted.gauges(GAUGES)
        assert "draftwire_queue_length 2.0" in get(port)
    finally:
        server.close()
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------- the event loop's lag


def test_the_lag_is_the_worst_of_the_last_minute() -> None:
    now = [100.0]
    counted = observer(clock=lambda: now[0])
    counted.loop_wakes(100.0)
    now[0] = 100.5
    assert counted.loop_lag_s() == pytest.approx(0.5), "overdue counts before it is over"
    counted.loop_woke(100.0)
    counted.loop_wakes(None)
    now[0] = 101.0
    counted.loop_woke(100.9)
    assert counted.loop_lag_s() == pytest.approx(0.5)
    now[0] = 160.6
    assert counted.loop_lag_s() == pytest.approx(0.1)
    now[0] = 170.0
    assert counted.loop_lag_s() == 0


async def test_a_blocked_event_loop_shows() -> None:
    now = [100.0]
    counted = observer(clock=lambda: now[0])
    watch = asyncio.create_task(watch_loop_lag(counted, 0.01))
    await asyncio.sleep(0)
    now[0] = 100.31  # the loop comes back to its watcher only now
    await asyncio.sleep(0.05)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert scrape(counted)["event_loop_lag_seconds", ()] == pytest.approx(0.3)
    now[0] = 110.0
    assert counted.loop_lag_s() == pytest.approx(0.3), "nobody watches: nothing grows"
