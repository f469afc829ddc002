"""`python -m bench gpu_check`: the verifier on a device, by itself: identity, time of a step, tokens a second.

Random weights of the right shape, the product's own step, no gRPC, no draft model, no download; the same code on a CPU
with a tiny shape. For each shape: the self-check of a start; identity of texts written in a batch with hints, by the
rule of DESIGN section 3; the time of one step by sessions and hint nodes; tokens/s of many sessions, streamed and with
replayed hints of which a set share is wrong. What does not fit into --within-s is left out, and said; what fails is
said too, and the rest goes on. Exit code 1 if anything failed or an id is not the target's own.

Also `python -m bench.gpu_check`, which loads no more than the verifier needs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.gpu_models import (
    SHAPES,
    Desk,
    FreeTokens,
    Script,
    Seat,
    random_context,
    random_target,
    spoiled,
    weight_bytes,
)
from bench.near_tie import check_text
from bench.processes import machine
from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.loading import DTYPES, SELF_CHECK_TOLERANCE
from cloud_verifier.reports import StepReport
from cloud_verifier.row_choice import RowChooser, RowRequest
from cloud_verifier.scheduler import PlannedRow
from cloud_verifier.self_check import self_check
from cloud_verifier.step_cost import StepCost
from cloud_verifier.target_model import RowInput, TorchTarget
from shared.errors import ConfigError, DraftwireError
from shared.hint_trie import Node
from shared.sampling import GREEDY, SamplingParams

CHAIN = 8
NODES = (0, 4, 8, 16)
REPEATS = 7
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
KINDS = (GREEDY, SamplingParams(temperature=1.0), SAMPLED, SamplingParams(temperature=1.0, top_k=40, min_p=0.02))
"""Parameters of the texts of the identity check, in turn."""
IDENTITY_SESSIONS, IDENTITY_TOKENS = 8, 64
WARM_UP_TOKENS = 16
PARTS = ("plan", "stage", "forward", "gather", "judge", "commit")
GROWTH = 2.5
"""A cell is begun only if so many times what the one before it took is left."""
FLAT = 1.25
"""A forward over many sessions that takes no longer than so many times one over a single session is flat."""
Cell = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    """The subcommand."""
    command = subparsers.add_parser(
        "gpu_check",
        help="step time, tokens/s and identity on a GPU, with random weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(command)
    command.set_defaults(handler=run)


def _add_options(command: argparse.ArgumentParser) -> None:
    has_cuda = torch.cuda.is_available()
    command.add_argument("--device", default="cuda" if has_cuda else "cpu", help="cuda or cpu (default: what is here)")
    command.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on cuda, float32 on cpu")
    command.add_argument("--shapes", default="", metavar="S,S", help=f"of {', '.join(SHAPES)} (1.5b,7b; on a cpu tiny)")
    command.add_argument("--sessions", default="1,16,64", metavar="N,N", help="session counts (default: 1,16,64)")
    command.add_argument("--batches", default="1,4,16,64", metavar="N,N", help="sessions of a step that is timed")
    command.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens per session (default: 128)")
    command.add_argument("--context", type=int, default=0, metavar="N", help="context tokens (default: 512; tiny 32)")
    command.add_argument(
        "--batch-nodes", type=int, default=256, metavar="N", help="hint nodes of a step (default: 256)"
    )
    command.add_argument("--wrong", type=float, default=0.2, metavar="P", help="share of wrong hints (default: 0.2)")
    command.add_argument("--compile", action="store_true", help="then measure with torch.compile too")
    command.add_argument("--within-s", type=float, default=480, metavar="S", help="seconds for it all (default: 480)")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if nothing failed and every text is the target's own."""
    clock, settings = TimeBudget(args.within_s), _settings(args)
    shapes = []
    for index, name in enumerate(settings.shapes):
        share = clock.share(len(settings.shapes) - index)
        shapes += share.cells([name], partial(_measured_shape, name, settings, share))
        gc.collect()
        if settings.is_cuda:
            torch.cuda.empty_cache()
    result = {
        "device": _device(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "settings": {"tokens": args.tokens, "wrong": args.wrong, "chain": CHAIN, "batch_nodes": args.batch_nodes},
        "shapes": shapes,
        "skipped": clock.skipped,
        "failed": clock.failed,
        "seconds": round(args.within_s - clock.left_s, 1),
    }
    print(json.dumps(result) if args.json else "\n".join(_table(result)))
    return 1 if clock.failed else 0


@dataclass(frozen=True)
class Settings:
    """What is asked for."""

    device: str
    dtype: torch.dtype
    shapes: tuple[str, ...]
    sessions: tuple[int, ...]
    batches: tuple[int, ...]
    tokens: int
    context: int
    wrong: float
    batch_nodes: int
    is_compiled: bool

    @property
    def is_cuda(self) -> bool:
        """True if the device has a clock of its own."""
        return self.device.startswith("cuda")

    def context_of(self, shape: str) -> int:
        """Context tokens of a session."""
        return self.context or (32 if shape == "tiny" else 512)


def _settings(args: argparse.Namespace) -> Settings:
    """Raises: ConfigError."""
    shapes = (args.shapes or ("1.5b,7b" if args.device.startswith("cuda") else "tiny")).split(",")
    sessions, batches = _counts(args.sessions), _counts(args.batches)
    if not set(shapes) <= set(SHAPES):
        raise ConfigError(f"--shapes: names of {', '.join(SHAPES)}, got {args.shapes!r}")
    if min(*sessions, *batches, args.tokens - 1, args.batch_nodes) < 1:
        raise ConfigError("--sessions, --batches and --batch-nodes are numbers from 1, --tokens from 2")
    if args.context < 0 or not 0 <= args.wrong <= 1:
        raise ConfigError("--context is a number from 1, --wrong one from 0 to 1")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {args.device} is not available: this PyTorch sees no CUDA device", field="device")
    dtype = DTYPES[args.dtype or _default_dtype(args.device)]
    return Settings(
        device=args.device,
        dtype=dtype,
        shapes=tuple(shapes),
        sessions=sessions,
        batches=batches,
        tokens=args.tokens,
        context=args.context,
        wrong=args.wrong,
        batch_nodes=args.batch_nodes,
        is_compiled=args.compile,
    )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(word) if word.isdigit() else 0 for word in text.split(","))


