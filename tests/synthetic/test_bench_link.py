"""The link bench in short: its figures on made-up times, its spoilt drafts, and its baselines on the tiny pair."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import baselines
from bench.bare_session import Job, Outcome
from bench.baselines import Device, is_judged, paths_of
from bench.degraded import NEXT_RANKS, DegradedModel, agreement
from bench.gpu_models import FreeTokens
from bench.link import add_parser, rotated, variants_of
from bench.link_settings import settings_of
from bench.link_table import DRAFT_ONLY, DRAFTWIRE_PREFIX, RPC, RUN_ON, STREAMING, WAIT_PREFIX, cell, table
from bench.statistics import ratio_interval
from cloud_verifier.loading import LoadedTarget
from edge_client.client import SpeculativeClient
from edge_client.drafter import Budget, Drafter, HintTree, ModelDrafter
from edge_client.onnx_drafter import OnnxModel
from edge_client.tokenizer import TextTokenizer
from edge_client.transport import GrpcTransport, Traffic
from shared.errors import ConfigError, ModelMismatch
from shared.sampling import GREEDY, SamplingParams
from shared.types import Usage
from tests.oracle import PlainTarget
from tests.rig import ScriptedDrafter, client, serving
from tests.tiny_pair import STOP_ID, TinyPair

# ---------------------------------------------------------------- figures


def outcome(decode_s: float, first_s: float = 0.5, ids: Sequence[int] = range(10), **usage: int) -> Outcome:
    return Outcome(tuple(ids), first_s + decode_s, first_s, Usage(**usage), Traffic(up_bytes=30, down_bytes=50))


def made_up(streaming: Sequence[float], run_on: Sequence[float], wait_4: Sequence[float]) -> dict[str, list[Outcome]]:
    names = {STREAMING: streaming, f"{WAIT_PREFIX}2": [9.0] * len(wait_4), f"{WAIT_PREFIX}4": wait_4, RUN_ON: run_on}
    return {name: [outcome(seconds, steps=5, dry_steps=1) for seconds in times] for name, times in names.items()}


def test_ratios_are_of_sums_of_times_with_the_best_propose_and_wait_chosen_by_its_sum() -> None:
    found = cell(50, made_up([3, 1], [1, 1], [2, 1]), {RUN_ON: (100, 200)}, 2, "model")
    ours = found["variants"][RUN_ON]
    assert found["best_propose_and_wait"] == f"{WAIT_PREFIX}4"
    assert ours["decode_over_streaming"] == [2.0, 1.0, 3.0]
    assert ours["whole_over_streaming"][0] == pytest.approx(5 / 3, abs=1e-3)
    assert ours["decode_over_best_wait"] == [1.5, 1.0, 2.0]
    assert ours["decode_tokens_per_s"] == 9.0
    assert ours["whole_tokens_per_s"] == pytest.approx(20 / 3, abs=0.01)
    assert (ours["forwards_per_token"], ours["dry_steps_per_token"]) == (0.5, 0.1)
    assert (ours["up_bytes_per_token"], ours["down_bytes_per_token"]) == (3, 5)
    assert (ours["tcp_up_bytes_per_token"], ours["tcp_down_bytes_per_token"]) == (5, 10)
    assert found["differences"] == []


def test_repeats_of_a_prompt_are_one_sample() -> None:
    found = cell(0, made_up([3, 1, 3, 1], [1, 2, 1, 2], [1, 1, 1, 1]), {}, 2, "model")
    assert found["variants"][RUN_ON]["decode_s"] == [2, 4]
    assert found["variants"][STREAMING]["decode_s"] == [6, 2]


@pytest.mark.parametrize(
    ("rtt_ms", "drafts", "expected"),
    [
        (0, "model", [(RUN_ON, 0.95, True)]),
        (20, "model", [(RUN_ON, 0.95, True), (RUN_ON, 1.5, False)]),
        (20, "degraded", [(RUN_ON, 0.95, True), (RUN_ON, 1.1, True)]),
        (50, "model", [(RUN_ON, 0.95, True), (RUN_ON, 1.5, False), (RUN_ON, 1.3, True)]),
        (200, "model", [(RUN_ON, 0.95, True), (RUN_ON, 1.3, True)]),
        (50, "random", [(RUN_ON, 0.95, True)]),
    ],
)
def test_the_bars_are_those_of_the_round_trip_and_the_drafter(
    rtt_ms: float, drafts: str, expected: list[tuple[str, float, bool]]
) -> None:
    found = cell(rtt_ms, made_up([1.4, 1.4], [1, 1], [1.35, 1.35]), {}, 2, drafts)
    assert [(bar["variant"], bar["needed"], bar["is_met"]) for bar in found["bars"]] == expected


def test_the_lower_end_decides_not_the_ratio() -> None:
    found = cell(0, made_up([2, 0.5], [1, 1], [1, 1]), {}, 2, "model")
    assert found["variants"][RUN_ON]["decode_over_streaming"][0] == 1.25
    assert [bar["is_met"] for bar in found["bars"]] == [False]


def test_ids_that_are_not_cloud_streamings_are_named_save_the_drafts_own() -> None:
    texts = made_up([1, 1], [1, 1], [1, 1])
    texts[RUN_ON][1] = replace(texts[RUN_ON][1], ids=(0, 1, 7, 3))
    texts[f"{WAIT_PREFIX}2"][0] = replace(texts[f"{WAIT_PREFIX}2"][0], ids=tuple(range(9)))
    texts[DRAFT_ONLY] = [outcome(1, ids=(5,)), outcome(1, ids=(6,))]
    found = cell(0, texts, {}, 2, "model")
    assert found["differences"] == [
        {"variant": f"{WAIT_PREFIX}2", "text": 0, "at": 9},
        {"variant": RUN_ON, "text": 1, "at": 2},
    ]
    assert "decode_over_streaming" not in found["variants"][DRAFT_ONLY]


def test_the_table_names_every_variant_its_intervals_and_what_was_missed() -> None:
    texts = made_up([1.4, 1.4], [1, 1], [1.35, 1.35])
    head = {"pair": "tiny", "rule": "greedy", "drafts": "model", "prompts": 2, "tokens": 10, "repeats": 1}
    shown = table(
        {**head, "machine": "here", "agreement": 0.9, "cells": [cell(50, texts, {}, 2, "model")]},
    )
    assert all(name in shown for name in texts)
    assert "1.40 (1.40-1.40)" in shown
    assert "needed 1.5: MISSED" in shown
    assert "needed 1.3: met" in shown
    assert "ids: identical" in shown


def test_the_interval_of_a_ratio_is_paired_and_holds_the_truth_about_as_often_as_it_says() -> None:
    """Prompts differ tenfold, the ratio hardly: unpaired the interval would be wide."""
    rng = np.random.default_rng(5)
    held, widths = 0, []
    for case in range(200):
        theirs = rng.uniform(1, 10, 20)
        ours = theirs / (1.5 + rng.normal(0, 0.1, 20))
        ratio, low, high = ratio_interval(theirs.tolist(), ours.tolist(), seed=case, resamples=300)
        assert low <= ratio <= high
        held += low <= 1.493 <= high  # the mean of ours over theirs is E[1 / (1.5 + e)] = 1 / 1.493
        widths.append(high - low)
    assert 170 <= held <= 199
    assert max(widths) < 0.25


def test_every_variant_comes_first_for_some_prompt() -> None:
    names = ["a", "b", "c"]
    assert [rotated(names, by)[0] for by in range(6)] == ["a", "b", "c"] * 2
    assert sorted(rotated(names, 2)) == names


# ---------------------------------------------------------------- arguments


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["link", *words])


def test_quick_is_smaller_and_what_is_given_stands() -> None:
    quick, normal = settings_of(parsed("--quick", "--tokens", "7")), settings_of(parsed("--hint-reach", "0"))
    assert (quick.up_bytes_per_s, settings_of(parsed("--uplink", "2000")).up_bytes_per_s) == (0, 2000)
    assert (quick.rtts_ms, quick.prompts, quick.tokens, quick.lengths) == ((20, 100), 6, 7, (2, 4, 8))
    assert (normal.rtts_ms, normal.prompts, normal.lengths) == ((0, 20, 50, 100, 200), 20, tuple(range(1, 9)))
    assert normal.given == {"hint_reach": 0.0, "drafter": "both"}
    assert (normal.drafts, settings_of(parsed("--degrade", "0.6")).drafts) == ("model", "degraded")
    useless = settings_of(parsed("--drafter", "random"))
    assert (useless.drafts, useless.given) == ("random", {"drafter": "model"})


@pytest.mark.parametrize(
    "words",
    [
        ["--rtt-ms", "-1"],
        ["--rtt-ms", "20,"],
        ["--lengths", "0"],
        ["--prompts", "0"],
        ["--tokens", "129"],
        ["--degrade", "1"],
        ["--degrade", "0.5", "--drafter", "random"],
        ["--jitter-ms", "-1"],
        ["--uplink", "-1"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        settings_of(parsed(*words))


# ---------------------------------------------------------------- propose and wait, its parts


def test_a_hint_is_judged_once_the_text_has_left_it_or_passed_it() -> None:
    tree = HintTree((5, 6, 7, 8), (-1, -1, 0, 0), (0.5,) * 4)
    paths = paths_of(tree)
    assert paths == {(5,), (6,), (5, 7), (5, 8)}
    texts: dict[tuple[int, ...], bool] = {(): False, (5,): False, (6,): True, (9,): True, (5, 8): True, (5, 9): True}
    assert {text: is_judged(paths, [1, 2, *text], 2) for text in texts} == texts


# ---------------------------------------------------------------- on the tiny pair


@pytest.fixture(scope="module")
def model(tiny_pair: TinyPair) -> OnnxModel:
    return OnnxModel(tiny_pair.noisy_draft)


def valid_of(pair: TinyPair, model: OnnxModel) -> Any:
    return np.arange(model.vocabulary_rows) < pair.vocabulary_size


def job(prompt: Sequence[int] = (70, 71, 72), tokens: int = 16, sampling: SamplingParams = GREEDY) -> Job:
    return Job(tuple(prompt), tokens, sampling, 5)


@asynccontextmanager
async def link(
    loaded: LoadedTarget, pair: TinyPair, drafter: Drafter, max_wait_ms: int = 60_000
) -> AsyncIterator[tuple[Device, SpeculativeClient]]:
    """What `variants_of` needs; in pace wait nothing comes for want of hints, and all hints are verified."""
    executor = ThreadPoolExecutor(1)
    async with serving(loaded, max_wait_ms=max_wait_ms, engine_options={"cost": FreeTokens()}) as running:
        transport = GrpcTransport(running.address)
        async with client(running, pair, transport=transport, drafter=drafter) as device:
            yield Device(transport, device.card, drafter, executor), device
    executor.shutdown()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_k=50)], ids=["greedy", "agreement"])
async def test_all_baselines_write_the_targets_own_ids(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, model: OnnxModel, sampling: SamplingParams
) -> None:
    prompts = ((70, 71, 72), (90, 40, 200, 3))
    async with link(loaded_tiny, tiny_pair, ModelDrafter(model, valid_of(tiny_pair, model))) as (device, streams):
        variants = {
            name: write
            for name, write in variants_of(device, streams, [1, 3]).items()
            if not name.startswith(DRAFTWIRE_PREFIX)  # tests/wire/test_wire_identity.py
        }
        assert {STREAMING, RPC, DRAFT_ONLY, f"{WAIT_PREFIX}3", f"{WAIT_PREFIX}tree of 4 x 2"} <= variants.keys()
        for prompt in prompts:
            truth = tuple(plain.ids(list(prompt), 16, sampling, 5, (STOP_ID,)))
            for name, write in variants.items():
                written = await write(job(prompt, sampling=sampling))
                assert 0 < written.first_s <= written.wall_s
                if name != DRAFT_ONLY:
                    assert written.ids == truth, name
                    assert written.usage.generated_tokens == len(truth)
                    assert written.traffic.up_bytes > 0


async def test_a_round_trip_per_token_asks_for_each_and_waiting_sends_no_hint_too_many(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    """With a drafter that knows the text, every hint of 3 brings 4 ids; the first id may come before the first hint."""
    truth = plain.ids([70, 71, 72], 16, GREEDY, 5, (STOP_ID,))
    drafter = ScriptedDrafter([70, 71, 72, *truth])
    async with link(loaded_tiny, tiny_pair, drafter) as (device, _):
        asked = await baselines.one_rpc_per_token(device, job())
        waited = await baselines.propose_and_wait(device, job(), Budget(3))
    assert asked.ids == waited.ids == tuple(truth)
    assert asked.usage.steps == len(truth) == asked.traffic.kinds["commit"]
    assert asked.traffic.kinds["pace"] == len(truth) - 1
    assert "hint" not in asked.traffic.kinds
    assert waited.usage.dry_steps <= 1
    assert waited.traffic.kinds["hint"] <= waited.usage.steps
    assert waited.usage.accepted_tokens > 0


async def test_a_refused_session_is_an_error_and_leaves_nothing_behind(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    async with link(loaded_tiny, tiny_pair, ScriptedDrafter([70])) as (device, _):
        stranger = replace(device, card=replace(device.card, fingerprint=b"\0" * len(device.card.fingerprint)))
        with pytest.raises(ModelMismatch):
            await baselines.propose_and_wait(stranger, job(), Budget(3))


# ---------------------------------------------------------------- spoilt drafts


def test_a_spoilt_model_swaps_its_choice_with_a_near_one_the_same_way_each_time(
    tiny_pair: TinyPair, model: OnnxModel
) -> None:
    valid = valid_of(tiny_pair, model)
    spoilt = DegradedModel(model, valid)
    swapped = 0
    for first in range(4, 104):
        model.rewind(0)
        true = model.feed([first, 71])
        spoilt.keep = 0.5
        seen = []
        for _ in range(2):
            spoilt.rewind(0)
            seen.append(spoilt.feed([first, 71]))
        assert np.array_equal(seen[0], seen[1])
        assert sorted(seen[0]) == sorted(true)
        order = np.argsort(-np.where(valid, true, -np.inf), kind="stable")
        choice = int(np.argmax(np.where(valid, seen[0], -np.inf)))
        assert choice in order[: NEXT_RANKS + 1]
        swapped += choice != order[0]
    assert 25 <= swapped <= 75  # a fair coin thrown 100 times: 1e-6


async def test_spoiling_brings_agreement_near_what_is_asked_and_a_useless_model_near_nothing(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, tiny_tokenizer: TextTokenizer
) -> None:
    own = OnnxModel(tiny_pair.same_draft)
    spoilt = DegradedModel(own, valid_of(tiny_pair, own))
    texts = [(prompt, plain.ids(prompt, 100, GREEDY, 5)) for prompt in ([70, 71, 72], [90, 40, 200, 3])]

    def mean() -> float:
        own.rewind(0)
        drafter = ModelDrafter(spoilt, spoilt.valid_ids)
        tasks = [(baselines.task_of(job(prompt), loaded_tiny.card), prompt, ids) for prompt, ids in texts]
        return sum(agreement(drafter, task, prompt, ids) for task, prompt, ids in tasks) / len(tasks)

    assert mean() == 1.0
    spoilt.keep = 0.6
    assert 0.42 < mean() < 0.78  # 200 throws at 0.6: 1e-6
    spoilt.is_useless = True
    assert mean() < 0.1
