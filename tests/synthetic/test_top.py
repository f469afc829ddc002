"""The live view: right figures from two scrapes, 80 columns whatever comes, and a verifier that goes and comes."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from prometheus_client import generate_latest

from cloud_verifier.metrics import PrometheusObserver, serve_metrics
from cloud_verifier.reports import Gauges, StepReport
from cloud_verifier.top import WIDTH, NoAnswer, Scrape, fetch, main, parse, render

REPORT = StepReport(
    sessions=4,
    prefill_tokens=256,
    nodes=30,
    committed=12,
    accepted=9,
    dry_rows=1,
    offered_by_depth=(3, 3, 2, 2, 1),
    accepted_by_depth=(3, 2, 2, 1, 1),
    plan_s=0.001,
    stage_s=0.002,
    forward_s=0.034,
    gather_s=0.004,
    judge_s=0.002,
    commit_s=0.001,
    judged_rows=3,
)
GAUGES = Gauges(5, 2, 7, 320, 64, 1024, 256, 1)
RUN = "import sys; from cloud_verifier.top import main; sys.exit(main(sys.argv[1:]))"


def observer(model: str = "tiny") -> PrometheusObserver:
    return PrometheusObserver(model=model, device="cpu", dtype="float32", clock=lambda: 0.0)


def look(counted: PrometheusObserver) -> Scrape:
    return parse(generate_latest(counted.registry).decode())


def line_of(lines: list[str], start: str) -> str:
    """The first line that begins so, its runs of spaces made one."""
    found = [line for line in lines if line.startswith(start)]
    assert found, f"{start!r} in {lines}"
    return re.sub(" +", " ", found[0])


def busy(model: str = "tiny") -> tuple[Scrape, Scrape]:
    """Ten steps, a look, five steps of half the acceptance, another look."""
    counted = observer(model)
    counted.session_opened(100, 40)
    counted.session_ended("lease")
    counted.refused("queue_full")
    counted.refused("queue_full")
    counted.evicted(3)
    counted.gauges(GAUGES)
    for _ in range(10):
        counted.step(REPORT)
    first = look(counted)
    for _ in range(5):
        counted.step(replace(REPORT, accepted=6, offered_by_depth=(2, 1), accepted_by_depth=(1, 1)))
    return first, look(counted)


# ---------------------------------------------------------------- render


def test_now_is_between_two_scrapes_and_the_rest_since_the_start() -> None:
    lines = render(*busy(), 2.0)
    assert line_of(lines, "tiny") == "tiny · cpu · float32 · speculation on over the last 2 s"
    assert line_of(lines, "sessions") == "sessions 5 attached · 2 absent · 1 finished · 1 opened so far queue 7"
    assert line_of(lines, "ended") == "ended 1 lease"
    assert line_of(lines, "refused") == "refused 2 queue_full event loop lag 0.00 ms"
    for start, figures in {
        "tokens": "30.0/s 180",
        "steps  ": "2.5/s 15",
        "prefill tokens": "640.0/s 3,840",
        "rows a step": "4.000 4.000",
        "forwards per token": "0.250 0.250",
        "steps per token": "0.083 0.083",
        "dry rows": "33.3 % 33.3 %",
        "accepted of text": "50.0 % 66.7 %",
        "accepted of nodes": "20.0 % 26.7 %",
        "context reused": "– 40.0 %",
        "step time": "40.0 ms KV pages 1,024",
    }.items():
        assert line_of(lines, start).removeprefix(start.strip()).strip().startswith(figures), line_of(lines, start)
    assert line_of(lines, "device busy") == "device busy 10 % of the time out of memory 0"


def test_acceptance_by_depth_is_that_of_now_with_a_bar_as_long_as_it_is_high() -> None:
    lines = render(*busy(), 2.0)
    assert "accepted by depth" in lines[6]
    assert lines[7].endswith("1 ██████        50 %        10")
    assert lines[8].endswith("2 ████████████ 100 %         5")
    assert lines[9].endswith("since start") is False
    assert "%" not in lines[9]


def test_a_step_is_split_into_parts_that_add_up_to_it() -> None:
    lines = render(*busy(), 2.0)
    shares = {}
    for part in ("plan", "stage", "forward", " gather", "judge", "commit"):
        found = re.match(
            rf"{part} [ ▏▎▍▌▋▊▉█]* +([\d.]+) % +([\d.]+) ms", next(x for x in lines if x.startswith(f"{part} "))
        )
        assert found, part
        shares[part.strip()] = float(found[1])
        assert float(found[2]) == pytest.approx(float(found[1]) * 0.4, abs=0.1)
    assert shares["gather"] == 10
    assert sum(share for part, share in shares.items() if part != "gather") == pytest.approx(100, abs=0.3)


def test_the_bar_of_pages_shows_each_kind_in_its_share() -> None:
    lines = render(*busy(), 2.0)
    bar = next(line for line in lines if "░░" in line).split()[-1]
    assert len(bar) == 34
    counts = {"█": 320 - 64, "▓": 64, "▒": 256, "░": 448}
    for char, count in counts.items():
        assert abs(bar.count(char) - 34 * count / 1024) <= 1, char
    assert sum(map(bar.count, counts)) == 34
    text = " ".join(" ".join(lines).split())
    for words in (
        "█ used 320 31 %",
        "▓ of these shared 64 6 %",
        "▒ cached 256 25 %",
        "░ free 448 44 %",
        "evicted so far 3",
    ):
        assert words in text, words


def test_while_nothing_happens_shares_are_those_since_the_start_and_say_so() -> None:
    _, second = busy()
    lines = render(second, second, 1.0)
    assert line_of(lines, "tokens").startswith("tokens 0.0/s 180")
    assert line_of(lines, "forwards").startswith("forwards per token – 0.250")
    assert any("accepted by depth, since start" in line for line in lines)
    assert line_of(lines, "step time").startswith("step time, since start 40.0 ms")


def test_a_first_look_and_a_look_at_a_verifier_started_anew_know_no_rates() -> None:
    first, second = busy()
    for lines in (render(None, first, 0.0), render(second, first, 2.0)):
        assert lines[0].endswith("one look")
        assert line_of(lines, "tokens").startswith("tokens – 120")
        assert not any("/s" in line for line in lines)


def test_a_verifier_that_did_nothing_yet_can_be_looked_at() -> None:
    scrape = look(observer())
    for lines in (render(None, scrape, 0.0), render(scrape, scrape, 2.0)):
        assert line_of(lines, "ended") == "ended none"
        assert "no hint yet" in " ".join(lines)


def test_every_line_fits_into_80_columns_whatever_the_figures() -> None:
    counted = observer("m" * 200)
    for number in range(40):
        counted.refused(f"a_reason_with_a_long_name_{number}")
        counted.session_ended(f"a_reason_with_a_long_name_{number}")
    counted.session_opened(10**15, 10**15)
    counted.gauges(Gauges(10**9, 10**9, 10**9, 10**12, 10**12, 10**13, 10**12, 10**9))
    first = look(counted)
    deep = (10**12,) * 20
    counted.step(StepReport(10**6, 10**12, 10**13, 10**13, 10**12, 10**6, deep, deep, *(9e6,) * 6, 10**6))
    for lines in (render(first, look(counted), 0.1), render(*busy(), 2.0)):
        assert max(map(len, lines)) <= WIDTH
        assert len(lines) < 30
        assert any("queue" in line for line in lines)
        assert any("event loop lag" in line for line in lines)
        assert lines[0].endswith(" s")


def test_a_name_cannot_send_escape_codes_to_the_terminal() -> None:
    lines = render(*busy("x\x1b[2Jy\nz"), 2.0)
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("x?[2Jy?z ·")


@pytest.mark.parametrize("text", ["", "# nothing\n", "up 1\n", "<html>{{{\n", 'draftwire_x{a="b 1\n'])
def test_what_is_no_verifiers_metrics_is_no_answer(text: str) -> None:
    with pytest.raises(NoAnswer):
        parse(text)


# ---------------------------------------------------------------- over HTTP


@pytest.fixture
def served() -> Iterator[tuple[PrometheusObserver, str]]:
    counted = observer()
    counted.gauges(GAUGES)
    counted.step(REPORT)
    server, port = serve_metrics(counted, "127.0.0.1", 0)
    yield counted, f"127.0.0.1:{port}"
    server.close()


@pytest.fixture
def free_address(served: tuple[PrometheusObserver, str]) -> str:
    server, port = serve_metrics(observer(), "127.0.0.1", 0)
    server.close()
    return f"127.0.0.1:{port}"


def test_once_prints_one_snapshot_without_escape_codes(
    served: tuple[PrometheusObserver, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of 12 tokens ends between the two looks."""
    counted, address = served
    looks: list[Scrape] = []

    def looking(at: str) -> Scrape:
        looks.append(fetch(at))
        if len(looks) == 1:
            counted.step(REPORT)
        return looks[-1]

    monkeypatch.setattr("cloud_verifier.top.fetch", looking)
    assert main(["--metrics", address, "--once", "--interval", "0.6"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("speculation on") == 1
    rate = re.search(r"tokens +([\d.]+)/s +24", out)
    assert rate
    assert 0 < float(rate[1]) <= 12 / 0.6


def test_once_says_who_does_not_answer_and_fails(free_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--metrics", free_address, "--once"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"cloud-verifier top: no answer from {free_address}: Connection refused\n"


@pytest.mark.parametrize(
    "arguments",
    [["--interval", "0"], ["--interval", "nan"], ["--metrics", "host"], ["--metrics", "h:0"], ["--metrics", "a/b@c:1"]],
)
def test_a_bad_argument_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_a_proxy_in_the_environment_is_not_asked(
    served: tuple[PrometheusObserver, str], free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{free_address}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch(served[1]).get("steps_total") == 1


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.0 500 no\r\n\r\n", b"HTTP/1.0 200 ok\r\n\r\nup 1\n", b"\x00\xff garbage", b""]
)
def test_a_server_of_another_kind_is_no_answer(reply: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(reply)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(NoAnswer):
            fetch(f"127.0.0.1:{server.server_port}", timeout_s=5)
        thread.join()


def test_an_endpoint_that_accepts_and_says_nothing_is_given_up() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent, pytest.raises(NoAnswer, match="timed out"):
        fetch(f"127.0.0.1:{silent.server_port}", timeout_s=0.2)


# ---------------------------------------------------------------- as a process


@contextmanager
def running(address: str, **given: Any) -> Iterator[subprocess.Popen[str]]:
    """`cloud-verifier top` with a tenth of a second between looks; gone at the end whatever happened."""
    command = [sys.executable, "-c", RUN, "--metrics", address, "--interval", "0.1"]
    with subprocess.Popen(command, text=True, encoding="utf-8", **given) as top:
        try:
            yield top
        finally:
            top.kill()


def until(read: Callable[[], str], wanted: str, limit_s: float = 20.0) -> str:
    """Reads until the text is there."""
    got, ends_at = "", time.monotonic() + limit_s
    while wanted not in got:
        assert time.monotonic() < ends_at, f"no {wanted!r} in ...{got[-2000:]!r}"
        got += read()
    return got


def test_into_a_pipe_it_goes_on_with_snapshots_while_the_verifier_goes_and_comes(free_address: str) -> None:
    with running(free_address, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        text = until(top.stdout.readline, f"no answer from {free_address}")
        server, _ = serve_metrics(observer(), "127.0.0.1", int(free_address.split(":")[1]))
        text += until(top.stdout.readline, "out of memory")
        text += until(top.stdout.readline, "out of memory")
        server.close()
        text += until(top.stdout.readline, f"no answer from {free_address}")
        top.send_signal(signal.SIGINT)
        rest, errors = top.communicate(timeout=20)
    assert top.returncode == 0
    assert errors == ""
    assert "\x1b" not in text + rest
    assert "\n\ntiny · cpu" in text
    assert "one look" not in text


def test_a_reader_that_leaves_ends_it_without_a_word(served: tuple[PrometheusObserver, str]) -> None:
    with running(served[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        top.stdout.readline()
        top.stdout.close()
        assert top.wait(20) == 0
        assert top.stderr.read() == ""


def test_on_a_terminal_it_draws_over_itself_and_leaves_the_screen_as_it_was(
    served: tuple[PrometheusObserver, str],
) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "LINES": "12", "PYTHONIOENCODING": "utf-8"}

    def read() -> str:
        ready, _, _ = select.select([master], [], [], 0.2)
        return os.read(master, 65536).decode("utf-8", errors="replace") if ready else ""

    with running(served[1], stdout=slave, stderr=slave, env=environment) as top:
        text = until(read, "0.0/s")
        top.send_signal(signal.SIGINT)
        text += until(read, "\x1b[?1049l")
        assert top.wait(20) == 0
    os.close(slave)
    os.close(master)
    assert text.startswith("\x1b[?1049h")
    assert "Traceback" not in text
    frames = [frame for frame in text.split("\x1b[H")[1:] if "speculation" in frame]
    assert frames
    for frame in frames:
        shown = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", frame).splitlines()
        assert len(shown) <= 12
        assert max(map(len, shown)) <= 60


def test_a_terminal_without_utf_8_gets_plain_characters(
    served: tuple[PrometheusObserver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert main(["--metrics", served[1], "--once", "--interval", "0.1"]) == 0
    text = raw.getvalue().decode("ascii")
    assert "tiny , cpu" in text
    assert re.search(r"#+%+\++\.+", text)
