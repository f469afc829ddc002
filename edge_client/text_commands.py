"""The commands `generate` and `chat`: one text after another, in a terminal or for a script.

Must not know: options' spelling, drafting, the wire. Called by `cli`, which says what becomes of errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from edge_client.cli_options import check_before_loading, check_trace, client_config, sampling_of
from edge_client.client import SpeculativeClient
from edge_client.display import TextPrinter, report_fields, report_line
from edge_client.events import Committed, Done, FinishReason, Preview, StateChanged
from edge_client.trace import Trace
from edge_client.user_text_cli import RememberedText
from shared.errors import ConfigError, DraftwireError
from shared.types import Rule

ENGINE_LOG = logging.getLogger("draftwire.engine")


async def generate(args: argparse.Namespace) -> int:
    """Writes one text; returns the exit code."""
    check_before_loading(args)
    check_trace(args.trace)
    config = client_config(args)
    remembered = RememberedText(args.user_text, config)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ConfigError("the prompt is empty", field="prompt")
    turns = [{"role": "system", "content": args.system}] if args.system else []
    async with SpeculativeClient(config) as client:
        remembered.give(client, Rule(args.rule), sampling_of(args, client.card.generation_defaults))
        content = prompt if args.raw else [*turns, {"role": "user", "content": prompt}]
        if args.json:
            text, reason = await _print_json(args, client, content)
        else:
            text, reason = await _show(args, client, content, args.trace)
        await remembered.accept(client, reason, *((prompt + text,) if args.raw else (prompt, text)))
    return 0


async def chat(args: argparse.Namespace) -> int:
    """Answers line after line; returns the exit code. A file of the user's text that cannot be written is told once."""
    check_before_loading(args)
    check_trace(args.trace)
    config = client_config(args)
    remembered = RememberedText(args.user_text, config)
    start = [{"role": "system", "content": args.system}] if args.system else []
    async with SpeculativeClient(config) as client:
        remembered.give(client, Rule(args.rule), sampling_of(args, client.card.generation_defaults))
        turns: list[dict[str, str]] = list(start)
        is_terminal = sys.stdin.isatty()
        answers, is_lossy = 0, False
        while line := (await _read_line("you> " if is_terminal else "")).strip():
            if line == "/quit":
                break
            if line == "/reset":
                turns = list(start)
                continue
            turns.append({"role": "user", "content": line})
            answers += 1
            text, reason = await _show(args, client, turns, _numbered(args.trace, answers))
            turns.append({"role": "assistant", "content": text})
            try:
                await remembered.accept(client, reason, line, text)
            except ConfigError as error:
                if not is_lossy:
                    print(f"edge-client: {error.message}", file=sys.stderr)
                is_lossy = True
    return 1 if is_lossy else 0


def _options(args: argparse.Namespace, client: SpeculativeClient) -> dict[str, Any]:
    return {
        "max_new_tokens": args.max_new_tokens,
        "sampling": sampling_of(args, client.card.generation_defaults),
        "seed": args.seed,
        "rule": Rule(args.rule),
        "stop": args.stop,
    }


async def _print_json(args: argparse.Namespace, client: SpeculativeClient, content: Any) -> tuple[str, FinishReason]:
    """Writes one text and prints it with its figures; returns the text and why it ended."""
    with _recorded(args.trace) as trace, _engine_told(args.debug, lambda line: print(line, file=sys.stderr)):
        result = await client.generate(content, trace=trace, **_options(args, client))
    fields = {"text": result.text, "seed": result.seed, **report_fields(result.report, result.reason)}
    print(json.dumps(fields if trace is None else {**fields, "trace": str(args.trace)}))
    return result.text, result.reason


async def _show(
    args: argparse.Namespace, client: SpeculativeClient, content: Any, trace_file: Path | None
) -> tuple[str, FinishReason]:
    """Streams one text to the terminal, and under it a line of figures; returns the text and why it ended."""
    options = _options(args, client)
    printer, text = TextPrinter(sys.stdout, has_ghost=args.preview), ""
    previews = printer.is_terminal and (args.preview or client.config.offline == "local")
    seeds: list[int] = []
    done: Done | None = None
    with _recorded(trace_file) as trace, _engine_told(args.debug, printer.note):
        try:
            events = client.stream(content, on_open=seeds.append, previews=previews, trace=trace, **options)
            async with aclosing(events):
                async for event in events:
                    match event:
                        case Committed():
                            printer.show(event)
                            text += event.text
                        case Preview():
                            printer.preview(event)
                        case StateChanged():
                            printer.state(event)
                        case Done():
                            printer.end()
                            done = event
        finally:
            if done is None:
                printer.leave()
    assert done is not None, "a generation ends with Done"
    if not args.no_stats:
        is_repeatable = options["rule"] is Rule.AGREEMENT and not options["sampling"].is_greedy
        seed = seeds[0] if is_repeatable else None
        print(report_line(done.report, seed, trace_file), file=sys.stderr)
    return text, done.reason


@contextmanager
def _recorded(path: Path | None) -> Iterator[Trace | None]:
    """A trace that is written at the end, however the text ends. What ended it is not hidden by a file that fails."""
    if path is None:
        yield None
        return
    trace = Trace()
    try:
        yield trace
    except BaseException:
        try:
            trace.write(path)
        except DraftwireError as error:
            print(f"edge-client: no trace: {error.message}", file=sys.stderr)
        else:
            print(f"[trace in {path}]", file=sys.stderr)
        raise
    trace.write(path)


@contextmanager
def _engine_told(is_wanted: bool, show: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile the engine's line of each commit is shown."""
    if not is_wanted:
        yield
        return
    handler = logging.Handler()
    handler.emit = lambda record: show(f"[{record.getMessage()}]")  # type: ignore[method-assign]
    before = ENGINE_LOG.level
    ENGINE_LOG.addHandler(handler)
    ENGINE_LOG.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        ENGINE_LOG.removeHandler(handler)
        ENGINE_LOG.setLevel(before)


def _numbered(path: Path | None, number: int) -> Path | None:
    """trace.json, trace-2.json, trace-3.json, ..."""
    return path if path is None or number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


async def _read_line(prompt: str) -> str:
    """A line of standard input. On a daemon thread: Ctrl-C at the prompt ends the program at once."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def settle(text: str) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        loop.call_soon_threadsafe(settle, sys.stdin.readline())

    if prompt:
        print(prompt, end="", flush=True)
    threading.Thread(target=read, daemon=True).start()
    return await line
