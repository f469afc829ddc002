"""A batch's files: which prompts are taken, what is refused and how, what a journal keeps, how texts are laid down."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import pytest

from edge_client.batch_files import (
    MAX_LISTED,
    Line,
    Settings,
    check_output,
    parse_lines,
    read_lines,
    write_output,
)
from edge_client.batch_journal import Journal, whole_rows
from shared.errors import ConfigError
from shared.sampling import GREEDY, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime(2026, 5, 4, 3, 2, 1)
SETTINGS = Settings(
    target="big",
    target_id="ab" * 32,
    chat_template="0123",
    stop_ids=(0,),
    sampling=SamplingParams(temperature=0.5),
    max_new_tokens=32,
    seed=0,
    rule="agreement",
)
RESULT = {"text": "你好 \u2028", "finish_reason": "stop", "context_tokens": 3, "generated_tokens": 2}


def rows(*objects: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in objects)


def one(**fields: Any) -> Line:
    (line,) = parse_lines(rows(fields))
    return line


# ---------------------------------------------------------------- prompts in


@pytest.mark.parametrize(
    ("fields", "prompt", "name"),
    [
        ({"prompt": "a"}, "a", 0),
        ({"id": "x", "prompt": "a", "question": "b"}, "a", "x"),
        ({"question_id": 81, "category": "writing", "turns": ["first", "second"]}, "first", 81),
        ({"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "…"}, "def f():\n", "HumanEval/0"),
        ({"question": "How many?", "answer": "#### 18"}, "How many?", 0),
        ({"messages": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}], 0),
        ({"prompt": "a", "messages": None, "seed": None}, "a", 0),
    ],
    ids=["plain", "id", "Spec-Bench", "HumanEval", "GSM8K", "chat", "null is not given"],
)
def test_lines_of_these_forms_are_prompts(fields: dict[str, Any], prompt: Any, name: str | int) -> None:
    line = one(**fields)
    assert (line.prompt, line.id) == (prompt, name)


def test_blank_lines_a_byte_order_mark_and_windows_ends_change_nothing() -> None:
    lines = parse_lines(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b\xe2\x80\xa8"}')
    assert [(line.index, line.number, line.prompt) for line in lines] == [(0, 1, "a"), (1, 4, "b\u2028")]
    assert lines[0].source == one(prompt="a").source


def test_a_lines_own_options_replace_the_runs() -> None:
    line = one(prompt="a", temperature=0, top_k=3, seed=7, max_new_tokens=9, stop="x", logit_bias={"5": -2})
    assert SETTINGS.sampling_of(line) == SamplingParams(temperature=0, top_k=3, logit_bias={5: -2})
    assert (SETTINGS.seed_of(line), line.max_new_tokens, line.stop) == (7, 9, ("x",))
    assert SETTINGS.sampling_of(one(prompt="a", min_p=0.5)) == SamplingParams(temperature=0.5, min_p=0.5)


BAD = [
    ({}, "prompt is missing"),
    ({"prompt": ""}, "prompt must"),
    ({"prompt": 5}, "prompt must"),
    ({"prompt": "a", "turns": ["b"]}, "prompt and turns"),
    ({"turns": []}, "turns must"),
    ({"turns": [5]}, "turns[0] must"),
    ({"messages": []}, "messages: must"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "no role", "content": ""}]}, "messages[0].role"),
    ({"prompt": "a", "id": [1]}, "id must"),
    ({"prompt": "a", "id": True}, "id must"),
    ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens must"),
    ({"prompt": "a", "max_new_tokens": True}, "max_new_tokens must"),
    ({"prompt": "a", "max_tokens": 5}, "max_new_tokens"),
    ({"prompt": "a", "seed": -1}, "seed must"),
    ({"prompt": "a", "seed": 2**64}, "seed must"),
    ({"prompt": "a", "temperature": "hot"}, "temperature must"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature must"),
    ({"prompt": "a", "top_k": 1.5}, "top_k must"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "a", "stop": [""]}, "stop must"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop must"),
    ([1], "must be a JSON object"),
]


@pytest.mark.parametrize(("content", "part"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_line_is_named_with_its_field(content: Any, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lines(b"\n" + rows({"prompt": "good"}, content))
    assert caught.value.message.startswith("line 3: ")
    assert part in caught.value.message


@pytest.mark.parametrize("raw", [b"{", b"\xff", b'"' + b"[" * 5000, b"1" * 5000], ids=["cut", "bytes", "deep", "long"])
def test_what_is_not_json_is_a_bad_line(raw: bytes) -> None:
    with pytest.raises(ConfigError, match="line 1: "):
        parse_lines(raw)


def test_all_bad_lines_are_named_at_once_but_not_too_many(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(rows(*({"prompt": "good"} if n % 2 else {"prompt": n} for n in range(30))))
    with pytest.raises(ConfigError) as caught:
        read_lines(file)
    told = caught.value.message
    assert all(f"line {number}: prompt must" in told for number in range(1, 2 * MAX_LISTED, 2))
    assert "line 21" not in told
    assert "and 5 more" in told
    assert str(file) in told
    assert "\n" not in told


def test_raw_runs_refuse_chats_and_empty_files_are_refused() -> None:
    chat = rows({"messages": [{"role": "user", "content": "hi"}]})
    assert parse_lines(chat)
    with pytest.raises(ConfigError, match="--raw"):
        parse_lines(chat, is_raw=True)
    with pytest.raises(ConfigError, match="no prompt"):
        parse_lines(b"\n")


def test_seeds_depend_on_the_runs_seed_and_the_index_alone() -> None:
    lines = parse_lines(rows(*[{"prompt": "same"}] * 50))
    seeds = [SETTINGS.seed_of(line) for line in lines]
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[0] == 0xAC72368A586A18C1  # SHA-256 of "0:0": a new version must not change texts
    assert not set(seeds) & {replace(SETTINGS, seed=1).seed_of(line) for line in lines}


# ---------------------------------------------------------------- the journal

LINES = parse_lines(rows(*({"prompt": f"p{n}"} for n in range(5))))


def journal(path: Path, settings: Settings = SETTINGS, lines: list[Line] = LINES, *, anew: bool = False) -> Journal:
    return Journal(path, settings, lines, NOW, anew=anew)


def filled(path: Path, *indices: int) -> bytes:
    """A journal that holds these texts, closed; what it wrote."""
    held = journal(path)
    for index in indices:
        held.add(LINES[index], RESULT)
    held.close()
    return path.read_bytes()


def test_a_journal_gives_back_what_it_was_given_and_the_time_it_began(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path, 3, 0)
    again = Journal(path, SETTINGS, LINES, datetime(2027, 1, 1), anew=False)
    assert again.results == {3: RESULT, 0: RESULT}
    assert again.began == NOW
    again.add(LINES[1], RESULT)
    again.close()
    last = journal(path)
    assert sorted(last.results) == [0, 1, 3]
    last.remove()
    assert not path.exists()


def test_a_row_is_on_the_disk_when_add_returns(tmp_path: Path) -> None:
    held = journal(tmp_path / "j")
    held.add(LINES[2], RESULT)
    assert (tmp_path / "j").read_bytes().count(b"\n") == 2
    held.close()


def test_wherever_its_last_row_is_torn_the_others_stand_and_the_journal_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = filled(path, 0, 1)
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        held = journal(path)
        assert len(held.results) == max(0, sum(end <= cut for end in ends) - 1)
        held.add(LINES[4], RESULT)
        held.close()
        again = journal(path)
        assert again.results == {**held.results, 4: RESULT}
        again.close()


def test_a_damaged_row_before_the_last_is_refused() -> None:
    good = rows({"a": 1})
    assert whole_rows(good + b"{torn\n", Path("j")) == ([{"a": 1}], len(good))
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        whole_rows(good + b"{torn\n" + good, Path("j"))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (replace(SETTINGS, max_new_tokens=33), "max_new_tokens was 32, is 33"),
        (replace(SETTINGS, sampling=GREEDY), "temperature was 0.5, is 0.0"),
        (replace(SETTINGS, target_id="cd" * 32), "target_id was"),
        (replace(SETTINGS, stop=("x",), system="s"), 'stop was [], is ["x"]; system was "", is "s"'),
    ],
    ids=["length", "sampling", "target", "two"],
)
def test_a_journal_of_other_settings_is_refused_naming_them_and_left_alone(
    tmp_path: Path, changed: Settings, told: str
) -> None:
    path = tmp_path / "j"
    before = filled(path, 0)
    with pytest.raises(ConfigError) as caught:
        journal(path, changed)
    assert told in caught.value.message
    assert "--restart" in caught.value.message
    assert path.read_bytes() == before
    anew = journal(path, changed, anew=True)
    assert anew.results == {}
    anew.close()
    assert len(path.read_bytes()) < len(before)


def test_a_journal_of_another_input_is_refused_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path, 2)
    for lines, told in (
        ([*LINES[:2], replace(LINES[2], source=b'{"prompt": "other"}')], "line 3 has changed"),
        (LINES[:2], "prompt 2 has changed"),
    ):
        with pytest.raises(ConfigError, match=told):
            journal(path, lines=lines)
    more = parse_lines(rows(*({"prompt": f"p{n}"} for n in range(9))))  # what was done is the same in a longer file
    held = journal(path, lines=more)
    assert held.results == {2: RESULT}
    held.close()


@pytest.mark.parametrize("content", [b"notes of mine", b'{"a": 1}\n', b'{"draftwire_batch": 99}\n'])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"journal of a batch|not of this version"):
        journal(path)
    assert path.read_bytes() == content


def test_two_batches_cannot_hold_one_journal(tmp_path: Path) -> None:
    held = journal(tmp_path / "j")
    with pytest.raises(ConfigError, match="another batch"):
        journal(tmp_path / "j")
    held.close()
    journal(tmp_path / "j").close()


# ---------------------------------------------------------------- texts out


def test_texts_come_out_in_the_order_of_the_prompts_whatever_their_characters(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = parse_lines(b'{"prompt": "a", "id": "\\ud800"}\n{"prompt": "b"}')
    write_output(out, lines, {1: {"error": {"class": "X"}}, 0: RESULT})
    written = out.read_bytes().split(b"\n")
    assert [json.loads(row) for row in written[:2]] == [
        {"id": "\ud800", **RESULT},
        {"id": 1, "error": {"class": "X"}},
    ]
    assert written[2:] == [b""]
    assert "你好".encode() in written[0]
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_output_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.touch()
    check_output(out, source, is_forced=False)
    out.touch()
    with pytest.raises(ConfigError, match="--force"):
        check_output(out, source, is_forced=False)
    check_output(out, source, is_forced=True)
    for bad in (source, tmp_path, tmp_path / "no" / "out"):
        with pytest.raises(ConfigError, match=str(bad)):
            check_output(bad, source, is_forced=True)


# ---------------------------------------------------------------- without the edge extra


@pytest.mark.parametrize("missing", ["grpc", "tokenizers", "jinja2"])
def test_the_command_without_the_edge_extra_says_in_a_line_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from edge_client.cli import main; sys.exit(main(['chat']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"edge-client: {missing} is not installed: pip install 'draftwire[edge]'\n"


def test_another_missing_module_is_not_taken_for_the_edge_extra() -> None:
    code = "import sys; sys.modules['shared.codec'] = None; import edge_client.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 1
    assert "shared.codec" in done.stderr
    assert "draftwire[edge]" not in done.stderr


def test_the_public_names_are_all_there() -> None:
    import edge_client

    found = {name: getattr(edge_client, name) for name in edge_client.__all__}
    assert all(value.__name__ == name for name, value in found.items() if name != "Event")
    assert found["Preview"] in get_args(found["Event"])
    with pytest.raises(AttributeError, match="no_such_name"):
        edge_client.no_such_name  # noqa: B018
