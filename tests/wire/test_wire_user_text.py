"""`--user-text FILE` over real gRPC: a later run drafts by look-up from what an earlier one has written."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_models import FreeTokens
from cloud_verifier.loading import LoadedTarget
from cloud_verifier.target_model import RowInput
from edge_client.cli import main
from edge_client.tokenizer import TextTokenizer
from edge_client.user_text_file import UserTextFile
from tests.formula_model import FormulaTarget
from tests.rig import serving
from tests.tiny_pair import ROWS, TinyPair

PROMPT = "my letter:"
ANSWER = " that quick fox, def 你好 return 1, jumps over"
"""In itself there is nothing to look up: the two ids that stand in it twice are followed by others."""


class WritesOneText(FormulaTarget):
    """A target that knows one text, and after any other says the same id for ever."""

    def __init__(self, truth: Sequence[int]) -> None:
        super().__init__()
        self.truth = list(truth)

    def _scores(self, row: RowInput) -> torch.Tensor:
        paths: list[list[int]] = []
        for token, parent in zip(row.ids, row.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else row.slot.kept), token])  # type: ignore[attr-defined]
        scores = np.zeros((len(row.wanted), ROWS), np.float32)
        for at, index in enumerate(row.wanted):
            path = paths[index]
            is_so = len(path) < len(self.truth) and path == self.truth[: len(path)]
            scores[at, self.truth[len(path)] if is_so else 70] = 1.0
        return torch.from_numpy(scores)


@pytest.fixture
def truth(tiny_tokenizer: TextTokenizer) -> list[int]:
    """The whole text."""
    ids = tiny_tokenizer.encode(PROMPT + ANSWER)
    assert tiny_tokenizer.encode(PROMPT) == ids[: len(tiny_tokenizer.encode(PROMPT))]
    return ids


def options(address: str, pair: TinyPair, count: int, *more: str) -> list[str]:
    given = ["--raw", "--max-new-tokens", str(count), "--temperature", "0", "--drafter", "retrieval"]
    return [*given, "--pace", "wait", "--verifier", address, "--draft", str(pair.same_draft), *more]


async def test_a_second_run_finds_the_text_of_the_first_in_the_file(
    loaded_tiny: LoadedTarget,
    tiny_pair: TinyPair,
    tiny_tokenizer: TextTokenizer,
    truth: list[int],
    tmp_path: Path,
    always_drafts: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pace wait: hints by look-up are there before the verifier has waited `max_wait_ms` for them."""
    path = tmp_path / "user.text"
    count = len(truth) - len(tiny_tokenizer.encode(PROMPT))

    async def run(max_wait_ms: int) -> dict[str, Any]:
        given = {"max_wait_ms": max_wait_ms, "engine_options": {"cost": FreeTokens()}}
        async with serving(loaded_tiny, model=WritesOneText(truth), **given) as running:
            arguments = ["generate", PROMPT, "--json", *options(running.address, tiny_pair, count)]
            assert await asyncio.to_thread(main, [*arguments, "--user-text", str(path)]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["text"] == ANSWER
        assert isinstance(result, dict)
        return result

    first = await run(max_wait_ms=10)
    assert UserTextFile(path).texts() == [PROMPT + ANSWER]
    second = await run(max_wait_ms=60_000)
    assert first["accepted_tokens"] == 0
    assert first["steps"] == count
    assert second["accepted_tokens"] > count / 2
    assert second["steps"] < count / 2
    assert UserTextFile(path).texts() == [PROMPT + ANSWER]


async def test_a_batch_drafts_from_the_file_and_adds_nothing_to_it(
    loaded_tiny: LoadedTarget,
    tiny_pair: TinyPair,
    tiny_tokenizer: TextTokenizer,
    truth: list[int],
    tmp_path: Path,
    always_drafts: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, source, out = tmp_path / "user.text", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    UserTextFile(path).add([PROMPT + ANSWER], tiny_tokenizer, 1000)
    before = path.read_bytes()
    source.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    count = len(truth) - len(tiny_tokenizer.encode(PROMPT))
    given = {"max_wait_ms": 60_000, "engine_options": {"cost": FreeTokens()}}
    async with serving(loaded_tiny, model=WritesOneText(truth), **given) as running:
        arguments = ["batch", str(source), str(out), *options(running.address, tiny_pair, count)]
        assert await asyncio.to_thread(main, [*arguments, "--user-text", str(path)]) == 0
    assert json.loads(out.read_text())["text"] == ANSWER
    share = re.search(r"(\d+)% accepted", capsys.readouterr().err)
    assert share is not None
    assert int(share[1]) > 50
    assert path.read_bytes() == before
