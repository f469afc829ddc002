"""`bench simulate`: figures are those of the times given, the stores keep what they were told, bad input is named."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench import simulate, traces
from bench.pairs import pair
from bench.recorded_draft import AnswerStore, RecordedDrafter
from bench.recorded_target import Times
from bench.simulate import Text
from bench.traces import Trace
from edge_client.drafter import Budget, DraftTask, HintTree, ModelDrafter
from shared.errors import ConfigError
from shared.randomness import ids_digest
from shared.sampling import GREEDY
from shared.types import Epoch, PaceKind, Rule

IDS = tuple(range(100, 164))
TRACE = Trace("made up", (1, 2, 3), IDS, seed=5)
TIMES = Times(step_s=0.1, round_trip_s=0.05, draft_s=0.01, node_cost=0.0)
TASK = DraftTask(GREEDY, 5, Rule.AGREEMENT, Epoch(0), 3)


class Knowing:
    """A drafter that is right save at every `wrong_every`th id, where its second choice is."""

    name = "model"

    def __init__(self, wrong_every: int = 0) -> None:
        self.wrong_every, self.length, self.asked = wrong_every, 0, 0

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""

    def sync(self, ids: list[int]) -> None:
        """See Drafter."""
        self.length = len(ids)

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        self.asked += 1
        place = self.length + len(budget.path) - len(TRACE.prompt)
        right = IDS[place] if place < len(IDS) else 7
        is_wrong = self.wrong_every and place % self.wrong_every == self.wrong_every - 1
        ids = ((9, right) if is_wrong else (right, 9))[: budget.width]
        return HintTree(ids, (-1,) * len(ids), (0.8, 0.1)[: len(ids)])


def text_of(drafter: Knowing) -> Text:
    return Text(TRACE, cast(Any, drafter))


def arguments(**changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    args = parser.parse_args(["simulate"])
    return argparse.Namespace(**{**vars(args), **changes})


def test_streaming_takes_a_step_an_id_and_half_a_round_trip() -> None:
    assert simulate._streaming_s(text_of(Knowing()), TIMES) == pytest.approx(64 * 0.1 + 0.025)
    slow = replace(TIMES, commit_s=0.01)
    assert simulate._streaming_s(text_of(Knowing()), slow) == pytest.approx(64 * 0.1 + 63 * 0.01 + 0.025)


@pytest.mark.parametrize("length", [1, 3, 7])
def test_propose_and_wait_with_a_perfect_draft_brings_its_length_and_one_a_round(length: int) -> None:
    rounds = -(-64 // (length + 1))
    taken = simulate._propose_and_wait(text_of(Knowing()), TIMES, length, 1)
    shortest = rounds * (0.1 + 0.05 + 0.01 * length) - 0.025
    assert shortest <= taken <= shortest + rounds * 0.01 / 3 + 1e-9


def test_alternatives_beside_the_chain_save_what_the_first_choice_missed() -> None:
    narrow = simulate._propose_and_wait(text_of(Knowing(3)), TIMES, 4, 1)
    assert simulate._propose_and_wait(text_of(Knowing(3)), TIMES, 4, 2) < narrow


@pytest.mark.parametrize("pace", [PaceKind.RUN_ON, PaceKind.WAIT])
def test_a_cell_tells_what_drafting_ahead_brings_over_both(pace: PaceKind) -> None:
    row = simulate._cell(arguments(drafters="model"), TIMES, [text_of(Knowing(9)) for _ in range(4)], pace)
    assert row["over_streaming"] > 2
    assert row["over_wait"] == pytest.approx(row["over_streaming"] / row["wait_over_streaming"])
    assert row["forwards_per_token"] < 0.5
    assert row["tokens"] == 256
    assert row["ids_sent_per_token"] > 0.5
    assert row["up_bytes_per_token"] > row["ids_sent_per_token"]
    assert row["acceptance_by_depth"][0] > 0.5
    assert max(row["acceptance_by_depth"]) <= 1


def test_without_a_model_none_is_asked() -> None:
    drafter = Knowing()
    row = simulate._cell(arguments(drafters="retrieval"), TIMES, [text_of(drafter)], PaceKind.RUN_ON)
    assert drafter.asked == 0
    assert row["draft_steps_per_token"] == 0
    assert row["over_streaming"] >= 0.99


def test_costs_by_tokens_are_straight_lines_between_the_points_given() -> None:
    cost = simulate._step_costs("1:50,5:70,9:90")
    assert cost is not None
    assert [cost(tokens) for tokens in (1, 3, 5, 9, 50)] == pytest.approx([0.05, 0.06, 0.07, 0.09, 0.09])
    assert simulate._step_costs("") is None


class Counting:
    """Stands for a ModelDrafter; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def begin(self, task: DraftTask) -> None:
        """See Drafter."""

    def sync(self, ids: list[int]) -> None:
        """See Drafter."""

    def propose(self, budget: Budget) -> HintTree:
        """See Drafter."""
        self.asked += 1
        return HintTree((7, 8, 9), (-1, -1, -1), (0.5, 0.25, 0.125))


