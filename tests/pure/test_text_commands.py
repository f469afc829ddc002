"""`edge-client generate` and `chat` on a client that is a script: what reaches it, what is refused before it is there,
and the trace that is written however a text ends."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_client import cli, text_commands
from edge_client.cli_options import CONNECTION_OPTIONS
from edge_client.client_config import ClientConfig
from edge_client.events import Committed, Done, FinishReason, Piece, Preview, Report, State, StateChanged
from edge_client.trace_file import read_trace
from edge_client.transport import Traffic
from shared.errors import TransportError
from shared.sampling import SamplingParams
from shared.types import Usage

REPORT = Report(Usage(generated_tokens=2, steps=2), Traffic(), 1.0, 0.5, 0.0, 0, 0)


class ScriptedClient:
    """Tells `Hi you`, with a preview between; keeps what it was given. `fails`: what comes instead of the end."""

    made: list[ScriptedClient]
    fails: BaseException | None = None

    def __init__(self, config: ClientConfig) -> None:
        self.config, self.calls = config, list[dict[str, Any]]()
        self.card = SimpleNamespace(generation_defaults=SamplingParams())
        self.made.append(self)

    async def __aenter__(self) -> ScriptedClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def stream(self, content: Any, *, on_open: Callable[[int], None], **options: Any) -> AsyncIterator[Any]:
        self.calls.append({"content": list(content), **options})
        if options["trace"] is not None:
            options["trace"].state(1.0, "drafting")
        on_open(5)
        yield StateChanged(State.DRAFTING)
        yield Committed("Hi", (1,), (Piece("Hi", 1, False),))
        text_commands.ENGINE_LOG.debug("+1 %s", "why")
        if options.get("previews"):
            yield Preview(" ghost", (2,), False)
        if self.fails is not None:
            raise self.fails
        yield Committed(" you", (2,), (Piece(" you", 2, True),))
        yield Done(FinishReason.LENGTH, REPORT)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedClient]:
    """The clients that a command has made."""
    kind = type("Client", (ScriptedClient,), {"made": []})
    monkeypatch.setattr(text_commands, "SpeculativeClient", kind)
    return kind.made


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


# ---------------------------------------------------------------- settings


def test_every_setting_is_an_option_and_every_option_a_setting() -> None:
    options = {name.removeprefix("--").replace("-", "_") for name, _, _ in CONNECTION_OPTIONS}
    assert options == {field.name for field in dataclasses.fields(ClientConfig)}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, _, text in CONNECTION_OPTIONS])
def test_the_help_of_an_option_tells_the_default_that_holds(name: str, text: str) -> None:
    default = getattr(ClientConfig(), name.removeprefix("--").replace("-", "_"))
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    assert not shown or f"(default: {shown})" in text


def test_settings_reach_the_client(made: list[ScriptedClient]) -> None:
    given = ["--drafter", "retrieval", "--offline", "local", "--pace", "run_on"]
    given += ["--hint-tokens", "7", "--hint-width", "2", "--hint-reach", "0.5"]
    assert cli.main(["generate", "hello", *given]) == 0
    config = made[0].config
    assert (config.drafter, config.offline, config.pace) == ("retrieval", "local", "run_on")
    assert (config.hint_tokens, config.hint_width, config.hint_reach) == (7, 2, 0.5)


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--drafter", "me"], "drafter"),
        (["--offline", "maybe"], "offline"),
        (["--pace", "slow"], "pace"),
        (["--hint-tokens", "65"], "hint_tokens"),
        (["--hint-tokens", "x"], "hint_tokens"),
        (["--hint-width", "17"], "hint_width"),
        (["--hint-reach", "1.5"], "hint_reach"),
        (["--hint-reach", "nan"], "hint_reach"),
        (["--trace", "/no/such/folder/t.json"], "--trace"),
        (["--trace", "."], "--trace"),
        (["--trace", ""], "--trace"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded_or_read(
    command: str,
    given: list[str],
    name: str,
    made: list[ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # reading it would fail otherwise than asked for
    assert cli.main([command, *(["-"] if command == "generate" else []), *given]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("edge-client: ")
    assert name in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert not made


# ---------------------------------------------------------------- previews


@pytest.mark.parametrize(
    ("given", "is_asked"),
    [([], False), (["--preview"], True), (["--offline", "local"], True), (["--preview", "--offline", "fail"], True)],
)
def test_previews_are_asked_for_on_a_terminal_only(
    given: list[str], is_asked: bool, made: list[ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main(["generate", "hello", *given]) == 0
    on_pipe, on_terminal = (client.calls[0]["previews"] for client in made)
    assert (on_pipe, on_terminal) == (False, is_asked)
    assert pipe.getvalue() == "Hi you\n"
    assert (" ghost" in terminal.getvalue()) == ("--preview" in given)


def test_json_takes_no_previews(made: list[ScriptedClient], monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(self: ScriptedClient, content: Any, **options: Any) -> Any:
        assert "previews" not in options
        return SimpleNamespace(text="Hi", seed=3, report=REPORT, reason=FinishReason.STOP)

    monkeypatch.setattr(text_commands.SpeculativeClient, "generate", generate, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["generate", "hello", "--json", "--preview"]) == 0
    assert json.loads(terminal.getvalue())["text"] == "Hi"


# ---------------------------------------------------------------- traces


def test_a_trace_is_written_and_the_line_of_figures_says_where(
    made: list[ScriptedClient], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    assert cli.main(["generate", "hello", "--trace", str(path)]) == 0
    assert [span.state for span in read_trace(path).states] == ["drafting"]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"trace in {path}" in line


def test_without_the_option_nothing_is_traced(made: list[ScriptedClient], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hello"]) == 0
    assert made[0].calls[0]["trace"] is None
    assert "trace" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (TransportError("the line is dead"), 1, "the line is dead"),
        (asyncio.CancelledError(), None, ""),
        (BrokenPipeError(), None, ""),
    ],
)
def test_a_trace_is_written_however_the_text_ends(
    error: BaseException,
    code: int | None,
    said: str,
    made: list[ScriptedClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(text_commands.SpeculativeClient, "fails", error)
    path = tmp_path / "t.json"
    arguments = ["generate", "hello", "--trace", str(path)]
    if code is None:  # what main makes of these is no matter of the trace
        args = cli.parser().parse_args(arguments)
        with pytest.raises(type(error)):
            args.handler(args)
    else:
        assert cli.main(arguments) == code
    assert [span.state for span in read_trace(path).states] == ["drafting"]
    printed = capsys.readouterr()
    assert f"[trace in {path}]" in printed.err
    assert said in printed.err


def test_a_trace_that_cannot_be_written_does_not_hide_what_ended_the_text(
    made: list[ScriptedClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text_commands.SpeculativeClient, "fails", TransportError("the line is dead"))
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.setattr(text_commands, "check_trace", lambda path: folder.rmdir())
    assert cli.main(["generate", "hello", "--trace", str(folder / "t.json")]) == 1
    told = capsys.readouterr().err.splitlines()
    assert "no trace" in told[-2]
    assert told[-1] == "edge-client: the line is dead"


def test_chat_writes_a_trace_for_each_answer(
    made: list[ScriptedClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n/reset\nthree\n"))
    assert cli.main(["chat", "--trace", str(tmp_path / "t.v1.json")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.v1-2.json", "t.v1-3.json", "t.v1.json"]
    traces = [call["trace"] for call in made[0].calls]
    assert len({id(trace) for trace in traces}) == 3
    assert [len(call["content"]) for call in made[0].calls[2:]] == [1]


# ---------------------------------------------------------------- the engine's line


def test_debug_tells_a_line_for_each_commit_and_only_then(
    made: list[ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "hello", "--debug", "--no-stats"]) == 0
    assert capsys.readouterr().err == "[+1 why]\n"
    assert cli.main(["generate", "hello", "--no-stats"]) == 0
    assert capsys.readouterr().err == ""
    assert not text_commands.ENGINE_LOG.handlers
