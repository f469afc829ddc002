"""C12, C13: drafts whose layers see a window, drafts with a short context; what cannot be rolled back is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from edge_client.drafter import Budget, DraftTask, ModelDrafter
from edge_client.onnx_drafter import MAX_CHUNK, OnnxModel
from shared.errors import ModelLoadError
from shared.sampling import GREEDY
from shared.types import Epoch, Rule
from tests.oracle import PlainTarget
from tests.tiny_pair import CONTEXT, ROWS, TinyPair, build_tokenizer, export

IDS = 300
WINDOW = 16
TINY = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "Mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "Lfm2": {"layer_types": ["full_attention", "conv"]},
}
"""Gemma2: a sliding layer, then a full one; Mistral: all slide; Lfm2: the second layer holds no keys and values."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, one_torch_thread: None) -> Path:
    """`<kind>` and its export, `<kind>-draft`, for each kind."""
    root = tmp_path_factory.mktemp("windows")
    for kind, settings in MODELS.items():
        build_tokenizer(root / kind)
        transformers.set_seed(12)
        config = getattr(transformers, f"{kind}Config")(**TINY, **settings)
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(root / kind)
    export([(root / kind, root / f"{kind}-draft") for kind in MODELS])
    return root


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(IDS) for _ in range(count)]


def changed_draft(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy whose configuration says otherwise."""
    shutil.copytree(source, folder)
    file = folder / "genai_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"] = {**content["model"], **changes}
    file.write_text(json.dumps(content), encoding="utf-8")
    return folder


def rounds(model: OnnxModel, rng: random.Random, truth: list[int], prompt: int) -> Iterator[tuple[int, Any]]:
    """Drafts of 5 ids of which one is wrong, rolled back to where it went wrong; right ids fed, with their scores.

    Every third time the branch that was left is taken back for a moment.
    """
    yield prompt, model.feed(truth[:prompt])
    while model.length < len(truth):
        wrong = rng.randrange(5)
        right = truth[model.length : model.length + wrong]
        draft = [*right, *random_ids(rng, 5 - wrong)][: model.context_size - model.length]
        start, kept = model.length, len(right)
        model.feed(draft)
        branch = model.save_rows(start)
        model.rewind(start)
        if rng.random() < 0.3:
            model.append_rows(branch)
            model.rewind(start + kept)
        more = truth[model.length : start + kept + 1]
        if more:
            scores = model.feed(more)
            yield model.length, scores


@pytest.mark.parametrize("prompt", [8, 15, 16, 17, 40])
def test_wrong_drafts_across_a_window_leave_the_scores_of_the_model_itself(folders: Path, prompt: int) -> None:
    """C12: no row that a roll-back needs is dropped, for the buffers of sliding layers are as long as the others."""
    rng = random.Random(prompt)
    truth = random_ids(rng, CONTEXT)
    own = PlainTarget(folders / "Gemma2", IDS).rows(truth)
    model, checked = OnnxModel(folders / "Gemma2-draft"), 0
    assert model.context_size == CONTEXT
    for length, scores in rounds(model, rng, truth, prompt):
        assert np.abs(scores - own[length - 1]).max() < 1e-4
        checked += 1
    assert model.length == CONTEXT
    assert checked > 100
    model.rewind(WINDOW + 3)  # far back, with a chunk that is longer than the window behind it
    after = WINDOW + 3 + 2 * MAX_CHUNK + 5
    assert np.abs(model.feed(truth[WINDOW + 3 : after]) - own[after - 1]).max() < 1e-4


def test_a_draft_that_lost_its_window_in_the_export_ends_where_the_window_does(folders: Path) -> None:
    """C12. Once wrong: the exporter applies Mistral's window to no layer; the draft was another model beyond it."""
    rng, model = random.Random(3), OnnxModel(folders / "Mistral-draft")
    truth = random_ids(rng, WINDOW + 1)
    own = PlainTarget(folders / "Mistral", IDS).rows(truth)
    assert model.context_size == WINDOW
    for _ in range(3):
        model.rewind(0)
        for length, scores in rounds(model, rng, truth[:WINDOW], 1):
            assert np.abs(scores - own[length - 1]).max() < 1e-4
        assert model.length == WINDOW
    model.context_size = CONTEXT
    assert np.abs(model.feed(truth[WINDOW:]) - own[WINDOW]).max() > 0.1, "this export keeps the window: let it draft on"


def test_a_draft_with_a_state_that_cannot_be_rolled_back_is_refused_at_load(folders: Path) -> None:
    """C12. Once wrong: where only a later layer had such a state, the first draft failed, with ONNX Runtime's words."""
    assert_refused(folders / "Lfm2-draft", "past.1.conv, past_key_values.1.key")


def test_a_draft_with_a_cache_that_would_never_be_fed_is_refused_at_load(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """C12: its configuration tells of one layer less than the graph has."""
    decoder = json.loads((tiny_pair.same_draft / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    one_less = {**decoder, "num_hidden_layers": 1}
    folder = changed_draft(tiny_pair.same_draft, tmp_path / "draft", decoder=one_less)
    assert_refused(folder, "past_key_values.1.key, past_key_values.1.value")


def assert_refused(folder: Path, names: str) -> None:
    """By one line that says where, why, and what was met."""
    with pytest.raises(ModelLoadError, match="nothing else can be rolled back; see ") as caught:
        OnnxModel(folder)
    assert str(caught.value).startswith(str(folder / "model.onnx"))
    assert str(caught.value).endswith(f"see {names}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture(scope="module")
def short_draft(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own weights, with a context of 48."""
    return changed_draft(tiny_pair.same_draft, tmp_path_factory.mktemp("short") / "draft", context_length=48)


@pytest.mark.parametrize("width", [1, 3])
def test_a_draft_of_48_is_asked_at_every_length_up_to_the_targets_64_and_never_fails(
    short_draft: Path, tiny_pair: TinyPair, width: int
) -> None:
    """C13: with paths before the draft, up and down; no position at or beyond its context is drafted or cached."""
    rng, model = random.Random(13), OnnxModel(short_draft)
    assert model.context_size == 48
    drafter = ModelDrafter(model, np.arange(ROWS) < tiny_pair.vocabulary_size)
    drafter.begin(DraftTask(GREEDY, 7, Rule.AGREEMENT, Epoch(1), generated_from=0))
    ids = random_ids(rng, 64)
    lengths = [*range(40, 65), *range(64, 39, -1)]
    for length, path in product(lengths, (0, 1, 5)):
        drafter.sync(ids[:length])
        tree = drafter.propose(Budget(8, width, tuple(random_ids(rng, path))))
        room = max(0, 48 - length - path)
        assert len(set(tree.parents)) == min(8, room)
        assert bool(tree.ids) == (room > 0)
        assert model.length <= 48


def test_within_its_context_a_short_draft_proposes_what_the_long_one_does(
    short_draft: Path, tiny_pair: TinyPair
) -> None:
    """C13: the bound cuts a proposal, and changes none of its ids."""
    valid, ids = np.arange(ROWS) < tiny_pair.vocabulary_size, random_ids(random.Random(14), 64)
    short, long = (ModelDrafter(OnnxModel(folder), valid) for folder in (short_draft, tiny_pair.same_draft))
    for drafter in (short, long):
        drafter.begin(DraftTask(GREEDY, 7, Rule.AGREEMENT, Epoch(1), generated_from=0))
    for length in range(36, 48):
        for drafter in (short, long):
            drafter.sync(ids[:length])
        whole = long.propose(Budget(8))
        assert short.propose(Budget(8)).ids == whole.ids[: 48 - length]
