"""The model commands as a user calls them, on the fake tools of the model store's tests."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from edge_client import models_cli
from shared.errors import ConfigError, ModelLoadError
from shared.model_store import Store
from tests.pure.test_model_store import PAYLOAD, make_store, write_wheels

PRETENDS = {"tty": True, "file": False}


class Stream(io.StringIO):
    """A standard error that is, or is not, a terminal."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def isatty(self) -> bool:
        return PRETENDS[self.kind]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    write_wheels(tmp_path / "state" / "wheels", PAYLOAD)
    store = make_store(tmp_path)
    monkeypatch.setattr(models_cli, "Store", lambda: store)
    return store


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="edge-client")
    models_cli.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args(arguments)
    code = args.handler(args)
    assert isinstance(code, int)
    return code


def test_list_shows_what_is_ready(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "ROLES", "SIZE", "LICENCE", "STATE"]
    assert row.startswith("fake  target, draft  0 MB  Apache-2.0  not pulled")
    store.pull("fake", "target")
    store.pull("fake", "draft")
    run("models", "list")
    assert "target ready, draft ready (int4 agrees 0.75)" in capsys.readouterr().out
    (store.folder(store.find("fake"), "draft") / "self_test.json").unlink()
    store.pull("fake", "draft", precision="fp32")
    run("models", "list")
    assert "target ready, draft ready (int4, fp32 agrees 0.75)" in capsys.readouterr().out


def test_the_tokenizer_alone_is_pulled_when_it_is_named(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "pull", "fake", "--role", "tokenizer") == 0
    assert capsys.readouterr().out == f"tokenizer: {store.folder(store.find('fake'), 'tokenizer')}\n"
    run("models", "list")
    assert capsys.readouterr().out.splitlines()[1].endswith("Apache-2.0  tokenizer ready")
    store.pull("fake", "draft")
    run("models", "list")
    assert capsys.readouterr().out.splitlines()[1].endswith("draft ready (int4 agrees 0.75), tokenizer ready")


def test_list_as_json_gives_the_folders(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store.pull("fake", "draft")
    assert run("models", "list", "--json") == 0
    (described,) = json.loads(capsys.readouterr().out)
    assert described["ready"] == {"draft-int4": str(folder)}
    assert described["agreement"] == {"draft-int4": 0.75}
    assert described["size_bytes"] == len(PAYLOAD)


def test_pull_fetches_every_role_unless_one_is_named(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "pull", "fake", "--role", "draft", "--precision", "fp32", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)["folders"]) == ["draft"]
    assert run("models", "pull", "fake") == 0
    bundle = store.find("fake")
    assert [folder.name for folder in store.ready(bundle)] == ["target", "draft-int4", "draft-fp32"]
    assert str(store.folder(bundle, "target")) in capsys.readouterr().out


def test_verify_exits_with_1_and_names_the_damaged_file(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store.pull("fake", "target")
    assert run("models", "verify") == 0
    assert capsys.readouterr().out == "fake: ok\n"
    draft = store.pull("fake", "draft", precision="fp32")
    small = store.pull("fake", "tokenizer")
    for path in (folder / "config.json", draft / "model.onnx", draft / "genai_config.json", small / "tokenizer.json"):
        path.write_text("[]")
    assert run("models", "verify", "fake") == 1
    out = capsys.readouterr().out
    assert f"fake: {folder / 'config.json'} is corrupt" in out
    assert out.splitlines()[-3:] == [
        "fake: run: edge-client models pull fake --role target --force",
        "fake: run: edge-client models pull fake --role draft --precision fp32 --force",
        "fake: run: edge-client models pull fake --role tokenizer --force",
    ]
    assert run("models", "verify", "--json") == 1
    assert json.loads(capsys.readouterr().out)["fake"][0]["path"] == str(folder / "config.json")


def test_verify_of_what_is_not_there_is_an_error_if_it_was_named(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models", "verify") == 0
    assert "nothing is pulled" in capsys.readouterr().out
    with pytest.raises(ModelLoadError, match="fake is not pulled"):
        run("models", "verify", "fake")


def test_an_unknown_model_reaches_the_caller_as_a_config_error(store: Store) -> None:
    with pytest.raises(ConfigError, match="the bundles are: fake"):
        run("models", "pull", "nope")


def test_a_wrong_choice_is_a_usage_error(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("models", "pull", "fake", "--role", "judge")
    assert caught.value.code == 2
    assert "--role" in capsys.readouterr().err


def test_export_draft_writes_the_folder_and_says_where(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export-draft", "fake", str(tmp_path / "mine"), "--precision", "fp32") == 0
    assert capsys.readouterr().out == f"draft: {tmp_path / 'mine'}\n"
    assert (tmp_path / "mine" / "genai_config.json").read_text() == "fp32"
    with pytest.raises(ConfigError, match="not empty"):
        run("export-draft", "fake", str(tmp_path / "mine"))


def test_a_draft_that_is_bad_where_it_is_exported_is_told_of_in_one_line(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = str(tmp_path / "mine")
    assert run("models", "pull", "fake") == run("export-draft", "fake", mine) == 0
    assert capsys.readouterr().err == ""
    shutil.rmtree(mine)
    (tmp_path / "state" / "bad").touch()
    for command in (("models", "pull", "fake", "--force", "--json"), ("export-draft", "fake", mine)):
        assert run(*command) == 0
        err = capsys.readouterr().err
        assert "agrees with the model it was made of in 0.25 of its self-test, below the bound of 0.50 for int4" in err
        assert len(err.splitlines()) == 1
    assert run("models", "pull", "fake", "--role", "tokenizer") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [("models", "list"), ("models", "pull"), ("models", "verify"), ("export-draft",)])
def test_every_help_text_has_an_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*command, "--help")
    assert caught.value.code == 0
    assert f"example:\n  edge-client {' '.join(command)}" in capsys.readouterr().out


def test_bars_are_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    for kind in PRETENDS:
        monkeypatch.setattr(sys, "stderr", Stream(kind))
        with models_cli.progress_bars() as progress:
            progress("converting fake", 0, 1)
            progress("converting fake", 1, 1)
            progress("hashing", 1 << 20, 1 << 20)
        drawn[kind] = sys.stderr.getvalue()
    assert drawn["file"] == ""
    assert "converting fake: 100%" in drawn["tty"]
    assert "1.05M/1.05M" in drawn["tty"]
