"""The option `--user-text FILE` of the commands that write texts, and the commands `user-text show|clear FILE`.

Must not know: how the file looks, drafting. Called by `cli`, `text_commands` and `batch`; errors propagate to them.
What the user accepted is what he typed, once the answer to it has come to its end, and that answer. A text that was
interrupted, that failed, or that the verifier ended early leaves nothing. System turns are the script's, not his. The
texts of a batch nobody has read when they are written: a batch drafts from the file and adds nothing to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.events import FinishReason
from edge_client.user_text_file import UserTextFile
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from shared.types import Rule

OPTION = "--user-text"


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands; each sets `handler`, which takes the parsed arguments and gives the exit code."""
    parser = subparsers.add_parser(
        "user-text", help=f"show or clear a file of {OPTION}", description=f"Looks after a file of {OPTION}."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    show = _command(commands, "show", "print what is remembered, the oldest first")
    show.add_argument("--json", action="store_true", help="print a JSON list of the texts")
    show.set_defaults(handler=_show)
    _command(commands, "clear", "forget it all: the file is removed, a damaged one too").set_defaults(handler=_clear)


def _command(commands: Any, name: str, says: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=says,
        description=f"{says[0].upper()}{says[1:]}.",
        epilog=f"example: edge-client user-text {name} ~/.my-texts",
    )
    command.add_argument("file", metavar="FILE", type=Path, help=f"what {OPTION} named")
    return command


def add_option(command: argparse.ArgumentParser, what: str) -> None:
    """Adds `--user-text`; `what` it does there."""
    command.add_argument(OPTION, type=Path, metavar="FILE", help=f"{what} (default: nothing is stored)")


def _show(args: argparse.Namespace) -> int:
    file = UserTextFile(args.file)
    if not file.exists():
        raise ConfigError(f"{args.file}: there is no such file", field="FILE")
    texts = file.texts()
    if args.json:
        print(json.dumps(texts, ensure_ascii=False, indent=1))
        return 0
    for number, text in enumerate(texts, 1):
        print(f"--- {number} of {len(texts)}\n{text}")
    if not texts:
        print("nothing is remembered")
    return 0


def _clear(args: argparse.Namespace) -> int:
    UserTextFile(args.file).clear()
    return 0


class RememberedText:
    """What one command remembers of the user's text, and adds to it; does nothing where no file was named."""

    def __init__(self, path: Path | None, config: ClientConfig, *, is_kept: bool = True) -> None:
        """Reads it. `is_kept`: the command will add to it. Raises: ConfigError naming the option."""
        self._file = None if path is None else UserTextFile(path, OPTION)
        self._config, self._max_tokens, self._is_kept = config, config.user_text_tokens, is_kept
        self._texts: list[str] = []
        if self._file is None:
            return
        if not self._max_tokens:
            raise ConfigError(f"{OPTION} {path}: user_text_tokens is 0, there is no room for it", field=OPTION)
        if is_kept:
            self._file.check_usable()
        elif not self._file.exists():
            raise ConfigError(f"{OPTION} {path}: there is no such file", field=OPTION)
        self._texts = self._file.texts()

    def give(self, client: SpeculativeClient, rule: Rule, sampling: SamplingParams) -> None:
        """The client drafts from it from now on. Where nothing does under these settings, a line on stderr says so."""
        if self._file is not None and (why := self._why_idle(rule, sampling)):
            kept = "; texts are added to it all the same" if self._is_kept else ""
            print(f"edge-client: nothing drafts from the file of {OPTION}: {why}{kept}", file=sys.stderr)
        for text in self._texts:
            client.remember(text)

    def _why_idle(self, rule: Rule, sampling: SamplingParams) -> str:
        """Why look-up proposes nothing; empty if it does. See RetrievalDrafter."""
        if self._config.hint_tokens == 0:
            return "hint_tokens is 0"
        if self._config.drafter == "model":
            return "drafter is model, which looks nothing up"
        if rule is Rule.REJECTION and not sampling.is_greedy:
            return "under the rejection rule nothing is looked up"
        return ""

    async def accept(self, client: SpeculativeClient, reason: FinishReason, *texts: str) -> None:
        """The user's turn and its answer; if that came to its end they are drafted from, and in the file at once.

        Raises: ConfigError if they cannot be written; they are drafted from all the same.
        """
        if self._file is None or reason is FinishReason.CANCELLED:
            return
        for text in texts:
            client.remember(text)
        await asyncio.to_thread(self._file.add, texts, client.tokenizer, self._max_tokens)
