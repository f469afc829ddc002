"""`python -m bench exactness`: are the ids those of the target alone, for any drafter and any shape of hint?

Each cell (rule, drafter, hint length, width) runs over all prompts through a real verifier process and the real
client; the reference is `bench.plain`. Exit code 0 only if every text is identical.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.pairs import PAIRS, Pair, pair, prompt_source, spec_bench_prompts
from bench.plain import PlainStep, PlainTarget
from bench.processes import VerifierProcess, machine
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.drafter import Budget, DraftTask, HintTree
from edge_client.tokenizer import TextTokenizer
from shared.errors import ConfigError
from shared.model_store import resolve
from shared.sampling import GREEDY, SamplingParams
from shared.types import PaceKind

SEED = 20_261_129
RULES = {"greedy": GREEDY, "agreement": SamplingParams(temperature=0.8, top_p=0.95, top_k=50)}


@dataclass(frozen=True)
class Cell:
    """One way to draft."""

    name: str
    hint_tokens: int
    hint_width: int = 1
    is_bad: bool = False
    pace: PaceKind = PaceKind.WAIT
    hint_reach: float = 0.0


CELLS = (
    Cell("chains of 1", 1),
    Cell("chains of 4", 4),
    Cell("chains of 8", 8),
    Cell("trees of 4 x 3", 4, 3),
    Cell("chains of up to 16 by reach", 16, hint_reach=0.3),
    Cell("chains of 8, run on", 8, pace=PaceKind.RUN_ON),
    Cell("bad drafter, chains of 8", 8, is_bad=True),
    Cell("bad drafter, trees of 4 x 3", 4, 3, is_bad=True),
)


class BadDrafter:
    """Proposes ids drawn at random: nearly always wrong, never harmful."""

    name = "random"

    def __init__(self, vocabulary_size: int) -> None:
        self._size = vocabulary_size
        self._random = random.Random(7)

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""

    def sync(self, ids: Sequence[int]) -> None:
        """See Drafter."""

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        ids = tuple(self._random.randrange(self._size) for _ in range(budget.depth * budget.width))
        parents = tuple((n // budget.width - 1) * budget.width if n >= budget.width else -1 for n in range(len(ids)))
        return HintTree(ids, parents, tuple(0.5 for _ in ids))


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "exactness",
        help="ids against the target run alone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pair", default="smollm2", help=f"one of {', '.join(PAIRS)} (default: smollm2)")
    command.add_argument("--prompts", type=int, default=20, metavar="N", help="prompts per cell (default: 20)")
    command.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per text (default: 64)")
    command.add_argument("--rules", default="greedy,agreement", help="of greedy,agreement (default: both)")
    command.add_argument("--cells", default="", metavar="TEXT", help="only cells whose name holds TEXT")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if all is identical."""
    rules = args.rules.split(",")
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise ConfigError(f"unknown rule {unknown[0]!r}; there are {', '.join(RULES)}", field="rules")
    cells = [cell for cell in CELLS if args.cells in cell.name]
    if not cells or args.prompts < 1 or args.tokens < 1:
        raise ConfigError("nothing to measure: --prompts and --tokens must be at least 1, --cells must match a cell")
    chosen = pair(args.pair)
    prompts = encoded_prompts(chosen, args.prompts)
    references = _references(chosen, prompts, rules, args.tokens)
    with VerifierProcess(chosen.target) as verifier:
        rows = asyncio.run(_measure(verifier.address, chosen, prompts, rules, cells, references, args))
    identical, of = sum(row["identical"] for row in rows), sum(row["of"] for row in rows)
    result = {
        "identical": identical,
        "of": of,
        "pair": args.pair,
        "prompts": args.prompts,
        "prompt_source": prompt_source(),
        "distinct_prompts": len({tuple(ids) for ids in prompts}),
        "tokens": args.tokens,
        "machine": machine(),
        "cells": rows,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{identical} of {of} texts identical ({args.pair}, {args.prompts} prompts x {args.tokens} tokens)")
    return 0 if identical == of else 1


def encoded_prompts(chosen: Pair, count: int) -> list[list[int]]:
    """Spec-Bench questions as chat prompts."""
    return encoded(chosen, spec_bench_prompts(count))


def encoded(chosen: Pair, prompts: list[str]) -> list[list[int]]:
    """Questions as chat prompts of the draft's tokenizer, which is the target's."""
    from edge_client.chat_template import ChatTemplate, read_chat_template

    folder = resolve(chosen.draft, "draft", chosen.precision)
    tokenizer = TextTokenizer(folder)
    template = ChatTemplate(read_chat_template(folder) or "", tokenizer.special_tokens)
    return [template.encode_chat([{"role": "user", "content": prompt}], tokenizer) for prompt in prompts]


def _references(
    chosen: Pair, prompts: list[list[int]], rules: list[str], tokens: int
) -> dict[tuple[str, int], list[PlainStep]]:
    vocabulary = TextTokenizer(resolve(chosen.draft, "draft", chosen.precision)).vocabulary
    target = PlainTarget(resolve(chosen.target, "target"), vocabulary.valid_mask(vocabulary.size))
    stop_ids = target.stop_ids
    references = {}
    for rule in rules:
        for number, ids in enumerate(prompts):
            print(f"plain {rule} {number + 1}/{len(prompts)}", file=sys.stderr)
            references[rule, number] = target.generate(ids, RULES[rule], SEED + number, tokens, stop_ids)
    return references


async def _measure(
    address: str,
    chosen: Pair,
    prompts: list[list[int]],
    rules: list[str],
    cells: list[Cell],
    references: dict[tuple[str, int], list[PlainStep]],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    config = ClientConfig(verifier=address, draft=chosen.draft, precision=chosen.precision)
    rows = []
    async with SpeculativeClient(config) as client:
        bad_drafter = BadDrafter(client.tokenizer.vocabulary.size)
        async with SpeculativeClient(config, drafter=bad_drafter) as bad_client:
            for rule in rules:
                for cell in cells:
                    drafts = bad_client if cell.is_bad else client
                    rows.append(await _one_cell(drafts, cell, rule, prompts, references, args.tokens))
                    print(f"{rule}, {cell.name}: {rows[-1]['identical']} of {len(prompts)}", file=sys.stderr)
    return rows


async def _one_cell(
    client: SpeculativeClient,
    cell: Cell,
    rule: str,
    prompts: list[list[int]],
    references: dict[tuple[str, int], list[PlainStep]],
    tokens: int,
) -> dict[str, Any]:
    identical, generated, accepted, differences = 0, 0, 0, []
    for number, ids in enumerate(prompts):
        result = await client.generate(
            ids,
            max_new_tokens=tokens,
            sampling=RULES[rule],
            seed=SEED + number,
            pace=cell.pace,
            hint_tokens=cell.hint_tokens,
            hint_width=cell.hint_width,
            hint_reach=cell.hint_reach,
        )
        reference = references[rule, number]
        expected = tuple(step.token for step in reference)
        generated += len(result.ids)
        accepted += result.report.usage.accepted_tokens
        if result.ids == expected:
            identical += 1
        else:
            differences.append(_difference(number, result.ids, reference))
    return {
        "rule": rule,
        "cell": cell.name,
        "identical": identical,
        "of": len(prompts),
        "tokens": generated,
        "accepted": accepted,
        "differences": differences,
    }


def _difference(number: int, ids: tuple[int, ...], reference: list[PlainStep]) -> dict[str, Any]:
    at = next(
        (n for n, step in enumerate(reference) if n >= len(ids) or ids[n] != step.token), min(len(ids), len(reference))
    )
    gap = reference[at].gap if at < len(reference) else None
    return {"prompt": number, "first_difference": at, "plain_gap": gap}
