"""The command `edge-client`: generate, chat, batch, models, export-draft, timeline, user-text.

Exit codes: 0 done, 1 failed (one line on stderr says why), 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared.errors import DraftwireError
from shared.types import Rule

EDGE_MODULES = ("grpc", "onnxruntime", "tokenizers", "jinja2", "tqdm")
"""What the edge extra brings."""

_missing: ModuleNotFoundError | None = None
try:
    from edge_client import models_cli, text_commands, timeline_cli, user_text_cli
    from edge_client.batch import DEFAULT_CONCURRENCY, BatchOptions, run_batch
    from edge_client.cli_options import (
        add_generation_options,
        add_watching_options,
        check_before_loading,
        client_config,
        given_sampling,
    )
except ModuleNotFoundError as error:
    if error.name not in EDGE_MODULES:
        raise
    _missing = error  # told by main, in a line


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
    user_text_cli.add_parsers(commands)
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
    add_watching_options(command)
    user_text_cli.add_option(command, "look-up drafts from this file too, and the prompt and its text are added to it")
    add_generation_options(command)
    command.set_defaults(handler=lambda args: asyncio.run(text_commands.generate(args)))


def _add_chat(commands: Any) -> None:
    command = commands.add_parser(
        "chat",
        help="talk with the target",
        description="A conversation. An empty line, /quit or end of input ends it; /reset forgets it.",
        epilog="example: edge-client chat --preview",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--system", metavar="TEXT", help="a system turn before the first")
    add_watching_options(command, ", one for each answer: later ones get -2, -3, ... before the suffix")
    user_text_cli.add_option(command, "look-up drafts from this file too, and each turn and its answer are added to it")
    add_generation_options(command)
    command.set_defaults(handler=lambda args: asyncio.run(text_commands.chat(args)))


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
    user_text_cli.add_option(command, "look-up drafts from this file too, which must be there; nothing is added to it")
    add_generation_options(command)
    command.set_defaults(handler=_batch, seed=0)


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


def _batch(args: argparse.Namespace) -> int:
    check_before_loading(args)
    options = BatchOptions(
        source=args.source,
        out=args.out,
        concurrency=args.concurrency,
        sampling=given_sampling(args),
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        rule=Rule(args.rule),
        stop=tuple(args.stop),
        system=args.system,
        is_raw=args.raw,
        is_forced=args.force,
        is_restarted=args.restart,
        with_figures=not args.no_stats,
        user_text=args.user_text,
    )
    return run_batch(client_config(args), options)


if __name__ == "__main__":
    sys.exit(main())
