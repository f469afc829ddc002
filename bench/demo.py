"""`python -m bench demo`: a verifier on loopback, a device beside it, three real texts, and what it cost.

Run by `make demo`. Starts and ends its own verifier; ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from bench.pairs import PAIRS, pair
from bench.processes import VerifierProcess, pin_self
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.display import DIM, GREEN, PLAIN, YELLOW, TextPrinter, has_colour
from edge_client.events import Committed, Done, Report
from shared.sampling import GREEDY, SamplingParams
from shared.types import PaceKind

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50)


@dataclass(frozen=True)
class Scene:
    """One text of the demo."""

    prompt: str
    sampling: SamplingParams
    how: str
    seed: int | None = None


SCENES = (
    Scene("Write a Python function that adds the numbers of a list.", GREEDY, "greedy"),
    Scene("Explain in three sentences why the sky is blue.", GREEDY, "greedy"),
    Scene("Tell a very short story about a lighthouse.", SAMPLED, "temperature 0.8, seed 7", seed=7),
)


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "demo",
        help="watch a device and a verifier write text together",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pair", default="smollm2", help=f"one of {', '.join(PAIRS)} (default: smollm2)")
    command.add_argument("--tokens", type=int, default=96, metavar="N", help="tokens per text at most (default: 96)")
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Shows the demo; 0 if every text was the same with and without hints."""
    chosen = pair(args.pair)
    print("starting the verifier ...", flush=True)
    with VerifierProcess(chosen.target, cores={0}, threads=1) as verifier:
        pin_self({1})
        print(verifier.start_line, flush=True)
        config = ClientConfig(verifier=verifier.address, draft=chosen.draft, precision=chosen.precision)
        return asyncio.run(_show(config, args.tokens))


async def _show(config: ClientConfig, tokens: int) -> int:
    hinted, streamed, is_identical = [], [], True
    async with SpeculativeClient(config) as client:
        await client.generate(SCENES[0].prompt, max_new_tokens=4)  # warms both sides
        for scene in SCENES:
            _title(scene)
            ids, report = await _scene(client, scene, tokens)
            hinted.append(report)
            options = _options(scene, tokens)
            alone = await client.generate(_turns(scene), **options, pace=PaceKind.RUN_ON, hint_tokens=0)
            streamed.append(alone.report)
            is_identical = is_identical and alone.ids == ids
    _table(hinted, streamed)
    print(
        "the verifier streaming alone wrote the same ids"
        if is_identical
        else "NOT the same ids as the verifier streaming alone: this is a bug"
    )
    return 0 if is_identical else 1


def _turns(scene: Scene) -> list[dict[str, str]]:
    return [{"role": "user", "content": scene.prompt}]


def _options(scene: Scene, tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "sampling": scene.sampling, "seed": scene.seed}


def _title(scene: Scene) -> None:
    if has_colour(sys.stdout):
        legend = f"{GREEN}accepted{PLAIN} {YELLOW}the target's own{PLAIN}"
        print(f"\n{DIM}> {scene.prompt}  ({scene.how}){PLAIN}  {legend}", flush=True)
    else:
        print(f"\n> {scene.prompt}  ({scene.how})", flush=True)


async def _scene(client: SpeculativeClient, scene: Scene, tokens: int) -> tuple[tuple[int, ...], Report]:
    printer = TextPrinter(sys.stdout)
    ids: list[int] = []
    async with aclosing(client.stream(_turns(scene), **_options(scene, tokens))) as events:
        async for event in events:
            if isinstance(event, Committed):
                printer.show(event)
                ids.extend(event.ids)
            elif isinstance(event, Done):
                printer.end()
                return tuple(ids), event.report
    raise AssertionError("a generation ends with Done")


COLUMNS = ("text", "tokens", "accepted", "forwards/token", "bytes up", "bytes down", "tokens/s", "alone", "ratio")


def _table(hinted: list[Report], streamed: list[Report]) -> None:
    rows: list[tuple[str, ...]] = [COLUMNS]
    for number, (ours, alone) in enumerate(zip(hinted, streamed, strict=True), start=1):
        rows.append(_row(str(number), [ours], [alone]))
    rows.append(_row("all", hinted, streamed))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    print()
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("bytes are protobuf payload, prompts included; alone = the same verifier streaming without hints, same run")


def _row(name: str, hinted: list[Report], streamed: list[Report]) -> tuple[str, ...]:
    tokens = sum(report.usage.generated_tokens for report in hinted)
    rate = tokens / sum(report.wall_s for report in hinted)
    alone = sum(report.usage.generated_tokens for report in streamed) / sum(report.wall_s for report in streamed)
    return (
        name,
        str(tokens),
        str(sum(report.usage.accepted_tokens for report in hinted)),
        f"{sum(report.usage.steps for report in hinted) / tokens:.2f}",
        str(sum(report.traffic.up_bytes for report in hinted)),
        str(sum(report.traffic.down_bytes for report in hinted)),
        f"{rate:.1f}",
        f"{alone:.1f}",
        f"{rate / alone:.2f}",
    )
