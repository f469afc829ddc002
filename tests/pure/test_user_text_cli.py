"""`--user-text FILE` on a client that is a script, and the commands `user-text show|clear`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_client import batch, cli, text_commands
from edge_client.client_config import ClientConfig
from edge_client.events import FinishReason
from edge_client.user_text_cli import RememberedText
from edge_client.user_text_file import UserTextFile
from shared.errors import TransportError
from shared.sampling import SamplingParams
from shared.types import Rule
from tests.pure.test_text_commands import REPORT, ScriptedClient
from tests.pure.test_user_text_file import Bytes, add, texts

GIVEN = {"generate": ["generate", "hello"], "chat": ["chat"], "batch": ["batch", "in.jsonl", "out.jsonl"]}


class RememberingClient(ScriptedClient):
    """Keeps what it was told to remember. `others`: what another process adds while a text is written."""

    others: Sequence[str] = ()
    path: Path
    reason = FinishReason.LENGTH

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.remembered: list[str] = []
        self.tokenizer = Bytes()

    def remember(self, text: str) -> None:
        self.remembered.append(text)

    async def stream(self, content: Any, **options: Any) -> Any:
        before = list(self.remembered)
        if self.others:
            add(self.path, *self.others)
        async for event in super().stream(content, **options):
            yield event if not hasattr(event, "reason") else type(event)(self.reason, event.report)
        self.calls[-1]["before"] = before

    async def generate(self, content: Any, **options: Any) -> Any:
        return SimpleNamespace(text="Hi you", seed=3, report=REPORT, reason=self.reason)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "user.text"


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[RememberingClient]:
    """The clients that a command has made."""
    kind = type("Client", (RememberingClient,), {"made": [], "path": path})
    monkeypatch.setattr(text_commands, "SpeculativeClient", kind)
    monkeypatch.setattr(batch, "SpeculativeClient", kind)
    return kind.made


def say(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))


# ---------------------------------------------------------------- what is remembered


def test_nothing_is_stored_unless_asked_for(
    made: list[RememberingClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    say(monkeypatch, "one\n")
    assert cli.main(["generate", "hello"]) == cli.main(["chat"]) == 0
    assert [client.remembered for client in made] == [[], []]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_generate_adds_the_prompt_and_its_text_but_no_system_turn(form: list[str], path: Path) -> None:
    assert cli.main(["generate", "hello", "--system", "be brief", *form, "--user-text", str(path)]) == 0
    assert texts(path) == ["hello", "Hi you"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_raw_prompt_and_what_follows_are_one_text(path: Path) -> None:
    assert cli.main(["generate", "hello ", "--raw", "--user-text", str(path)]) == 0
    assert texts(path) == ["hello Hi you"]


def test_what_was_remembered_is_drafted_from_and_added_to(made: list[RememberingClient], path: Path) -> None:
    add(path, "earlier", "later")
    assert cli.main(["generate", "hello", "--user-text", str(path)]) == 0
    assert made[0].calls[0]["before"] == ["earlier", "later"]
    assert made[0].remembered == ["earlier", "later", "hello", "Hi you"]
    assert texts(path) == ["earlier", "later", "hello", "Hi you"]


def test_the_file_is_bounded_by_the_setting(path: Path) -> None:
    add(path, "earlier", "later")
    assert cli.main(["generate", "hello", "--user-text", str(path), "--user-text-tokens", "19"]) == 0
    assert texts(path) == ["later", "hello", "Hi you"]


def test_chat_adds_each_turn_when_its_answer_is_done(
    made: list[RememberingClient], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(path, "earlier")
    say(monkeypatch, "one\n/reset\ntwo\n\n")
    assert cli.main(["chat", "--system", "be brief", "--user-text", str(path)]) == 0
    assert texts(path) == ["earlier", "one", "two", "Hi you"]
    assert [call["before"] for call in made[0].calls] == [["earlier"], ["earlier", "one", "Hi you"]]


def test_chat_keeps_the_turns_before_one_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "one\ntwo\n")
    stream = text_commands.SpeculativeClient.stream

    def failing(self: Any, content: Any, **options: Any) -> Any:
        self.fails = TransportError("the line is dead") if len(content) > 1 else None
        return stream(self, content, **options)

    monkeypatch.setattr(text_commands.SpeculativeClient, "stream", failing)
    assert cli.main(["chat", "--user-text", str(path)]) == 1
    assert texts(path) == ["one", "Hi you"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"fails": TransportError("the line is dead")}, 1),
        ({"fails": KeyboardInterrupt()}, 130),
        ({"reason": FinishReason.CANCELLED}, 0),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_text_that_did_not_come_to_its_end_leaves_nothing(
    change: dict[str, Any], code: int, is_there: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        add(path, "earlier")
    for name, value in change.items():
        monkeypatch.setattr(text_commands.SpeculativeClient, name, value)
    assert cli.main(["generate", "hello", "--user-text", str(path)]) == code
    assert path.exists() == is_there
    assert texts(path) == ["earlier"] * is_there


def test_what_another_process_adds_meanwhile_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, "earlier")
    monkeypatch.setattr(text_commands.SpeculativeClient, "others", ["theirs"])
    assert cli.main(["generate", "hello", "--user-text", str(path)]) == 0
    assert texts(path) == ["earlier", "theirs", "hello", "Hi you"]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("command", list(GIVEN))
@pytest.mark.parametrize(
    ("file", "more", "told"),
    [
        ("damaged", [], "damaged; it is left as it is"),
        ("essay", [], "not a file of a user's text"),
        (".", [], "a folder, not a file"),
        ("none/user.text", [], "there is no "),
        ("user.text", ["--user-text-tokens", "0"], "user_text_tokens is 0"),
        ("user.text", ["--user-text-tokens", "1"], "user_text_tokens must be 0 or at least 2, got 1"),
        ("user.text", ["--user-text-tokens", "many"], "user_text_tokens (argument) must be a whole number"),
    ],
)
def test_a_bad_file_is_named_before_anything_is_loaded_read_or_lost(
    command: str,
    file: str,
    more: list[str],
    told: str,
    made: list[RememberingClient],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "stdin", None)  # reading it would fail otherwise than asked for
    add(path, "earlier")
    contents = {"user.text": path.read_bytes(), "damaged": path.read_bytes()[:-3], "essay": b"my essay"}
    for name, content in contents.items():
        Path(name).write_bytes(content)
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    assert cli.main([*GIVEN[command], "--user-text", file, *more]) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "edge-client: " if "argument" in told or "least" in told else f"edge-client: --user-text {file}: "
    )
    assert told in err
    assert len(err.splitlines()) == 1
    assert not made
    assert {name: Path(name).read_bytes() for name in contents} == contents
    assert sorted(each.name for each in path.parent.iterdir()) == sorted([*contents, "in.jsonl"])


def test_a_file_that_cannot_be_written_in_the_end_is_named_and_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(path, "earlier")

    def full(self: UserTextFile, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(UserTextFile, "_write", full)
    assert cli.main(["generate", "hello", "--user-text", str(path), "--no-stats"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "Hi you\n"
    assert printed.err == f"edge-client: --user-text {path}: No space left on device\n"
    assert texts(path) == ["earlier"]


def test_a_chat_goes_on_when_its_file_cannot_be_written_and_tells_so_once(
    made: list[RememberingClient], path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, asked = UserTextFile._write, []

    def full_twice(self: UserTextFile, content: bytes) -> None:
        asked.append(content)
        if len(asked) < 3:
            raise OSError(28, "No space left on device")
        write(self, content)

    monkeypatch.setattr(UserTextFile, "_write", full_twice)
    say(monkeypatch, "one\ntwo\nthree\n")
    assert cli.main(["chat", "--user-text", str(path), "--no-stats"]) == 1
    assert capsys.readouterr().err == f"edge-client: --user-text {path}: No space left on device\n"
    assert made[0].remembered == ["one", "Hi you", "two", "Hi you", "three", "Hi you"]
    assert texts(path) == ["three", "Hi you"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--drafter", "model"], "drafter is model, which looks nothing up"),
        (["--hint-tokens", "0"], "hint_tokens is 0"),
        (["--rule", "rejection"], "under the rejection rule nothing is looked up"),
        (["--rule", "rejection", "--temperature", "0"], ""),
        (["--drafter", "retrieval"], ""),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_where_nothing_drafts_from_the_file_one_line_says_so(
    command: str,
    options: list[str],
    why: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(monkeypatch, "hello\nhello\n")
    assert cli.main([*GIVEN[command], *options, "--no-stats", "--user-text", str(path)]) == 0
    told = f"edge-client: nothing drafts from the file of --user-text: {why}; texts are added to it all the same\n"
    assert capsys.readouterr().err == (told if why else "")
    assert texts(path) == ["hello", "Hi you"]
    assert cli.main([*GIVEN["generate"], *options, "--no-stats"]) == 0
    assert capsys.readouterr().err == ""


def test_a_batch_that_does_not_draft_from_the_file_says_so(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(path, "earlier")
    config = ClientConfig(drafter="model")
    client = batch.SpeculativeClient(config)
    RememberedText(path, config, is_kept=False).give(client, Rule.AGREEMENT, SamplingParams())
    told = "edge-client: nothing drafts from the file of --user-text: drafter is model, which looks nothing up\n"
    assert capsys.readouterr().err == told


def test_a_batch_needs_a_file_to_draft_from(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(path.parent)
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    assert cli.main([*GIVEN["batch"], "--user-text", str(path)]) == 1
    assert capsys.readouterr().err == f"edge-client: --user-text {path}: there is no such file\n"
    assert not path.exists()


# ---------------------------------------------------------------- show and clear


@pytest.mark.parametrize("command", [["user-text", "show"], ["batch", "in.jsonl", "out.jsonl", "--user-text"]])
def test_a_file_that_may_not_be_looked_for_is_one_line(
    command: list[str], path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(path.parent)
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    name = "x" * 300
    assert cli.main([*command, name]) == 1
    err = capsys.readouterr().err
    assert err.endswith(f"{name}: File name too long\n")
    assert len(err.splitlines()) == 1


def test_show_prints_what_is_remembered(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(path, "one\nline", "你好")
    assert cli.main(["user-text", "show", str(path)]) == 0
    assert capsys.readouterr().out == "--- 1 of 2\none\nline\n--- 2 of 2\n你好\n"
    assert cli.main(["user-text", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ["one\nline", "你好"]
    path.write_bytes(b"")
    assert cli.main(["user-text", "show", str(path)]) == 0
    assert capsys.readouterr().out == "nothing is remembered\n"


def test_clear_forgets_it_all(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(path, "one")
    assert cli.main(["user-text", "clear", str(path)]) == 0
    assert not path.exists()
    for command in ("show", "clear"):
        assert cli.main(["user-text", command, str(path)]) == 1
        assert capsys.readouterr().err == f"edge-client: {path}: there is no such file\n"


def test_a_damaged_file_is_told_by_show_and_removed_by_clear(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(path, "one")
    path.write_bytes(path.read_bytes()[:-2])
    assert cli.main(["user-text", "show", str(path)]) == 1
    assert "damaged" in capsys.readouterr().err
    assert cli.main(["user-text", "clear", str(path)]) == 0
    assert not path.exists()
