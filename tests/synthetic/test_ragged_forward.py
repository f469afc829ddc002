"""One forward over sessions of any length and shape gives each row what it would get alone, whatever model it is."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cloud_verifier.hf import CausalLm, load_causal_lm
from cloud_verifier.kv_pages import PAGE_TOKENS
from cloud_verifier.kv_pool import KvSlot, token_bytes
from cloud_verifier.staging import group_rows
from cloud_verifier.target_model import RowInput, TorchTarget
from shared.errors import ConfigError, ModelLoadError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOLERANCE = 1e-4
IDS = 120
CONTEXT = 128
SMALL = {
    "vocab_size": IDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "full_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", {}),
    "Llama": ("LlamaConfig", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen2": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1}),
    "Mistral": ("MistralConfig", {}),
    "Gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "Gemma3": ("Gemma3TextConfig", {"layer_types": SLIDING, "query_pre_attn_scalar": 16}),
}


def tiny_model(name: str, changes: dict[str, Any]) -> Any:
    config = getattr(transformers, name)(**{**SMALL, **changes})
    torch.manual_seed(1)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) is not None else "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@functools.cache
def lm_of(kind: str, window: int = 8) -> CausalLm:
    name, changes = KINDS[kind]
    slides = {} if kind in ("GPT-2", "Llama", "Qwen3") else {"sliding_window": window}
    return CausalLm(tiny_model(name, {**slides, **changes}))


def target_of(lm: CausalLm, pages: int = 128) -> TorchTarget:
    return TorchTarget(lm, CONTEXT, pages * page_bytes(lm))


def page_bytes(lm: CausalLm) -> int:
    return token_bytes(lm.kv_shapes(), torch.float32) * PAGE_TOKENS


@pytest.fixture
def llama() -> TorchTarget:
    return target_of(lm_of("Llama"))


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(IDS) for _ in range(count)]


def chain(count: int) -> list[int]:
    return list(range(-1, count - 1))


def random_tree(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(-1, index - 1) for index in range(count)]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def row_of(slot: KvSlot, ids: Sequence[int], parents: Sequence[int], wanted: Sequence[int] | None = None) -> RowInput:
    assert slot.try_reserve(len(ids))
    return RowInput(slot, ids, parents, range(len(ids)) if wanted is None else wanted)


def forward(target: TorchTarget, rows: Sequence[RowInput]) -> list[torch.Tensor]:
    """Scores row by row."""
    return list(target.forward(rows).split([len(row.wanted) for row in rows]))


def filled(target: TorchTarget, ids: Sequence[int]) -> KvSlot:
    slot = target.new_slot()
    if ids:
        target.forward([row_of(slot, ids, chain(len(ids)), [])])
        slot.keep(range(len(ids)))
    return slot


def alone(target: TorchTarget, context: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
    """What a session gets that nobody shares a forward with. Shapes: (len(ids), V)."""
    slot = filled(target, context)
    scores = target.forward([row_of(slot, ids, parents)])
    target.release(slot)
    return scores


def assert_same(scores: torch.Tensor, own: torch.Tensor) -> None:
    torch.testing.assert_close(scores, own, atol=TOLERANCE, rtol=0)
    assert torch.equal(scores.argmax(-1), own.argmax(-1))


def assert_paths(lm: CausalLm, context: Sequence[int], ids: Sequence[int], parents: Sequence[int],
                 scores: torch.Tensor) -> None:  # fmt: skip
    """Each path of the tree against the model's own causal forward."""
    for leaf in set(range(len(ids))) - set(parents):
        path = path_to(parents, leaf)
        own = lm.own_causal_scores([*context, *(ids[node] for node in path)])[len(context) :]
        assert_same(scores[path], own)


# ---------------------------------------------------------------- C19: short contexts beside long ones

LENGTHS = (1, 2, 17, 64)


