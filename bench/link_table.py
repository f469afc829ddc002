"""The figures of `python -m bench link`: sums and ratios of what was measured, the bars they are held to, the table.

Must not know: sessions, models, clocks. Called by `link`. Checked on made-up figures by
tests/synthetic/test_bench_link.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from bench.bare_session import Outcome
from bench.statistics import ratio_interval

STREAMING, RPC, DRAFT_ONLY = "cloud streaming", "one rpc per token", "draft only"
WAIT_PREFIX, DRAFTWIRE_PREFIX = "propose and wait, ", "draftwire, "
RUN_ON = f"{DRAFTWIRE_PREFIX}run_on"
STREAMING_BAR = 0.95
"""Of the lower end, pace run_on, at any round trip and with any drafter."""
SPEED_BARS = {"model": 1.5, "degraded": 1.1}
"""Over streaming at 20 to 50 ms, pace run_on."""
WAIT_BAR = 1.3
"""Over the best propose-and-wait from 50 ms on."""

Texts = Mapping[str, Sequence[Outcome]]
"""Per variant what each text cost: all prompts in order, then all again for each repeat."""


def cell(rtt_ms: float, texts: Texts, tcp: Mapping[str, tuple[int, int]], prompts: int, drafts: str) -> dict[str, Any]:
    """All figures of one round trip. `tcp`: bytes up and down at the proxy; `drafts`: model, degraded or random."""
    rows = {name: row(outcomes, tcp.get(name, (0, 0)), prompts) for name, outcomes in texts.items()}
    waits = [name for name in rows if name.startswith(WAIT_PREFIX)]
    best = min(waits, key=lambda name: float(sum(rows[name]["decode_s"]))) if waits else None
    for name, each in rows.items():
        against = {"streaming": STREAMING if name != DRAFT_ONLY else None}
        against["best_wait"] = best if name.startswith(DRAFTWIRE_PREFIX) else None
        for word, other in against.items():
            if other in rows:
                for part in ("decode", "whole"):
                    each[f"{part}_over_{word}"] = _ratio(rows[other], each, f"{part}_s")
    return {
        "rtt_ms": rtt_ms,
        "best_propose_and_wait": best,
        "variants": rows,
        "bars": list(bars(rtt_ms, rows, drafts)),
        "differences": differences(texts),
    }


def row(outcomes: Sequence[Outcome], tcp: tuple[int, int], prompts: int) -> dict[str, Any]:
    """One variant's figures; times are sums over the repeats, one a prompt."""
    tokens = max(1, sum(len(each.ids) for each in outcomes))
    decode_s = [sum(each.decode_s for each in outcomes[prompt::prompts]) for prompt in range(prompts)]
    whole_s = [sum(each.wall_s for each in outcomes[prompt::prompts]) for prompt in range(prompts)]
    sums = {
        "forwards": sum(each.usage.steps for each in outcomes),
        "dry_steps": sum(each.usage.dry_steps for each in outcomes),
        "accepted": sum(each.usage.accepted_tokens for each in outcomes),
        "hint_nodes": sum(each.usage.hint_nodes for each in outcomes),
        "frames": sum(each.traffic.up_frames + each.traffic.down_frames for each in outcomes),
        "hint_bytes": sum(each.traffic.hint_bytes for each in outcomes),
        "up_bytes": sum(each.traffic.up_bytes for each in outcomes),
        "down_bytes": sum(each.traffic.down_bytes for each in outcomes),
        "tcp_up_bytes": tcp[0],
        "tcp_down_bytes": tcp[1],
    }
    return {
        "tokens": tokens,
        "decode_s": [round(seconds, 4) for seconds in decode_s],
        "whole_s": [round(seconds, 4) for seconds in whole_s],
        "decode_tokens_per_s": round((tokens - len(outcomes)) / max(sum(decode_s), 1e-9), 2),
        "whole_tokens_per_s": round(tokens / max(sum(whole_s), 1e-9), 2),
        **{f"{name}_per_token": round(total / tokens, 3) for name, total in sums.items()},
        **_measured(outcomes),
    }


