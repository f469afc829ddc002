"""`python -m bench capacity`: many sessions on one verifier, with recorded hints and without.

The draft model's hints are recorded once (`bench.replay`), so that drafting costs the machine nothing while the
verifier is measured. Verifier and load generator are pinned to a core each. Streamed and hinted runs alternate; each
repeat gives one ratio. Identity: every session's ids are those of its solo run without hints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.exactness import encoded_prompts
from bench.pairs import PAIRS, Pair, pair
from bench.processes import VerifierProcess, machine, pin_self
from bench.replay import Played, Script, play_all, recorded_chains
from edge_client.drafter import ModelDrafter
from edge_client.onnx_drafter import OnnxModel
from edge_client.tokenizer import TextTokenizer
from edge_client.transport import GrpcTransport
from shared.errors import ConfigError
from shared.model_store import resolve
from shared.types import DEFAULT_RUN_AHEAD, ModelCard, PaceKind

VERIFIER_CORE, LOAD_CORE = 0, 1
PARTS = ("plan", "stage", "forward", "gather", "judge", "commit")


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "capacity",
        help="tokens/s of many sessions, with replayed hints and streamed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--pair", default="smollm2", help=f"one of {', '.join(PAIRS)} (default: smollm2)")
    command.add_argument("--sessions", default="1,4,8,16", metavar="N,N", help="session counts (default: 1,4,8,16)")
    command.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per session (default: 64)")
    command.add_argument("--repeats", type=int, default=5, metavar="N", help="repeats (default: 5)")
    command.add_argument("--hint-tokens", type=int, default=8, metavar="N", help="length of chains (default: 8)")
    command.add_argument("--soak-steps", type=int, default=0, metavar="N", help="then so many steps, watching memory")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if every text is that of its solo run."""
    counts = [int(word) for word in args.sessions.split(",") if word.isdigit() and int(word) > 0]
    if len(counts) != len(args.sessions.split(",")) or min(args.tokens, args.repeats, args.hint_tokens) < 1:
        raise ConfigError(f"sessions must be numbers from 1, got {args.sessions!r}; --tokens, --repeats likewise")
    if args.tokens > DEFAULT_RUN_AHEAD:
        raise ConfigError(f"--tokens must be at most {DEFAULT_RUN_AHEAD}: streamed runs send no ack", field="tokens")
    chosen, here = pair(args.pair), machine()
    prompts = encoded_prompts(chosen, max(counts))
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder, "steps.jsonl")
        options = ("--metrics-port", "0", "--step-log", str(steps), "--kv-memory", "512MiB")
        with VerifierProcess(chosen.target, {VERIFIER_CORE}, threads=1, options=options) as verifier:
            pin_self({LOAD_CORE})
            result = asyncio.run(_measure(args, chosen, counts, prompts, verifier, steps))
    result = {"machine": here, "pair": args.pair, "hint_tokens": args.hint_tokens, "tokens": args.tokens, **result}
    print(json.dumps(result) if args.json else _table(result))
    is_same = all(cell["is_identical"] for cell in [*result["cells"], *([result["soak"]] if "soak" in result else [])])
    return 0 if is_same else 1


async def _measure(
    args: argparse.Namespace,
    chosen: Pair,
    counts: Sequence[int],
    prompts: Sequence[list[int]],
    verifier: VerifierProcess,
    steps: Path,
) -> dict[str, Any]:
    transport = GrpcTransport(verifier.address)
    card = await transport.describe()
    await transport.close()
    scripts = await scripts_of(chosen, verifier.address, card, prompts, args.tokens, args.hint_tokens)
    say(f"recorded: first proposed id right at {statistics.mean(s.agreement for s in scripts):.3f} of positions")
    cells = [await _cell(verifier.address, card, scripts[:count], args, steps) for count in counts]
    result: dict[str, Any] = {
        "agreement": round(statistics.mean(script.agreement for script in scripts), 3),
        "cells": cells,
    }
    if args.soak_steps:
        result["soak"] = await _soak(verifier, card, scripts, args, steps)
    return result


async def scripts_of(
    chosen: Pair, address: str, card: ModelCard, prompts: Sequence[list[int]], tokens: int, depth: int
) -> list[Script]:
    """Solo texts without hints, one after another, and the draft model's chains along them."""
    folder = resolve(chosen.draft, "draft", chosen.precision)
    model = OnnxModel(folder, threads=1)
    drafter = ModelDrafter(model, TextTokenizer(folder).vocabulary.valid_mask(model.vocabulary_rows))
    scripts = []
    for ids in prompts:
        bare = Script(tuple(ids), (0,) * tokens)
        (solo,), _ = await play_all(address, card, [bare], 0, PaceKind.RUN_ON)
        chains = await asyncio.to_thread(recorded_chains, drafter, ids, solo.ids, depth)
        scripts.append(Script(tuple(ids), tuple(solo.ids), chains))
    return scripts


