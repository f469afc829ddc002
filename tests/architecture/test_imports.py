"""The import rules of the house, read from the syntax trees; what an import really loads; fresh generated code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edge_client", "cloud_verifier", "shared")
GENERATED = ROOT / "shared" / "pb"
PROTO = ROOT / "proto" / "shared" / "pb" / "verifier.proto"
TOKEN_PATH = ROOT / "docs" / "token_path.md"

FORBIDDEN: dict[str, set[str]] = {
    "edge_client": {"torch", "transformers", "cloud_verifier", "safetensors", "tests", "bench"},
    "cloud_verifier": {"onnxruntime", "onnxruntime_genai", "edge_client", "tests", "bench"},
    "shared": {
        "grpc",
        "torch",
        "onnxruntime",
        "asyncio",
        "transformers",
        "tokenizers",
        "edge_client",
        "cloud_verifier",
        "tests",
        "bench",
    },
}
ONLY_IN: dict[str, set[str]] = {
    "onnxruntime": {"edge_client/onnx_drafter.py"},
    "transformers": {"cloud_verifier/hf.py"},
    "huggingface_hub": {"shared/model_fetch.py"},
    "tokenizers": {"edge_client/tokenizer.py", "cloud_verifier/hf.py"},
    "shared.pb": {
        "shared/codec.py",
        "edge_client/transport.py",
        "cloud_verifier/service.py",
        "cloud_verifier/server.py",
    },
}
LAZY_ONLY = {"huggingface_hub"}
"""Not even there at the top of a module."""


def modules() -> list[Path]:
    """Our own source files, generated ones left out."""
    return [
        path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if GENERATED not in path.parents
    ]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every dotted name that a file imports, and whether it does so at the top of the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in lazy
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            yield ast.unparse(node.args[0]).strip("'\""), False


def is_under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check() -> None:
    found = {name_of(path) for path in modules()}
    assert set().union(*ONLY_IN.values()) <= found
    assert len(found) > 30
    assert ("onnxruntime", True) in set(imports(ROOT / "edge_client" / "onnx_drafter.py"))


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_package_imports_nothing_that_it_must_not_know(path: Path) -> None:
    package = name_of(path).split("/")[0]
    bad = [name for name, _ in imports(path) if any(is_under(name, module) for module in FORBIDDEN[package])]
    assert bad == []


@pytest.mark.parametrize("module", ONLY_IN)
def test_these_are_imported_in_their_own_modules_only(module: str) -> None:
    users = {name_of(path) for path in modules() for name, _ in imports(path) if is_under(name, module)}
    assert users == ONLY_IN[module]


@pytest.mark.parametrize("module", LAZY_ONLY)
def test_these_are_imported_when_needed_only(module: str) -> None:
    early = {name_of(p) for p in modules() for name, is_top in imports(p) if is_under(name, module) and is_top}
    assert early == set()


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_client_loads_neither_onnxruntime_nor_torch() -> None:
    loaded = loaded_by("import edge_client, edge_client.cli")
    assert {"edge_client", "shared", "grpc", "numpy"} <= loaded
    assert not loaded & {"onnxruntime", "torch", "transformers", "cloud_verifier", "huggingface_hub"}


def test_the_onnx_drafter_loads_no_torch() -> None:
    loaded = loaded_by("import edge_client.onnx_drafter, edge_client.drafter")
    assert "onnxruntime" in loaded
    assert not loaded & {"torch", "transformers", "cloud_verifier"}


def test_the_verifiers_command_line_is_there_without_torch() -> None:
    loaded = loaded_by("import cloud_verifier.cli; cloud_verifier.cli.parser()")
    assert not loaded & {"torch", "transformers", "onnxruntime", "edge_client"}


def test_importing_the_verifier_loads_no_onnxruntime() -> None:
    loaded = loaded_by("import cloud_verifier.verifier_process")
    assert "torch" in loaded
    assert not loaded & {"onnxruntime", "edge_client"}


def test_generated_code_is_what_the_proto_file_gives(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    done = subprocess.run(
        [*command, str(PROTO.relative_to(ROOT))], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    fresh = {path.name: path.read_text() for path in (tmp_path / "shared" / "pb").iterdir()}
    assert len(fresh) == 3
    for name, text in fresh.items():
        assert (GENERATED / name).read_text() == text, f"{name} is stale: run make proto"


# ---------------------------------------------------------------- docs/token_path.md


def defined_in(path: Path) -> set[str]:
    """Names of functions, methods and classes in a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)}


def test_the_token_path_names_files_and_functions_that_exist() -> None:
    """Each row of its table names files, then calls; a call is defined in a file of its own row."""
    assert TOKEN_PATH.is_file(), "docs/token_path.md is missing"
    rows = [line for line in TOKEN_PATH.read_text(encoding="utf-8").splitlines() if re.match(r"\|\s*\d", line)]
    assert len(rows) >= 8
    for row in rows:
        spans = re.findall(r"`([^`]+)`", row)
        files = [span for span in spans if span.endswith(".py")]
        calls = [re.sub(r"\(.*", "", span).split(".")[-1] for span in spans if not span.endswith(".py")]
        assert files, row
        assert calls, row
        defined: set[str] = set()
        for file in files:
            found = [path for path in modules() if name_of(path) == file or path.name == file]
            assert found, f"{file} in: {row}"
            for path in found:
                defined |= defined_in(path)
        for call in calls:
            assert call in defined, f"{call} is not defined in {files}: {row}"
