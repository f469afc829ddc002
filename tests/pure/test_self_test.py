"""C33: the self-test beside a draft: its file, when the model store makes one, and what guards it."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from shared import model_folder, model_store
from shared.errors import ModelLoadError
from shared.model_bundles import PRECISIONS
from shared.model_store import Store
from shared.self_test import BOUNDS, SELF_TEST, SelfTest, read_self_test
from tests.pure.test_model_store import PAYLOAD, calls, left_over, make_store, write_wheels

SOUND = SelfTest("int8", 0.85, 0.97, ((5, 6, 7), (8,)), ((1, 2, 3), (4,)))
DAMAGE = {
    "cut": '{"version": 1, "precision": "in',
    "no object": "[]",
    "nothing": "",
    "another version": {"version": 2},
    "no texts": {"texts": []},
    "an empty text": {"texts": [[5, 6, 7], []], "choices": [[1, 2, 3], []]},
    "a choice less": {"choices": [[1, 2], [4]]},
    "a text less": {"texts": [[5, 6, 7]]},
    "a long text": {"texts": [[5] * 33], "choices": [[1] * 33]},
    "no id": {"texts": [[5, "6", 7], [8]]},
    "below 0": {"texts": [[5, -6, 7], [8]]},
    "huge": {"texts": [[5, 1 << 40, 7], [8]]},
    "a truth value": {"texts": [[5, True, 7], [8]]},
    "a bound beyond 1": {"bound": 1.5},
    "a bound beyond all numbers": {"bound": 10**400},
    "no number": {"agreement": float("nan")},
    "text for a number": {"bound": "high"},
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    write_wheels(tmp_path / "state" / "wheels", PAYLOAD)
    return make_store(tmp_path)


def make_older(folder: Path) -> None:
    """Leaves a draft as a version without self-tests would have made it."""
    (folder / SELF_TEST).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][SELF_TEST]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    SOUND.write(tmp_path / SELF_TEST)
    assert read_self_test(tmp_path / SELF_TEST) == SOUND
    assert read_self_test(tmp_path / "none") is None


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_named_and_nothing_of_it_is_used(tmp_path: Path, case: str) -> None:
    file, change = tmp_path / SELF_TEST, DAMAGE[case]
    SOUND.write(file)
    changed = change if isinstance(change, str) else json.dumps({**json.loads(file.read_text()), **change})
    file.write_text(changed)
    with pytest.raises(ModelLoadError, match="holds no self-test") as caught:
        read_self_test(file)
    assert caught.value.message.startswith(str(file))


def test_every_precision_has_a_bound_and_finer_ones_a_higher_one() -> None:
    assert set(BOUNDS) == set(PRECISIONS)
    assert 0 < BOUNDS["int4"] < BOUNDS["int8"] < BOUNDS["fp32"] < 1


@pytest.mark.parametrize("is_export", [False, True], ids=["pulled", "exported"])
def test_a_draft_comes_with_a_self_test_that_its_manifest_guards(store: Store, tmp_path: Path, is_export: bool) -> None:
    folder = store.export_draft("fake", tmp_path / "mine", "int8") if is_export else store.pull("fake", "draft")
    test = read_self_test(folder / SELF_TEST)
    assert test is not None
    assert (test.precision, test.agreement) == ("int8" if is_export else "int4", 0.75)
    assert test.choices == ((PAYLOAD[-1], 4),), "of the weights that it was exported from"
    assert model_folder.hash_damage(folder, model_folder.silent) == []
    (folder / SELF_TEST).write_text((folder / SELF_TEST).read_text().replace("0.75", "0.15"))
    assert [damage.path for damage in model_folder.hash_damage(folder, model_folder.silent)] == [folder / SELF_TEST]


def test_a_draft_of_an_older_version_loads_and_verifies_and_a_pull_completes_it(store: Store, tmp_path: Path) -> None:
    store.pull("fake", "target")
    folder = store.pull("fake", "draft")
    make_older(folder)
    assert store.resolve("fake", "draft") == folder
    store.verify("fake")
    before = calls(tmp_path)
    assert store.pull("fake", "draft") == folder
    assert calls(tmp_path) == [*before, "choose", "measure"], "nothing is fetched or exported again"
    test = read_self_test(folder / SELF_TEST)
    assert test is not None
    assert test.precision == "int4"
    store.verify("fake")
    store.pull("fake", "draft")
    assert calls(tmp_path) == [*before, "choose", "measure"]
    (folder / SELF_TEST).write_text((folder / SELF_TEST).read_text().replace("0.75", "0.15"))
    assert [damage.path for damage in store.damage("fake")] == [folder / SELF_TEST], "its manifest guards it too"
    assert left_over(tmp_path) == ["draft-int4", "target"]


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_draft_is_loaded_without_its_self_test_and_a_pull_makes_that_anew(
    damage: str, store: Store, tmp_path: Path
) -> None:
    store.pull("fake", "target")
    folder = store.pull("fake", "draft")
    whole = (folder / SELF_TEST).read_bytes()
    (folder / SELF_TEST).unlink()
    if damage == "cut":
        (folder / SELF_TEST).write_bytes(whole[:-9])
    before = calls(tmp_path)
    assert store.resolve("fake", "draft") == store.resolve(str(folder), "draft") == folder
    (told,) = store.damage("fake")
    assert (told.path, told.what.split()[1]) == (folder / SELF_TEST, "missing" if damage == "gone" else "corrupt:")
    store.pull("fake", "draft")
    assert calls(tmp_path) == [*before, "choose", "measure"]
    assert (folder / SELF_TEST).read_bytes() == whole
    store.verify("fake")


@pytest.mark.parametrize("failure", ["lock", "folder", "tool", "disk"])
def test_a_ready_draft_is_given_back_whatever_keeps_it_from_getting_a_self_test(
    failure: str, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.pull("fake", "target")
    folder = store.pull("fake", "draft")
    make_older(folder)
    if failure == "lock":
        shutil.rmtree(store.root / "locks")
        (store.root / "locks").write_text("no folder")
        told = f"{store.root / 'locks' / 'fake.lock'} cannot be written: "
    elif failure == "folder":
        monkeypatch.setattr(tempfile, "mkdtemp", refuses)
        told = f"{folder.parent} cannot be written: Read-only file system"
    elif failure == "tool":
        store = replace(store, tools=replace(store.tools, choose=("false",)))
        told = "asking the draft's source for its choices failed"
    else:
        monkeypatch.setattr(model_store, "add_sealed", refuses)
        told = "Read-only file system"
    assert store.pull("fake", "draft") == store.resolve("fake", "draft") == folder
    (line,) = [record.getMessage() for record in caplog.records if record.name == "draftwire.models"]
    assert line.startswith(f"the draft in {folder} gets no self-test: ")
    assert told in line


def refuses(*given: object, **named: object) -> str:
    raise OSError(errno.EROFS, "Read-only file system")


def test_an_older_draft_is_left_as_it_is_where_its_source_is_gone_or_another(store: Store, tmp_path: Path) -> None:
    target, folder = store.pull("fake", "target"), store.pull("fake", "draft")
    make_older(folder)
    before = calls(tmp_path)
    lacking = replace(store, tools=replace(store.tools, export_needs=("no_such_module_here",)))
    lacking.pull("fake", "draft")
    manifest = (target / "manifest.json").read_text()
    (target / "manifest.json").write_text(manifest.replace('"source_sha256": "', '"source_sha256": "0'))
    store.pull("fake", "draft")
    (target / "manifest.json").write_text(manifest)
    (target / "model.safetensors").write_bytes(b"cut")
    store.pull("fake", "draft")
    shutil.rmtree(target)
    assert store.pull("fake", "draft") == folder
    assert calls(tmp_path) == before
    assert not (folder / SELF_TEST).exists()
