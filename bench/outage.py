"""`python -m bench outage`: the network is cut in mid-sentence, the draft writes on alone, the network comes back.

What is told: ids shown as unverified while the link was down, how many of them the target said too, how long after the
link's return the first committed id came, and whether the text is that of an undisturbed run. The exit code is 1 if a
text differs, or nothing was shown as unverified.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import aclosing
from typing import Any

from bench.delay_line import Shape
from bench.delay_proxy import DelayProxy
from bench.exactness import SEED, encoded_prompts
from bench.link_table import first_difference
from bench.pairs import PAIRS, pair
from bench.processes import VerifierProcess, machine
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.events import Committed, Done, OfflinePolicy, Preview, State, StateChanged
from shared.errors import ConfigError
from shared.sampling import GREEDY


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "outage",
        help="the network is cut in mid-sentence and comes back",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pair", default="smollm2", help=f"one of {', '.join(PAIRS)} (default: smollm2)")
    command.add_argument("--prompts", type=int, default=4, metavar="N", help="default: 4")
    command.add_argument("--tokens", type=int, default=96, metavar="N", help="per text (default: 96)")
    command.add_argument("--after", type=int, default=24, metavar="N", help="cut after so many ids (default: 24)")
    command.add_argument("--seconds", type=float, default=5.0, metavar="S", help="the cut lasts so long (default: 5)")
    command.add_argument("--rtt-ms", type=float, default=20.0, metavar="MS", help="of the link (default: 20)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if every text is that of an undisturbed run."""
    if min(args.prompts, args.tokens, args.after) < 1 or args.seconds < 0:
        raise ConfigError("--prompts, --tokens and --after must be at least 1, --seconds at least 0")
    chosen, here = pair(args.pair), machine()
    prompts = encoded_prompts(chosen, args.prompts)
    with (
        VerifierProcess(chosen.target, threads=1) as verifier,
        DelayProxy(verifier.address, Shape(args.rtt_ms)) as link,
    ):
        config = ClientConfig(verifier=link.address, draft=chosen.draft, precision=chosen.precision, offline="local")
        rows = asyncio.run(_texts(config, link, prompts, args))
    print(json.dumps({"machine": here, "pair": args.pair, "texts": rows}) if args.json else _table(rows))
    is_shown = all(row["unverified_ids"] > 0 for row in rows)
    return 0 if is_shown and all(row["is_identical"] for row in rows) else 1


async def _texts(
    config: ClientConfig, link: DelayProxy, prompts: list[list[int]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    async with SpeculativeClient(config) as client:
        for number, prompt in enumerate(prompts):
            options = {"max_new_tokens": args.tokens, "sampling": GREEDY, "seed": SEED + number, "stop_ids": ()}
            whole = (await client.generate(prompt, **options)).ids
            rows.append(await _cut(client, link, prompt, options, whole, args))
    return rows


async def _cut(
    client: SpeculativeClient,
    link: DelayProxy,
    prompt: list[int],
    options: dict[str, Any],
    whole: tuple[int, ...],
    args: argparse.Namespace,
) -> dict[str, Any]:
    ids: list[int] = []
    states: list[State] = []
    unverified: tuple[int, ...] = ()
    held = 0
    cut_at = back_at = 0.0
    async with aclosing(client.stream(prompt, previews=True, offline=OfflinePolicy.LOCAL, **options)) as events:
        async for event in events:
            match event:
                case Committed():
                    ids += event.ids
                    if State.UNVERIFIED in states and not back_at:
                        back_at = time.perf_counter()
                    if not cut_at and len(ids) >= args.after:
                        cut_at = time.perf_counter()
                        await asyncio.to_thread(link.cut, args.seconds)
                case Preview() if event.is_unverified:
                    unverified, held = event.ids, len(ids)
                case StateChanged():
                    states.append(event.state)
                case Done():
                    differs_at = first_difference(unverified, ids[held:])
                    stood = len(unverified) if differs_at is None else differs_at
                    return {
                        "is_identical": tuple(ids) == whole,
                        "committed_at_cut": held,
                        "unverified_ids": len(unverified),
                        "of_them_the_targets_from_the_first": stood,
                        "first_commit_after_return_s": round(back_at - cut_at - args.seconds, 3),
                        "states": [state.value for state in states],
                        "reconnects": event.report.reconnects,
                    }
    raise AssertionError("a generation ends with Done")


def _table(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"cut at {row['committed_at_cut']}: {row['unverified_ids']} unverified ids,"
        f" of which the first {row['of_them_the_targets_from_the_first']} stood;"
        f" first commit {row['first_commit_after_return_s']} s after the link was back; {' '.join(row['states'])};"
        f" text {'identical' if row['is_identical'] else 'DIFFERENT'}"
        for row in rows
    )
