"""The self-check lets through what is served exactly, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cloud_verifier.attention import RaggedAttention
from cloud_verifier.hf import CausalLm
from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.kv_pool import KvPool, token_bytes
from cloud_verifier.self_check import self_check
from cloud_verifier.staging import Staged, Staging, _Layout
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
    "Gemma4, heads of two sizes": (
        "Gemma4TextConfig",
        {
            "sliding_window": 8,
            "layer_types": SLIDING,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "GPT-2": ("GPT2Config", {"n_positions": 128}),
    "GPT-2, scaled by layer": ("GPT2Config", {"n_positions": 128, "scale_attn_by_inverse_layer_idx": True}),
    "OPT": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Phi3": ("Phi3Config", {}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 2}),
}


def build(kind: str, kv_bytes: int = 4 << 20, **more: Any) -> TorchTarget:
    name, changes = KINDS[kind]
    config = getattr(transformers, name)(**{**SMALL, **changes, **more})
    torch.manual_seed(1)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) is not None else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return TorchTarget(CausalLm(model), SMALL["max_position_embeddings"], kv_bytes)  # type: ignore[arg-type]


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


def flipped(gather: Any) -> Any:
    """Pages in the wrong order: right as long as there is one."""
    return lambda pool, layer, pages: gather(pool, layer, pages.flip(1))


def of_the_first_row(gather: Any) -> Any:
    """Everybody reads the first row's pages: right alone."""
    return lambda pool, layer, pages: gather(pool, layer, pages[:1].expand_as(pages))


def not_moved(move: Any) -> Any:
    return lambda pool, slot, source, target: None


def one_layer_moved(move: Any) -> Any:
    def moved(pool: Any, slot: Any, source: Any, target: Any) -> None:
        move(pool, slot, source, target)
        whole, pool._stacks = pool._stacks, [pool._stacks[0][:1]]
        pool.settle()
        pool._stacks = whole

    return moved


@pytest.mark.parametrize(
    ("method", "sabotage"),
    [("gather", flipped), ("gather", of_the_first_row), ("move", not_moved), ("move", one_layer_moved)],
    ids=["pages in the wrong order", "pages of another session", "no compaction", "one layer compacted"],
)
def test_a_pool_that_hands_out_wrong_rows_is_refused(
    method: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch, one_torch_thread: None
) -> None:
    target = build("Llama")
    monkeypatch.setattr(KvPool, method, sabotage(getattr(KvPool, method)))
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)


def packed_order(staged: Staged) -> Staged:
    """Wanted scores in the order of the groups: right alone."""
    return replace(staged, wanted=staged.wanted.sort().values)


def positions_from_nought(staged: Staged) -> Staged:
    return replace(staged, positions=staged.positions - staged.positions.min())


def positions_of_the_longest(staged: Staged) -> Staged:
    """As in a batch padded on the left whose positions are shared: right alone."""
    groups = staged.attention._groups
    together = staged.positions.clone()
    for group in groups[1:]:
        together[group.start : group.stop] += groups[0].stop - groups[0].start
    return replace(staged, positions=together)


@pytest.mark.parametrize("kind", ["Llama", "GPT-2"])
@pytest.mark.parametrize("sabotage", [packed_order, positions_from_nought, positions_of_the_longest])
def test_a_step_that_is_staged_wrong_is_refused(
    kind: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch, one_torch_thread: None
) -> None:
    target = build(kind)
    target._staging._overhead = 0
    stage = Staging.stage
    monkeypatch.setattr(Staging, "stage", lambda self, rows: sabotage(stage(self, rows)))
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)


def test_padding_that_is_not_taken_out_right_is_refused(
    monkeypatch: pytest.MonkeyPatch, one_torch_thread: None
) -> None:
    """Sound alone, and in batches of rows of one length."""
    target = build("Llama")
    target._staging._overhead = 10**9
    assert self_check(target, 1e-4) < 1e-4
    made = _Layout.of

    def shifted(rows: Any, window: int) -> _Layout:
        layout = made(rows, window)
        return layout if layout.unpad is None else replace(layout, unpad=np.sort(layout.pad)[: layout.count])

    monkeypatch.setattr(_Layout, "of", shifted)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("Gemma2", {"softcap": None}), ("Llama", {"scale": 1.0})],
    ids=["no soft cap", "no scale"],
)
def test_an_attention_that_leaves_out_what_the_model_does_is_refused(
    kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, one_torch_thread: None
) -> None:
    target = build(kind, **({"attn_logit_softcapping": 2.0} if kind == "Gemma2" else {}))
    assert self_check(target, 1e-4) < 1e-4
    attend = RaggedAttention.attend

    def changed(self: Any, layer: int, query: Any, scale: float, softcap: float | None) -> Any:
        return attend(self, layer, query, **{"scale": scale, "softcap": softcap, **changes})

    monkeypatch.setattr(RaggedAttention, "attend", changed)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)


@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
def test_a_pool_too_small_for_the_check_is_refused_with_the_setting_that_helps(
    kind: str, one_torch_thread: None
) -> None:
    lm = build(kind).lm
    page = token_bytes(lm.kv_shapes(), torch.float32) * PAGE_TOKENS
    outcomes = []
    for pages in range(1, 9):
        target = TorchTarget(lm, 128, pages * page)
        try:
            self_check(target, 1e-4)
            outcomes.append("")
        except ModelLoadError as error:
            outcomes.append(str(error))
    assert outcomes == sorted(outcomes, reverse=True), "more memory is never worse"
    assert "kv_memory" in outcomes[0]
    assert outcomes[-1] == ""


@pytest.mark.parametrize("context_size", [16, 20, 128])
def test_a_context_of_any_size_can_be_checked(context_size: int, one_torch_thread: None) -> None:
    """16 is the least that the settings let through."""
    lm = build("Gemma3").lm
    assert self_check(TorchTarget(lm, context_size, 4 << 20), 1e-4) < 1e-4


def test_the_check_leaves_other_sessions_as_they_were(one_torch_thread: None) -> None:
    target = build("Llama")
    slot = target.new_slot("anna")
    ids = list(range(3, 43))
    assert slot.try_reserve(len(ids))
    target.forward([RowInput(slot, ids, range(-1, len(ids) - 1), [])])
    slot.keep(range(len(ids)))
    before = [target.pool.content(slot, layer) for layer in range(2)]
    self_check(target, 1e-4)
    for layer, old in enumerate(before):
        assert all(torch.equal(a, b) for a, b in zip(target.pool.content(slot, layer), old, strict=True))
    assert target.pool.table.used == 3


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


def test_scores_that_are_not_numbers_in_a_batch_alone_are_refused(
    monkeypatch: pytest.MonkeyPatch, one_torch_thread: None
) -> None:
    # Once wrong: max() of a number and NaN is the number, so only NaN in the first check was seen.
    target = build("Llama")
    forward = TorchTarget.forward

    def spoilt(self: TorchTarget, rows: Any) -> torch.Tensor:
        scores = forward(self, rows).clone()
        if len(rows) > 1:
            scores[-1, 0] = float("nan")
        return scores

    monkeypatch.setattr(TorchTarget, "forward", spoilt)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(target, 1e-4)