def _measured(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Medians of what the device measured, in ms."""
    told = [each.measured for each in outcomes if each.measured is not None]
    names = ("round_trip_ms", "step_ms", "draft_step_ms")
    return {name: round(1000 * median(column), 2) for name, column in zip(names, zip(*told, strict=True), strict=False)}


def _ratio(other: Mapping[str, Any], ours: Mapping[str, Any], part: str) -> list[float]:
    """How many times faster than the other: the ratio of the sums of times, lower and upper end."""
    return [round(value, 3) for value in ratio_interval(other[part], ours[part])]


def bars(rtt_ms: float, rows: Mapping[str, Mapping[str, Any]], drafts: str) -> Iterator[dict[str, Any]]:
    """DESIGN.md section 8, on the decode part."""
    if "decode_over_streaming" in rows.get(RUN_ON, {}):
        ratio, low, _ = rows[RUN_ON]["decode_over_streaming"]
        yield _bar(RUN_ON, "lower end over cloud streaming", low, STREAMING_BAR)
        if 20 <= rtt_ms <= 50 and drafts in SPEED_BARS:
            yield _bar(RUN_ON, "over cloud streaming at 20-50 ms", ratio, SPEED_BARS[drafts])
    for name, each in rows.items():
        if rtt_ms >= 50 and drafts in SPEED_BARS and "decode_over_best_wait" in each:
            yield _bar(name, "over the best propose and wait", each["decode_over_best_wait"][0], WAIT_BAR)


def _bar(name: str, what: str, value: float, needed: float) -> dict[str, Any]:
    return {"variant": name, "what": what, "value": value, "needed": needed, "is_met": value >= needed}


def differences(texts: Texts) -> list[dict[str, Any]]:
    """Where a variant's ids are not those of cloud streaming; the draft alone writes its own."""
    found = []
    for name, outcomes in texts.items():
        for number, (ours, theirs) in enumerate(zip(outcomes, texts[STREAMING], strict=True)):
            if name != DRAFT_ONLY and (at := first_difference(ours.ids, theirs.ids)) is not None:
                found.append({"variant": name, "text": number, "at": at})
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place at which two texts differ; None if they are one."""
    if tuple(ours) == tuple(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def table(result: Mapping[str, Any]) -> str:
    """All cells as text."""
    lines = [
        f"{result['pair']}, {result['rule']}, {result['drafts']}, {result['prompts']} prompts x {result['tokens']} "
        f"tokens x {result['repeats']}, {result['machine']}",
        f"the drafter's first id is the target's at {result['agreement']:.2f} of positions",
        "ratios: times as fast, with 95 % intervals over prompts; decode: after the first ids; whole: with opening, "
        "both prefix caches warm; the rest per token, payload in protobuf bytes",
    ]
    for each in result["cells"]:
        lines += ["", *_cell_lines(each)]
    return "\n".join(lines)


def _cell_lines(each: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"round trip {each['rtt_ms']:g} ms{'':<19}  tokens/s  decode over streaming  whole over streaming  "
        "forwards  dry  accepted  hints/up/down  TCP up/down"
    )
    for name, figures in each["variants"].items():
        yield _variant_line(name, figures) + (" (best)" if name == each["best_propose_and_wait"] else "")
    for name, figures in each["variants"].items():
        if "decode_over_best_wait" in figures:
            ratios = [_interval(figures[f"{part}_over_best_wait"]) for part in ("decode", "whole")]
            yield f"  {name} over {each['best_propose_and_wait']}: decode {ratios[0]}, whole {ratios[1]}"
    for bar in each["bars"]:
        verdict = "met" if bar["is_met"] else "MISSED"
        yield f"  bar: {bar['variant']}, {bar['what']} {bar['value']:.2f}, needed {bar['needed']}: {verdict}"
    yield f"  ids: DIFFERENT: {each['differences']}" if each["differences"] else "  ids: identical"


def _variant_line(name: str, figures: Mapping[str, Any]) -> str:
    per = {key.removesuffix("_per_token"): value for key, value in figures.items() if key.endswith("_per_token")}
    ratios = [
        _interval(figures[key]) if (key := f"{part}_over_streaming") in figures else "" for part in ("decode", "whole")
    ]
    payload = "/".join(f"{per[key]:.0f}" for key in ("hint_bytes", "up_bytes", "down_bytes"))
    tcp = "/".join(f"{per[key]:.0f}" for key in ("tcp_up_bytes", "tcp_down_bytes"))
    return (
        f"{name:<36} {figures['decode_tokens_per_s']:>9.2f}  {ratios[0]:>21}  {ratios[1]:>20}  {per['forwards']:>8.2f} "
        f"{per['dry_steps']:>4.2f}  {per['accepted']:>8.2f}  {payload:>13}  {tcp:>11}"
    )


def _interval(ratio: Sequence[float]) -> str:
    return f"{ratio[0]:.2f} ({ratio[1]:.2f}-{ratio[2]:.2f})"
