"""`edge-client batch` over real gRPC: the same file whatever runs at once or is killed; and room that is awaited."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpu_models import FreeTokens
from cloud_verifier.loading import LoadedTarget
from edge_client import batch, onnx_drafter
from edge_client.batch_files import parse_lines
from edge_client.cli import main
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.events import Done, State, StateChanged
from edge_client.onnx_drafter import OnnxModel
from shared.errors import ConfigError, ModelMismatch, Overloaded
from shared.sampling import GREEDY, SamplingParams
from shared.types import Close, PaceKind
from tests.oracle import PlainTarget
from tests.proxy import proxying
from tests.rig import PATIENCE_S, RandomDrafter, RawStream, Running, client, open_frame, raw, serving
from tests.tiny_pair import STOP_ID, TinyPair

ROOT = Path(__file__).resolve().parents[2]
COUNT = 20
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "the cat"},
    {"prompt": "a dog", "id": "dog"},
    {"prompt": "one two three", "max_new_tokens": 7},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "你好"}], "id": "chat"},
    {"turns": ["first", "second"], "question_id": 81},
    {"prompt": "def f(x):", "task_id": "HumanEval/0", "temperature": 0},
    {"question": "how many?", "answer": "#### 3"},
    {"prompt": "the cat"},
    {"prompt": "seeded", "seed": 5},
    {"prompt": "x", "stop": "do"},
    {"prompt": "if x:\n    return", "top_k": 5},
    {"prompt": "last"},
]
HOT = SamplingParams(temperature=1.1)


def written(folder: Path, prompts: Sequence[Any] = PROMPTS) -> Path:
    """The prompts as a file."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def arguments(running: Running | str, pair: TinyPair, source: Path, out: Path, *more: str) -> list[str]:
    address = running if isinstance(running, str) else running.address
    given = [str(source), str(out), "--verifier", address, "--draft", str(pair.noisy_draft), "--hint-tokens", "4"]
    given += ["--max-new-tokens", str(COUNT), "--temperature", "1.1", *more]
    return ["batch", *given]


async def run(running: Running | str, pair: TinyPair, source: Path, out: Path, *more: str) -> int:
    """The command, in this process."""
    return await asyncio.to_thread(main, arguments(running, pair, source, out, *more))


@asynccontextmanager
async def child(running: Running, pair: TinyPair, source: Path, out: Path, *more: str) -> AsyncIterator[Any]:
    """The command in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "edge_client.cli", *arguments(running, pair, source, out, *more)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def hold_back(running: Running, is_held: Callable[[], bool]) -> threading.Event:
    """From when the condition holds, the verifier's forwards wait for the event."""
    gate, forward = threading.Event(), running.model.forward

    def gated(*args: Any, **named: Any) -> Any:
        if is_held() and not gate.is_set():
            assert gate.wait(60)
        return forward(*args, **named)

    running.model.forward = gated
    return gate


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_bytes().split(b"\n")[:-1]]


def texts_kept(out: Path) -> int:
    """Whole rows of the journal, without its header."""
    path = out.with_name(f"{out.name}.partial")
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


# ---------------------------------------------------------------- the same texts


async def test_texts_written_at_once_are_those_written_one_by_one_and_the_targets_own(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, tmp_path: Path
) -> None:
    source, lines = written(tmp_path), parse_lines(written(tmp_path).read_bytes())
    outs = {name: tmp_path / f"{name}.jsonl" for name in ("one", "four", "none", "other")}
    async with serving(loaded_tiny) as running:
        assert await run(running, tiny_pair, source, outs["one"], "--concurrency", "1") == 0
        assert await run(running, tiny_pair, source, outs["four"], "--concurrency", "4") == 0
        assert await run(running, tiny_pair, source, outs["none"], "--hint-tokens", "0") == 0
        assert await run(running, tiny_pair, source, outs["other"], "--seed", "1") == 0
        async with client(running, tiny_pair) as device:
            prompts = [
                device.encode(
                    line.prompt if not isinstance(line.prompt, str) else [{"role": "user", "content": line.prompt}]
                )
                for line in lines
            ]
            settings = batch._settings(device.card, batch.BatchOptions(source, outs["one"], sampling=vars(HOT)))
            ids = [plain_ids(plain, line, prompt, settings) for line, prompt in zip(lines, prompts, strict=True)]
            texts = [device.tokenizer.decode(each) for each in ids]
    assert outs["one"].read_bytes() == outs["four"].read_bytes() == outs["none"].read_bytes()
    assert outs["one"].read_bytes() != outs["other"].read_bytes()
    found = rows(outs["one"])
    assert [row["id"] for row in found] == [0, "dog", 2, "chat", 81, "HumanEval/0", 6, 7, 8, 9, 10, 11]
    for row, text, prompt, line in zip(found, texts, prompts, lines, strict=True):
        assert set(row) == {"id", "text", "finish_reason", "context_tokens", "generated_tokens"}
        assert row["context_tokens"] == len(prompt)
        assert row["text"] == (text if line.stop is None else text.split(line.stop[0])[0])
    assert found[0]["text"] != found[7]["text"]  # one prompt, two seeds
    assert (found[9]["finish_reason"], found[10]["finish_reason"]) == ("stop", "length")
    assert all(name.endswith(".jsonl") for name in os.listdir(tmp_path))


