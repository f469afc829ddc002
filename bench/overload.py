"""`python -m bench overload`: far more opens than a verifier is sized for.

Opens N sessions at once on a verifier with few places: those that find one are served, as many wait as the queue
holds, the rest are refused with a time to come again. Meanwhile health is asked again and again. Nothing may hang,
and what is served is the text of a solo run. Verifier and load are pinned to a core each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.capacity import LOAD_CORE, VERIFIER_CORE, say, scripts_of
from bench.exactness import encoded_prompts
from bench.pairs import PAIRS, Pair, pair
from bench.processes import VerifierProcess, machine, pin_self
from bench.replay import OWN_CONNECTION, Played, Script, connection, play
from edge_client.transport import GrpcTransport
from shared.errors import ConfigError, Overloaded
from shared.types import ModelCard, PaceKind

DISTINCT_TEXTS = 16
HANG_S = 600.0
ASK_EVERY_S = 0.05


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "overload",
        help="far more opens than places",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pair", default="smollm2", help=f"one of {', '.join(PAIRS)} (default: smollm2)")
    command.add_argument("--opens", type=int, default=200, metavar="N", help="sessions opened at once (default: 200)")
    command.add_argument("--places", type=int, default=16, metavar="N", help="--max-sessions (default: 16)")
    command.add_argument("--queue", type=int, default=64, metavar="N", help="--max-queue (default: 64)")
    command.add_argument("--queue-ms", type=int, default=10_000, metavar="N", help="--max-queue-ms (default: 10000)")
    command.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens per session (default: 32)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if nothing hung, what was served is right, and every refusal says when to come again."""
    if min(args.opens, args.places, args.tokens) < 1 or args.queue < 0:
        raise ConfigError("--opens, --places and --tokens must be at least 1, --queue at least 0")
    chosen, here = pair(args.pair), machine()
    options = ("--max-sessions", str(args.places), "--max-queue", str(args.queue), "--max-queue-ms", str(args.queue_ms))
    with VerifierProcess(chosen.target, {VERIFIER_CORE}, threads=1, options=options) as verifier:
        pin_self({LOAD_CORE})
        result = {"machine": here, **asyncio.run(_measure(args, chosen, verifier.address))}
    print(json.dumps(result) if args.json else "\n".join(f"{name}: {value}" for name, value in result.items()))
    return 0 if result["is_right"] else 1


async def _measure(args: argparse.Namespace, chosen: Pair, address: str) -> dict[str, Any]:
    transport = GrpcTransport(address)
    card = await transport.describe()
    await transport.close()
    prompts = encoded_prompts(chosen, DISTINCT_TEXTS)
    texts = await scripts_of(chosen, address, card, prompts, args.tokens, 8)
    scripts = [texts[index % len(texts)] for index in range(args.opens)]
    quiet = await _health_ms(address, asyncio.create_task(asyncio.sleep(3)))
    say("overloading")
    began = time.perf_counter()
    load = asyncio.create_task(_open_all(address, card, scripts))
    loaded = await _health_ms(address, load)
    played = await load
    return {
        "opens": args.opens,
        "places": args.places,
        "queue": args.queue,
        "seconds": round(time.perf_counter() - began, 1),
        **_outcomes(played, scripts, args.places),
        "health_ms_quiet": _percentiles(quiet),
        "health_ms_loaded": _percentiles(loaded),
        "health_calls_loaded": len(loaded),
    }


async def _open_all(address: str, card: ModelCard, scripts: list[Script]) -> list[Played | BaseException]:
    async with connection(address) as stub, asyncio.timeout(HANG_S):
        sessions = (play(stub, card, script, 8, PaceKind.WAIT) for script in scripts)
        return await asyncio.gather(*sessions, return_exceptions=True)


def _outcomes(played: list[Played | BaseException], scripts: list[Script], places: int) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    retries: list[int] = []
    for each, script in zip(played, scripts, strict=True):
        if isinstance(each, BaseException):
            kinds[f"broke: {each!r}"[:80]] += 1
        elif each.error is None:
            kinds["served"] += 1
            kinds["served, another text"] += each.ids != list(script.ids)
        elif isinstance(each.error, Overloaded) and each.error.retry_after_ms > 0:
            kinds["refused with retry-after"] += 1
            retries.append(each.error.retry_after_ms)
        else:
            kinds[f"refused otherwise: {each.error}"[:80]] += 1
    found = {kind: count for kind, count in kinds.items() if count}
    return {
        **found,
        "retry_after_ms": [min(retries), max(retries)] if retries else [],
        "is_right": set(found) <= {"served", "refused with retry-after"}
        and sum(found.values()) == len(scripts)
        and kinds["served"] >= min(places, len(scripts)),
    }


async def _health_ms(address: str, until: asyncio.Task[Any]) -> list[float]:
    """Times of health calls on a connection of their own until the task is done.

    Calls are due at fixed times and measured from then: a stall shows in all calls that it holds up.
    """
    times: list[float] = []
    async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
        due = time.perf_counter()
        while not until.done():
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
            times.append(1000 * (time.perf_counter() - due))
            due += ASK_EVERY_S
    return times


def _percentiles(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {
        "p50": round(cuts[49], 1),
        "p90": round(cuts[89], 1),
        "p99": round(cuts[98], 1),
        "max": round(max(times), 1),
    }
