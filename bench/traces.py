"""`python -m bench record`: what a target writes on its own, kept so that times can be simulated without it.

A trace names its prompt by set and number: the prompts themselves stay in the data folder. The texts come from a
verifier that streams without hints, several at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.exactness import RULES, SEED, encoded
from bench.pairs import PAIRS, Pair, humaneval_prompts, pair, spec_bench_prompts
from bench.processes import VerifierProcess
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from shared.errors import ConfigError
from shared.randomness import ids_digest
from shared.types import PaceKind

SETS: dict[str, Callable[[int], list[str]]] = {
    "humaneval": humaneval_prompts,
    "spec_bench": spec_bench_prompts,
    "summarization": lambda count: spec_bench_prompts(count, 4000, ("summarization",)),
    "rag": lambda count: spec_bench_prompts(count, 4000, ("rag",)),
}
FOLDER = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Trace:
    """One text of a target: the whole context, the ids that it wrote, the seed of its noise."""

    set: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    seed: int


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "record",
        help="record what a target writes, for `simulate`",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pair", default="qwen", help=f"one of {', '.join(PAIRS)} (default: qwen)")
    command.add_argument("--sets", default="humaneval,spec_bench", help=f"of {','.join(SETS)}")
    command.add_argument("--prompts", type=int, default=20, metavar="N", help="of each set (default: 20)")
    command.add_argument("--tokens", type=int, default=128, metavar="N", help="per text (default: 128)")
    command.add_argument("--rule", default="greedy", choices=sorted(RULES), help="default: greedy")
    command.add_argument("--sessions", type=int, default=8, metavar="N", help="texts at once (default: 8)")
    command.add_argument("--out", type=Path, help="file to write (default: bench/recorded/PAIR-RULE.json)")
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Records and writes the file."""
    unknown = [name for name in args.sets.split(",") if name not in SETS]
    if unknown:
        raise ConfigError(f"sets must be of {', '.join(SETS)}, got {unknown[0]!r}", field="sets")
    chosen = pair(args.pair)
    prompts = [
        (name, number, ids)
        for name in args.sets.split(",")
        for number, ids in enumerate(encoded(chosen, SETS[name](args.prompts)))
    ]
    with VerifierProcess(chosen.target, options=("--kv-memory", "4GiB")) as verifier:
        texts = asyncio.run(_record(args, chosen, verifier.address, [ids for _, _, ids in prompts]))
    out = args.out or FOLDER / f"{args.pair}-{args.rule}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "set": name,
                "of": args.prompts,
                "number": number,
                "prompt": ids_digest(prompt).hex(),
                "seed": SEED + index,
                "ids": text,
            }
        )
        for index, ((name, number, prompt), text) in enumerate(zip(prompts, texts, strict=True))
    ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} texts, {sum(map(len, texts))} tokens: {out}")
    return 0


def load(file: Path, chosen: Pair, sets: list[str], most: int) -> list[Trace]:
    """At most so many recorded texts of each set. Raises: ConfigError if the prompts here are not those recorded."""
    traces: list[Trace] = []
    cached: dict[tuple[str, int], list[list[int]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        name, of = entry["set"], entry["of"]
        if name not in sets or sum(trace.set == name for trace in traces) >= most:
            continue
        if (name, of) not in cached:
            cached[name, of] = encoded(chosen, SETS[name](of))
        prompt = cached[name, of][entry["number"]]
        if ids_digest(prompt).hex() != entry["prompt"]:
            raise ConfigError(f"{file}: the prompts of {name} here are not those that were recorded", field="sets")
        traces.append(Trace(name, tuple(prompt), tuple(entry["ids"]), entry["seed"]))
    return traces


async def _record(args: argparse.Namespace, chosen: Pair, address: str, prompts: list[list[int]]) -> list[list[int]]:
    config = ClientConfig(verifier=address, draft=chosen.draft, precision=chosen.precision, hint_tokens=0)
    async with SpeculativeClient(config, concurrency=args.sessions) as client:

        async def one(index: int, prompt: list[int]) -> list[int]:
            result = await client.generate(
                prompt,
                max_new_tokens=args.tokens,
                sampling=RULES[args.rule],
                seed=SEED + index,
                pace=PaceKind.RUN_ON,
            )
            print(f"recorded {index + 1}/{len(prompts)}", file=sys.stderr)
            return list(result.ids)

        return list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))
