"""Counts what the verifier does, for Prometheus: `PrometheusObserver`, its HTTP endpoint, the event loop's lag.

Must not know: torch, sessions, the wire. Fed by `worker` and `engine` through `reports`, started by `server`.
A scrape sees whole steps only: all figures change under one lock, which is why these are not prometheus_client's own
counters. Nothing here names a principal, a session or a token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import socketserver
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from itertools import zip_longest
from operator import attrgetter
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import MetricsHandler

from cloud_verifier.reports import Gauges, StepReport
from shared.errors import ConfigError

log = logging.getLogger("draftwire.metrics")

N = TypeVar("N", int, float)

METRICS_PORT = 50152
"""Where `top` looks if it is not told."""

COUNTERS = {
    "steps": "Forward passes of the target over a batch of sessions, committed.",
    "committed": "Ids decided: accepted + corrections.",
    "accepted": "Committed ids that a hint had foretold.",
    "judged_rows": "Rows of steps that decided ids: forwards as one session counts them.",
    "dry_rows": "Judged rows without a usable hint.",
    "verified_nodes": "Hint nodes that went through a forward.",
    "hint_nodes": "Hint nodes received.",
    "hint_nodes_fresh": "Hint nodes received that were not held already.",
    "prefill_tokens": "Committed ids fed to build up keys and values.",
    "context_tokens": "Tokens of the contexts of sessions opened.",
    "reused_tokens": "Of these, tokens whose keys and values were there already.",
    "kv_evicted_pages": "Pages of keys and values taken from sessions for others; they are computed again.",
    "sessions_opened": "Sessions begun.",
    "out_of_memory": "Times the device had no memory for a step.",
}
CORRECTIONS = "The target's own ids, corrections and bonuses: committed - accepted."

BY_REASON = {
    "hint_nodes_dropped": ("late", "disagreeing", "over_budget"),
    "refused": ("queue_full", "queue_timeout", "principal_sessions", "streams", "draining", "context"),
    "sessions_ended": ("finished", "cancelled", "lease", "failed", "displaced"),
}
BY_REASON_HELP = {
    "hint_nodes_dropped": "Hint nodes dropped: come too late, against the committed ids, or beyond the budget.",
    "refused": "Opens refused.",
    "sessions_ended": "Sessions gone.",
}
MOST_REASONS = 32
"""Reasons are words of our code; should they ever be more, the rest counts as `other`."""

PARTS = ("plan", "stage", "forward", "gather", "judge", "commit")
DEEPEST = 16
"""Depths from here on share one label."""
DEPTHS = (*(str(depth) for depth in range(1, DEEPEST)), f"{DEEPEST}+")

SECONDS_BOUNDS = (*(digit * 10.0**power for power in range(-4, 1) for digit in (1.0, 2.5, 5.0)), 10.0)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

LAG_INTERVAL_S = 0.25
LAG_WINDOW_S = 60.0

_parts_of = attrgetter(*(f"{part}_s" for part in PARTS))


class _Histogram:
    """Counts per bucket and the sum. Under the observer's lock."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        total, result = 0, []
        for name, count in zip(names, self.counts, strict=True):
            total += count
            result.append((name, float(total)))
        return result