def plain_ids(plain: PlainTarget, line: Any, prompt: list[int], settings: Any) -> list[int]:
    return plain.ids(
        prompt, line.max_new_tokens or COUNT, settings.sampling_of(line), settings.seed_of(line), (STOP_ID,)
    )


async def test_raw_prompts_and_a_system_turn_are_encoded_as_generate_does(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    source = written(tmp_path, [PROMPTS[0], {"messages": [{"role": "user", "content": "b"}]}, PROMPTS[3]])
    raw_source = tmp_path / "raw.jsonl"
    raw_source.write_text('{"prompt": "the cat"}\n')
    async with serving(loaded_tiny) as running, client(running, tiny_pair) as device:
        assert await run(running, tiny_pair, source, tmp_path / "out", "--system", "be brief") == 0
        assert await run(running, tiny_pair, raw_source, tmp_path / "raw", "--raw") == 0
        system = {"role": "system", "content": "be brief"}
        expected: list[Any] = [
            [system, {"role": "user", "content": "the cat"}],
            [system, {"role": "user", "content": "b"}],
            PROMPTS[3]["messages"],
        ]
        lengths = [len(device.encode(prompt)) for prompt in expected]
        assert [row["context_tokens"] for row in rows(tmp_path / "out")] == lengths
        assert rows(tmp_path / "raw")[0]["context_tokens"] == len(device.encode("the cat"))


# ---------------------------------------------------------------- killed, interrupted, torn


async def test_a_run_killed_half_way_and_started_again_gives_the_undisturbed_file(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    source, whole, out = written(tmp_path), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    async with serving(loaded_tiny) as running:
        assert await run(running, tiny_pair, source, whole) == 0
        gate = hold_back(running, lambda: texts_kept(out) >= 3)
        async with child(running, tiny_pair, source, out, "--concurrency", "4") as process:
            await running.settled(lambda: texts_kept(out) >= 3)
            process.send_signal(signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
        gate.set()
        kept, journal = texts_kept(out), out.with_name("out.jsonl.partial")
        assert 3 <= kept < len(PROMPTS)
        assert not out.exists()
        journal.write_bytes(journal.read_bytes() + b'{"index": 11, "dig')  # torn, as by a kill in mid write
        opened: list[Any] = []
        count_opens(running, opened)
        assert await run(running, tiny_pair, source, out, "--concurrency", "4") == 0
    assert len(opened) == len(PROMPTS) - kept
    assert out.read_bytes() == whole.read_bytes()
    assert not journal.exists()


def count_opens(running: Running, opened: list[Any], closed: list[Any] | None = None, retry_after_ms: int = 20) -> None:
    """Every Open that the verifier has answered goes into the list, or its refusal; every Close into the other.

    A refusal asks to come again after `retry_after_ms`, that no test need wait longer.
    """
    engine, ask = running.engine, running.engine.open

    async def asked(frame: Any, *more: Any) -> Any:
        try:
            stream = await ask(frame, *more)
        except Overloaded as error:
            error.retry_after_ms = retry_after_ms
            opened.append(error)
            raise
        opened.append(frame)
        hand = stream.send

        async def sent(frame: Any) -> None:
            if isinstance(frame, Close) and closed is not None:
                closed.append(frame)
            await hand(frame)

        stream.send = sent  # type: ignore[method-assign]
        return stream

    engine.open = asked  # type: ignore[method-assign]


async def test_ctrl_c_ends_the_sessions_keeps_what_is_done_and_says_how_to_go_on(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    source, out, opens, closes = written(tmp_path), tmp_path / "out.jsonl", list[Any](), list[Any]()
    async with serving(loaded_tiny) as running:
        count_opens(running, opens, closes)
        gate = hold_back(running, lambda: texts_kept(out) >= 2)
        async with child(running, tiny_pair, source, out, "--concurrency", "3") as process:
            await running.settled(lambda: texts_kept(out) >= 2)
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
        await running.settled(lambda: not running.server._service._streams)  # an open that nobody waits for is none
        gate.set()
        told = err.decode().strip().splitlines()
        assert process.returncode == 130
        assert f"interrupted; {texts_kept(out)} of 12 texts are kept in {out}.partial: run the same" in told[-1]
        assert len(told) >= 2
        assert all(line.startswith("[") and "of 12 texts" in line for line in told[:-1])  # one every ten seconds
        assert len(closes) == len(opens) > 2
        assert 2 <= texts_kept(out) < len(PROMPTS)
        assert await run(running, tiny_pair, source, out) == 0
    assert len(rows(out)) == len(PROMPTS)


async def test_a_verifier_that_is_gone_stops_the_run_which_goes_on_with_another(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = written(tmp_path), tmp_path / "out.jsonl"
    async with serving(loaded_tiny) as running, proxying(running.port) as proxy:
        gate = hold_back(running, lambda: texts_kept(out) >= 2)
        address = f"127.0.0.1:{proxy.port}"
        stopped = asyncio.create_task(run(address, tiny_pair, source, out, "--reconnect-for-s", "0.3"))
        await running.settled(lambda: texts_kept(out) >= 2)
        proxy.target_port = 1
        proxy.cut_all()
        async with asyncio.timeout(PATIENCE_S):
            assert await stopped == 1
        gate.set()
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{texts_kept(out)} of 12 texts are kept in {out}.partial: run the same command again" in last
    assert not out.exists()
    async with serving(loaded_tiny) as running:
        assert await run(running, tiny_pair, source, out) == 0
    assert len(rows(out)) == len(PROMPTS)


# ---------------------------------------------------------------- refused


async def test_bad_lines_end_the_command_before_it_asks_anybody(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path, [PROMPTS[0], {"prompt": 5}, PROMPTS[1], {"prompt": "a", "top_p": 2}])
    assert await run("127.0.0.1:1", tiny_pair, source, tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert "line 2: prompt must" in told
    assert "line 4: top_p must" in told
    assert len(told.splitlines()) == 1
    assert os.listdir(tmp_path) == ["in.jsonl"]


async def test_other_settings_and_an_output_that_is_there_are_refused_until_asked_for(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = written(tmp_path, PROMPTS[:3]), tmp_path / "out"
    async with serving(loaded_tiny) as running:
        gate = hold_back(running, lambda: texts_kept(out) >= 1)
        async with child(running, tiny_pair, source, out, "--concurrency", "1") as process:
            await running.settled(lambda: texts_kept(out) >= 1)
            process.kill()
            await process.wait()
        gate.set()
        assert await run(running, tiny_pair, source, out, "--seed", "3", "--top-k", "9") == 1
        told = capsys.readouterr().err
        assert "top_k was 0, is 9" in told
        assert "seed was 0, is 3" in told
        assert not out.exists()
        assert await run(running, tiny_pair, source, out, "--seed", "3", "--top-k", "9", "--restart") == 0
        before = out.read_bytes()
        assert await run(running, tiny_pair, source, out) == 1
        assert "--force" in capsys.readouterr().err
        assert out.read_bytes() == before
        assert await run(running, tiny_pair, source, out, "--force") == 0
        assert out.read_bytes() != before


async def test_a_prompt_that_fails_in_itself_is_a_line_with_its_error_and_the_others_are_written(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"prompt": "word " * 600, "id": "long"}
    source, out = (
        written(tmp_path, [PROMPTS[0], long, {"prompt": "a", "logit_bias": {"9999": 1}}, PROMPTS[1]]),
        tmp_path / "out",
    )
    async with serving(loaded_tiny) as running:
        assert await run(running, tiny_pair, source, out) == 1
    found = rows(out)
    assert ["error" in row for row in found] == [False, True, True, False]
    assert found[1]["id"] == "long"
    assert (found[1]["error"]["class"], found[1]["error"]["field"]) == ("ConfigError", "prompt")
    assert "too long" in found[1]["error"]["message"]
    assert found[2]["error"]["field"] == "logit_bias"
    assert "2 of 4 prompts failed" in capsys.readouterr().err
    assert texts_kept(out) == 2


async def test_another_target_in_mid_run_is_refused_rather_than_mixed(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    async with serving(loaded_tiny) as running, client(running, tiny_pair) as device:
        with pytest.raises(ModelMismatch):
            await device.generate("the cat", target_id=bytes(32), max_new_tokens=4)
        result = await device.generate("the cat", target_id=device.card.target_id, max_new_tokens=4, stop_ids=())
    assert len(result.ids) == 4


# ---------------------------------------------------------------- one copy of the draft, several texts


@pytest.mark.usefixtures("always_drafts")
async def test_texts_at_once_share_one_copy_of_the_drafts_weights_and_no_cache(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Any] = []
    load = onnx_drafter._open_session
    monkeypatch.setattr(onnx_drafter, "_open_session", lambda *args: (loads.append(args), load(*args))[1])
    used: set[int] = set()
    async with serving(loaded_tiny, max_wait_ms=60_000, engine_options={"cost": FreeTokens()}) as running:
        gate = hold_back(running, lambda: running.sessions < 4 and not used)
        settings = ClientConfig(verifier=running.address, draft=str(tiny_pair.noisy_draft), hint_tokens=4)
        async with SpeculativeClient(settings, concurrency=4) as device:
            assert len(loads) == 1
            for drafter in device._idle:
                draft = drafter.propose
                drafter.propose = lambda budget, draft=draft, own=drafter: (used.add(id(own)), draft(budget))[1]  # type: ignore[method-assign, attr-defined, misc]
            texts = [
                asyncio.create_task(
                    device.generate(
                        [50 + n],
                        max_new_tokens=40,
                        sampling=HOT,
                        seed=n,
                        stop_ids=(),
                        pace=PaceKind.WAIT,
                        on_open=opened(n),
                    )
                )
                for n in range(9)
            ]
            await running.settled(lambda: running.sessions == 4)
            gate.set()
            results = await asyncio.gather(*texts)
            assert len(device._idle) == 4
    assert len(used) == 4
    assert [list(result.ids) for result in results] == [plain.ids([50 + n], 40, HOT, n) for n in range(9)]
    assert all(result.report.usage.accepted_tokens > 0 for result in results)


async def test_a_drafter_is_not_handed_on_while_its_thread_is_at_work_however_often_its_text_is_cancelled(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    async with serving(loaded_tiny) as running:
        settings = ClientConfig(verifier=running.address, draft=str(tiny_pair.same_draft), hint_tokens=4)
        async with SpeculativeClient(settings, concurrency=2) as device:
            drafter = device._idle[-1]
            propose = drafter.propose
            drafter.propose = lambda budget: (begun.set(), may_end.wait(60), propose(budget))[2]  # type: ignore[method-assign]
            text = asyncio.create_task(device.generate([70, 71], max_new_tokens=40, sampling=GREEDY, stop_ids=()))
            assert await asyncio.to_thread(begun.wait, PATIENCE_S)
            for _ in range(3):
                text.cancel()
                await asyncio.sleep(0.05)
            assert drafter not in device._idle
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await text
            assert drafter in device._idle


def opened(number: int) -> Callable[[int], None]:
    def check(seed: int) -> None:
        assert seed == number

    return check


def test_models_over_the_same_weights_compute_at_once_what_each_computes_alone(tiny_pair: TinyPair) -> None:
    rng = random.Random(6)
    first = OnnxModel(tiny_pair.noisy_draft)
    models = [first, *(first.another() for _ in range(3))]
    sequences = [[rng.randrange(300) for _ in range(300)] for _ in models]

    def fed(model: OnnxModel, ids: list[int]) -> Any:
        return [model.feed(ids[start : start + 7]) for start in range(0, len(ids), 7)]

    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(fed, models, sequences))
    for scores, ids in zip(at_once, sequences, strict=True):
        assert np.array_equal(scores, fed(OnnxModel(tiny_pair.noisy_draft), ids))


def test_a_drafter_of_the_callers_own_serves_one_text_at_a_time() -> None:
    for concurrency, drafter in ((2, RandomDrafter(300)), (0, None), (257, None)):
        with pytest.raises(ConfigError, match="concurrency"):
            SpeculativeClient(drafter=drafter, concurrency=concurrency)


# ---------------------------------------------------------------- room that is awaited


async def test_more_prompts_at_once_than_the_verifier_has_room_for_are_all_written(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    source, whole, out = written(tmp_path, PROMPTS[:6]), tmp_path / "whole", tmp_path / "out"
    answers: list[Any] = []
    async with serving(loaded_tiny) as running:
        assert await run(running, tiny_pair, source, whole) == 0
    async with serving(loaded_tiny, max_sessions=2) as running, raw(running) as stub:
        holders = [RawStream(stub), RawStream(stub)]
        for holder in holders:
            await holder.open(open_frame(loaded_tiny, run_ahead=0))
        count_opens(running, answers)
        texts = asyncio.create_task(run(running, tiny_pair, source, out, "--concurrency", "6"))
        await running.settled(lambda: refusals(answers) >= 6)
        for holder in holders:
            holder.call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            assert await texts == 0
    assert out.read_bytes() == whole.read_bytes()


async def test_a_batch_waits_past_the_clients_limit_while_it_holds_the_room_itself(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "TRY_AGAIN_S", 0.05)
    source, out, answers = written(tmp_path, PROMPTS[:4]), tmp_path / "out", list[Any]()
    async with serving(loaded_tiny, max_sessions=1) as running:
        gate = hold_back(running, lambda: True)
        count_opens(running, answers)
        texts = asyncio.create_task(run(running, tiny_pair, source, out, "--overload-wait-s", "0"))
        commands = running.engine.worker._commands  # the others' opens, behind the first text's first step
        await running.settled(lambda: commands.qsize() >= 3 or refusals(answers) > 0)
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await texts == 0
    assert refusals(answers) > 0
    assert len(rows(out)) == 4


async def test_a_batch_gives_up_where_others_hold_all_the_room_and_says_how_to_go_on(
    loaded_tiny: LoadedTarget,
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(batch, "TRY_AGAIN_S", 0.05)
    source, out = written(tmp_path, PROMPTS[:4]), tmp_path / "out"
    async with serving(loaded_tiny, max_sessions=1) as running, raw(running) as stub:
        await RawStream(stub).open(open_frame(loaded_tiny, run_ahead=0))
        async with asyncio.timeout(PATIENCE_S):
            assert await run(running, tiny_pair, source, out, "--overload-wait-s", "0.1") == 1
    assert "; 0 of 4 texts are kept" in capsys.readouterr().err.splitlines()[-1]


def refusals(answers: Sequence[Any]) -> int:
    return sum(isinstance(answer, Overloaded) for answer in answers)


async def test_a_full_verifier_is_waited_for_and_the_text_comes_when_there_is_room(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    answers: list[Any] = []
    async with serving(loaded_tiny, max_sessions=1) as running, raw(running) as stub:
        count_opens(running, answers)
        holder = RawStream(stub)
        await holder.open(open_frame(loaded_tiny, run_ahead=0))
        async with client(running, tiny_pair, "same") as device, asyncio.timeout(PATIENCE_S):
            ids, states = list[int](), list[State]()
            async for event in device.stream([70, 71], max_new_tokens=12, sampling=GREEDY, stop_ids=()):
                if isinstance(event, StateChanged):
                    states.append(event.state)
                    if event.state is State.OFFLINE:
                        holder.call.cancel()
                elif isinstance(event, Done):
                    assert event.report.reconnects == 0
                else:
                    ids += event.ids
    assert refusals(answers) > 0
    assert ids == plain.ids([70, 71], 12, GREEDY)
    assert states[:2] == [State.OFFLINE, State.DRAFTING]


@pytest.mark.parametrize("limit_s", [0, 0.2])
async def test_a_verifier_that_stays_full_is_an_error_that_says_so(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, limit_s: float
) -> None:
    """It asks for an hour: the client's own limit ends the wait, with a last try."""
    answers: list[Any] = []
    async with serving(loaded_tiny, max_sessions=1) as running, raw(running) as stub:
        await RawStream(stub).open(open_frame(loaded_tiny, run_ahead=0))
        count_opens(running, answers, retry_after_ms=3_600_000)
        async with client(running, tiny_pair, "same", overload_wait_s=limit_s, reconnect_for_s=600) as device:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(Overloaded, match="sessions"):
                    await device.generate([70, 71], max_new_tokens=4)
    assert len(answers) == (1 if limit_s == 0 else 2)


async def test_a_text_given_up_before_its_open_is_answered_is_closed_when_it_is(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    # Once wrong: the cancelled read ended the stream, and the session stood until its lease ended.
    asked = asyncio.Event()
    async with serving(loaded_tiny) as running, raw(running) as stub, client(running, tiny_pair, "same") as device:
        gate = hold_back(running, lambda: True)
        neighbour = RawStream(stub)
        await neighbour.open(open_frame(loaded_tiny))  # the open waits behind its forward
        ask = running.engine.open

        async def asking(*frame: Any) -> Any:
            asked.set()
            return await ask(*frame)

        running.engine.open = asking  # type: ignore[method-assign]
        text = asyncio.create_task(device.generate([70, 71], max_new_tokens=400, sampling=GREEDY, stop_ids=()))
        await asked.wait()
        await asyncio.sleep(0.05)  # the client's own write is done: it reads
        text.cancel()
        await asyncio.sleep(0.05)  # long enough for a cancelled stream to be noticed
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await text
        await neighbour.rest()
        await running.settled(lambda: running.sessions == 1)


# ---------------------------------------------------------------- a text that loses its room

VICTIM = 19
"""max_new_tokens of the text that is ended: how the verifier's side tells it from the others."""


def end_in_mid_text(running: Running, ended: list[Any], most: int) -> None:
    """The verifier ends the text with max_new_tokens VICTIM, whenever it has begun, as if it had no memory for it.

    After `most` times it is let through, that a client which tries for ever ends too.
    """
    forward = running.model.forward

    def watched(*args: Any, **named: Any) -> Any:
        for session in list(running.engine._sessions.values()):
            is_due = session.opened_with.max_new_tokens == VICTIM and session.length > len(session.opened_with.ids)
            if is_due and session not in ended and len(ended) < most:
                ended.append(session)
                told = Overloaded("the device has no memory for this session's step")
                running.engine.submit(lambda session=session, told=told: running.engine.end_with(session, told))
        return forward(*args, **named)

    running.model.forward = watched


@pytest.mark.parametrize("concurrency", ["1", "4"])
async def test_a_text_that_the_verifier_ends_for_want_of_memory_is_its_lines_error_and_is_tried_again_when_asked(
    loaded_tiny: LoadedTarget,
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    concurrency: str,
) -> None:
    monkeypatch.setattr(batch, "TRY_AGAIN_S", 0.02)
    prompts = [PROMPTS[0], {"prompt": "the other", "id": "victim", "max_new_tokens": VICTIM}, PROMPTS[1], PROMPTS[11]]
    source, whole, out = written(tmp_path, prompts), tmp_path / "whole", tmp_path / "out"
    more, ended, opened = ("--concurrency", concurrency), list[Any](), list[Any]()
    async with serving(loaded_tiny) as running:
        assert await run(running, tiny_pair, source, whole, *more) == 0
        expected = rows(whole)
        assert expected[1]["generated_tokens"] == VICTIM
        end_in_mid_text(running, ended, most=12)
        async with asyncio.timeout(60):
            assert await run(running, tiny_pair, source, out, *more) == 1
        assert 1 <= len(ended) < 12
        assert "1 of 4 prompts failed" in capsys.readouterr().err
        found = rows(out)
        assert [found[0], *found[2:]] == [expected[0], *expected[2:]]
        assert set(found[1]) == {"id", "error"}
        assert (found[1]["id"], found[1]["error"]["class"]) == ("victim", "SessionError")
        assert "no memory for this session" in found[1]["error"]["message"]
        assert texts_kept(out) == 3

        del running.model.forward  # from now on it has room
        count_opens(running, opened)
        assert await run(running, tiny_pair, source, out, *more, "--force") == 0
    assert [frame.max_new_tokens for frame in opened] == [VICTIM]
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name("out.partial").exists()