@pytest.mark.parametrize("is_reversed", [False, True], ids=["short first", "long first"])
@pytest.mark.parametrize("kind", ["GPT-2", "Llama", "Qwen3", "Gemma2", "Gemma3"])
def test_contexts_of_any_length_in_one_batch_are_scored_as_alone(kind: str, is_reversed: bool) -> None:
    rng, lm = random.Random(19), lm_of(kind)
    target = target_of(lm)
    contexts = [random_ids(rng, length) for length in LENGTHS]
    if is_reversed:
        contexts.reverse()
    rows = [row_of(target.new_slot(), context, chain(len(context))) for context in contexts]
    for row, context, scores in zip(rows, contexts, forward(target, rows), strict=True):
        assert_same(scores, lm.own_causal_scores(context))
        assert_same(scores, alone(target, [], context, chain(len(context))))
        row.slot.keep(range(len(context)))
    for shapes in (("chain", "tree", "chain", "tree"), ("tree", "chain", "tree", "chain")):
        hints = []
        for shape in shapes:
            count = rng.randint(2, 8)
            hints.append((random_ids(rng, count), random_tree(rng, count) if shape == "tree" else chain(count)))
        verified = [row_of(row.slot, *hint) for row, hint in zip(rows, hints, strict=True)]
        for context, hint, scores in zip(contexts, hints, forward(target, verified), strict=True):
            assert_paths(lm, context, *hint, scores)
            assert_same(scores, alone(target, context, *hint))


@pytest.mark.parametrize("kind", ["GPT-2", "Gemma3"])
def test_a_probe_writes_the_same_text_beside_any_neighbours(kind: str) -> None:
    lm, texts = lm_of(kind), []
    prompt = random_ids(random.Random(20), 9)
    for neighbours in (0, 1, 3, 7, 15):
        rng, target = random.Random(neighbours), target_of(lm)
        probe = filled(target, prompt[:-1])
        others = [filled(target, random_ids(rng, rng.randint(1, 40))) for _ in range(neighbours)]
        text = [prompt[-1]]
        for _ in range(12):
            rows = [row_of(probe, text[-1:], [-1])]
            rows += [row_of(other, random_ids(rng, 5), random_tree(rng, 5)) for other in others]
            order = rng.sample(range(len(rows)), len(rows))
            scores = dict(zip(order, forward(target, [rows[index] for index in order]), strict=True))
            probe.keep([0])
            text.append(int(scores[0][0].topk(3).indices[len(text) % 3]))  # the best alone would soon repeat
            for other in others:
                other.keep(range(rng.randint(0, 1)))
        texts.append(text)
    assert all(text == texts[0] for text in texts)
    assert len(set(texts[0])) > 3


# ---------------------------------------------------------------- C12: wrong hints across a sliding window


@pytest.mark.parametrize("window", [8, 16])
@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Gemma2", "Gemma3"])
def test_wrong_hints_across_a_sliding_window_leave_every_path_as_the_models_own(kind: str, window: int) -> None:
    rng, lm = random.Random(window), lm_of(kind, window)
    assert lm.sliding_window == window
    target = target_of(lm)
    truths = [random_ids(rng, 104) for _ in range(9)]
    own = [lm.own_causal_scores(truth) for truth in truths]
    slots = [filled(target, truth[:length]) for truth, length in zip(truths, range(8, 41, 4), strict=True)]
    for step in range(16):
        rows, wrong_at = [], []
        for truth, slot in zip(truths, slots, strict=True):
            right = truth[slot.length : slot.length + 5]
            wrong = rng.randrange(1, 5)
            # five right ids; behind one of them two wrong ones branch off, on a chain they take the place of the rest
            is_tree = rng.random() < 0.5
            kept = right if is_tree else right[:wrong]
            ids = [*kept, (truth[slot.length + wrong] + 1) % IDS, rng.randrange(IDS)]
            rows.append(row_of(slot, ids, [*chain(len(kept)), wrong - 1, len(kept)]))
            wrong_at.append(wrong)
        probe = step % len(slots)
        for index, (row, slot, scores) in enumerate(zip(rows, slots, forward(target, rows), strict=True)):
            right_count = len(row.ids) - 2
            assert_same(scores[:right_count], own[index][slot.length : slot.length + right_count])
            if index == probe:
                assert_paths(lm, truths[index][: slot.length], row.ids, row.parents, scores)
            slot.keep(range(min(rng.randint(wrong_at[index], 5), right_count)))
            if rng.random() < 0.2:
                slot.roll_back(slot.length - rng.randint(0, 4))
    target.pool.check_integrity()
    assert all(slot.length > length + window for slot, length in zip(slots, range(8, 41, 4), strict=True))