class PrometheusObserver:
    """An Observer that counts, and the collector of a registry of its own. Counters only rise; any thread may call."""

    def __init__(
        self,
        *,
        model: str,
        device: str,
        dtype: str,
        version: str = "",
        speculation: str = "on",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`speculation` is "on", or says why it is off; `clock` in seconds."""
        self.registry = CollectorRegistry()
        self._info = {"model": model, "device": device, "dtype": dtype, "speculation": speculation, "version": version}
        self.clock = clock
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._reasons = {name: dict.fromkeys(reasons, 0) for name, reasons in BY_REASON.items()}
        self._offered, self._accepted = [0] * DEEPEST, [0] * DEEPEST
        self._batch = _Histogram(BATCH_BOUNDS)
        self._whole = _Histogram(SECONDS_BOUNDS)
        self._parts = [_Histogram(SECONDS_BOUNDS) for _ in PARTS]
        self._gauges: Gauges | None = None
        self._lags: deque[tuple[float, float]] = deque()
        self._wake_due_at: float | None = None
        self._complained: set[str] = set()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # ------------------------------------------------------------ Observer

    def step(self, report: StepReport) -> None:
        """See Observer. All amounts are made sound first, so that a bad report counts wholly or not at all."""
        sound = self._sound
        sessions = sound("sessions", report.sessions)
        committed = sound("committed", report.committed)
        accepted = self._within("accepted", report.accepted, committed)
        judged = sound("judged_rows", report.judged_rows)
        dry = sound("dry_rows", report.dry_rows)
        nodes = sound("nodes", report.nodes)
        prefill = sound("prefill_tokens", report.prefill_tokens)
        offered = [sound("offered_by_depth", count) for count in report.offered_by_depth]
        taken = [
            self._within("accepted_by_depth", count, most)
            for count, most in zip_longest(report.accepted_by_depth, offered, fillvalue=0)
        ]
        parts = [sound("step_seconds", part_s) for part_s in _parts_of(report)]
        whole_s = sound("step_seconds", report.whole_s)
        with self._lock:
            counts = self._counts
            counts["steps"] += 1
            counts["committed"] += committed
            counts["accepted"] += accepted
            counts["judged_rows"] += judged
            counts["dry_rows"] += dry
            counts["verified_nodes"] += nodes
            counts["prefill_tokens"] += prefill
            _add_by_depth(self._offered, offered)
            _add_by_depth(self._accepted, taken)
            self._batch.add(sessions)
            self._whole.add(whole_s)
            for histogram, part_s in zip(self._parts, parts, strict=True):
                histogram.add(part_s)

    def session_opened(self, context_tokens: int, reused_tokens: int) -> None:
        """See Observer."""
        self._count(sessions_opened=1, context_tokens=context_tokens, reused_tokens=reused_tokens)

    def session_ended(self, reason: str) -> None:
        """See Observer."""
        self._count_reasons("sessions_ended", {reason: 1})

    def refused(self, reason: str) -> None:
        """See Observer."""
        self._count_reasons("refused", {reason: 1})

    def hints(self, nodes: int, fresh: int) -> None:
        """See Observer."""
        self._count(hint_nodes=nodes, hint_nodes_fresh=fresh)

    def dropped(self, late: int, disagreeing: int, over_budget: int) -> None:
        """See Observer."""
        reasons = {"late": late, "disagreeing": disagreeing, "over_budget": over_budget}
        self._count_reasons("hint_nodes_dropped", reasons)

    def evicted(self, pages: int) -> None:
        """See Observer."""
        self._count(kv_evicted_pages=pages)

    def out_of_memory(self) -> None:
        """See Observer."""
        self._count(out_of_memory=1)

    def gauges(self, g: Gauges) -> None:
        """See Observer."""
        self._gauges = g

    # ------------------------------------------------------------ the event loop's lag

    def loop_wakes(self, due_at: float | None) -> None:
        """The event loop is to wake at `due_at` (of the clock); None: nobody watches it any more."""
        self._wake_due_at = due_at

    def loop_woke(self, due_at: float) -> None:
        """It did, just now."""
        now = self.clock()
        with self._lock:
            self._lags.append((now, max(0.0, now - due_at)))
            while self._lags[0][0] < now - LAG_WINDOW_S:
                self._lags.popleft()

    def loop_lag_s(self) -> float:
        """The latest wake-up of the last minute, one that is overdue now included."""
        now, due_at = self.clock(), self._wake_due_at
        with self._lock:
            recent = [lag for at, lag in self._lags if at >= now - LAG_WINDOW_S]
        return max([*recent, 0.0 if due_at is None else now - due_at, 0.0])

    # ------------------------------------------------------------ counting

    def _count(self, **amounts: int) -> None:
        sound = {name: self._sound(name, amount) for name, amount in amounts.items()}
        with self._lock:
            for name, amount in sound.items():
                self._counts[name] += amount

    def _count_reasons(self, name: str, amounts: dict[str, int]) -> None:
        sound = {reason: self._sound(f"{name}.{reason}", amount) for reason, amount in amounts.items()}
        with self._lock:
            counts = self._reasons[name]
            for reason, amount in sound.items():
                known = reason if reason in counts or len(counts) < MOST_REASONS else "other"
                counts[known] = counts.get(known, 0) + amount

    def _sound(self, name: str, amount: N) -> N:
        """The amount if a counter may rise by it, else 0: a slip elsewhere must not take the counter down."""
        if 0 <= amount < math.inf:
            return amount
        self._complain(name, f"{amount} counted as 0")
        return type(amount)(0)

    def _within(self, name: str, amount: int, most: int) -> int:
        if 0 <= amount <= most:
            return amount
        self._complain(name, f"{amount} of {most} cannot be")
        return min(max(0, amount), most)

    def _complain(self, name: str, what: str) -> None:
        if name not in self._complained:
            self._complained.add(name)
            log.warning("metrics: %s: %s; not logged again", name, what)

    # ------------------------------------------------------------ collecting

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at a scrape: one moment, copied under the lock."""
        with self._lock:
            counts, reasons = dict(self._counts), {name: dict(found) for name, found in self._reasons.items()}
            offered, accepted = list(self._offered), list(self._accepted)
            batch = (self._batch.buckets(), self._batch.sum)
            whole = (self._whole.buckets(), self._whole.sum)
            parts = [(histogram.buckets(), histogram.sum) for histogram in self._parts]
        yield InfoMetricFamily("draftwire_model", "What is served, and whether hints are used.", self._info)
        for name, help_text in COUNTERS.items():
            yield CounterMetricFamily(f"draftwire_{name}", help_text, counts[name])
        yield CounterMetricFamily("draftwire_corrections", CORRECTIONS, counts["committed"] - counts["accepted"])
        for name, found in reasons.items():
            yield _labelled(CounterMetricFamily, name, BY_REASON_HELP[name], "reason", found)
        for name, help_text, depths in (
            ("offered_by_depth", "Judged rows whose way went on to a hint node at this depth.", offered),
            ("accepted_by_depth", "Of these, accepted.", accepted),
        ):
            yield _labelled(CounterMetricFamily, name, help_text, "depth", dict(zip(DEPTHS, depths, strict=True)))
        yield HistogramMetricFamily("draftwire_batch_size", "Rows of a step.", *batch)
        yield HistogramMetricFamily("draftwire_step_seconds", "Whole steps, from plan to emit.", *whole)
        split = HistogramMetricFamily(
            "draftwire_step_part_seconds", "Steps by part; gather is a part of forward.", labels=["part"]
        )
        for part, (buckets, sum_s) in zip(PARTS, parts, strict=True):
            split.add_metric([part], buckets, sum_s)
        yield split
        yield from self._standing()

    def _standing(self) -> Iterator[Metric]:
        lag_help = f"The latest wake-up of the event loop in the last {LAG_WINDOW_S:g} s."
        yield GaugeMetricFamily("draftwire_event_loop_lag_seconds", lag_help, self.loop_lag_s())
        g = self._gauges
        if g is None:
            return
        yield GaugeMetricFamily("draftwire_queue_length", "Opens that wait for room.", g.queue_length)
        states = {"attached": g.sessions_attached, "absent": g.sessions_absent, "finished": g.sessions_finished}
        yield _labelled(GaugeMetricFamily, "sessions", "Sessions held.", "state", states)
        pages = {
            "used": g.kv_pages_used,
            "shared": g.kv_pages_shared,
            "cached": g.kv_pages_cached,
            "free": max(0, g.kv_pages_total - g.kv_pages_used - g.kv_pages_cached),
        }
        help_text = "Pages of keys and values: used + cached + free is the pool; shared is a part of used."
        yield _labelled(GaugeMetricFamily, "kv_pages", help_text, "state", pages)


def _add_by_depth(totals: list[int], amounts: Sequence[int]) -> None:
    for depth, amount in enumerate(amounts):
        totals[min(depth, DEEPEST - 1)] += amount


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_text: str,
    label: str,
    values: dict[str, int],
) -> Metric:
    family = kind(f"draftwire_{name}", help_text, labels=[label])
    for value, amount in values.items():
        family.add_metric([value], amount)
    return family


