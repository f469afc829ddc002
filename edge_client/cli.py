"""The command `edge-client`: generate, chat, batch, models, export-draft, timeline.

Exit codes: 0 done, 1 failed (one line on stderr says why), 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from shared.config import load_config
from shared.errors import ConfigError, DraftwireError
from shared.sampling import SamplingParams
from shared.types import Rule

EDGE_MODULES = ("grpc", "onnxruntime", "tokenizers", "jinja2", "tqdm")
"""What the edge extra brings."""

_missing: ModuleNotFoundError | None = None
try:
    from edge_client import models_cli, timeline_cli
    from edge_client.batch import DEFAULT_CONCURRENCY, BatchOptions, run_batch
    from edge_client.client import ClientConfig, SpeculativeClient
    from edge_client.display import TextPrinter, report_fields, report_line
    from edge_client.events import Committed, Done, StateChanged
except ModuleNotFoundError as error:
    if error.name not in EDGE_MODULES:
        raise
    _missing = error  # told by main, in a line

CONNECTION_OPTIONS = (
    ("--verifier", "HOST:PORT", "the verifier (default: 127.0.0.1:50151)"),
    ("--draft", "NAME", "bundle, folder or hub id of the draft model (default: smollm2-135m)"),
    ("--precision", "P", "of a draft given by name: auto, int4, int8 or fp32 (default: auto)"),
    ("--target-name", "NAME", "refuse a verifier that serves another model"),
    ("--threads", "N", "CPU threads of the draft model (default: 1)"),
    ("--hint-tokens", "N", "ids drafted ahead, 0 streams from the verifier (default: 16)"),
    ("--hint-reach", "P", "stop drafting where the chance that all of it stands is lower (default: 0.3)"),
    ("--hint-width", "N", "alternatives per position, 1 for chains (default: 1)"),
    ("--pace", "PACE", "auto, wait or run_on (default: wait)"),
    ("--run-ahead", "N", "ids the verifier may commit unacknowledged (default: 256)"),
    ("--timeout-s", "S", "how long to wait for a verifier (default: 5)"),
    ("--reconnect-for-s", "S", "how long to try again after a cut in mid text (default: 60)"),
    ("--overload-wait-s", "S", "how long to wait for room at a verifier that is full (default: 30)"),
)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    result = argparse.ArgumentParser(
        prog="edge-client",
        description="The device side of Draftwire: drafts with a small model, shows the large model's exact text.",
        epilog="first steps:\n"
        "  edge-client models pull smollm2-135m\n"
        "  cloud-verifier --model smollm2-135m &\n"
        '  edge-client generate "Explain what a rainbow is."',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = result.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_chat(commands)
    _add_batch(commands)
    models_cli.add_parsers(commands)
    timeline_cli.add_parser(commands)
    return result


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="write one text",
        description="Writes the target's text for one prompt. Accepted ids are green, the target's own yellow.",
        epilog='example: edge-client generate "Explain what a rainbow is." --temperature 0.8 --top-p 0.95 --seed 7',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("prompt", help="the user's turn; - reads it from standard input")
    command.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without a chat template")
    command.add_argument("--system", metavar="TEXT", help="a system turn before it")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    _add_generation_options(command)
    command.set_defaults(handler=lambda args: asyncio.run(_generate(args)))


def _add_chat(commands: Any) -> None:
    command = commands.add_parser(
        "chat",
        help="talk with the target",
        description="A conversation. An empty line, /quit or end of input ends it; /reset forgets it.",
        epilog="example: edge-client chat --pace wait",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--system", metavar="TEXT", help="a system turn before the first")
    _add_generation_options(command)
    command.set_defaults(handler=lambda args: asyncio.run(_chat(args)))


def _add_batch(commands: Any) -> None:
    command = commands.add_parser(
        "batch",
        help="write the texts of a file of prompts",
        description="Writes the target's texts for the prompts of IN into OUT, JSON lines both, in their order.\n\n"
        "A line of IN holds prompt (a user's turn, unless --raw), messages (a chat), turns (the first is the prompt)\n"
        "or question. It may hold id, and of its own: max_new_tokens, seed, stop, temperature, top_p and so on.\n"
        "Texts that are done are kept in OUT.partial: a run that was stopped goes on when it is started again.",
        epilog="example: edge-client batch prompts.jsonl texts.jsonl --concurrency 16 --temperature 0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("source", metavar="IN", type=Path, help="JSON lines with the prompts")
    add("out", metavar="OUT", type=Path, help="where the texts go, in one piece, when all are done")
    most = f"texts written at once (default: {DEFAULT_CONCURRENCY})"
    add("--concurrency", type=int, default=DEFAULT_CONCURRENCY, metavar="N", help=most)
    add("--raw", action="store_true", help="continue the prompts as they stand, without a chat template")
    add("--system", default="", metavar="TEXT", help="a system turn before each chat that has none")
    add("--force", action="store_true", help="replace OUT if it is there")
    add("--restart", action="store_true", help="begin anew: forget what an earlier run has kept in OUT.partial")
    _add_generation_options(command)
    command.set_defaults(handler=_batch, seed=0)


def _add_generation_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--max-new-tokens", type=int, default=256, metavar="N", help="length of the answer at most (default: 256)")
    for name, kind, text in (
        ("temperature", float, "0 is greedy (default: as the target's makers advise)"),
        ("top-k", int, "keep the k likeliest, 0 keeps all"),
        ("top-p", float, "keep the likeliest with this share of the mass"),
        ("min-p", float, "keep ids with this share of the best one's probability"),
        ("repetition-penalty", float, "once per id seen, 1 is off"),
        ("frequency-penalty", float, "per time generated, 0 is off"),
        ("presence-penalty", float, "once if generated, 0 is off"),
    ):
        add(f"--{name}", type=kind, metavar="X", help=text)
    add("--seed", type=int, metavar="N", help="the same seed gives the same text under the agreement rule")
    add("--rule", choices=[rule.value for rule in Rule], default="agreement", help="how drafts are judged")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--no-stats", action="store_true", help="no line of figures at the end")
    add("--config", type=Path, metavar="FILE", help="TOML file with a [client] table")
    group = command.add_argument_group("connection and draft (also in the environment as DRAFTWIRE_CLIENT_<OPTION>)")
    for name, metavar, text in CONNECTION_OPTIONS:
        group.add_argument(name, metavar=metavar, help=text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    try:
        if _missing is not None:
            raise _missing
        args = parser().parse_args(arguments)
        handler: Callable[[argparse.Namespace], int] = args.handler
        return handler(args)
    except DraftwireError as error:
        print(f"edge-client: {error.message}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:  # onnxruntime and tqdm are imported when they are needed
        if error.name not in EDGE_MODULES:
            raise
        print(f"edge-client: {error.name} is not installed: pip install 'draftwire[edge]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("edge-client: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


# ---------------------------------------------------------------- generate, chat and batch


def _config(args: argparse.Namespace) -> ClientConfig:
    names = [option[0].removeprefix("--").replace("-", "_") for option in CONNECTION_OPTIONS]
    given = {name: getattr(args, name) for name in names}
    return load_config(ClientConfig, "client", file=args.config, environment=os.environ, arguments=given)


def _sampling(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The target's defaults, with what the command line says instead."""
    return dataclasses.replace(defaults, **_given_sampling(args))


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "logit_bias"]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _options(args: argparse.Namespace, client: SpeculativeClient) -> dict[str, Any]:
    return {
        "max_new_tokens": args.max_new_tokens,
        "sampling": _sampling(args, client.card.generation_defaults),
        "seed": args.seed,
        "rule": Rule(args.rule),
        "stop": args.stop,
    }