def _default_dtype(device: str) -> str:
    return "bfloat16" if device.startswith("cuda") else "float32"


def _device(device: str) -> dict[str, str]:
    if device.startswith("cuda"):
        name, cuda = torch.cuda.get_device_name(device), str(torch.version.cuda)
    else:
        name, cuda = machine(), ""
    return {"name": name, "torch": torch.__version__, "cuda": cuda}


@dataclass
class TimeBudget:
    """The seconds left; what was left out for want of them, and what failed."""

    within_s: float
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends_at = time.monotonic() + self.within_s

    @property
    def left_s(self) -> float:
        """Below 0 if it took too long."""
        return self.ends_at - time.monotonic()

    def share(self, parts: int) -> TimeBudget:
        """One of so many equal parts of what is left; it tells the same lists."""
        return TimeBudget(self.left_s / parts, self.skipped, self.failed)

    def cells(self, names: Sequence[str], measure: Callable[[int], Cell | None]) -> list[Cell]:
        """`measure(index)` of each; once one does not fit, or is cut (None), those after it are left out too."""
        found: list[Cell] = []
        needed_s, is_full = 0.0, False
        for index, name in enumerate(names):
            is_full = is_full or self.left_s <= needed_s
            if is_full:
                self.skipped.append(f"{name}: not begun, {max(0.0, self.left_s):.0f} s were left")
                continue
            began = time.monotonic()
            try:
                cell = measure(index)
            except Exception as error:  # a device is lent for minutes: the other cells are still wanted
                traceback.print_exc()
                self.failed.append(f"{name}: {(str(error) or repr(error)).splitlines()[0]}")
                continue
            took_s = time.monotonic() - began
            needed_s = GROWTH * took_s
            if cell is None:
                is_full = True
                self.skipped.append(f"{name}: cut after {took_s:.0f} s")
            else:
                found.append(cell)
                print(f"{name}: {took_s:.1f} s", file=sys.stderr, flush=True)
        return found


# ---------------------------------------------------------------- one shape


