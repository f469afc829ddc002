"""Recorded hints: drafted once by the real draft model, then replayed to a verifier by many sessions at once.

So drafting costs nothing while the verifier is measured. `record` needs the draft model, `play` a running verifier and
no model at all. Called by `capacity`, `overload` and `gpu_check`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from edge_client.drafter import Budget, DraftTask, ModelDrafter
from shared import codec
from shared.errors import DraftwireError, error_class
from shared.pb import verifier_pb2_grpc
from shared.sampling import GREEDY, SamplingParams
from shared.types import Close, Commit, Epoch, Fault, Finished, Hint, ModelCard, Open, PaceKind, Rule

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
"""Otherwise channels of one process to one address share a connection: one principal, one prefix cache."""


@dataclass(frozen=True)
class Script:
    """One text and what the drafter proposed at each of its positions."""

    context: tuple[int, ...]
    ids: tuple[int, ...]
    """What the target alone writes."""
    chains: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per generated position the proposed ids, each with the drafter's probability of it."""

    @property
    def agreement(self) -> float:
        """Share of positions whose first proposed id is the target's."""
        hits = sum(chain[0][0] == token for chain, token in zip(self.chains, self.ids, strict=True) if chain)
        return hits / max(1, len(self.ids))


def recorded_chains(
    drafter: ModelDrafter, context: Sequence[int], ids: Sequence[int], depth: int
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The drafter's greedy chain at every position of a text; while it agrees, one new id a position is drafted."""
    task = DraftTask(GREEDY, 0, Rule.AGREEMENT, Epoch(0), len(context))
    drafter.begin(task)
    chains: list[tuple[tuple[int, float], ...]] = []
    chain: list[tuple[int, float]] = []
    for place in range(len(ids)):
        chain = chain[1:] if chain and chain[0][0] == ids[place - 1] else []
        if len(chain) < depth:
            drafter.sync([*context, *ids[:place], *(token for token, _ in chain)])
            tree = drafter.propose(Budget(depth - len(chain)))
            chain += zip(tree.ids, tree.confidence, strict=True)
        chains.append(tuple(chain))
    return tuple(chains)


@dataclass
class Played:
    """What one session got."""

    ids: list[int] = field(default_factory=list)
    steps: int = 0
    accepted: int = 0
    first_s: float = 0.0
    """From the start to the first committed id."""
    batch_sizes: list[int] = field(default_factory=list)
    error: DraftwireError | None = None


@asynccontextmanager
async def connection(address: str) -> AsyncIterator[verifier_pb2_grpc.VerifierStub]:
    """A stub on a connection of its own."""
    async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        yield verifier_pb2_grpc.VerifierStub(channel)


def open_frame(card: ModelCard, script: Script, pace: PaceKind, sampling: SamplingParams = GREEDY) -> Open:
    """Opens a session that writes as many ids as the script has; no stop ids, so that all texts are full."""
    return Open(
        ids=script.context,
        generated_from=len(script.context),
        fingerprint=card.fingerprint,
        sampling=sampling,
        max_new_tokens=len(script.ids),
        seed=1,
        pace=pace,
    )


async def play(
    stub: verifier_pb2_grpc.VerifierStub, card: ModelCard, script: Script, hint_tokens: int, pace: PaceKind
) -> Played:
    """One session to its end: at every commit the recorded chain of its position goes up at once. 0: no hints."""
    played, began = Played(), time.perf_counter()
    call = stub.Session()
    await call.write(codec.encode_up(open_frame(card, script, pace)))
    rim = codec.Rim()
    next_node = 1

    async def hint(place: int) -> int:
        chain = script.chains[place][:hint_tokens] if hint_tokens and place < len(script.chains) else ()
        chain = chain[: len(script.ids) - place]
        if not chain:
            return 0
        at = len(script.context) + place
        frame = Hint(
            Epoch(0),
            next_node,
            tuple(token for token, _ in chain),
            at,
            base_position=at,
            parents=tuple(int(index > 0) for index in range(len(chain))),
            confidence=tuple(probability for _, probability in chain),
        )
        await call.write(codec.encode_up(frame))
        return len(chain)

    while (message := await call.read()) is not grpc.aio.EOF:
        frame = codec.decode_down(message, rim)
        if isinstance(frame, Commit):
            played.first_s = played.first_s or time.perf_counter() - began
            played.ids += frame.ids
            played.steps += 1
            played.accepted += frame.accepted
            played.batch_sizes.append(frame.batch_size)
            next_node += await hint(len(played.ids))
        elif isinstance(frame, Fault):
            played.error = error_class(frame.error)(frame.message, retry_after_ms=frame.retry_after_ms)
            break
        elif isinstance(frame, Finished):
            await call.write(codec.encode_up(Close(Epoch(0), len(script.context) + len(played.ids))))
            await call.done_writing()
        else:  # Opened
            next_node += await hint(0)
    call.cancel()
    return played


async def play_all(
    address: str, card: ModelCard, scripts: Sequence[Script], hint_tokens: int, pace: PaceKind
) -> tuple[list[Played], float]:
    """All scripts at once, each in a session of its own on one connection. Returns what they got, and the seconds."""
    async with connection(address) as stub:
        began = time.perf_counter()
        played = await asyncio.gather(*(play(stub, card, script, hint_tokens, pace) for script in scripts))
        return list(played), time.perf_counter() - began
