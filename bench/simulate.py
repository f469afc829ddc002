"""`python -m bench simulate`: speed under a virtual clock, with the real drafter and recorded outputs of the target.

The product's own engines on both sides run unchanged (bench/virtual.py); step, draft and link times are what you say.
Figures are ratios of summed times: Draftwire over cloud streaming and over the best propose-and-wait of lengths 1 to 8
and of trees of 8 to 32 nodes. Prefill is left out of all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from bench.exactness import RULES
from bench.pairs import PAIRS, Pair, pair
from bench.recorded_draft import AnswerStore, RecordedDrafter
from bench.recorded_target import Times
from bench.traces import FOLDER, Trace, load
from bench.virtual import Outcome, World
from edge_client.controller import EngineSettings, Experience
from edge_client.drafter import Budget, DraftTask, ModelDrafter
from edge_client.retrieval import RetrievalDrafter
from edge_client.tokenizer import TextTokenizer
from shared.errors import ConfigError
from shared.model_folder import cache_root
from shared.model_store import resolve
from shared.types import Epoch, PaceKind, Rule

SYNC_LENGTHS = tuple(range(1, 9))
SYNC_TREES = ((4, 2), (8, 2), (4, 4), (8, 4), (12, 2))
"""Length of the main chain, alternatives at each of its positions: up to what Draftwire has in a step, and more."""
GRID = "20,50,100/5,20,50,100/8,17,40"


@dataclass(frozen=True)
class Text:
    """One recorded text and what drafts for it."""

    trace: Trace
    drafter: RecordedDrafter


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "simulate",
        help="speed under a virtual clock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pair", default="qwen", help=f"one of {', '.join(PAIRS)} (default: qwen)")
    command.add_argument("--traces", type=Path, help="recorded texts (default: bench/recorded/PAIR-RULE.json)")
    command.add_argument("--rule", default="greedy", choices=sorted(RULES), help="default: greedy")
    command.add_argument("--sets", default="humaneval,spec_bench", help="default: humaneval,spec_bench")
    command.add_argument("--prompts", type=int, default=20, metavar="N", help="of each set (default: 20)")
    command.add_argument("--tokens", type=int, default=128, metavar="N", help="of each text (default: 128)")
    command.add_argument("--grid", default=GRID, metavar="S,../R,../D,..", help=f"step/round trip/draft, ms ({GRID})")
    command.add_argument("--pace", default="run_on", help="of run_on,wait,auto (default: run_on)")
    command.add_argument("--width", type=int, default=4, metavar="N", help="alternatives (default: 4)")
    command.add_argument("--depth", type=int, default=24, metavar="N", help="ids ahead (default: 24)")
    command.add_argument("--reach", type=float, default=0.03, metavar="P", help="see edge-client (default: 0.03)")
    command.add_argument("--send-reach", type=float, default=0.02, metavar="P", help="default: 0.02")
    command.add_argument("--node-cost", type=float, default=0.003, metavar="SHARE", help="of a step (default: 0.003)")
    command.add_argument(
        "--step-costs", default="", metavar="N:MS,..", help="ms of a step over N tokens, instead of the grid's steps"
    )
    command.add_argument("--overhead", type=float, default=0.0, metavar="MS", help="between two steps (default: 0)")
    command.add_argument("--refeed", type=float, default=1 / 3, metavar="SHARE", help="of a draft step (default: 1/3)")
    command.add_argument("--jitter", type=float, default=0.0, metavar="SHARE", help="of link and steps (default: 0)")
    command.add_argument("--loss", type=float, default=0.0, metavar="SHARE", help="messages lost once (default: 0)")
    command.add_argument("--uplink", type=float, default=0.0, metavar="BYTES/S", help="0: unlimited (default)")
    command.add_argument("--drafters", default="model,retrieval", help="of model,retrieval (default: both)")
    command.add_argument("--explain", action="store_true", help="print the controller's choice at every commit")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Simulates and prints."""
    chosen = pair(args.pair)
    sets = args.sets.split(",")
    file = args.traces or FOLDER / f"{args.pair}-{args.rule}.json"
    if not file.exists():
        raise ConfigError(f"{file} is not there; record it with `python -m bench record`", field="traces")
    traces = [replace(t, ids=t.ids[: args.tokens]) for t in load(file, chosen, sets, args.prompts)]
    store = AnswerStore(cache_root() / "bench" / f"answers-{args.pair}.npz")
    texts = list(_texts(chosen, traces, args.rule, store, "model" in args.drafters.split(",")))
    rows = []
    try:
        for cell in _cells(args):
            for name in sets:
                for pace in args.pace.split(","):
                    row = _cell(args, cell, [text for text in texts if text.trace.set == name], PaceKind(pace))
                    rows.append({"set": name, **row})
                    if not args.json:
                        print(_line(rows[-1]), flush=True)
            store.save()
    finally:
        store.save()
    if args.json:
        print(json.dumps({"pair": args.pair, "rule": args.rule, "prompts": args.prompts, "cells": rows}))
    return 0


