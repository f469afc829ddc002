"""SmolLM2-135M as target and as its own drafter: the ids of the target alone, as transformers writes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cloud_verifier.loading import LoadedTarget, load_target
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.events import FinishReason
from shared import agreement
from shared.sampling import GREEDY, SamplingParams, warp
from shared.types import Limits, PaceKind
from tests.rig import serving

pytestmark = pytest.mark.real

COUNT = 32
SEED = 424242
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50)
PROMPTS: list[Any] = [
    "def quicksort(items):\n    ",
    [{"role": "system", "content": ""}, {"role": "user", "content": "Why is the sky blue?"}],
]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine are slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(smollm2_target_folder: Path, one_thread: None) -> LoadedTarget:
    return load_target(smollm2_target_folder, "smollm2-135m", "float32", "cpu", Limits())


@pytest.fixture(scope="module")
def truths() -> dict[tuple[bool, int], list[int]]:
    """What the target alone writes, by rule and prompt: the same for every draft."""
    return {}


@pytest.fixture(scope="module")
def own(smollm2_target_folder: Path, one_thread: None) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_target_folder, dtype=torch.float32).eval()


@torch.inference_mode()
def plain_ids(model: Any, prompt: list[int], params: SamplingParams, stop_ids: tuple[int, ...]) -> list[int]:
    """One id after another with transformers' own cache; greedy by its own `generate`."""
    if params.is_greedy:
        context = torch.tensor([prompt])
        ids = model.generate(
            context,
            attention_mask=torch.ones_like(context),
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=list(stop_ids),
            pad_token_id=stop_ids[0],
        )
        return [int(token) for token in ids[0, len(prompt) :]]
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids, fed, cache = list(prompt), list(prompt), None
    while len(ids) < len(prompt) + COUNT and not (len(ids) > len(prompt) and ids[-1] in stop_ids):
        output = model(torch.tensor([fed]), use_cache=True, **{name: cache})
        cache, row = output.past_key_values, np.asarray(output.logits[0, -1].numpy())
        fed = [agreement.choose(warp(row, params), SEED, len(ids))]
        ids += fed
    return ids[len(prompt) :]


def test_generate_and_one_forward_an_id_agree(own: Any) -> None:
    """The two ways of the oracle are one."""
    prompt = [28120, 253, 655]
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(4):
            ids.append(int(own(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert plain_ids(own, prompt, GREEDY, (2,))[:4] == ids[len(prompt) :]


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "agreement"])
async def test_the_real_pair_writes_the_targets_own_ids(
    loaded: LoadedTarget,
    own: Any,
    truths: dict[tuple[bool, int], list[int]],
    smollm2_draft_folder: Path,
    smollm2_fp32_draft_folder: Path,
    params: SamplingParams,
    precision: str,
) -> None:
    folder = smollm2_draft_folder if precision == "int8" else smollm2_fp32_draft_folder
    accepted = committed = 0
    async with serving(loaded, max_wait_ms=60_000) as running:
        config = ClientConfig(verifier=running.address, draft=str(folder), hint_tokens=8, hint_reach=0.0)
        async with SpeculativeClient(config) as device:
            for number, prompt in enumerate(PROMPTS):
                ids = device.encode(prompt)
                known = (params.is_greedy, number)
                if known not in truths:
                    truths[known] = plain_ids(own, ids, params, device.card.stop_ids)
                truth = truths[known]
                result = await device.generate(
                    ids, max_new_tokens=COUNT, sampling=params, seed=SEED, pace=PaceKind.WAIT, logprobs=True
                )
                assert list(result.ids) == truth
                ends = truth[-1] in device.card.stop_ids
                assert result.reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
                assert all(value <= 0 for value in result.logprobs)
                assert result.text == device.tokenizer.decode(result.ids)
                accepted += result.report.usage.accepted_tokens
                committed += len(truth)
                if precision == "fp32":  # all that is judged is accepted
                    assert sum(not piece.is_accepted for piece in result.pieces) <= result.report.usage.steps
            if precision == "fp32":  # what was drafted was right; how much of it came in time is the machine's affair
                assert device.experience.acceptance.share > 0.8
    assert 0 < accepted < committed