def _check_before_loading(args: argparse.Namespace) -> None:
    """What can be refused without a model or a verifier is refused at once."""
    _sampling(args, SamplingParams())
    if args.seed is not None and not 0 <= args.seed < 2**64:
        raise ConfigError(f"seed must be from 0 to 2^64-1, got {args.seed}", field="seed")
    if args.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {args.max_new_tokens}", field="max_new_tokens")


async def _generate(args: argparse.Namespace) -> int:
    _check_before_loading(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ConfigError("the prompt is empty", field="prompt")
    turns = [{"role": "system", "content": args.system}] if args.system else []
    async with SpeculativeClient(_config(args)) as client:
        content = prompt if args.raw else [*turns, {"role": "user", "content": prompt}]
        options = _options(args, client)
        if args.json:
            result = await client.generate(content, **options)
            print(json.dumps({"text": result.text, "seed": result.seed, **report_fields(result.report, result.reason)}))
            return 0
        await _show(client, content, options, not args.no_stats)
    return 0


async def _show(client: SpeculativeClient, content: Any, options: dict[str, Any], with_figures: bool) -> str:
    """Streams one text to the terminal, and under it a line of figures; returns the text."""
    printer, text = TextPrinter(sys.stdout), ""
    seeds: list[int] = []
    async with aclosing(client.stream(content, on_open=seeds.append, **options)) as events:
        async for event in events:
            match event:
                case Committed():
                    printer.show(event)
                    text += event.text
                case StateChanged():
                    printer.state(event)
                case Done():
                    printer.end()
                    if with_figures:
                        is_repeatable = options["rule"] is Rule.AGREEMENT and not options["sampling"].is_greedy
                        seed = seeds[0] if is_repeatable else None
                        print(report_line(event.report, seed), file=sys.stderr)
                    return text
    raise AssertionError("a generation ends with Done")


async def _chat(args: argparse.Namespace) -> int:
    _check_before_loading(args)
    start = [{"role": "system", "content": args.system}] if args.system else []
    async with SpeculativeClient(_config(args)) as client:
        turns: list[dict[str, str]] = list(start)
        is_terminal = sys.stdin.isatty()
        while line := (await _read_line("you> " if is_terminal else "")).strip():
            if line == "/quit":
                break
            if line == "/reset":
                turns = list(start)
                continue
            turns.append({"role": "user", "content": line})
            text = await _show(client, turns, _options(args, client), not args.no_stats)
            turns.append({"role": "assistant", "content": text})
    return 0


def _batch(args: argparse.Namespace) -> int:
    _check_before_loading(args)
    options = BatchOptions(
        source=args.source,
        out=args.out,
        concurrency=args.concurrency,
        sampling=_given_sampling(args),
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        rule=Rule(args.rule),
        stop=tuple(args.stop),
        system=args.system,
        is_raw=args.raw,
        is_forced=args.force,
        is_restarted=args.restart,
        with_figures=not args.no_stats,
    )
    return run_batch(_config(args), options)


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


if __name__ == "__main__":
    sys.exit(main())
