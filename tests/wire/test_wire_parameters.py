"""What a caller asks for is what the target does, with drafting and without: seeds, parameters, stops, logprobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.gpu_models import FreeTokens
from cloud_verifier.loading import LoadedTarget
from edge_client.events import FinishReason, Result
from edge_client.text import TextStream
from edge_client.tokenizer import TextTokenizer
from shared.errors import ConfigError
from shared.sampling import GREEDY, SamplingParams
from shared.types import PaceKind
from tests.oracle import PlainTarget
from tests.rig import ScriptedDrafter, client, serving
from tests.tiny_pair import TinyPair

PROMPT = [70, 71, 72]
HOT = SamplingParams(temperature=1.5)


async def generate(loaded: LoadedTarget, pair: TinyPair, draft: str, **options: Any) -> Result:
    """One text from a verifier and a client made for it."""
    options = {"max_new_tokens": 32, "sampling": GREEDY, "stop_ids": (), "pace": PaceKind.WAIT, **options}
    parts = {name: options.pop(name) for name in ("hint_tokens", "drafter") if name in options}
    async with serving(loaded, max_wait_ms=2) as running, client(running, pair, draft, **parts) as device:
        return await device.generate(PROMPT, **options)


# ---------------------------------------------------------------- seeds (C08)


async def test_a_seed_fixes_the_text_across_restarts_drafters_and_hint_lengths(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    texts = {
        (await generate(loaded_tiny, tiny_pair, draft, sampling=HOT, seed=42, hint_tokens=hint)).ids
        for draft, hint in (("same", 1), ("same", 8), ("noisy", 3), ("none", 0), ("bad", 5))
    }
    assert texts == {tuple(plain.ids(PROMPT, 32, HOT, 42))}


async def test_without_a_seed_texts_differ_and_the_seed_that_was_drawn_gives_the_text_again(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "sampling": HOT, "stop_ids": ()}
    async with serving(loaded_tiny) as running, client(running, tiny_pair) as device:
        results = [await device.generate(PROMPT, **options) for _ in range(20)]
        again = await device.generate(PROMPT, seed=results[0].seed, **options)
    assert len({result.seed for result in results}) == 20
    assert len({result.ids for result in results}) >= 19
    assert again.ids == results[0].ids
    assert all(0 <= result.seed < 2**64 for result in results)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
async def test_every_64_bit_seed_is_a_seed(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, seed: int
) -> None:
    result = await generate(loaded_tiny, tiny_pair, "same", sampling=HOT, seed=seed)
    assert result.seed == seed
    assert list(result.ids) == plain.ids(PROMPT, 32, HOT, seed)


# ---------------------------------------------------------------- the cross of parameters (C09)

TEMPERATURES = [0.0, -0.0, 1e-45, 1e-6, 1e-4, 2.0, 100.0, None]
TOP_PS = [0.0, 1e-6, 1.0, None]
TOP_KS = [-1, 0, 1, 320, 321, None]


@pytest.mark.parametrize("temperature", TEMPERATURES)
async def test_extreme_parameters_give_text_or_a_plain_refusal_and_harm_nobody(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, temperature: float | None
) -> None:
    greedy_ids = plain.ids(PROMPT, 6, GREEDY)
    options: dict[str, Any] = {"max_new_tokens": 6, "seed": 4, "stop_ids": (), "logprobs": True}
    async with serving(loaded_tiny) as running, client(running, tiny_pair) as device:
        for top_p in TOP_PS:
            for top_k in TOP_KS:
                asked = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
                given = {name: value for name, value in asked.items() if value is not None}
                if top_k == -1:
                    with pytest.raises(ConfigError, match="top_k"):
                        SamplingParams(**given)  # type: ignore[arg-type]
                    continue
                params = SamplingParams(**given)  # type: ignore[arg-type]
                result = await device.generate(PROMPT, sampling=params, **options)
                assert list(result.ids) == plain.ids(PROMPT, 6, params, 4), asked
                assert all(-1000 < value <= 0 for value in result.logprobs)
                coldest = temperature is not None and temperature <= 1e-6
                if coldest or top_k == 1 or (top_p is not None and top_p <= 1e-6):
                    assert list(result.ids) == greedy_ids, asked
        healthy = await device.generate(PROMPT, sampling=GREEDY, **options)
        assert list(healthy.ids) == greedy_ids


# ---------------------------------------------------------------- no field is ignored (C10)

BASE = SamplingParams(temperature=0.9)
FIELDS: dict[str, tuple[SamplingParams, SamplingParams]] = {
    "temperature": (BASE, replace(BASE, temperature=0.3)),
    "top_k": (BASE, replace(BASE, top_k=3)),
    "top_p": (BASE, replace(BASE, top_p=0.4)),
    "min_p": (BASE, replace(BASE, min_p=0.5)),
    "repetition_penalty": (GREEDY, replace(GREEDY, repetition_penalty=1.8)),
    "frequency_penalty": (GREEDY, replace(GREEDY, frequency_penalty=2.0)),
    "frequency_penalty below 0": (GREEDY, replace(GREEDY, frequency_penalty=-2.0)),
    "presence_penalty": (GREEDY, replace(GREEDY, presence_penalty=2.0)),
    "logit_bias": (GREEDY, replace(GREEDY, logit_bias={65: 4.0, 66: -1.5})),
    "logit_bias that forbids": (GREEDY, replace(GREEDY, logit_bias={114: float("-inf")})),
}


@pytest.mark.parametrize("name", FIELDS)
async def test_every_sampling_field_changes_the_text_and_the_same_way_with_drafting(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, name: str
) -> None:
    off, on = FIELDS[name]
    without = plain.ids(PROMPT, 60, off, 8)
    truth = plain.ids(PROMPT, 60, on, 8)
    assert truth != without
    for draft in ("none", "same", "noisy"):
        result = await generate(loaded_tiny, tiny_pair, draft, sampling=on, seed=8, max_new_tokens=60)
        assert list(result.ids) == truth, draft


async def test_the_fields_above_are_all_fields() -> None:
    told = {name.split()[0] for name in FIELDS}
    assert told == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("draft", ["none", "same"])
async def test_the_other_options_of_a_text_are_followed(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, draft: str
) -> None:
    truth = plain.ids(PROMPT, 32, HOT, 9)
    short = await generate(loaded_tiny, tiny_pair, draft, sampling=HOT, seed=9, max_new_tokens=5)
    assert list(short.ids) == truth[:5]
    stopped = await generate(loaded_tiny, tiny_pair, draft, sampling=HOT, seed=9, stop_ids=(truth[9],))
    assert list(stopped.ids) == truth[: truth.index(truth[9]) + 1]
    assert stopped.reason is FinishReason.STOP
    assert (await generate(loaded_tiny, tiny_pair, draft, sampling=HOT, seed=9)).logprobs == ()


# ---------------------------------------------------------------- stops (C03, C04)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("hint_tokens", [1, 3, 8])
async def test_a_stop_string_at_every_offset_ends_the_text_before_it(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tiny_tokenizer: TextTokenizer, plain: PlainTarget, hint_tokens: int
) -> None:
    """A drafter that is always right, so that stops begin and end anywhere in accepted blocks and across them."""
    params = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(40, 90), 7.0))
    truth = plain.ids(PROMPT, 40, params, 6)
    whole = tiny_tokenizer.decode(truth)
    drafter = ScriptedDrafter([*PROMPT, *truth])
    seen: set[bool] = set()
    async with (
        serving(loaded_tiny, max_wait_ms=60_000, engine_options={"cost": FreeTokens()}) as running,
        client(running, tiny_pair, drafter=drafter, hint_tokens=hint_tokens) as device,
    ):
        for start in range(0, len(whole) - 6, 2):
            stop = whole[start : start + 2 + start % 5]
            result = await device.generate(
                PROMPT, max_new_tokens=40, sampling=params, seed=6, stop=stop, stop_ids=(), pace=PaceKind.WAIT
            )
            assert result.text == whole[: whole.index(stop)]
            assert (result.reason, result.stop) == (FinishReason.STOP, stop)
            assert list(result.ids) == truth[: len(result.ids)]
            assert stop in tiny_tokenizer.decode(result.ids)
            assert stop not in tiny_tokenizer.decode(result.ids[:-1])
            seen.add(result.pieces[-1].is_accepted)
        await running.settled(lambda: running.sessions == 0)
    assert any(seen)
    assert all(not task.stop_ids for task in drafter.tasks)


async def test_a_stop_that_never_comes_holds_nothing_back(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tiny_tokenizer: TextTokenizer, plain: PlainTarget
) -> None:
    truth = plain.ids(PROMPT, 32, HOT, 6)
    stream = TextStream(tiny_tokenizer.vocabulary)
    text = stream.push(truth).text + stream.finish().text
    result = await generate(
        loaded_tiny, tiny_pair, "same", sampling=HOT, seed=6, stop=[text[-3:] + "never", "\x00\x01never"]
    )
    assert result.text == text
    assert (result.reason, result.stop) == (FinishReason.LENGTH, None)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("index", range(9))
async def test_a_stop_id_inside_an_accepted_block_is_the_last_id(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, index: int
) -> None:
    truth = plain.ids(PROMPT, 40, HOT, 6)
    stop = truth[index]
    drafter = ScriptedDrafter([*PROMPT, *truth])
    async with (
        serving(loaded_tiny, max_wait_ms=60_000, engine_options={"cost": FreeTokens()}) as running,
        client(running, tiny_pair, drafter=drafter, hint_tokens=8) as device,
    ):
        result = await device.generate(
            PROMPT, max_new_tokens=40, sampling=HOT, seed=6, stop_ids=(stop,), pace=PaceKind.WAIT
        )
    assert list(result.ids) == truth[: truth.index(stop) + 1]
    assert result.reason is FinishReason.STOP
    assert result.report.usage.generated_tokens == len(result.ids)


# ---------------------------------------------------------------- logprobs (C05)


@pytest.mark.parametrize("draft", ["none", "same", "noisy"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_k=20)], ids=["greedy", "sampled"])
async def test_every_id_has_the_targets_raw_log_probability(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, draft: str, params: SamplingParams
) -> None:
    result = await generate(loaded_tiny, tiny_pair, draft, sampling=params, seed=2, logprobs=True)
    assert list(result.ids) == plain.ids(PROMPT, 32, params, 2)
    assert len(result.logprobs) == len(result.ids)
    assert result.logprobs == pytest.approx(plain.logprobs(PROMPT, result.ids), abs=1e-4)
