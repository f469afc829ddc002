"""The client as callers use it: blocking, cancelled half-way, several at once, and from the command line."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from cloud_verifier.loading import LoadedTarget
from edge_client import BlockingClient, ClientConfig, Committed, Done, SpeculativeClient
from edge_client.cli import main
from edge_client.trace_file import read_trace
from shared.errors import ConfigError, VerifierUnavailable
from shared.sampling import GREEDY
from shared.types import Rule
from tests.rig import PATIENCE_S, Running, held_after, serving
from tests.tiny_pair import TinyPair

PROMPT = "the cat"
ROOT = Path(__file__).resolve().parents[2]


def config(running: Running, pair: TinyPair, **changes: object) -> ClientConfig:
    settings = {"verifier": running.address, "draft": str(pair.same_draft), "pace": "wait", **changes}
    return ClientConfig(**settings)  # type: ignore[arg-type]


async def test_the_blocking_client_writes_what_the_async_client_writes(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    async with serving(loaded_tiny) as running:
        async with SpeculativeClient(config(running, tiny_pair)) as client:
            expected = await client.generate(PROMPT, max_new_tokens=24, sampling=GREEDY, stop_ids=())

        def blocking() -> tuple[tuple[int, ...], tuple[int, ...]]:
            with BlockingClient(config(running, tiny_pair)) as client:
                whole = client.generate(PROMPT, max_new_tokens=24, sampling=GREEDY, stop_ids=())
                events = list(client.stream(PROMPT, max_new_tokens=24, sampling=GREEDY, stop_ids=()))
                assert isinstance(events[-1], Done)
                streamed = [token for event in events if isinstance(event, Committed) for token in event.ids]
                return whole.ids, tuple(streamed)

        whole, streamed = await asyncio.to_thread(blocking)
    assert len(expected.ids) == 24
    assert whole == streamed == expected.ids


async def test_leaving_a_stream_early_frees_the_session_on_the_verifier(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    async with serving(loaded_tiny) as running, SpeculativeClient(config(running, tiny_pair)) as client:
        async with aclosing(client.stream(PROMPT, max_new_tokens=300, sampling=GREEDY, stop_ids=())) as events:
            async for event in events:
                if isinstance(event, Committed):
                    break
        await running.settled(lambda: running.sessions == 0)
        after = await client.generate(PROMPT, max_new_tokens=8, sampling=GREEDY, stop_ids=())
    assert len(after.ids) == 8


async def test_generations_asked_for_at_once_come_out_as_one_after_another(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    prompts = ["the cat", "a dog", "one two three", "x"]
    async with serving(loaded_tiny) as running:
        async with SpeculativeClient(config(running, tiny_pair)) as client:
            alone = [await client.generate(p, max_new_tokens=20, sampling=GREEDY, stop_ids=()) for p in prompts]
            at_once = await asyncio.gather(
                *(client.generate(p, max_new_tokens=20, sampling=GREEDY, stop_ids=()) for p in prompts)
            )
        clients = [SpeculativeClient(config(running, tiny_pair)) for _ in prompts]
        for each in clients:
            await each.connect()
        side_by_side = await asyncio.gather(
            *(
                each.generate(p, max_new_tokens=20, sampling=GREEDY, stop_ids=())
                for each, p in zip(clients, prompts, strict=True)
            )
        )
        for each in clients:
            await each.close()
    assert [r.ids for r in at_once] == [r.ids for r in alone] == [r.ids for r in side_by_side]


async def test_bad_calls_are_refused_before_anything_is_sent(loaded_tiny: LoadedTarget, tiny_pair: TinyPair) -> None:
    async with serving(loaded_tiny) as running, SpeculativeClient(config(running, tiny_pair)) as client:
        for prompt, options in (
            ("", {}),
            ([], {}),
            ([10**6], {}),
            ([0], {"max_new_tokens": 0}),
            (PROMPT, {"stop": [""]}),
            (PROMPT, {"stop": ["a"] * 17}),
            ([0] * client.card.context_size, {}),
            ([{"role": "user"}], {}),
        ):
            with pytest.raises(ConfigError):
                await client.generate(prompt, **options)
        assert running.sessions == 0


async def test_the_command_line_prints_one_json_object_with_the_text_and_its_figures(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(loaded_tiny) as running:
        arguments = ["generate", PROMPT, "--raw", "--json", "--max-new-tokens", "12", "--temperature", "0"]
        arguments += ["--verifier", running.address, "--draft", str(tiny_pair.same_draft), "--pace", "wait"]
        code = await asyncio.to_thread(main, arguments)
        printed = capsys.readouterr()
        result = json.loads(printed.out)
        async with SpeculativeClient(config(running, tiny_pair)) as client:
            expected = await client.generate(PROMPT, max_new_tokens=12, sampling=GREEDY)
    assert code == 0
    assert result["text"] == expected.text
    assert result["tokens"] == len(expected.ids)
    assert 0 < result["steps"] <= result["tokens"]


async def test_ctrl_c_in_mid_text_leaves_what_was_written_and_a_trace_of_it(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    trace = tmp_path / "t.json"
    async with serving(loaded_tiny) as running:
        gate = held_after(running, 6)  # the text is not over when the signal comes
        arguments = ["generate", PROMPT, "--raw", "--temperature", "0", "--trace", str(trace), "--preview"]
        arguments += ["--verifier", running.address, "--draft", str(tiny_pair.same_draft)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "edge_client.cli", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                begun = await process.stdout.read(1)
                process.send_signal(signal.SIGINT)
                rest, told = await process.communicate()
        finally:
            gate.set()
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 130
    assert told.decode().splitlines() == [f"[trace in {trace}]", "edge-client: interrupted"]
    assert b"\x1b" not in begun + rest
    recording = read_trace(trace)
    assert recording.commits
    assert "".join(commit.text for commit in recording.commits).encode() == begun + rest


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate", "x", "--temperature", "nan"], "temperature"),
        (["generate", "x", "--top-k", "-1"], "top_k"),
        (["generate", "x", "--seed", "-1"], "seed"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["generate", ""], "prompt"),
        (["generate", "x", "--hint-width", "0"], "hint_width"),
        (["generate", "x", "--draft", "no-such-model"], "no-such-model"),
        (["generate", "x", "--config", "no-such-file.toml"], "no-such-file.toml"),
        (["models", "pull", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_on_the_command_line_is_one_line_that_names_it(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert part in printed.err
    assert len(printed.err.strip().splitlines()) == 1


async def test_an_absent_verifier_is_named_by_its_address(tiny_pair: TinyPair) -> None:
    client = SpeculativeClient(ClientConfig(verifier="127.0.0.1:1", draft=str(tiny_pair.same_draft), timeout_s=2))
    with pytest.raises(VerifierUnavailable, match=r"127\.0\.0\.1:1"):
        await client.connect()
    await client.close()


async def test_a_new_turn_is_encoded_anew_from_the_text_seen_and_both_sides_hold_those_ids(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    """C15: what was generated may encode to other ids; the written rule is in docs/embedding.md."""
    turns: list[dict[str, str]] = []
    seen_at_verifier: list[list[int]] = []
    async with serving(loaded_tiny) as running, SpeculativeClient(config(running, tiny_pair)) as client:
        for said in ("你好 🙂", "if x:\n        return  1", "again"):
            turns.append({"role": "user", "content": said})
            fresh = client.encode(turns)
            text = ""
            async with aclosing(client.stream(turns, max_new_tokens=12, sampling=GREEDY, stop_ids=())) as events:
                async for event in events:
                    if isinstance(event, Committed):
                        text += event.text
                        if len(seen_at_verifier) < len(turns) // 2 + 1:
                            *_, newest = running.engine._sessions.values()  # an older one may not have been closed yet
                            seen_at_verifier.append(list(newest.opened_with.ids))
            assert seen_at_verifier[-1] == fresh
            result = await client.generate(fresh, max_new_tokens=12, sampling=GREEDY, stop_ids=())
            assert result.text == text == client.tokenizer.decode(result.ids)
            turns.append({"role": "assistant", "content": text})


async def test_each_text_draws_its_drafts_with_a_secret_of_its_own(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    """Texts of one context that shared draft draws would not be independent of one another."""
    async with serving(loaded_tiny) as running, SpeculativeClient(config(running, tiny_pair)) as client:
        drafter, secrets = client._drafter, []
        assert drafter is not None
        begin = drafter.begin
        drafter.begin = lambda task: (secrets.append(task.secret), begin(task))[1]  # type: ignore[method-assign]
        for _ in range(3):
            await client.generate(PROMPT, max_new_tokens=4, rule=Rule.REJECTION, seed=1)
    assert len(set(secrets)) == 3


async def test_a_stop_string_leaves_no_more_accepted_ids_than_ids(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    async with serving(loaded_tiny) as running, SpeculativeClient(config(running, tiny_pair)) as client:
        whole = await client.generate(PROMPT, max_new_tokens=24, sampling=GREEDY, stop_ids=())
        for piece in whole.pieces[:12]:
            if piece.text.strip():
                cut = await client.generate(PROMPT, max_new_tokens=24, sampling=GREEDY, stop_ids=(), stop=piece.text)
                usage = cut.report.usage
                assert usage.accepted_tokens <= usage.generated_tokens == len(cut.ids)
