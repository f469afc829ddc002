"""`python -m bench loopback`: tokens/s with hints over tokens/s of the same verifier streaming alone, on loopback.

The verifier is pinned to one core with one thread in both runs, the device to the other; runs are interleaved prompt
by prompt; each repeat gives one ratio, and the median and the range of the repeats are printed. Then the payload:
bytes of hints by the codec's count, confirmed from the HTTP/2 frames at a counting proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from bench.counting_proxy import CountingProxy
from bench.exactness import RULES, SEED, encoded_prompts
from bench.pairs import PAIRS, pair
from bench.processes import VerifierProcess, machine, pin_self
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.events import Result
from shared.errors import ConfigError
from shared.types import PaceKind

VERIFIER_CORE, DEVICE_CORE = 0, 1


@dataclass
class Run:
    """Sums over the prompts of one repeat of one cell."""

    tokens: int = 0
    wall_s: float = 0.0
    steps: int = 0
    accepted: int = 0
    ids: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """One text."""
        usage = result.report.usage
        self.tokens += usage.generated_tokens
        self.wall_s += result.report.wall_s
        self.steps += usage.steps
        self.accepted += usage.accepted_tokens
        self.ids.append(result.ids)

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.wall_s


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "loopback",
        help="tokens/s against the same verifier streaming alone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pair", default="smollm2", help=f"one of {', '.join(PAIRS)} (default: smollm2)")
    command.add_argument("--prompts", type=int, default=10, metavar="N", help="prompts per repeat (default: 10)")
    command.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per text (default: 64)")
    command.add_argument("--repeats", type=int, default=5, metavar="N", help="repeats (default: 5)")
    command.add_argument("--rules", default="greedy", help="of greedy,agreement (default: greedy)")
    command.add_argument("--hint-tokens", default="8,24", metavar="N,N", help="ids ahead (default: 8,24)")
    command.add_argument("--hint-reach", type=float, default=0.03, metavar="P", help="see edge-client (default: 0.03)")
    command.add_argument("--hint-width", type=int, default=4, metavar="N", help="alternatives (default: 4)")
    command.add_argument("--pace", default="run_on", choices=[kind.value for kind in PaceKind], help="default: run_on")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if every text is the same with and without hints."""
    rules = args.rules.split(",")
    if not all(rule in RULES for rule in rules):
        raise ConfigError(f"rules must be of {', '.join(RULES)}, got {args.rules!r}", field="rules")
    if not all(length.isdigit() and 0 < int(length) <= 64 for length in args.hint_tokens.split(",")):
        raise ConfigError(f"hint-tokens must be numbers from 1 to 64, got {args.hint_tokens!r}", field="hint_tokens")
    if min(args.prompts, args.tokens, args.repeats) < 1:
        raise ConfigError("nothing to measure: --prompts, --tokens and --repeats must be at least 1")
    chosen, here = pair(args.pair), machine()
    prompts = encoded_prompts(chosen, args.prompts)
    lengths = [int(length) for length in args.hint_tokens.split(",")]
    with VerifierProcess(chosen.target, cores={VERIFIER_CORE}, threads=1) as verifier:
        pin_self({DEVICE_CORE})
        base = ClientConfig(
            verifier=verifier.address,
            draft=chosen.draft,
            precision=chosen.precision,
            hint_width=args.hint_width,
            hint_reach=args.hint_reach,
        )
        rows = []
        for rule in rules:
            rows += asyncio.run(_speed(base, args, rule, lengths, prompts))
        payload = asyncio.run(_payload(base, verifier.address, prompts, args.tokens))
    result = {
        "machine": here,
        "pair": args.pair,
        "pace": args.pace,
        "hint_reach": args.hint_reach,
        "cells": rows,
        "payload": payload,
    }
    print(json.dumps(result) if args.json else _table(result))
    is_confirmed = payload["up_bytes_by_codec"] == payload["up_bytes_at_proxy"]
    return 0 if is_confirmed and all(row["is_identical"] for row in rows) else 1


