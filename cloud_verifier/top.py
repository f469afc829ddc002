"""The command `cloud-verifier top`: a live view of a running verifier, read from its metrics endpoint.

Must not know: engine, torch. Called by `cli`. `render` is pure: two scrapes in, lines out; the rest fetches and shows.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TextIO

from prometheus_client.parser import text_string_to_metric_families

from cloud_verifier.metrics import DEPTHS, METRICS_PORT, PARTS

WIDTH = 80
LEFT_WIDTH = 45
BAR_WIDTH = 12
TIMEOUT_S = 3.0
MOST_BYTES = 4 << 20

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"

EIGHTHS = " ▏▎▍▌▋▊▉█"
PAGE_CHARS = {"used": "█", "shared": "▓", "cached": "▒", "free": "░"}
PLAIN_CHARS = str.maketrans("▏▎▍▌▋▊▉█▓▒░·–", "   #####%+.,-")
"""For terminals that do not speak UTF-8."""

RATIOS = (
    ("rows a step", "batch_size_sum", "steps_total", False),
    ("forwards per token", "judged_rows_total", "committed_total", False),
    ("steps per token", "steps_total", "committed_total", False),
    ("dry rows", "dry_rows_total", "judged_rows_total", True),
    ("accepted of text", "accepted_total", "committed_total", True),
    ("accepted of nodes", "accepted_total", "verified_nodes_total", True),
    ("context reused", "reused_tokens_total", "context_tokens_total", True),
)
"""One counter over another, the last says if in percent. Forwards are a session's: a step over five is one of each."""

DEPTH_GROUPS = (*((depth,) for depth in DEPTHS[:8]), DEPTHS[8:12], DEPTHS[12:])


class NoAnswer(Exception):
    """The endpoint did not give a verifier's figures; `str()` says why."""


@dataclass(frozen=True)
class Scrape:
    """What the endpoint said once. `values` by sample name and value of its one label ("" if it has none)."""

    info: Mapping[str, str]
    values: Mapping[tuple[str, str], float]

    def get(self, name: str, label: str = "") -> float:
        """A sample, 0 if it is not there."""
        return self.values.get((f"draftwire_{name}", label), 0.0)

    def by_label(self, name: str) -> dict[str, float]:
        """All samples of a name by label, in the endpoint's order."""
        return {label: value for (found, label), value in self.values.items() if found == f"draftwire_{name}"}