async def _cell(
    address: str, card: ModelCard, scripts: Sequence[Script], args: argparse.Namespace, steps: Path
) -> dict[str, Any]:
    """One session count: streamed and hinted, by turns."""
    ways = {"streamed": (0, PaceKind.RUN_ON), "hinted": (args.hint_tokens, PaceKind.WAIT)}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    reports: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    texts: dict[str, list[Played]] = {way: [] for way in ways}
    for repeat in range(args.repeats + 1):
        for way, (hint_tokens, pace) in ways.items():
            seen = len(_lines(steps))
            played, seconds = await play_all(address, card, scripts, hint_tokens, pace)
            if repeat:  # the first warms up
                texts[way] += played
                rates[way].append(sum(len(each.ids) for each in played) / seconds)
                reports[way] += [json.loads(line) for line in _lines(steps)[seen:]]
        say(f"{len(scripts)} sessions: {'warmed up' if not repeat else f'repeat {repeat} of {args.repeats}'}")
    ratios = [ours / theirs for ours, theirs in zip(rates["hinted"], rates["streamed"], strict=True)]
    wanted = [list(script.ids) for script in scripts] * args.repeats
    return {
        "sessions": len(scripts),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "is_identical": all([each.ids for each in texts[way]] == wanted for way in ways),
        **{way: _way(rates[way], texts[way], reports[way]) for way in ways},
    }


def _way(rates: Sequence[float], texts: Sequence[Played], reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(len(each.ids) for each in texts)
    decoding = [report for report in reports if not report["prefill_tokens"]]
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "forwards_per_token": round(sum(each.steps for each in texts) / tokens, 3),
        "steps_per_token": round(len(reports) / tokens, 4),
        "accepted_per_token": round(sum(each.accepted for each in texts) / tokens, 3),
        "mean_batch": round(statistics.mean(report["sessions"] for report in decoding), 2),
        "mean_nodes": round(statistics.mean(report["nodes"] for report in decoding), 1),
        "step_ms": _parts(decoding),
    }


def _parts(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of the parts and of the whole step, in ms."""
    medians = {part: 1000 * statistics.median(report[f"{part}_s"] for report in reports) for part in PARTS}
    whole = [sum(report[f"{part}_s"] for part in PARTS if part != "gather") for report in reports]
    medians["whole"] = 1000 * statistics.median(whole)
    bookkeeping = [report["plan_s"] + report["commit_s"] for report in reports]
    medians["plan_and_commit"] = 1000 * statistics.median(bookkeeping)
    return {part: round(value, 2) for part, value in medians.items()}


async def _soak(
    verifier: VerifierProcess, card: ModelCard, scripts: Sequence[Script], args: argparse.Namespace, steps: Path
) -> dict[str, Any]:
    """Round after round of all sessions; the verifier's memory after each, and whether texts stay the same."""
    began, samples, is_identical = len(_lines(steps)), [], True
    while (done := len(_lines(steps)) - began) < args.soak_steps:
        played, _ = await play_all(verifier.address, card, scripts, args.hint_tokens, PaceKind.WAIT)
        is_identical &= all(each.ids == list(script.ids) for each, script in zip(played, scripts, strict=True))
        samples.append((len(_lines(steps)) - began, _resident_bytes(verifier.metrics_address)))
        say(f"soak: {done} steps, {samples[-1][1] / 2**20:.0f} MiB")
    half = [sample for sample in samples if sample[0] >= samples[-1][0] / 2]
    slope = statistics.linear_regression(*zip(*half, strict=True)).slope if len(half) > 1 else 0.0
    return {
        "steps": samples[-1][0],
        "resident_mib_first": round(samples[0][1] / 2**20, 1),
        "resident_mib_half": round(half[0][1] / 2**20, 1),
        "resident_mib_last": round(samples[-1][1] / 2**20, 1),
        "mib_per_1000_steps_second_half": round(1000 * slope / 2**20, 2),
        "is_identical": is_identical,
    }


def _resident_bytes(metrics_address: str) -> float:
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
    (line,) = (line for line in text.splitlines() if line.startswith("process_resident_memory_bytes "))
    return float(line.split()[1])


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def say(text: str) -> None:
    """A line about how far it is, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['pair']}, chains of {result['hint_tokens']}, {result['tokens']} tokens a session, draft agrees at "
        f"{result['agreement']}, {result['machine']}",
        "sessions  ratio (range)       tokens/s hinted streamed  forwards/token  batch  nodes  step ms  same",
    ]
    lines += [_row(cell) for cell in result["cells"]]
    lines += list(_part_rows(result["cells"]))
    if "soak" in result:
        lines.append(f"soak: {result['soak']}")
    return "\n".join(lines)


def _row(cell: dict[str, Any]) -> str:
    hinted, streamed = cell["hinted"], cell["streamed"]
    return (
        f"{cell['sessions']:>8}  {cell['ratio_median']:.2f} ({cell['ratio_min']:.2f}-{cell['ratio_max']:.2f})   "
        f"{hinted['tokens_per_s']:>15} {streamed['tokens_per_s']:>8}  {hinted['forwards_per_token']:>14}  "
        f"{hinted['mean_batch']:>5}  {hinted['mean_nodes']:>5}  {hinted['step_ms']['whole']:>7}  "
        f"{'yes' if cell['is_identical'] else 'NO'}"
    )


def _part_rows(cells: Iterable[dict[str, Any]]) -> Iterable[str]:
    for cell in cells:
        for way in ("hinted", "streamed"):
            parts = cell[way]["step_ms"]
            shown = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
            yield f"{cell['sessions']} {way}: ms a step (medians): {shown}"