async def watch_loop_lag(observer: PrometheusObserver, interval_s: float = LAG_INTERVAL_S) -> None:
    """Measures, until cancelled, how late the event loop wakes this task."""
    try:
        while True:
            due_at = observer.clock() + interval_s
            observer.loop_wakes(due_at)
            await asyncio.sleep(interval_s)
            observer.loop_woke(due_at)
    finally:
        observer.loop_wakes(None)


# ---------------------------------------------------------------- the endpoint


class _Handler(MetricsHandler):
    """One scrape; a peer that connects and says nothing is let go."""

    timeout = 10.0


class MetricsServer(ThreadingHTTPServer):
    """The endpoint: any path answers GET with the figures. `close` ends it."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Listens. Raises: OSError."""
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__(address, _Handler.factory(registry))  # type: ignore[arg-type]
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="draftwire-metrics", daemon=True
        )
        self._thread.start()

    def server_bind(self) -> None:
        """Without http.server's look-up of the host's full name, which can hang where there is no DNS."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """A scrape failed: it is the scraper's loss, and not a traceback on stderr."""
        log.info("a scrape failed: %r", sys.exception())

    def close(self) -> None:
        """Stops listening and ends the thread."""
        self.shutdown()
        self.server_close()
        self._thread.join()


def serve_metrics(observer: PrometheusObserver, host: str, port: int) -> tuple[MetricsServer, int]:
    """Serves the figures over HTTP in a thread of their own; `port` 0 takes a free one. Returns server and port.

    Raises: ConfigError if the port cannot be had.
    """
    try:
        server = MetricsServer(observer.registry, host, port)
    except OSError as error:
        raise ConfigError(
            f"metrics_port: cannot listen on {host}:{port}: {error.strerror or error}", field="metrics_port"
        ) from error
    return server, server.server_port