async def _speed(
    base: ClientConfig, args: argparse.Namespace, rule: str, lengths: list[int], prompts: list[list[int]]
) -> list[dict[str, Any]]:
    streamed: list[Run] = []
    hinted: dict[int, list[Run]] = {length: [] for length in lengths}
    async with SpeculativeClient(base) as client:
        await client.generate(prompts[0], max_new_tokens=8, hint_tokens=0)
        for repeat in range(args.repeats):
            streamed.append(Run())
            for length in lengths:
                hinted[length].append(Run())
            for ids in prompts:
                await _text(client, 0, PaceKind.RUN_ON, rule, ids, args.tokens, streamed[-1])
                for length in lengths:
                    await _text(client, length, PaceKind(args.pace), rule, ids, args.tokens, hinted[length][-1])
            print(f"{rule}: repeat {repeat + 1} of {args.repeats}", file=sys.stderr)
    return [_cell(rule, length, streamed, hinted[length]) for length in lengths]


async def _text(
    client: SpeculativeClient, length: int, pace: PaceKind, rule: str, ids: list[int], tokens: int, into: Run
) -> None:
    into.add(
        await client.generate(
            ids, max_new_tokens=tokens, sampling=RULES[rule], seed=SEED, pace=pace, hint_tokens=length
        )
    )


def _cell(rule: str, length: int, streamed: list[Run], hinted: list[Run]) -> dict[str, Any]:
    ratios = [ours.rate / theirs.rate for ours, theirs in zip(hinted, streamed, strict=True)]
    tokens = sum(each.tokens for each in hinted)
    return {
        "rule": rule,
        "hint_tokens": length,
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "tokens_per_s": round(statistics.median(each.rate for each in hinted), 2),
        "streamed_tokens_per_s": round(statistics.median(each.rate for each in streamed), 2),
        "forwards_per_token": round(sum(each.steps for each in hinted) / tokens, 3),
        "accepted_per_token": round(sum(each.accepted for each in hinted) / tokens, 3),
        "is_identical": all(ours.ids == theirs.ids for ours, theirs in zip(hinted, streamed, strict=True)),
    }


async def _payload(base: ClientConfig, upstream: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Chains of 8, whatever their reach, under agreement at temperature 0.8, through a proxy that counts."""
    traffics, generated, accepted = [], 0, 0
    async with CountingProxy(upstream) as proxy:
        config = replace(base, verifier=proxy.address, hint_tokens=8, hint_width=1, hint_reach=0.0)
        async with SpeculativeClient(config) as client:
            before = (proxy.up.message_bytes, proxy.up.messages, proxy.up.tcp_bytes, proxy.down.message_bytes)
            for ids in prompts:
                result = await client.generate(
                    ids, max_new_tokens=tokens, sampling=RULES["agreement"], seed=SEED, pace=PaceKind.WAIT
                )
                traffics.append(result.report.traffic)
                generated += len(result.ids)
                accepted += result.report.usage.accepted_tokens
        by_proxy = proxy.up.message_bytes - before[0]
        tcp = proxy.up.tcp_bytes - before[2]
    by_codec = sum(traffic.up_bytes for traffic in traffics)
    hints = sum(traffic.hint_bytes for traffic in traffics)
    return {
        "tokens": generated,
        "accepted_per_token": round(accepted / generated, 3),
        "hint_bytes_per_token": round(hints / generated, 2),
        "up_bytes_by_codec": by_codec,
        "up_bytes_at_proxy": by_proxy,
        "tcp_up_bytes_per_token": round(tcp / generated, 2),
        "down_bytes_per_token": round(sum(traffic.down_bytes for traffic in traffics) / generated, 2),
    }


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['pair']}, pace {result['pace']}, {result['machine']}"]
    lines += [
        f"{row['rule']}, hints of at most {row['hint_tokens']}: {row['ratio_median']:.2f} times streaming "
        f"({row['ratio_min']:.2f}-{row['ratio_max']:.2f}), {row['tokens_per_s']} against "
        f"{row['streamed_tokens_per_s']} tokens/s, {row['forwards_per_token']:.2f} forwards/token, "
        f"{'identical' if row['is_identical'] else 'NOT IDENTICAL'}"
        for row in result["cells"]
    ]
    payload = result["payload"]
    lines.append(
        f"payload: {payload['hint_bytes_per_token']} bytes of hints per token at {payload['accepted_per_token']:.2f} "
        f"accepted; all frames up {payload['up_bytes_by_codec']} bytes by the codec, {payload['up_bytes_at_proxy']} "
        f"at the proxy; {payload['tcp_up_bytes_per_token']} TCP bytes per token"
    )
    return "\n".join(lines)