# ---------------------------------------------------------------- C18: many rows that come and go


@dataclass
class Member:
    """A session of the crowd: its slot, and its ids as a plain list."""

    slot: KvSlot
    ids: list[int]


@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
def test_sixteen_rows_that_come_and_go_are_scored_as_alone(kind: str) -> None:
    rng, lm = random.Random(18), lm_of(kind)
    target, other = target_of(lm), target_of(lm)
    members = [Member(target.new_slot(), random_ids(rng, rng.randint(1, 30))) for _ in range(16)]
    joined = 16
    for _ in range(60):
        taking_part = rng.sample(members, rng.choice([16, rng.randint(1, 16)]))
        rows, starts = [], []
        for member in taking_part:
            feed = member.ids[member.slot.length :]
            nodes = rng.randint(1, 8)
            tree = random_tree(rng, nodes)
            ids = [*feed, *random_ids(rng, nodes)]
            parents = [*chain(len(feed)), *(len(feed) + parent if parent >= 0 else len(feed) - 1 for parent in tree)]
            starts.append(len(feed))
            rows.append(row_of(member.slot, ids, parents))
        for member, row, fed, scores in zip(taking_part, rows, starts, forward(target, rows), strict=True):
            context = member.ids[: member.slot.length]
            everything, parents = [*context, *row.ids], chain(len(context))
            parents += [len(context) + parent if parent >= 0 else len(context) - 1 for parent in row.parents]
            slot = other.new_slot()
            own = forward(other, [row_of(slot, everything, parents, range(len(context), len(everything)))])[0]
            other.release(slot)
            assert_same(scores, own)
            path = [index for index in path_to(row.parents, rng.randrange(fed, len(row.ids))) if index >= fed]
            kept = path[: rng.randint(0, len(path))]
            member.slot.keep([*range(fed), *kept])
            member.ids += [row.ids[index] for index in kept]
        for place, member in enumerate(members):
            if rng.random() < 0.3 and member.slot.length:
                member.slot.roll_back(rng.randint(max(0, member.slot.length - 20), member.slot.length))
                del member.ids[member.slot.length :]
                member.ids.append(rng.randrange(IDS))
            if rng.random() < 0.1 or len(member.ids) > 80:
                target.release(member.slot)
                members[place] = Member(target.new_slot(), random_ids(rng, rng.randint(1, 30)))
                joined += 1
        target.pool.check_integrity()
    assert joined > 60
    for member in members:
        target.release(member.slot)
    assert target.pool.table.used == 0


# ---------------------------------------------------------------- groups


