"""The pairs that benchmarks speak of, and their prompts.

Prompts are read from the data folder beside the checkout (`../shared/data`, or $DRAFTWIRE_BENCH_DATA); without it a few
built-in ones serve.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.errors import ConfigError

BUILT_IN = (
    "Explain what a rainbow is in three sentences.",
    "Write a Python function that checks whether a number is prime.",
    "List five uses of a paper clip.",
    "Translate into French: The weather is fine today.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey?",
)


COMPLETE = "Complete this Python function. Answer with code only.\n"

Precision = Literal["auto", "int4", "int8", "fp32"]


@dataclass(frozen=True)
class Pair:
    """A target and the draft that goes with it, by bundle name."""

    target: str
    draft: str
    precision: Precision = "auto"


PAIRS = {
    "smollm2": Pair("smollm2-135m", "smollm2-135m"),
    "smollm2-int4": Pair("smollm2-135m", "smollm2-135m", "int4"),
    "smollm2-fp32": Pair("smollm2-135m", "smollm2-135m", "fp32"),
    "qwen": Pair("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
}


def pair(name: str) -> Pair:
    """The pair of this name. Raises: ConfigError listing the known ones."""
    if name not in PAIRS:
        raise ConfigError(f"unknown pair {name!r}; there are {', '.join(PAIRS)}", field="pair")
    return PAIRS[name]


def data_folder() -> Path:
    """Where the prompt sets lie, whether or not they are there."""
    return Path(os.environ.get("DRAFTWIRE_BENCH_DATA") or Path(__file__).parents[2] / "shared" / "data")


def prompt_source() -> str:
    """Which prompts `spec_bench_prompts` gives here."""
    return "spec_bench" if (data_folder() / "spec_bench.jsonl").exists() else "built-in"


def spec_bench_prompts(count: int, max_characters: int = 1200, categories: Collection[str] = ()) -> list[str]:
    """First turns of Spec-Bench, spread over its categories (or those given); without it built-in ones."""
    file = data_folder() / "spec_bench.jsonl"
    if not file.exists():
        return [BUILT_IN[index % len(BUILT_IN)] for index in range(count)]
    items = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    turns = [item["turns"][0] for item in items if not categories or item["category"] in categories]
    short = [turn for turn in turns if len(turn) <= max_characters]
    return [short[index * len(short) // count] for index in range(count)]


def humaneval_prompts(count: int) -> list[str]:
    """HumanEval functions to complete, spread over the set; without it repeats of a built-in one."""
    file = data_folder() / "humaneval.jsonl"
    if not file.exists():
        return [BUILT_IN[1]] * count
    functions = [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]
    return [f"{COMPLETE}{functions[index * len(functions) // count]}" for index in range(count)]
