"""A batch: prompts of a file through the client, several at once, into a file of texts. Goes on where it was stopped.

Must not know: gRPC, drafting, how the files look (batch_files, batch_journal). Called by `cli`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_client.batch_files import Line, Settings, check_output, read_lines, write_output
from edge_client.batch_journal import Journal
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.events import FinishReason, Result
from edge_client.user_text_cli import RememberedText
from shared.errors import ConfigError, DraftwireError, ModelMismatch, Overloaded, SessionError, TransportError
from shared.sampling import SamplingParams
from shared.types import ModelCard, Rule

DEFAULT_CONCURRENCY = 8
TELL_EVERY_S = 10.0
TRY_AGAIN_S = 1.0
"""After a verifier had no room for longer than the client waits, while other texts of this batch are being written."""

_STOPPING = (TransportError, Overloaded, ModelMismatch)
"""What would befall every prompt; any other error is the prompt's own."""


@dataclass(frozen=True)
class BatchOptions:
    """What a batch is asked to do."""

    source: Path
    out: Path
    concurrency: int = DEFAULT_CONCURRENCY
    """Texts written at once."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Parameters that replace the target's defaults; a line's own replace these."""
    max_new_tokens: int = 256
    seed: int = 0
    rule: Rule = Rule.AGREEMENT
    stop: tuple[str, ...] = ()
    system: str = ""
    is_raw: bool = False
    is_forced: bool = False
    """Replace an output that is there."""
    is_restarted: bool = False
    """Forget what an earlier run has done."""
    with_figures: bool = True
    user_text: Path | None = None
    """A file of the user's own text to draft from."""

    @property
    def journal(self) -> Path:
        """Beside the output."""
        return self.out.with_name(f"{self.out.name}.partial")


def run_batch(config: ClientConfig, options: BatchOptions) -> int:
    """Writes all texts; returns the exit code. What was done is kept if it is interrupted, killed, or fails.

    Raises: ConfigError before anything is written; TransportError, Overloaded, ModelMismatch, saying how to go on.
    """
    lines = read_lines(options.source, is_raw=options.is_raw)
    check_output(options.out, options.source, is_forced=options.is_forced)
    remembered = RememberedText(options.user_text, config, is_kept=False)
    batch = Batch(config, options, lines, remembered)
    try:
        asyncio.run(batch.run())
    except KeyboardInterrupt:
        print(f"edge-client: interrupted{batch.how_to_go_on()}", file=sys.stderr)
        return 130
    if batch.meter.failed:
        many = f"{batch.meter.failed} of {len(lines)} prompts"
        again = "the others are kept: run again with --force to try these once more"
        print(f"edge-client: {many} failed: see error in {options.out}; {again}", file=sys.stderr)
    return 1 if batch.meter.failed else 0


class Batch:
    """One run over the prompts of a file."""

    def __init__(
        self, config: ClientConfig, options: BatchOptions, lines: Sequence[Line], remembered: RememberedText
    ) -> None:
        self.meter, self._remembered = Meter(len(lines)), remembered
        self._config, self._options, self._lines = config, options, lines
        self._journal: Journal | None = None
        self._failures: dict[int, dict[str, Any]] = {}
        self._open: set[int] = set()
        """Indices of the texts being written at the moment."""
        self._opened = 0
        """Texts that the verifier had room for so far."""

    async def run(self) -> None:
        """See run_batch."""
        options = self._options
        async with SpeculativeClient(self._config, concurrency=min(options.concurrency, len(self._lines))) as client:
            if not client.card.chat_template and not options.is_raw:
                raise ConfigError(f"{client.card.model_name} has no chat template: add --raw", field="raw")
            settings = _settings(client.card, options)
            self._remembered.give(client, options.rule, settings.sampling)
            now = datetime.now()
            journal = self._journal = Journal(options.journal, settings, self._lines, now, anew=options.is_restarted)
            try:
                self.meter.begin(kept=len(journal.results))
                await self._write_all(client, settings, journal)
                write_output(options.out, self._lines, {**self._failures, **journal.results})
                if not self._failures:
                    journal.remove()
            except _STOPPING as error:
                raise type(error)(f"{error.message}{self.how_to_go_on()}", field=error.field) from error
            finally:
                journal.close()
                self.meter.end(with_figures=options.with_figures)

    def how_to_go_on(self) -> str:
        """The end of a message about a run that stopped early; empty if it had not begun."""
        if self._journal is None:
            return ""
        kept = f"{len(self._journal.results)} of {len(self._lines)} texts are kept in {self._journal.path}"
        return f"; {kept}: run the same command again to go on"

    async def _write_all(self, client: SpeculativeClient, settings: Settings, journal: Journal) -> None:
        waiting = iter([line for line in self._lines if line.index not in journal.results])
        teller = asyncio.create_task(self.meter.tell())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.concurrency):
                    group.create_task(self._work(client, settings, journal, waiting))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            teller.cancel()
            with suppress(asyncio.CancelledError):
                await teller

    async def _work(
        self, client: SpeculativeClient, settings: Settings, journal: Journal, waiting: Iterator[Line]
    ) -> None:
        """One of `concurrency` that take prompts from the same pile."""
        for line in waiting:
            try:
                result = await self._text(client, settings, line, journal.began)
            except _STOPPING:
                raise
            except DraftwireError as error:
                told = {"class": type(error).__name__, "message": error.message, "field": error.field}
                self._failures[line.index] = {"error": told}
                self.meter.add_failure()
            else:
                journal.add(line, _result_fields(result))
                self.meter.add(result)

    async def _text(self, client: SpeculativeClient, settings: Settings, line: Line, now: datetime) -> Result:
        """One text. As long as others of this batch are being written, there will be room: it waits on."""
        ids = client.encode(_content(settings, line), lambda: now)

        had_place = False

        def on_open(_: int) -> None:
            nonlocal had_place
            had_place = True
            self._open.add(line.index)
            self._opened += 1

        while True:
            had_room, opened_before, had_place = bool(self._open), self._opened, False
            try:
                result = await client.generate(
                    ids,
                    max_new_tokens=line.max_new_tokens or settings.max_new_tokens,
                    sampling=settings.sampling_of(line),
                    seed=settings.seed_of(line),
                    rule=self._options.rule,
                    stop=settings.stop if line.stop is None else line.stop,
                    target_id=client.card.target_id,
                    on_open=on_open,
                )
            except Overloaded as error:
                if had_place:  # not refused but ended: the prompt itself is too much
                    raise SessionError(f"the verifier ended the text: {error.message}") from error
                self._open.discard(line.index)
                await asyncio.sleep(TRY_AGAIN_S)
                if not had_room and self._opened == opened_before:
                    raise
            else:
                if result.reason is FinishReason.CANCELLED:
                    raise SessionError("the verifier ended the text early")
                return result
            finally:
                self._open.discard(line.index)