def test_a_path_is_drafted_once_and_its_answer_outlives_the_run(tmp_path: Path) -> None:
    file, model = tmp_path / "answers.npz", Counting()
    for run in range(2):
        store = AnswerStore(file)
        drafter = RecordedDrafter(TRACE, TASK, cast(ModelDrafter, model), store)
        drafter.sync([1, 2, 3, 100])
        for _ in range(2):
            assert drafter.propose(Budget(1, 2, (101,))) == HintTree((7, 8), (-1, -1), (0.5, 0.25))
        store.save()
        assert model.asked == 1, run
    drafter.sync([1, 2, 3, 50])
    drafter.propose(Budget(1, 2, (101,)))
    assert model.asked == 2
    other_seed = RecordedDrafter(TRACE, replace(TASK, seed=6), cast(ModelDrafter, model), store)
    other_seed.sync([1, 2, 3, 100])
    other_seed.propose(Budget(1, 2, (101,)))
    assert model.asked == 3


# ---------------------------------------------------------------- recorded texts


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A file of two recorded texts, over prompts that need no tokenizer."""
    monkeypatch.setattr(traces, "encoded", lambda chosen, prompts: [[len(prompt), 3] for prompt in prompts])
    monkeypatch.setitem(traces.SETS, "made up", lambda count: ["a" * (n + 1) for n in range(count)])

    def write(prompt: tuple[int, ...] = (1, 3)) -> Path:
        lines = [
            {"set": "made up", "of": 2, "number": n, "prompt": ids_digest(ids).hex(), "seed": n, "ids": [5, 6]}
            for n, ids in enumerate([prompt, (2, 3)])
        ]
        file = tmp_path / "texts.json"
        file.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
        return file

    return write


def test_recorded_texts_come_with_the_prompts_of_the_data_folder(recorded: Callable[..., Path]) -> None:
    assert traces.load(recorded(), pair("qwen"), ["made up"], 2) == [
        Trace("made up", (1, 3), (5, 6), 0),
        Trace("made up", (2, 3), (5, 6), 1),
    ]
    assert len(traces.load(recorded(), pair("qwen"), ["made up"], 1)) == 1
    assert traces.load(recorded(), pair("qwen"), ["humaneval"], 2) == []


def test_recorded_texts_of_other_prompts_are_refused(recorded: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="not those that were recorded"):
        traces.load(recorded((8, 8)), pair("qwen"), ["made up"], 2)


def test_a_file_of_texts_that_is_not_there_and_a_set_that_is_unknown_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json is not there"):
        simulate.run(arguments(traces=tmp_path / "none.json"))
    parser = argparse.ArgumentParser()
    traces.add_parser(parser.add_subparsers())
    with pytest.raises(ConfigError, match="sets must be of"):
        traces.run(parser.parse_args(["record", "--sets", "humaneval,poems"]))
