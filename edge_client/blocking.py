"""The client for programs without asyncio: the same calls, waiting.

Must not know: anything below `client`. Runs the client's event loop on a thread of its own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from typing import Any, Self, TypeVar

from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.events import Event, Result
from shared.types import ModelCard

T = TypeVar("T")

END_TIMEOUT_S = 5.0


class BlockingClient:
    """Use as `with BlockingClient(config) as client`. One thread may iterate a stream at a time."""

    def __init__(self, config: ClientConfig | None = None, **parts: Any) -> None:
        """`parts` as SpeculativeClient takes them."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="draftwire-client", daemon=True)
        self._config, self._parts = config, parts
        self._client: SpeculativeClient | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._call(self._connect())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._client is not None
        self._call(self._client.close())
        self._end_loop()

    @property
    def card(self) -> ModelCard:
        """What the verifier serves."""
        assert self._client is not None
        return self._client.card

    def generate(self, prompt: Any, **options: Any) -> Result:
        """See SpeculativeClient.generate."""
        assert self._client is not None
        return self._call(self._client.generate(prompt, **options))

    def stream(self, prompt: Any, **options: Any) -> Iterator[Event]:
        """See SpeculativeClient.stream; closing the iterator, or Ctrl-C, ends the generation on both sides."""
        handed: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        ended = threading.Event()
        pump = asyncio.run_coroutine_threadsafe(self._pump(prompt, options, handed, ended), self._loop)
        try:
            while (item := handed.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pump.cancel()
            ended.wait(END_TIMEOUT_S)

    async def _pump(
        self,
        prompt: Any,
        options: dict[str, Any],
        handed: queue.SimpleQueue[Event | BaseException | None],
        ended: threading.Event,
    ) -> None:
        assert self._client is not None
        try:
            async with aclosing(self._client.stream(prompt, **options)) as events:
                async for event in events:
                    handed.put(event)
        except Exception as error:
            handed.put(error)
        finally:
            handed.put(None)
            ended.set()

    async def _connect(self) -> None:
        self._client = SpeculativeClient(self._config, **self._parts)
        try:
            await self._client.connect()
        except BaseException:
            await self._client.close()
            raise

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here must end the work there
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