def _cells(args: argparse.Namespace) -> Iterator[Times]:
    steps, round_trips, drafts = ([float(each) / 1000 for each in part.split(",")] for part in args.grid.split("/"))
    costs = _step_costs(args.step_costs)
    for step, round_trip, draft in itertools.product(steps, round_trips, drafts):
        yield Times(
            costs(1) if costs else step,
            round_trip,
            draft,
            node_cost=args.node_cost,
            costs=costs,
            commit_s=args.overhead / 1000,
            refeed=args.refeed,
            jitter=args.jitter,
            loss=args.loss,
            up_bytes_per_s=args.uplink or 1e12,
        )


def _step_costs(text: str) -> Callable[[int], float] | None:
    """Straight lines between the points given, flat outside."""
    if not text:
        return None
    points = sorted((int(tokens), float(ms) / 1000) for tokens, ms in (part.split(":") for part in text.split(",")))

    def cost(tokens: int) -> float:
        return float(np.interp(tokens, [at for at, _ in points], [seconds for _, seconds in points]))

    return cost


def _texts(chosen: Pair, traces: list[Trace], rule: str, store: AnswerStore, has_model: bool) -> Iterator[Text]:
    drafter = _drafter(chosen) if has_model else None
    for trace in traces:
        task = DraftTask(RULES[rule], trace.seed, Rule.AGREEMENT, Epoch(0), len(trace.prompt))
        yield Text(trace, RecordedDrafter(trace, task, drafter, store))


def _drafter(chosen: Pair) -> ModelDrafter:
    from edge_client.onnx_drafter import OnnxModel

    folder = resolve(chosen.draft, "draft", chosen.precision)
    vocabulary = TextTokenizer(folder).vocabulary
    model = OnnxModel(folder, threads=1)
    return ModelDrafter(model, vocabulary.valid_mask(model.vocabulary_rows))


# ------------------------------------------------------------ one cell


def _cell(args: argparse.Namespace, times: Times, texts: list[Text], pace: PaceKind) -> dict[str, Any]:
    settings = EngineSettings(args.depth, args.width, args.reach, args.send_reach, pace)
    drafters = args.drafters.split(",")
    ours: list[Outcome] = []
    experience = Experience()
    for text in texts:
        world = World(
            text.trace,
            times,
            settings,
            text.drafter if "model" in drafters else None,
            retrieval=RetrievalDrafter() if "retrieval" in drafters else None,
            experience=experience,
            sampling=RULES[args.rule],
            explain=args.explain,
        )
        ours.append(world.run())
        for line in ours[-1].log:
            print(line, file=sys.stderr)
    streaming = sum(_streaming_s(text, times) for text in texts)
    synchronous = _synchronous(times) if "model" in drafters else {}  # look-up alone: no model is run
    waits = {name: sum(f(text) for text in texts) for name, f in synchronous.items()} or {"streaming": streaming}
    best = min(waits, key=lambda name: waits[name])
    tokens, seconds = sum(o.tokens for o in ours), sum(o.seconds for o in ours)
    return {
        "step_ms": 1000 * times.step_s,
        "round_trip_ms": 1000 * times.round_trip_s,
        "draft_ms": 1000 * times.draft_s,
        "pace": pace.value,
        "over_streaming": streaming / seconds,
        "worst_text": min(_streaming_s(t, times) / o.seconds for t, o in zip(texts, ours, strict=True)),
        "wait_over_streaming": streaming / waits[best],
        "best_wait": best,
        "over_wait": waits[best] / seconds,
        "forwards_per_token": sum(o.steps for o in ours) / tokens,
        "dry_steps_per_token": sum(o.dry_steps for o in ours) / tokens,
        "ids_sent_per_token": sum(o.ids_sent for o in ours) / tokens,
        "up_bytes_per_token": sum(o.up_bytes for o in ours) / tokens,
        "hints_per_token": sum(o.hints for o in ours) / tokens,
        "draft_steps_per_token": sum(o.draft_steps for o in ours) / tokens,
        "acceptance_by_depth": _acceptance_by_depth(ours),
        "tokens": tokens,
    }


