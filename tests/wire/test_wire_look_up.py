"""Look-up alone over real gRPC, on a device that holds the tokenizer's files and no model."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from cloud_verifier.loading import LoadedTarget
from edge_client.cli import main
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from shared.model_folder import TOKENIZER_FILES, seal, silent
from shared.sampling import GREEDY
from tests.rig import Running, serving
from tests.tiny_pair import TinyPair

PROMPT = "one two one two one two"
WITHOUT_A_MODEL = "; or draft without a model, its tokenizer is here: --drafter retrieval"


def small_files(pair: TinyPair, folder: Path) -> Path:
    """A folder with what look-up reads, and nothing besides."""
    folder.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copy(pair.same_draft / name, folder / name)
    return folder


def arguments(running: Running | str, draft: str, *more: str) -> list[str]:
    address = running if isinstance(running, str) else running.address
    given = ["generate", PROMPT, "--raw", "--json", "--max-new-tokens", "24", "--temperature", "0", "--pace", "wait"]
    return [*given, "--verifier", address, "--draft", draft, *more]


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("given", [["--drafter", "retrieval"], ["--hint-tokens", "0"]])
async def test_without_a_model_the_tokenizers_files_are_enough(
    is_cached: bool,
    given: list[str],
    loaded_tiny: LoadedTarget,
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a folder of the user's own, or in the cache of a device where no draft was ever exported."""
    monkeypatch.setenv("DRAFTWIRE_CACHE", str(tmp_path))
    name = "models/tiny--pair/tokenizer" if is_cached else "mine"
    folder = small_files(tiny_pair, tmp_path / name)
    seal(folder, {}, silent)
    async with serving(loaded_tiny) as running:
        draft = "tiny/pair" if is_cached else str(folder)
        assert await asyncio.to_thread(main, arguments(running, draft, *given)) == 0
        result = json.loads(capsys.readouterr().out)
        whole = ClientConfig(verifier=running.address, draft=str(tiny_pair.same_draft), pace="wait")
        async with SpeculativeClient(whole) as client:
            expected = await client.generate(PROMPT, max_new_tokens=24, sampling=GREEDY)
    assert result["text"] == expected.text
    assert result["draft_steps"] == 0
    assert (result["hints"] == 0) == ("--hint-tokens" in given)


async def test_a_chat_needs_no_template_on_the_device(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    folder = small_files(tiny_pair, tmp_path / "mine")
    turns = [{"role": "user", "content": "你好"}]
    async with serving(loaded_tiny) as running:
        settings = {"verifier": running.address, "drafter": "retrieval"}
        async with (
            SpeculativeClient(ClientConfig(draft=str(folder), **settings)) as small,
            SpeculativeClient(ClientConfig(draft=str(tiny_pair.same_draft), **settings)) as whole,
        ):
            assert small.encode(turns) == whole.encode(turns)
            assert (await small.generate(turns, max_new_tokens=12)).ids


@pytest.mark.parametrize("drafter", ["both", "model"])
def test_who_drafts_with_a_model_is_told_what_the_folder_lacks(
    drafter: str, tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_files(tiny_pair, tmp_path / "mine")
    assert main(arguments("127.0.0.1:1", str(folder), "--drafter", drafter)) == 1
    told = "mine is no draft model: genai_config.json and model.onnx missing"
    assert capsys.readouterr().err.endswith(f"{told}{WITHOUT_A_MODEL}\n")


def test_a_device_that_pulled_the_tokenizer_alone_is_told_what_it_is_for(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTWIRE_CACHE", str(tmp_path))
    seal(small_files(tiny_pair, tmp_path / "models" / "smollm2-135m" / "tokenizer"), {}, silent)
    assert main(arguments("127.0.0.1:1", "smollm2-135m")) == 1
    run = "run: edge-client models pull smollm2-135m --role draft --precision auto"
    told = f"smollm2-135m is not pulled as draft-int8; {run}{WITHOUT_A_MODEL}"
    assert capsys.readouterr().err == f"edge-client: {told}\n"


def test_without_a_tokenizer_nobody_is_sent_to_look_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTWIRE_CACHE", str(tmp_path))
    (tmp_path / "mine").mkdir()
    for draft in ("smollm2-135m", str(tmp_path / "mine")):
        assert main(arguments("127.0.0.1:1", draft)) == 1
        assert "retrieval" not in capsys.readouterr().err


def test_a_device_with_nothing_is_told_what_to_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTWIRE_CACHE", str(tmp_path))
    assert main(arguments("127.0.0.1:1", "smollm2-135m", "--drafter", "retrieval")) == 1
    told = "smollm2-135m is not pulled as tokenizer; run: edge-client models pull smollm2-135m --role tokenizer"
    assert capsys.readouterr().err == f"edge-client: {told}\n"