def padded_cells(counts: Sequence[int], ends: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    return sum(len(group) * max(counts[i] for i in group) * max(ends[i] for i in group) for group in groups)


def random_lengths(rng: random.Random) -> tuple[list[int], list[int]]:
    counts = [rng.choice([1, 1, 5, 6, 40]) for _ in range(rng.randint(1, 20))]
    return counts, [count + rng.choice([0, 1, 16, 17, rng.randint(0, 200)]) for count in counts]


@pytest.mark.parametrize("overhead", [0, 50, 1_000, 10**12])
def test_each_row_is_in_one_group_and_padding_costs_no_more_than_the_groups_saved(overhead: int) -> None:
    rng = random.Random(overhead)
    for _ in range(200):
        counts, ends = random_lengths(rng)
        groups = group_rows(counts, ends, overhead)
        assert sorted(index for group in groups for index in group) == list(range(len(counts)))
        own = sum(count * end for count, end in zip(counts, ends, strict=True))
        assert padded_cells(counts, ends, groups) - own <= overhead * (len(counts) - len(groups))
        if overhead == 10**12:
            assert len(groups) == 1


def test_without_overhead_only_rows_of_one_shape_attend_together() -> None:
    rng = random.Random(5)
    for _ in range(200):
        counts, ends = random_lengths(rng)
        shapes = {frozenset((counts[i], ends[i]) for i in group) for group in group_rows(counts, ends, 0)}
        assert all(len(shape) == 1 for shape in shapes)
    assert group_rows([3, 3, 3], [9, 9, 9], 0) == [[0, 1, 2]]


def test_rows_of_like_length_attend_together_and_a_long_one_apart() -> None:
    assert group_rows([5, 5, 400, 6], [50, 60, 400, 55], 1_000) == [[2], [3, 1, 0]]


def test_no_row_makes_no_group() -> None:
    assert group_rows([], [], 100) == []


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Gemma3"])
def test_scores_do_not_depend_on_how_rows_are_grouped(kind: str) -> None:
    rng, target = random.Random(6), target_of(lm_of(kind))
    contexts = [random_ids(rng, length) for length in (0, 3, 20, 20, 60, 61, 90)]
    slots = [filled(target, context) for context in contexts]
    counts = (30, 1, 5, 5, 1, 6, 2)
    rows = [row_of(slot, random_ids(rng, n), random_tree(rng, n)) for slot, n in zip(slots, counts, strict=True)]
    found, groups = [], []
    for overhead in (0, 600, 10**12):
        target._staging._overhead = overhead
        groups.append(len(target._staging.stage(rows).attention._groups))
        found.append(target.forward(rows))
    assert groups[0] > groups[1] > groups[2] == 1
    for scores in found[1:]:
        assert_same(scores, found[0])


# ---------------------------------------------------------------- rows that want no scores


def test_a_forward_of_prefill_rows_only_scores_nothing_and_keeps_everything(llama: TorchTarget) -> None:
    rng = random.Random(7)
    contexts = [random_ids(rng, length) for length in (40, 1, 17)]
    rows = [row_of(llama.new_slot(), context, chain(len(context)), []) for context in contexts]
    assert llama.forward(rows).shape == (0, IDS)
    for row, context in zip(rows, contexts, strict=True):
        row.slot.keep(range(len(context)))
    hints = [random_ids(rng, 3) for _ in rows]
    verified = [row_of(row.slot, hint, chain(3)) for row, hint in zip(rows, hints, strict=True)]
    for context, hint, scores in zip(contexts, hints, forward(llama, verified), strict=True):
        assert_same(scores, llama.lm.own_causal_scores([*context, *hint])[-3:])


def test_wanted_scores_come_row_after_row_whatever_is_left_out(llama: TorchTarget) -> None:
    rng = random.Random(8)
    contexts = [random_ids(rng, length) for length in (2, 40, 9, 1, 17)]
    wanted = ([1], [], [0, 3, 8], [], [16])
    rows = [
        row_of(llama.new_slot(), context, chain(len(context)), want)
        for context, want in zip(contexts, wanted, strict=True)
    ]
    scores = llama.forward(rows)
    assert scores.shape == (5, IDS)
    for context, want, own in zip(contexts, wanted, scores.split([len(want) for want in wanted]), strict=True):
        if want:
            assert_same(own, llama.lm.own_causal_scores(context)[want])


def test_a_prefill_in_pieces_beside_others_equals_one_in_one_piece(llama: TorchTarget) -> None:
    rng = random.Random(9)
    context, neighbour = random_ids(rng, 100), filled(llama, random_ids(rng, 5))
    slot, at, scores = llama.new_slot(), 0, []
    while at < len(context):
        piece = context[at : at + rng.choice([1, 15, 16, 17, 33])]
        rows = [row_of(neighbour, random_ids(rng, 4), random_tree(rng, 4)), row_of(slot, piece, chain(len(piece)))]
        scores.append(forward(llama, rows)[1])
        slot.keep(range(len(piece)))
        at += len(piece)
    assert_same(torch.cat(scores), llama.lm.own_causal_scores(context))


# ---------------------------------------------------------------- what is refused

MIXED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention"] * 3,
            "vocab_size_per_layer_input": IDS,
            "hidden_size_per_layer_input": 8,
        },
        r"layers \[2\] of 3 keep no keys and values",
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
        },
        "this architecture",
    ),
    "Falcon-H1": ("FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "this architecture"),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96}, "this architecture"),
}