def _acceptance_by_depth(texts: list[Outcome]) -> list[float]:
    """The share of commits whose first, second, ... id was hinted rightly, of those with a hint there; 20 at least."""
    right, judged = (
        [sum(counts) for counts in zip_longest(*many, fillvalue=0)]
        for many in ([text.right_by_depth for text in texts], [text.judged_by_depth for text in texts])
    )
    return [round(good / of, 3) for good, of in zip(right, judged, strict=True) if of >= 20]


def _streaming_s(text: Text, times: Times) -> float:
    """The verifier runs on alone; the last id has half a round trip to go."""
    return len(text.trace.ids) * (times.step(1) + times.commit_s) - times.commit_s + times.round_trip_s / 2


def _synchronous(times: Times) -> dict[str, Callable[[Text], float]]:
    """Propose, wait, propose: seconds for a text, for each length and for each of SYNC_TREES."""
    chains: dict[str, Callable[[Text], float]] = {
        f"chain of {length}": partial(_propose_and_wait, times=times, length=length, width=1) for length in SYNC_LENGTHS
    }
    trees = {
        f"tree {length}x{width}": partial(_propose_and_wait, times=times, length=length, width=width)
        for length, width in SYNC_TREES
    }
    return {**chains, **trees}


def _propose_and_wait(text: Text, times: Times, length: int, width: int) -> float:
    """A main chain of `length`, `width` alternatives at each of its positions."""
    prompt, ids = list(text.trace.prompt), text.trace.ids
    at, seconds = 0, 0.0
    while at < len(ids):
        path: list[int] = []
        stands = True
        accepted = 0
        for _ in range(length):
            text.drafter.sync([*prompt, *ids[:at]])
            proposed = text.drafter.propose(Budget(1, width, tuple(path)))
            if not stands or at + accepted >= len(ids):
                break
            if ids[at + accepted] not in proposed.ids:
                stands = False
                break
            accepted += 1
            stands = proposed.ids[0] == ids[at + accepted - 1]
            path.append(proposed.ids[0])
        seconds += times.draft_s * (length + (times.refeed if accepted == length else 0))
        seconds += times.round_trip_s + times.step(1 + length * width)
        at += accepted + 1
    return seconds - times.round_trip_s / 2


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['step_ms']:4.0f} {row['round_trip_ms']:4.0f} {row['draft_ms']:4.0f} {row['set']:<13} {row['pace']:<7}"
        f" over streaming {row['over_streaming']:.2f} (worst text {row['worst_text']:.2f}),"
        f" over {row['best_wait']} {row['over_wait']:.2f} ({row['wait_over_streaming']:.2f});"
        f" forwards {row['forwards_per_token']:.2f}, dry {row['dry_steps_per_token']:.2f},"
        f" ids {row['ids_sent_per_token']:.1f}, bytes {row['up_bytes_per_token']:.1f},"
        f" hints {row['hints_per_token']:.2f}, drafts {row['draft_steps_per_token']:.1f}"
    )