def parse(text: str) -> Scrape:
    """Raises: NoAnswer if this is not what a verifier's endpoint says."""
    info: Mapping[str, str] | None = None
    values: dict[tuple[str, str], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "draftwire_model_info":
                    info = sample.labels
                elif "le" not in sample.labels:
                    values[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    except ValueError as error:
        raise NoAnswer("what it says is no metrics") from error
    if info is None:
        raise NoAnswer("it is not a Draftwire verifier's metrics endpoint")
    return Scrape(info, values)


def fetch(address: str, timeout_s: float = TIMEOUT_S) -> Scrape:
    """One scrape of HOST:PORT, never by way of a proxy. Raises: NoAnswer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=timeout_s) as reply:
            body = reply.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise NoAnswer(f"HTTP status {error.code}") from error
    except urllib.error.URLError as error:
        raise NoAnswer(str(getattr(error.reason, "strerror", None) or error.reason)) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error
    if len(body) > MOST_BYTES:
        raise NoAnswer(f"more than {MOST_BYTES} bytes")
    return parse(body.decode("utf-8", errors="replace"))


# ---------------------------------------------------------------- the view


def render(previous: Scrape | None, current: Scrape, seconds: float) -> list[str]:
    """The view, each line within WIDTH columns. "now" is the `seconds` between the two scrapes.

    Without a previous one, or if the verifier was started anew in between, there is no "now".
    """
    since_start = _Span(None, current, 0.0)
    now = None if previous is None or _is_restarted(previous, current) else _Span(previous, current, seconds)
    lines = [
        _spread(_model_words(current), "one look" if now is None else f"over the last {seconds:.3g} s"),
        "",
        *_session_lines(current),
        "",
        *_beside(_table(now, since_start), _depth_lines(now, since_start)),
        "",
        *_beside(_part_lines(now, since_start), _page_lines(current)),
    ]
    return ["".join(char if char.isprintable() else "?" for char in line)[:WIDTH].rstrip() for line in lines]


class _Span:
    """What happened between two scrapes, or (`before` None) since the start."""

    def __init__(self, before: Scrape | None, after: Scrape, seconds: float) -> None:
        self._before, self._after, self._seconds = before, after, seconds

    def rise(self, name: str, labels: Sequence[str] = ("",)) -> float:
        """By how much a counter rose, summed over labels."""
        return sum(
            self._after.get(name, label) - (self._before.get(name, label) if self._before else 0.0) for label in labels
        )

    def rate(self, name: str) -> float | None:
        """The same per second."""
        return self.rise(name) / self._seconds if self._seconds > 0 else None

    def ratio(self, name: str, other: str) -> float | None:
        """Rise over rise; None if the other stood still."""
        below = self.rise(other)
        return self.rise(name) / below if below > 0 else None


def _is_restarted(previous: Scrape, current: Scrape) -> bool:
    """Counters only rise in one process's life."""
    return any(value < previous.values.get(key, 0.0) for key, value in current.values.items() if "_total" in key[0])


def _model_words(scrape: Scrape) -> str:
    words = [scrape.info.get(key, "") for key in ("model", "device", "dtype")]
    return " · ".join([*(word for word in words if word), f"speculation {scrape.info.get('speculation', '?')}"])


def _session_lines(scrape: Scrape) -> Iterator[str]:
    states = [f"{_whole(count)} {state}" for state, count in scrape.by_label("sessions").items()]
    states.append(f"{_whole(scrape.get('sessions_opened_total'))} opened so far")
    yield _spread(f"sessions  {' · '.join(states)}", f"queue {_whole(scrape.get('queue_length'))}")
    yield f"ended     {_reasons(scrape, 'sessions_ended_total')}"
    lag = f"event loop lag {_milliseconds(scrape.get('event_loop_lag_seconds'))}"
    yield _spread(f"refused   {_reasons(scrape, 'refused_total')}", lag)


def _table(now: _Span | None, since_start: _Span) -> list[str]:
    rows = [_row("", "now", "since start")]
    for words, name in (
        ("tokens", "committed_total"),
        ("steps", "steps_total"),
        ("prefill tokens", "prefill_tokens_total"),
    ):
        rate = now.rate(name) if now else None
        rows.append(_row(words, "–" if rate is None else f"{_number(rate, 1)}/s", _whole(since_start.rise(name))))
    for words, name, other, is_share in RATIOS:
        ratios = [span.ratio(name, other) if span else None for span in (now, since_start)]
        rows.append(_row(words, *(_percent(ratio) if is_share else _number(ratio, 3) for ratio in ratios)))
    return rows


def _depth_lines(now: _Span | None, since_start: _Span) -> list[str]:
    """Of the ids that hints offered at each depth, how many were accepted."""
    span, words = _livelier(now, since_start, "offered_by_depth_total", DEPTHS)
    lines = [f"accepted by depth{words}"]
    for group in DEPTH_GROUPS:
        offered = span.rise("offered_by_depth_total", group)
        if offered > 0:
            share = span.rise("accepted_by_depth_total", group) / offered
            lines.append(f"{_depth_name(group):>5} {_bar(share)} {_percent(share, 0)} {_whole(offered):>9}")
    return lines if len(lines) > 1 else [*lines, "      no hint yet"]


def _part_lines(now: _Span | None, since_start: _Span) -> list[str]:
    span, words = _livelier(now, since_start, "steps_total", ("",))
    steps, whole_s = span.rise("steps_total"), span.rise("step_seconds_sum")
    busy = now.rate("step_seconds_sum") if now else None
    lines = [f"step time{words:<17}{_milliseconds(whole_s / steps if steps else None):>18}"]
    for part in PARTS:
        part_s = span.rise("step_part_seconds_sum", (part,))
        share, each_s = (part_s / whole_s, part_s / steps) if steps and whole_s > 0 else (None, None)
        name = f" {part}" if part == "gather" else part
        lines.append(f"{name:<9}{_bar(share or 0.0, 16)} {_percent(share, 1)} {_milliseconds(each_s):>10}")
    return [*lines, f"device busy {_percent(busy, 0).strip()} of the time"]


def _page_lines(scrape: Scrape) -> list[str]:
    pages = scrape.by_label("kv_pages")
    used, shared, cached, free = (pages.get(state, 0.0) for state in PAGE_CHARS)
    total = used + cached + free
    lines = [f"KV pages {_whole(total):>25}", _page_bar((used - shared, shared, cached, free), 34)]
    for state, char in PAGE_CHARS.items():
        name = f"{char} {'of these shared' if state == 'shared' else state}"
        count = pages.get(state, 0.0)
        lines.append(f"{name:<18}{_whole(count):>9} {_percent(count / total if total else None, 0)}")
    lines.append(f"evicted so far    {_whole(scrape.get('kv_evicted_pages_total')):>9}")
    return [*lines, f"out of memory     {_whole(scrape.get('out_of_memory_total')):>9}"]


def _depth_name(group: Sequence[str]) -> str:
    if group[-1].endswith("+"):
        return f"{group[0].rstrip('+')}+"
    return group[0] if len(group) == 1 else f"{group[0]}-{group[-1]}"


def _livelier(now: _Span | None, since_start: _Span, name: str, labels: Sequence[str]) -> tuple[_Span, str]:
    """The span to show shares of: now, or since the start where nothing happens now, and words that say so."""
    return (now, "") if now is not None and now.rise(name, labels) > 0 else (since_start, ", since start")


# ---------------------------------------------------------------- words, numbers, bars


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1e7 else f"{value / 1e6:,.1f}M"


def _whole(value: float) -> str:
    return _number(value, 0)


def _percent(share: float | None, digits: int = 1) -> str:
    """Always as wide: bars stand in line."""
    return f"{'–' if share is None else f'{100 * share:.{digits}f} %':>{digits + 6 if digits else 5}}"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{_number(1000 * seconds, 2 if seconds < 0.01 else 1)} ms"


def _bar(share: float, width: int = BAR_WIDTH) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(width)


def _page_bar(counts: Sequence[float], width: int) -> str:
    total, upto, bar = sum(counts), 0.0, ""
    for count, char in zip(counts, PAGE_CHARS.values(), strict=True):
        upto += count
        bar += char * (round(width * upto / total) - len(bar)) if total > 0 else ""
    return bar


def _reasons(scrape: Scrape, name: str) -> str:
    return " · ".join(f"{_whole(count)} {reason}" for reason, count in scrape.by_label(name).items() if count) or "none"


def _row(words: str, now: str, since_start: str) -> str:
    return f"{words:<20}{now.strip():>11}{since_start.strip():>13}"


def _spread(left: str, right: str) -> str:
    """One at each end of the line; the right one is never cut."""
    room = WIDTH - len(right) - 1
    return f"{left[:room]:<{room}} {right}"


def _beside(left: Sequence[str], right: Sequence[str]) -> list[str]:
    return [f"{a:<{LEFT_WIDTH}} {b}" for a, b in zip_longest(left, right, fillvalue="")]


# ---------------------------------------------------------------- showing


class _Display:
    """Where the view goes: over itself on the terminal's second screen, or snapshots with a blank line between."""

    def __init__(self, out: TextIO, is_live: bool) -> None:
        self._out, self.is_live, self._is_first = out, is_live, True
        self._is_plain = not _writes(EIGHTHS, out)

    def __enter__(self) -> _Display:
        self._write(ENTER_SCREEN if self.is_live else "")
        return self

    def __exit__(self, *_: object) -> None:
        self._write(LEAVE_SCREEN if self.is_live else "")

    def show(self, lines: Sequence[str]) -> None:
        """One snapshot; what does not fit on the screen is left out."""
        if self._is_plain:
            lines = [line.translate(PLAIN_CHARS) for line in lines]
        if self.is_live:
            columns, rows = shutil.get_terminal_size()
            below = f"\n{CLEAR_BELOW}" if len(lines) < rows else ""
            self._write(HOME + "\n".join(CLEAR_LINE + line[:columns] for line in lines[:rows]) + below)
        else:
            self._write(("" if self._is_first else "\n") + "".join(f"{line}\n" for line in lines))
        self._is_first = False

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _writes(text: str, out: TextIO) -> bool:
    try:
        text.encode(out.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _once(address: str, interval_s: float, display: _Display) -> int:
    try:
        first, at = fetch(address), time.monotonic()
        time.sleep(interval_s)
        second = fetch(address)
    except NoAnswer as why:
        print(f"cloud-verifier top: no answer from {address}: {why}", file=sys.stderr)
        return 1
    display.show(render(first, second, time.monotonic() - at))
    return 0


def _watch(address: str, interval_s: float, display: _Display) -> None:
    """Until interrupted. A verifier that is gone is asked again and again."""
    previous: Scrape | None = None
    at = 0.0
    while True:
        try:
            current, now = fetch(address), time.monotonic()
            if display.is_live or previous is not None:
                display.show(render(previous, current, now - at))
            previous, at = current, now
        except NoAnswer as why:
            display.show([f"no answer from {address}: {why}", f"trying again every {interval_s:g} s"])
            previous = None
        time.sleep(interval_s)


def parser() -> argparse.ArgumentParser:
    """The command line of `top`."""
    result = argparse.ArgumentParser(
        prog="cloud-verifier top",
        description="Shows what a running verifier does: sessions, speed, acceptance, step times, pages.",
        epilog="example: cloud-verifier top --metrics 127.0.0.1:50152 --once",
    )
    add = result.add_argument
    default = f"127.0.0.1:{METRICS_PORT}"
    add("--metrics", type=_address, default=default, metavar="HOST:PORT", help=f"its endpoint (default: {default})")
    add("--interval", type=_interval_s, default=2.0, metavar="S", help="seconds between looks (default: 2)")
    add("--once", action="store_true", help="look twice, an interval apart, print one plain snapshot and end")
    return result


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text!r}")
    if not all(char.isalnum() or char in "-._[]:%" for char in host):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text!r}")
    return text


def _interval_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be from 0.1 to 3600 seconds, got {text!r}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, or 1 if --once got no answer."""
    given = parser().parse_args(arguments)
    is_live = not given.once and sys.stdout.isatty()
    try:
        with _Display(sys.stdout, is_live) as display:
            if given.once:
                return _once(given.metrics, given.interval, display)
            _watch(given.metrics, given.interval, display)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever read along has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
