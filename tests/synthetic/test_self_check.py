"""The self-check lets through what is served exactly, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cloud_verifier.hf import CausalLm
from cloud_verifier.self_check import self_check
from cloud_verifier.target_model import RowInput, TorchTarget
from shared.errors import ModelLoadError

SMALL = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "full_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen2, sliding": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "Qwen3": ("Qwen3Config", {}),
    "Mistral, sliding": ("MistralConfig", {"sliding_window": 8}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "Gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "layer_types": SLIDING, "query_pre_attn_scalar": 16}),
}


def build(kind: str) -> TorchTarget:
    name, changes = KINDS[kind]
    config = getattr(transformers, name)(**{**SMALL, **changes})
    torch.manual_seed(1)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) is not None else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return TorchTarget(CausalLm(model), SMALL["max_position_embeddings"], 4 << 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_these_architectures_pass(kind: str, one_torch_thread: None) -> None:
    target = build(kind)
    assert self_check(target, 1e-4) < 1e-4
    assert (target.pool.slots, target.pool.table.used) == (0, 0)
    target.pool.check_integrity()


@pytest.mark.parametrize("kind", ["Mistral, sliding", "Gemma2", "Gemma3", "Qwen2, sliding"])
def test_a_window_of_the_model_is_seen(kind: str, one_torch_thread: None) -> None:
    assert build(kind).lm.sliding_window == 8


def all_seen(parents: Any) -> Any:
    return np.ones((len(parents), len(parents)), np.bool_)


def a_chain(parents: Any) -> Any:
    return np.tri(len(parents), dtype=np.bool_)


def positions_in_order(parents: Any) -> Any:
    return np.arange(len(parents))


@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
@pytest.mark.parametrize(
    ("name", "sabotage"),
    [("ancestors", all_seen), ("ancestors", a_chain), ("depths_of", positions_in_order)],
    ids=["no mask", "a causal mask over a tree", "positions in order over a tree"],
)
def test_a_wrong_mask_or_position_is_refused(
    kind: str, name: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch, one_torch_thread: None
) -> None:
    target = build(kind)
    monkeypatch.setattr(f"cloud_verifier.staging.{name}", sabotage)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)


@pytest.mark.parametrize("kind", ["Mistral, sliding", "Gemma2", "Gemma3", "Qwen2, sliding"])
def test_a_window_that_is_not_masked_is_refused(kind: str, one_torch_thread: None) -> None:
    target = build(kind)
    target._staging._kinds = ("full_attention", "full_attention")
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)


def test_a_cache_that_keeps_the_wrong_rows_is_refused(monkeypatch: pytest.MonkeyPatch, one_torch_thread: None) -> None:
    target = build("Llama")

    def keep_without_compaction(self: Any, offsets: Any) -> None:
        self.length += len(offsets)

    monkeypatch.setattr("cloud_verifier.kv_pool.KvSlot.keep", keep_without_compaction)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)


def test_scores_that_are_not_numbers_are_refused(one_torch_thread: None) -> None:
    target = build("Llama")
    with torch.no_grad():
        target.lm.model.model.norm.weight[0] = float("nan")
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)


def test_rows_of_one_step_do_not_touch_each_other(one_torch_thread: None) -> None:
    """Batched equals alone, whatever the order of the rows."""
    target = build("Gemma3")

    def row(slot: Any, n: int) -> RowInput:
        assert slot.try_reserve(6 + n)
        return RowInput(slot, list(range(3, 9 + n)), range(-1, 5 + n), range(6 + n))

    rows = [row(target.new_slot(), n) for n in range(3)]
    for order in (rows, rows[::-1]):
        together = target.forward(order).split([len(one.ids) for one in order])
        for one, scores in zip(order, together, strict=True):
            alone = target.forward([row(target.new_slot(), len(one.ids) - 6)])
            torch.testing.assert_close(scores, alone, rtol=0, atol=1e-4)
