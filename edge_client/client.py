"""The client: one verifier, one draft model, and `stream(prompt)`. What an app or an input method embeds.

Must not know: gRPC, protobuf, onnxruntime. Step 1 of docs/token_path.md.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edge_client.client_config import ClientConfig
from edge_client.controller import EngineSettings, Experience
from edge_client.draft_loading import load_drafters, load_tokenizer
from edge_client.drafter import Drafter, DraftTask
from edge_client.edge_engine import EdgeEngine
from edge_client.events import Committed, Done, Event, OfflinePolicy, Piece, Result
from edge_client.generate import Generation, Manner
from edge_client.request_checks import Messages, checked_length, checked_stops, encode_prompt, known_ids
from edge_client.retrieval import RetrievalDrafter
from edge_client.session_stream import SessionStream
from edge_client.text import TextStream
from edge_client.tokenizer import TextTokenizer
from edge_client.trace import TraceSink
from edge_client.transport import GrpcTransport, Transport
from edge_client.user_text import UserText
from shared.cores import usable_cores
from shared.errors import ConfigError, ModelMismatch
from shared.fingerprint import Fingerprint, check_compatible, fingerprint
from shared.sampling import SamplingParams
from shared.types import ModelCard, Open, PaceKind, Rule

MAX_CONCURRENCY = 256


class SpeculativeClient:
    """Text exactly as the target alone would write it, sooner. Use as `async with SpeculativeClient(config) as client`.

    Any number of generations may be asked for; `concurrency` of them are written at once, the others wait in order.
    """

    def __init__(
        self,
        config: ClientConfig | None = None,
        *,
        transport: Transport | None = None,
        drafter: Drafter | None = None,
        tokenizer: TextTokenizer | None = None,
        concurrency: int = 1,
    ) -> None:
        """`transport`, `drafter` and `tokenizer` replace what the settings would give; apps leave them out.

        Each of `concurrency` texts drafts with keys and values of its own, over one copy of the draft's weights and
        on no more threads than this process may use cores. Raises: ConfigError.
        """
        most = MAX_CONCURRENCY if drafter is None else 1
        if not 1 <= concurrency <= most:
            raise ConfigError(f"concurrency must be from 1 to {most}, got {concurrency}", field="concurrency")
        self.config = config or ClientConfig()
        self._transport, self._drafter, self._tokenizer = transport, drafter, tokenizer
        self._card: ModelCard | None = None
        self._concurrency = concurrency
        threads = max(1, min(concurrency, usable_cores() // self.config.threads))
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="draftwire-draft")
        self._places = asyncio.Semaphore(concurrency)
        self._idle = [] if drafter is None else [drafter]
        self.user_text = UserText(self.config.user_text_tokens) if self.config.user_text_tokens else None
        """The user's own accepted text, on this device only; `remember` adds to it, `forget` clears it."""
        self.experience = Experience()
        """What was learnt of this pair of models: it outlives a text."""

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> ModelCard:
        """Asks the verifier what it serves, checks that the vocabularies are one, loads the draft model.

        Raises: VerifierUnavailable, ModelMismatch (naming both models and the first difference), ModelLoadError.
        """
        config = self.config
        loop = asyncio.get_running_loop()
        fingerprint_here = await loop.run_in_executor(self._executor, self._load_text)
        vocabulary = self.tokenizer.vocabulary
        if self._transport is None:
            self._transport = GrpcTransport(
                config.verifier, vocabulary.valid_mask(vocabulary.size), timeout_s=config.timeout_s
            )
        card = self._card = await self._transport.describe()
        if config.target_name and card.model_name != config.target_name:
            raise ModelMismatch(f"the verifier at {config.verifier} serves {card.model_name}, not {config.target_name}")
        target = Fingerprint.from_wire(card.fingerprint_blocks)
        check_compatible(fingerprint_here, target, Path(config.draft).name, card.model_name)
        if self._loads_model:
            self._idle = await loop.run_in_executor(self._executor, self._build_drafters)
            self._drafter = self._idle[-1]
        return card

    @property
    def _loads_model(self) -> bool:
        """Whether this client drafts with a model of the settings'."""
        return self._drafter is None and self.config.hint_tokens > 0 and self.config.drafter != "retrieval"

    def _load_text(self) -> Fingerprint:
        """(worker thread) Without a model the tokenizer alone need be there."""
        if self._tokenizer is None:
            config = self.config
            self._tokenizer = load_tokenizer(config.draft, config.precision, with_model=self._loads_model)
        return fingerprint(self._tokenizer.vocabulary)

    def _build_drafters(self) -> list[Drafter]:
        """(worker thread) One for each text at a time."""
        config = self.config
        return load_drafters(config.draft, config.precision, self.tokenizer, config.threads, self._concurrency)

    async def close(self) -> None:
        """Gives the channel and the draft thread back."""
        if self._transport is not None:
            await self._transport.close()
        self._executor.shutdown(wait=False)

    @property
    def card(self) -> ModelCard:
        """What the verifier serves. Raises: ConfigError before `connect`."""
        if self._card is None:
            raise ConfigError("the client is not connected: use it as `async with SpeculativeClient(...)`")
        return self._card

    @property
    def tokenizer(self) -> TextTokenizer:
        """The vocabulary both sides share."""
        assert self._tokenizer is not None
        return self._tokenizer

    # ------------------------------------------------------------ prompts

    def encode(self, prompt: str | Messages, now: Callable[[], datetime] = datetime.now) -> list[int]:
        """A raw prompt as it stands, or chat messages through the target's template, which may ask for the date.

        Raises: ConfigError for an empty prompt, a bad message, or messages where the target has no template.
        """
        return encode_prompt(prompt, self.card, self.tokenizer, now)

    # ------------------------------------------------------------ the user's own text

    def remember(self, text: str | Sequence[int]) -> None:
        """Text that the user has accepted: look-up drafts from it from now on. Of it only hints leave the device."""
        if self.user_text is not None:
            ids = self.tokenizer.encode(text) if isinstance(text, str) else self._known_ids(text, "text")
            self.user_text.add(ids)

    def forget(self) -> None:
        """Clears all text that was remembered."""
        if self.user_text is not None:
            self.user_text.clear()

    # ------------------------------------------------------------ generating

    async def stream(
        self,
        prompt: str | Messages | Sequence[int],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        rule: Rule = Rule.AGREEMENT,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        pace: PaceKind | None = None,
        hint_tokens: int | None = None,
        hint_width: int | None = None,
        hint_reach: float | None = None,
        offline: OfflinePolicy | None = None,
        previews: bool = False,
        trace: TraceSink | None = None,
        logprobs: bool = False,
        keep_special: bool = False,
        target_id: bytes = b"",
        on_open: Callable[[int], None] = lambda seed: None,
    ) -> AsyncGenerator[Event, None]:
        """Events of one generation, `Done` last. A raw prompt, chat messages, or ids.

        What is None comes from the target (`sampling`, `stop_ids`) or the settings (`pace`, `hint_tokens`,
        `hint_width`, `hint_reach`, `offline`); `on_open` is told the session's seed. `previews`: tell where the text
        probably goes, too. `trace` records what both sides do. `target_id` refuses a verifier that serves another
        target by now; empty takes any. Leaving the iteration early ends both sides.
        Raises: ConfigError, RemoteProtocolError (naming the field), TransportError, Overloaded, SessionError,
        ModelError.
        """
        ids = self._prompt_ids(prompt)
        if seed is not None and not 0 <= seed < 2**64:
            raise ConfigError(f"seed must be from 0 to 2^64-1, got {seed}", field="seed")
        request = Open(
            ids=tuple(ids),
            generated_from=len(ids),
            fingerprint=self.card.fingerprint,
            sampling=self.card.generation_defaults if sampling is None else sampling,
            max_new_tokens=checked_length(len(ids), max_new_tokens, self.card),
            seed=seed,
            rule=rule,
            stop_ids=self.card.stop_ids if stop_ids is None else tuple(self._known_ids(stop_ids, "stop_ids")),
            pace=pace or PaceKind(self.config.pace),
            run_ahead=self.config.run_ahead,
            target_id=target_id,
            logprobs=logprobs,
        )
        self._known_ids(list(request.sampling.logit_bias), "logit_bias")
        text = TextStream(self.tokenizer.vocabulary, checked_stops(stop), keep_special=keep_special)
        depth = self.config.hint_tokens if hint_tokens is None else hint_tokens
        async with self._place(depth) as drafter:
            if drafter is None and pace is None and (self.config.drafter == "model" or depth == 0):
                request = replace(request, pace=PaceKind.RUN_ON)
            settings = EngineSettings(
                depth=depth,
                width=self._width(request, hint_width),
                reach=self.config.hint_reach if hint_reach is None else hint_reach,
                pace=request.pace,
            )
            looks_up = self.config.drafter != "model" and depth > 0
            is_look_up = drafter is not None and drafter.name == RetrievalDrafter.name  # the caller's own
            retrieval = RetrievalDrafter(self.user_text) if looks_up and not is_look_up else None
            if retrieval is not None:
                retrieval.begin(DraftTask.of(request, seed=0))
            generation = Generation(
                SessionStream(
                    self._connected_transport(), request, self.config.reconnect_for_s, self.config.overload_wait_s
                ),
                EdgeEngine(
                    request,
                    settings,
                    has_model=drafter is not None,
                    retrieval=retrieval,
                    experience=self.experience,
                    context_size=self.card.context_size,
                ),
                drafter,
                text,
                executor=self._executor,
                manner=Manner(offline or OfflinePolicy(self.config.offline), previews, secrets.randbits(64)),
                trace=trace,
            )
            async with aclosing(generation.run()) as events:
                is_told = False
                async for event in events:
                    if not is_told and generation.is_open:
                        on_open(generation.seed)
                        is_told = True
                    yield event

    async def generate(
        self,
        prompt: str | Messages | Sequence[int],
        *,
        on_open: Callable[[int], None] = lambda seed: None,
        **options: Any,
    ) -> Result:
        """One generation at once; options as `stream`."""
        seeds: list[int] = []

        def opened(seed: int) -> None:
            seeds.append(seed)
            on_open(seed)

        pieces: list[Piece] = []
        logprobs: list[float] = []
        async with aclosing(self.stream(prompt, on_open=opened, **options)) as events:
            async for event in events:
                if isinstance(event, Committed):
                    pieces.extend(event.pieces)
                    logprobs.extend(event.logprobs)
                elif isinstance(event, Done):
                    return Result(
                        text="".join(piece.text for piece in pieces),
                        ids=tuple(piece.token for piece in pieces if piece.token >= 0),
                        reason=event.reason,
                        report=event.report,
                        seed=seeds[0],
                        pieces=tuple(pieces),
                        logprobs=tuple(logprobs),
                        stop=event.stop,
                    )
        raise AssertionError("a generation ends with Done")

    @asynccontextmanager
    async def _place(self, depth: int) -> AsyncIterator[Drafter | None]:
        """Waits for this text's turn; gives a drafter that no other text uses, None if none is wanted.

        The last used comes first: what its cache holds may begin this text too.
        """
        async with self._places:
            drafter = self._idle.pop() if depth > 0 and self._idle else None
            try:
                yield drafter
            finally:
                if drafter is not None:
                    self._idle.append(drafter)

    def _connected_transport(self) -> Transport:
        assert self._transport is not None
        return self._transport

    def _width(self, request: Open, asked: int | None) -> int:
        return 1 if request.is_chain else asked or self.config.hint_width

    def _prompt_ids(self, prompt: str | Messages | Sequence[int]) -> list[int]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            return self.encode(prompt)  # type: ignore[arg-type]
        if not prompt:
            raise ConfigError("the prompt is empty", field="prompt")
        return self._known_ids(prompt, "prompt")

    def _known_ids(self, ids: Sequence[Any], field: str) -> list[int]:
        return known_ids(ids, field, self.tokenizer.vocabulary)
