"""Over real gRPC: the text is the target's own, whatever drafts, however much, at whatever pace."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.gpu_models import FreeTokens
from cloud_verifier.loading import LoadedTarget
from edge_client.events import FinishReason, Result
from edge_client.tokenizer import TextTokenizer
from shared.sampling import GREEDY, SamplingParams
from shared.types import PaceKind, Rule
from tests.oracle import PlainTarget
from tests.rig import client, serving
from tests.tiny_pair import STOP_ID, TinyPair

SAMPLINGS = {
    "greedy": GREEDY,
    "agreement": SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4, min_p=0.01
    ),
}
HINTS = [(1, 1), (4, 1), (8, 1), (4, 3)]
"""Ids ahead, and alternatives at each position."""
DRAFTS = [("none", (0, 1)), *((draft, hint) for draft in ("same", "noisy", "bad") for hint in HINTS)]
SEED = 2**63 + 77
COUNT = 24


def prompts(tokenizer: TextTokenizer) -> list[list[int]]:
    """50 prompts: of one token, over the length of a first KV buffer, Chinese, code, and everything between."""
    rng = random.Random(4)
    found = [[72], tokenizer.encode("你好，世界"), tokenizer.encode("def f(x):\n    return"), [STOP_ID, STOP_ID]]
    found += [[rng.randrange(300) for _ in range(length)] for length in (2, 3, 31, 32, 33, 64, 127, 128, 129, 300)]
    found += [[rng.randrange(300) for _ in range(rng.randint(1, 40))] for _ in range(50 - len(found))]
    return found


def assert_is_plain(result: Result, plain: PlainTarget, prompt: list[int], params: SamplingParams, count: int) -> None:
    truth = plain.ids(prompt, count, params, SEED, (STOP_ID,))
    assert list(result.ids) == truth
    assert result.reason is (FinishReason.STOP if truth[-1] == STOP_ID else FinishReason.LENGTH)
    usage = result.report.usage
    assert usage.generated_tokens == len(truth)
    assert usage.context_tokens == len(prompt)
    assert usage.accepted_tokens == sum(piece.is_accepted for piece in result.pieces)
    assert result.seed == SEED


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("pace", [PaceKind.WAIT, PaceKind.RUN_ON], ids=lambda pace: pace.value)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("draft", "hint"), DRAFTS, ids=str)
async def test_any_drafter_any_length_any_pace_gives_the_targets_own_ids(
    loaded_tiny: LoadedTarget,
    tiny_pair: TinyPair,
    tiny_tokenizer: TextTokenizer,
    plain: PlainTarget,
    draft: str,
    sampling: str,
    hint: tuple[int, int],
    pace: PaceKind,
) -> None:
    params, every = SAMPLINGS[sampling], prompts(tiny_tokenizer)
    settings: dict[str, Any] = {"hint_tokens": hint[0], "hint_width": hint[1]}
    other = every[4 + DRAFTS.index((draft, hint)) * 3]
    accepted = 0
    async with (
        serving(loaded_tiny, max_wait_ms=60_000 if draft == "same" else 5) as running,
        client(running, tiny_pair, draft, **settings) as device,
    ):
        for prompt in (every[0], other):
            result = await device.generate(prompt, max_new_tokens=COUNT, sampling=params, seed=SEED, pace=pace)
            assert_is_plain(result, plain, prompt, params, COUNT)
            accepted += result.report.usage.accepted_tokens
    if draft == "same" and pace is PaceKind.WAIT:  # run on, it is a race whether a hint comes in time
        assert accepted > 0
    if draft == "none":
        assert accepted == 0


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("part", range(5))
async def test_fifty_prompts_with_a_half_right_drafter_give_the_targets_own_ids(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tiny_tokenizer: TextTokenizer, plain: PlainTarget, part: int
) -> None:
    """C01, ten at a time, with an acceptance between nothing and everything."""
    accepted = committed = 0
    async with (
        serving(loaded_tiny, max_wait_ms=60_000, engine_options={"cost": FreeTokens()}) as running,
        client(running, tiny_pair, "noisy", hint_tokens=4) as device,
    ):
        for prompt in prompts(tiny_tokenizer)[part::5]:
            result = await device.generate(prompt, max_new_tokens=32, sampling=GREEDY, seed=SEED, pace=PaceKind.WAIT)
            assert_is_plain(result, plain, prompt, GREEDY, 32)
            accepted += result.report.usage.accepted_tokens
            committed += len(result.ids)
    assert 0.2 < accepted / committed < 0.9


@pytest.mark.usefixtures("always_drafts")
async def test_the_targets_own_weights_are_accepted_always(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tiny_tokenizer: TextTokenizer
) -> None:
    """In pace wait nothing but the id behind the prompt and the bonus ids comes without a hint."""
    params = SamplingParams(temperature=1.0)
    async with (
        serving(loaded_tiny, max_wait_ms=60_000, engine_options={"cost": FreeTokens()}) as running,
        client(running, tiny_pair, "same", hint_tokens=8) as device,
    ):
        result = await device.generate(
            [70, 71], max_new_tokens=91, sampling=params, seed=3, pace=PaceKind.WAIT, stop_ids=()
        )
    flags = [piece.is_accepted for piece in result.pieces]
    assert len(flags) == 91
    steps = result.report.usage.steps
    assert sum(flags) >= 91 - steps
    assert steps <= 1 + 45  # the prompt's own, and with a hint or more two ids at least; how many more is a race


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": ""}, {"role": "user", "content": "Hi there"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "<|end|>你好"}, {"role": "assistant", "content": "x"}],
    ],
    ids=["empty system", "empty user", "markers in a message"],
)
async def test_chats_go_through_the_targets_template(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, messages: list[dict[str, str]]
) -> None:
    async with serving(loaded_tiny) as running, client(running, tiny_pair, "same") as device:
        ids = device.encode(messages)
        result = await device.generate(messages, max_new_tokens=COUNT, sampling=GREEDY, seed=SEED)
    assert ids[-1] == 3
    assert_is_plain(result, plain, ids, GREEDY, COUNT)
    rendered = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages) + "<|assistant|>"
    assert device.tokenizer.decode(ids, skip_special=False) == rendered


async def test_a_text_ends_where_the_targets_context_is_full(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    rng = random.Random(8)
    prompt = [rng.randrange(4, 300) for _ in range(500)]
    async with serving(loaded_tiny) as running, client(running, tiny_pair, "same", hint_tokens=8) as device:
        result = await device.generate(prompt, max_new_tokens=100, sampling=GREEDY, stop_ids=(), pace=PaceKind.WAIT)
    assert list(result.ids) == plain.ids(prompt, 12, GREEDY)
    assert result.reason is FinishReason.CONTEXT_FULL


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("hint_tokens", [1, 4, 8])
@pytest.mark.parametrize("pace", [PaceKind.WAIT, PaceKind.RUN_ON], ids=lambda pace: pace.value)
async def test_rejection_writes_text_and_accounts_for_its_rows(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, hint_tokens: int, pace: PaceKind
) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    async with (
        serving(loaded_tiny, max_wait_ms=60_000, engine_options={"cost": FreeTokens()}) as running,
        client(running, tiny_pair, "noisy", hint_tokens=hint_tokens, hint_width=4) as device,
    ):
        result = await device.generate(
            [70, 71], max_new_tokens=60, sampling=params, rule=Rule.REJECTION, pace=pace, stop_ids=()
        )
    assert len(result.ids) == 60
    assert max(result.ids) < tiny_pair.vocabulary_size
    traffic, usage = result.report.traffic, result.report.usage
    assert usage.accepted_tokens < 60
    assert usage.accepted_tokens > 0 or pace is PaceKind.RUN_ON  # run on, a hint may never come in time
    nodes = result.report.engine.hint_nodes
    assert nodes >= usage.hint_nodes >= usage.accepted_tokens  # some may have come behind the last id
    assert 40 * nodes <= traffic.hint_bytes <= 250 * nodes
    assert traffic.hint_bytes < traffic.up_bytes
    assert traffic.kinds.get("hint", 0) == result.report.hints


async def test_rejection_at_temperature_0_is_greedy(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    async with serving(loaded_tiny) as running, client(running, tiny_pair, "noisy", hint_width=3) as device:
        result = await device.generate(
            [70, 71], max_new_tokens=40, sampling=GREEDY, rule=Rule.REJECTION, seed=SEED, pace=PaceKind.WAIT
        )
    assert_is_plain(result, plain, [70, 71], GREEDY, 40)


@pytest.mark.parametrize("stopped", [0, 5, 17])
async def test_several_clients_at_once_each_get_their_own_text(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, stopped: int
) -> None:
    import asyncio

    async with serving(loaded_tiny) as running:

        async def one(number: int) -> None:
            prompt, params = [50 + number, 60 + stopped], list(SAMPLINGS.values())[number % 3]
            async with client(running, tiny_pair, ["same", "noisy", "none"][number % 3]) as device:
                result = await device.generate(prompt, max_new_tokens=20 + number, sampling=params, seed=SEED)
            assert_is_plain(result, plain, prompt, params, 20 + number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(one(number))