def _settings(card: ModelCard, options: BatchOptions) -> Settings:
    template = json.dumps([card.chat_template, card.special_tokens], sort_keys=True)
    return Settings(
        target=card.model_name,
        target_id=card.target_id.hex(),
        chat_template=hashlib.sha256(template.encode()).hexdigest()[:16],
        stop_ids=card.stop_ids,
        sampling=SamplingParams(**{**vars(card.generation_defaults), **options.sampling}),
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        rule=options.rule.value,
        stop=options.stop,
        system=options.system,
        raw=options.is_raw,
    )


def _content(settings: Settings, line: Line) -> str | list[dict[str, Any]]:
    """As `edge-client generate` takes a prompt: the user's turn of a chat, unless it is raw."""
    if settings.raw:
        assert isinstance(line.prompt, str)
        return line.prompt
    turns = [{"role": "user", "content": line.prompt}] if isinstance(line.prompt, str) else line.prompt
    has_system = turns[0]["role"] == "system"
    return turns if has_system or not settings.system else [{"role": "system", "content": settings.system}, *turns]


def _result_fields(result: Result) -> dict[str, Any]:
    """What the output says of a text: nothing that another run would say otherwise."""
    usage = result.report.usage
    return {
        "text": result.text,
        "finish_reason": result.reason.value,
        "context_tokens": usage.context_tokens,
        "generated_tokens": usage.generated_tokens,
    }


class Meter:
    """Counts what is done and tells it on stderr: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        self.failed = 0
        self._total = total
        self._kept = self._written = self._tokens = self._accepted = 0
        self._began = 0.0
        self._bar: Any = None

    def begin(self, kept: int) -> None:
        """`kept` texts were done by an earlier run."""
        self._kept, self._began = kept, time.perf_counter()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, initial=kept, unit="text", file=sys.stderr, dynamic_ncols=True)

    def add(self, result: Result) -> None:
        """A text is done."""
        usage = result.report.usage
        self._written += 1
        self._tokens += usage.generated_tokens
        self._accepted += usage.accepted_tokens
        self._step()

    def add_failure(self) -> None:
        """A prompt has failed."""
        self.failed += 1
        self._step()

    def _step(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._speed(), refresh=False)
            self._bar.update()

    async def tell(self) -> None:
        """Prints a line now and then where there is no bar, until cancelled."""
        while self._bar is None:
            await asyncio.sleep(TELL_EVERY_S)
            print(self._line(), file=sys.stderr, flush=True)

    def end(self, *, with_figures: bool) -> None:
        """The last word."""
        if self._bar is not None:
            self._bar.close()
        if with_figures:
            print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        kept = f" ({self._kept} kept from before)" if self._kept else ""
        failed = f", {self.failed} failed" if self.failed else ""
        accepted = f", {self._accepted / self._tokens:.0%} accepted" if self._tokens else ""
        done = f"{self._kept + self._written} of {self._total} texts{kept}{failed}"
        return f"[{done}, {self._tokens} tokens{accepted}, {self._speed()}]"

    def _speed(self) -> str:
        elapsed_s = time.perf_counter() - self._began
        return f"{self._tokens / elapsed_s if elapsed_s > 0 else 0.0:.1f} tokens/s"