@dataclass
class Bed:
    """A target under measurement."""

    name: str
    target: TorchTarget
    settings: Settings
    clock: TimeBudget
    cost: StepCost

    @property
    def vocabulary(self) -> int:
        """Rows of the head."""
        return int(self.target.lm.config.vocab_size)

    def scripts(self, count: int, kinds: Sequence[SamplingParams] = (GREEDY,)) -> list[Script]:
        """Sessions with contexts of their own."""
        length = self.settings.context_of(self.name)
        return [
            Script(random_context(length, self.vocabulary, seed), kinds[seed % len(kinds)], seed + 1)
            for seed in range(count)
        ]

    def hinted(self, scripts: Sequence[Script], texts: Sequence[Sequence[int]]) -> list[Script]:
        """The same sessions with their texts as hints, a share of them wrong."""
        return [
            Script(each.context, each.sampling, each.seed, spoiled(text, self.settings.wrong, self.vocabulary, n))
            for n, (each, text) in enumerate(zip(scripts, texts, strict=True))
        ]


def _measured_shape(name: str, settings: Settings, clock: TimeBudget, _: int = 0) -> Cell:
    began = time.monotonic()
    most = max(IDENTITY_SESSIONS, *settings.sessions, *settings.batches)
    longest = settings.context_of(name) + settings.tokens + max(NODES) + 2 * PAGE_TOKENS
    if settings.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    target = random_target(SHAPES[name], settings.dtype, settings.device, most * longest)
    bed = Bed(name, target, settings, clock, StepCost())
    cell: Cell = {"shape": name, "weights_gb": round(weight_bytes(bed.target) / 1e9, 2)}
    for check in clock.cells([f"{name}: self-check"], partial(_self_check, bed)):
        cell |= check
    cell["load_s"] = round(time.monotonic() - began, 1)
    for identity in clock.cells([f"{name}: identity"], partial(_identity, bed)):
        cell["identity"] = identity
        clock.failed += list(_identity_problems(name, identity, SELF_CHECK_TOLERANCE[settings.dtype]))
    if "identity" not in cell:
        clock.failed.append(f"{name}: identity was not measured")
    cell |= _speeds(bed, name)
    if settings.is_compiled:
        bed.target.lm.compile()
        bed.cost = StepCost()
        cell["compiled"] = _speeds(bed, f"{name} compiled")
    cell["memory_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2) if settings.is_cuda else None
    return cell


def _self_check(bed: Bed, _: int) -> Cell:
    return {"self_check": float(f"{self_check(bed.target, SELF_CHECK_TOLERANCE[bed.settings.dtype]):.2g}")}


def _speeds(bed: Bed, name: str) -> Cell:
    sizes, counts = list(product(bed.settings.batches, NODES)), bed.settings.sessions
    names = [f"{name}: step of {batch} sessions, {nodes} nodes each" for batch, nodes in sizes]
    with _StepBench(bed) as bench:
        steps = bed.clock.cells(names, lambda index: bench.cell(*sizes[index]))
        waits = bed.clock.cells([f"{name}: host waits"], bench.host_waits) if bed.settings.is_cuda else []
    rates = bed.clock.cells([f"{name}: {count} sessions" for count in counts], lambda index: _rates(bed, counts[index]))
    return {
        "steps": steps,
        "note": _note(steps, bed.settings.is_cuda),
        "host_waits": waits[0]["places"] if waits else None,
        "rates": rates,
    }


# ---------------------------------------------------------------- identity


def _identity_problems(name: str, identity: Cell, tolerance: float) -> Iterator[str]:
    """A batched forward that is wrong makes d large, and a large d explains anything: so it is bounded itself."""
    if identity["bugs"]:
        yield f"{name}: {identity['bugs']} ids are not the target's own"
    if not identity["relative_difference"] <= tolerance:
        found = identity["relative_difference"]
        yield f"{name}: scores of a batch differ by {found}, which is more than rounding does ({tolerance})"


def _identity(bed: Bed, _: int) -> Cell | None:
    """Texts written in one batch with hints, held to the target alone; and a streamed run held to itself."""
    scripts = bed.scripts(IDENTITY_SESSIONS, KINDS)
    tokens = min(bed.settings.tokens, IDENTITY_TOKENS)
    first, again = (_written(bed, scripts, tokens, 0, f"control {n}") for n in range(2))
    if first is None or again is None:
        return None
    hinted = _written(bed, bed.hinted(scripts, first.texts), tokens, CHAIN, "hinted", FreeTokens())
    if hinted is None:
        return None
    reports = []
    for script, ids in zip(scripts, hinted.texts, strict=True):
        if bed.clock.left_s < 0:
            return None
        reports.append(
            check_text(bed.target, script.context, ids, script.sampling, script.seed, sessions=IDENTITY_SESSIONS)
        )
    return {
        "texts": len(reports),
        "ids": sum(report.length for report in reports),
        "accepted": hinted.accepted,
        "mean_batch": round(statistics.mean(report.sessions for report in hinted.reports), 2),
        "flips": sum(len(report.flips) for report in reports),
        "widest_gap": float(f"{max(report.widest_gap for report in reports):.3g}"),
        "d": float(f"{max(report.largest_difference for report in reports):.3g}"),
        "relative_difference": float(f"{max(report.relative_difference for report in reports):.3g}"),
        "bugs": sum(len(report.bugs) for report in reports),
        "same_as_streamed": _same(hinted, first),
        "control_same": _same(again, first),
    }


# ---------------------------------------------------------------- tokens a second


@dataclass(frozen=True)
class Written:
    """What sessions wrote, and how; times are of the stretch in which all of them were at work."""

    texts: list[list[int]]
    accepted: int
    """Of all ids, how many a hint had foretold."""
    tokens: int
    seconds: float
    forwards_per_token: float
    """Of a session, over its whole text."""
    reports: list[StepReport]
    pages: int


def _same(run: Written, other: Written) -> int:
    return sum(ours == theirs for ours, theirs in zip(run.texts, other.texts, strict=True))


def _written(
    bed: Bed, scripts: Sequence[Script], tokens: int, chain: int, principal: str = "", cost: StepCost | None = None
) -> Written | None:
    """Runs sessions to their ends; None if time ran out. First all contexts are fed, then all are let go at once."""
    desk = Desk(bed.target, cost or bed.cost, bed.clock.ends_at, bed.settings.batch_nodes, principal)
    try:
        seats = [desk.open(script, tokens, chain) for script in scripts]
        while desk.maybe_step():
            pass
        desk.reports.clear()
        for seat in seats:
            seat.steps = 0
        desk.let_go()
        return _timed(desk, seats, bed.target)
    finally:
        desk.close()


def _timed(desk: Desk, seats: Sequence[Seat], target: TorchTarget) -> Written | None:
    began, before = time.perf_counter(), sum(len(seat.ids) for seat in seats)
    seconds, count, in_all, pages = 0.0, 0, 0, 0
    while desk.maybe_step():
        pages = max(pages, target.kv_use().used)
        if not in_all or not any(seat.session.finished for seat in seats):
            seconds = time.perf_counter() - began
            count, in_all = sum(len(seat.ids) for seat in seats) - before, len(desk.reports)
    if not all(seat.session.finished for seat in seats):
        return None
    return Written(
        texts=[seat.ids for seat in seats],
        accepted=sum(seat.session.usage.accepted_tokens for seat in seats),
        tokens=count,
        seconds=seconds,
        forwards_per_token=statistics.mean(seat.steps / (len(seat.ids) - 1) for seat in seats),
        reports=desk.reports[:in_all],
        pages=pages,
    )


def _rates(bed: Bed, count: int) -> Cell | None:
    """Streamed, then with that text as hints; a short run of both warms up and measures what steps cost."""
    scripts = bed.scripts(count)
    tokens = bed.settings.tokens
    _, runs = (_both_ways(bed, scripts, count) for count in (min(WARM_UP_TOKENS, tokens), tokens))
    if runs is None:
        return None
    streamed, hinted = (_rate(run) for run in runs)
    ratio = hinted["tokens_per_s"] / streamed["tokens_per_s"]
    same = {"ratio": round(ratio, 3), "same_texts": _same(*runs)}
    return {"sessions": count, "streamed": streamed, "hinted": hinted, **same}


def _both_ways(bed: Bed, scripts: Sequence[Script], tokens: int) -> tuple[Written, Written] | None:
    """Streamed and hinted."""
    streamed = _written(bed, scripts, tokens, 0)
    hinted = streamed and _written(bed, bed.hinted(scripts, streamed.texts), tokens, CHAIN)
    return (streamed, hinted) if streamed and hinted else None


def _rate(run: Written) -> Cell:
    offered = sum(sum(report.offered_by_depth) for report in run.reports)
    accepted = sum(sum(report.accepted_by_depth) for report in run.reports)
    whole = [report.whole_s for report in run.reports]
    medians = {part: 1000 * statistics.median(getattr(each, f"{part}_s") for each in run.reports) for part in PARTS}
    medians["whole"] = 1000 * statistics.median(whole)
    medians["between"] = 1000 * (run.seconds - sum(whole)) / len(whole)
    return {
        "tokens_per_s": round(run.tokens / run.seconds, 1),
        "forwards_per_token": round(run.forwards_per_token, 3),
        "acceptance": round(accepted / offered, 3) if offered else None,
        "mean_batch": round(statistics.mean(report.sessions for report in run.reports), 2),
        "mean_nodes": round(statistics.mean(report.nodes for report in run.reports), 1),
        "step_ms": {part: round(value, 3) for part, value in medians.items()},
        "kv_pages": run.pages,
    }


# ---------------------------------------------------------------- one step


class _StepBench:
    """Steps over sessions that stand behind their contexts, each with a chain of hints. Nothing is committed."""

    def __init__(self, bed: Bed) -> None:
        self._bed, self._target = bed, bed.target
        self._desk = Desk(bed.target, bed.cost, bed.clock.ends_at, bed.settings.batch_nodes)
        device = bed.target.lm.model.device
        self._chooser = RowChooser(np.ones(bed.vocabulary, np.bool_), device)

    def __enter__(self) -> _StepBench:
        return self

    def __exit__(self, *failure: object) -> None:
        self._desk.close()

    def cell(self, batch: int, nodes: int) -> Cell | None:
        """Medians of one size; None if time ran out."""
        rows = self._rows(batch, nodes)
        if rows is None:
            return None
        times = [self._step(rows) for _ in range(REPEATS + 2)][2:]
        medians = {part: statistics.median(each[part] for each in times) for part in times[0]}
        return {"sessions": batch, "nodes": nodes, **{part: round(1000 * value, 3) for part, value in medians.items()}}

    def host_waits(self, _: int) -> Cell | None:
        """Where the host waits for a GPU within a step with hints, as PyTorch sees it: once, to fetch, is right."""
        rows = self._rows(min(4, len(self._desk.seats)), CHAIN)
        if not rows:
            return None
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._desk.judge.judge(rows, self._target.forward([_input(row) for row in rows]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return {"places": [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]}

    def _rows(self, batch: int, nodes: int) -> list[PlannedRow] | None:
        """The plan of a step over the first sessions; more are opened as needed."""
        scripts = self._bed.scripts(batch)[len(self._desk.seats) :]
        for script in scripts:
            hints = random_context(1 + max(NODES), self._bed.vocabulary, -script.seed)
            self._desk.open(Script(script.context, hints=hints), 2 + max(NODES), max(NODES))
        while self._desk.maybe_step():
            pass
        seats = self._desk.seats[:batch]
        if any(not seat.ids for seat in seats):
            return None
        for seat in seats:
            if not seat.session.trie.held:
                seat.hint(0)  # no credit with it: the session stays where it is
            assert seat.session.slot.try_reserve(1 + nodes)
        return [_planned(seat, nodes) for seat in seats]

    def _step(self, rows: Sequence[PlannedRow]) -> dict[str, float]:
        """Seconds of the parts of one step. `launch`: until the host had told a GPU all of its forward."""
        requests = [
            RowRequest(SAMPLED, row.session.seed, row.session.length + depth)
            for row in rows
            for depth in range(1 + len(row.nodes))
        ]
        if self._bed.settings.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        scores = self._target.forward([_input(row) for row in rows])
        launched = time.perf_counter()
        self._desk.judge.judge(rows, scores)
        whole, timing = time.perf_counter() - began, self._target.timing()
        sampled = time.perf_counter()
        self._chooser.choose(scores, requests).fetch()
        return {
            "stage": timing.stage_s,
            "forward": timing.forward_s,
            "judge": max(0.0, whole - timing.stage_s - timing.forward_s),
            "whole": whole,
            "launch": launched - began - timing.stage_s,
            "judge_sampled": time.perf_counter() - sampled,
        }


def _planned(seat: Seat, nodes: int) -> PlannedRow:
    chain: list[Node] = []
    children = seat.session.trie.children
    while len(chain) < nodes:
        (node,) = children.values()
        chain.append(node)
        children = node.children
    return PlannedRow(seat.session, (seat.session.ids[-1],), tuple(chain), 0, 0, True, seat.session.slot.length)


def _input(row: PlannedRow) -> RowInput:
    ids = [*row.feed, *(node.token for node in row.nodes)]
    return RowInput(row.session.slot, ids, range(-1, len(ids) - 1), range(len(ids)))


def _note(steps: Sequence[Cell], is_cuda: bool) -> str:
    """What bounds a forward of one token a session."""
    plain = {cell["sessions"]: cell for cell in steps if not cell["nodes"]}
    if len(plain) < 2:
        return "too few batches were measured to say how the forward grows"
    least, most = plain[min(plain)], plain[max(plain)]
    growth = most["forward"] / least["forward"]
    text = f"forward of {most['sessions']} sessions takes {growth:.2f} times that of {least['sessions']}"
    if not is_cuda:
        return text
    if least["launch"] > 0.9 * least["forward"]:
        return f"{text}; launch-bound: telling the GPU takes {least['launch']} ms of {least['forward']}"
    return text + (": flat, bound by reading the weights" if growth <= FLAT else "")


# ---------------------------------------------------------------- printing


def _table(result: Cell) -> Iterator[str]:
    device = result["device"]
    cuda = f", CUDA {device['cuda']}" if device["cuda"] else ""
    yield f"{device['name']}, torch {device['torch']}{cuda}, {result['dtype']}, {result['seconds']} s"
    for shape in result["shapes"]:
        yield ""
        memory = f", peak memory {shape['memory_peak_gb']} GB" if shape["memory_peak_gb"] else ""
        yield (
            f"{shape['shape']}: {shape['weights_gb']} GB of weights a step, loaded in {shape['load_s']} s, self-check "
            f"{shape.get('self_check', 'FAILED')}{memory}"
        )
        yield from _identity_rows(shape.get("identity"))
        yield from _speed_rows(shape)
        if "compiled" in shape:
            yield "with torch.compile:"
            yield from _speed_rows(shape["compiled"])
    yield from (f"left out: {each}" for each in result["skipped"])
    yield from (f"FAILED: {each}" for each in result["failed"])


def _identity_rows(found: Cell | None) -> Iterator[str]:
    if found:
        yield (
            f"identity: {found['ids']} ids of {found['texts']} texts, {found['accepted']} accepted: {found['flips']} "
            f"flips (widest gap {found['widest_gap']}, d {found['d']}), {found['bugs']} BUGS; same as streamed "
            f"{found['same_as_streamed']}, streamed twice the same {found['control_same']} of {found['texts']}"
        )


def _speed_rows(found: Cell) -> Iterator[str]:
    if found["steps"]:
        parts = ("stage", "forward", "launch", "judge", "judge_sampled", "whole")
        yield "sessions  nodes  " + "  ".join(f"{part:>7}" for part in parts) + "  (ms)"
    for cell in found["steps"]:
        times = "  ".join(f"{cell[part]:>{max(7, len(part))}.2f}" for part in parts)
        yield f"{cell['sessions']:>8}  {cell['nodes']:>5}  {times}"
    yield found["note"]
    if found["host_waits"] is not None:
        yield f"the host waits {len(found['host_waits'])} times a step: {', '.join(found['host_waits'])}"
    if found["rates"]:
        head = "sessions  way       tokens/s  ratio  forwards/token  accepted  batch  nodes  pages  same"
        yield head + "  ms a step (medians)"
    for cell in found["rates"]:
        for way in ("streamed", "hinted"):
            yield _rate_row(cell, way)


def _rate_row(cell: Cell, way: str) -> str:
    run = cell[way]
    ratio = f"{cell['ratio']:.2f}" if way == "hinted" else ""
    same = cell["same_texts"] if way == "hinted" else ""
    accepted = f"{run['acceptance']:.2f}" if run["acceptance"] is not None else ""
    return (
        f"{cell['sessions']:>8}  {way:<8}  {run['tokens_per_s']:>8}  {ratio:>5}  {run['forwards_per_token']:>14}  "
        f"{accepted:>8}  {run['mean_batch']:>5}  {run['mean_nodes']:>5}  {run['kv_pages']:>5}  {same:>4}  "
        + ", ".join(f"{part} {value:.2f}" for part, value in run["step_ms"].items())
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m bench.gpu_check`."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    _add_options(parser)
    try:
        return run(parser.parse_args(arguments))
    except DraftwireError as error:
        print(f"gpu_check: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