@pytest.mark.parametrize("kind", MIXED)
def test_a_layer_without_keys_and_values_of_its_own_is_refused(kind: str) -> None:
    name, changes, message = MIXED[kind]
    lm = CausalLm(tiny_model(name, changes))
    with pytest.raises(ModelLoadError, match=message):
        TorchTarget(lm, CONTEXT, 4 << 20)


def test_a_layer_that_never_asks_the_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("LlamaConfig", {"num_hidden_layers": 4})
    for layer in (1, 2):
        monkeypatch.setattr(model.model.layers[layer], "forward", lambda hidden_states, **kwargs: hidden_states)
    with pytest.raises(ModelLoadError, match=r"layers \[1, 2\] of 4 keep no keys and values"):
        TorchTarget(CausalLm(model), CONTEXT, 4 << 20)


def test_an_architecture_without_attention_is_refused_at_load(tmp_path: Path) -> None:
    config = transformers.Mamba2Config(
        vocab_size=IDS, hidden_size=64, num_hidden_layers=1, num_heads=8, head_dim=16, state_size=8, n_groups=1
    )
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_causal_lm(tmp_path, torch.float32, "cpu")


def test_memory_for_less_than_a_page_is_a_configuration_error() -> None:
    lm = lm_of("Llama")
    for kv_bytes in (0, 1, page_bytes(lm) - 1):
        with pytest.raises(ConfigError, match="hold no page") as caught:
            TorchTarget(lm, CONTEXT, kv_bytes)
        assert caught.value.field == "kv_memory"


def test_the_context_is_no_longer_than_the_pool() -> None:
    lm = lm_of("Llama")
    for pages, context_size in ((1, 16), (7, 112), (8, 128), (9, 128)):
        target = TorchTarget(lm, CONTEXT, (pages + 1) * page_bytes(lm) - 1)
        assert (target.context_size, target.pool.table.total) == (context_size, pages)
    slot = target_of(lm, 1).new_slot()
    assert slot.try_reserve(16)
    assert not slot.try_reserve(17)


# ---------------------------------------------------------------- torch.compile


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_gives_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as torch.compile does it, without generating code, which takes a minute: what may break is the trace."""
    lm = CausalLm(tiny_model("LlamaConfig", {"num_hidden_layers": 1}))
    target, rng, graphs = target_of(lm), random.Random(10), []

    def counted(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(lm.model, "compile", functools.partial(lm.model.compile, backend=counted))
    slots = [filled(target, random_ids(rng, length)) for length in (1, 20)]
    counts = ((5, 3), (1, 40))
    batches = [
        [row_of(slot, random_ids(rng, n), random_tree(rng, n)) for slot, n in zip(slots, each, strict=True)]
        for each in counts
    ]
    own = [target.forward(rows) for rows in batches]
    lm.compile()
    assert_same(target.forward(batches[0]), own[0])
    traced = len(graphs)
    assert traced
    assert_same(target.forward(batches[1]), own[1])
    assert len(graphs) == traced, "another shape of a step was traced anew"
