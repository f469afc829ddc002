"""What `python -m bench link` is asked to measure: its arguments, checked.

Must not know: how it is measured. Called by `link`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from bench.bare_session import MOST_TOKENS
from bench.exactness import RULES
from bench.pairs import PAIRS
from shared.errors import ConfigError

NORMAL: dict[str, Any] = {"rtt_ms": "0,20,50,100,200", "prompts": 20, "tokens": 48, "lengths": "1,2,3,4,5,6,7,8"}
QUICK: dict[str, Any] = {"rtt_ms": "20,100", "prompts": 6, "tokens": 32, "lengths": "2,4,8"}
OF_DRAFTWIRE = (("hint_tokens", int), ("hint_width", int), ("hint_reach", float))


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    pair_name: str
    rtts_ms: tuple[float, ...]
    prompts: int
    tokens: int
    lengths: tuple[int, ...]
    repeats: int
    rule: str
    degrade: float
    is_random: bool
    jitter_ms: float
    given: dict[str, Any]
    """Draftwire's own settings, where not the client's defaults."""
    up_bytes_per_s: float = 0.0
    """Of the device's uplink, framing included; 0: no limit."""
    only: tuple[str, ...] = ()
    """Words of which a variant's name must hold one; empty: all. Streaming and the draft alone always run."""

    @property
    def drafts(self) -> str:
        """How good the drafter is."""
        return "random" if self.is_random else "degraded" if self.degrade else "model"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    add = command.add_argument
    add("--pair", default="smollm2", help=f"one of {', '.join(PAIRS)} (default: smollm2)")
    add("--rtt-ms", metavar="N,N", help=f"round trips (default: {NORMAL['rtt_ms']})")
    add("--prompts", type=int, metavar="N", help=f"prompts (default: {NORMAL['prompts']})")
    add("--tokens", type=int, metavar="N", help=f"tokens per text (default: {NORMAL['tokens']})")
    add("--lengths", metavar="N,N", help=f"of propose-and-wait (default: {NORMAL['lengths']})")
    add("--only", default="", metavar="TEXT,..", help="only variants whose name holds one of these, and streaming")
    add("--repeats", type=int, default=1, metavar="N", help="repeats of each text (default: 1)")
    add("--rule", default="greedy", choices=sorted(RULES), help="default: greedy")
    add("--degrade", type=float, default=0.0, metavar="P", help="spoil the draft: right at about P of positions")
    add("--drafter", default="model", choices=("model", "random"), help="random: a draft that is never right")
    add("--jitter-ms", type=float, default=0.0, metavar="N", help="up to so much more each way (default: 0)")
    add("--uplink", type=float, default=0.0, metavar="BYTES/S", help="limit of the device's uplink (default: none)")
    for name, kind in OF_DRAFTWIRE:
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help="of Draftwire (default: the client's)")
    add("--draftwire-drafter", choices=("model", "both"), help="with look-up or without (default: both; spoilt: model)")
    add("--quick", action="store_true", help="a few minutes: " + ", ".join(f"{k} {v}" for k, v in QUICK.items()))
    add("--json", action="store_true", help="print one JSON object")


def settings_of(args: argparse.Namespace) -> Settings:
    """The arguments, checked. Raises: ConfigError."""
    usual = QUICK if args.quick else NORMAL
    chosen = {name: default if (given := getattr(args, name)) is None else given for name, default in usual.items()}
    settings = Settings(
        pair_name=args.pair,
        rtts_ms=tuple(map(float, _words(chosen["rtt_ms"], "rtt_ms"))),
        prompts=chosen["prompts"],
        tokens=chosen["tokens"],
        lengths=tuple(map(int, _words(chosen["lengths"], "lengths"))),
        repeats=args.repeats,
        rule=args.rule,
        degrade=args.degrade,
        is_random=args.drafter == "random",
        jitter_ms=args.jitter_ms,
        given=_given(args),
        up_bytes_per_s=args.uplink,
        only=tuple(filter(None, args.only.split(","))),
    )
    _check(settings)
    return settings


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of Draftwire. A spoilt draft is measured by itself: look-up would mend it."""
    given = {name: value for name, _ in OF_DRAFTWIRE if (value := getattr(args, name)) is not None}
    is_spoilt = args.degrade > 0 or args.drafter == "random"
    return {**given, "drafter": args.draftwire_drafter or ("model" if is_spoilt else "both")}


def _words(text: str, field: str) -> list[str]:
    words = text.split(",")
    if not all(word.isdigit() for word in words):
        raise ConfigError(f"{field} must be whole numbers with commas between, got {text!r}", field=field)
    return words


def _check(settings: Settings) -> None:
    if not all(1 <= length <= 64 for length in settings.lengths):
        raise ConfigError("lengths must be from 1 to 64", field="lengths")
    if min(settings.prompts, settings.repeats) < 1 or not 2 <= settings.tokens <= MOST_TOKENS:
        raise ConfigError(f"prompts and repeats must be at least 1, tokens from 2 to {MOST_TOKENS}", field="tokens")
    if not 0 <= settings.degrade < 1 or (settings.degrade and settings.is_random):
        raise ConfigError("degrade must be below 1, and is for the model drafter only", field="degrade")
    if settings.jitter_ms < 0:
        raise ConfigError("jitter_ms must be at least 0", field="jitter_ms")
    if settings.up_bytes_per_s < 0:
        raise ConfigError("uplink must be at least 0", field="uplink")
