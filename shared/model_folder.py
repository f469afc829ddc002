"""Folders of the model cache: built aside under a lock, moved into place at once, checked against their manifest.

Must not know: which models there are or where they come from. Used by `model_cache` and `model_store`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, ModelLoadError
from shared.self_test import SELF_TEST

Progress = Callable[[str, int, int], None]
"""Called with a label, how much is done and how much there is (bytes, or parts); may be called often."""

MANIFEST = "manifest.json"
STAGING_PREFIX = ".tmp-"
_CHUNK_BYTES = 1 << 22
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""All that is read of a model where none is loaded: whether a raw prompt begins with BOS stands in the second. The chat
template and the stop ids come from the verifier."""
REQUIRED = {
    "target": ("config.json", "*.safetensors"),
    "draft": ("genai_config.json", "model.onnx"),
    "tokenizer": TOKENIZER_FILES,
}
"""The files, by role, without which a folder is none."""


def silent(label: str, done: int, total: int) -> None:
    """A Progress that says nothing."""


@dataclass(frozen=True)
class Damage:
    """One file of a cached model that is not what was stored."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def cache_root() -> Path:
    """Where pulled models live: $DRAFTWIRE_CACHE, else `draftwire` in the user's cache folder."""
    own = os.environ.get("DRAFTWIRE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draftwire"


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[int]:
    """Holds a lock between processes; yields its descriptor. Calls `on_wait` once if another process holds it.

    Child processes that inherit the descriptor hold the lock too, so a killed parent's children still keep others out
    until they have ended: whoever gets the lock may remove every temporary that the lock guards.
    Raises: ModelLoadError if the lock's file cannot be written.
    """
    try:
        import fcntl
    except ImportError as error:
        raise ConfigError("models can be built on Linux and macOS only: copy a pulled model folder here") from error
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staging(parent: Path, prefix: str = STAGING_PREFIX) -> Iterator[Path]:
    """A temporary folder in `parent`, gone afterwards. Removes what dead processes left; call it under the lock.

    Raises: ModelLoadError if it cannot be made.
    """
    with _writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(built: Path, final: Path, trash: Path) -> None:
    """Moves a sealed folder into place in one step; what stood there goes to `trash`, a name in the staging folder."""
    if final.exists():
        os.rename(final, trash)
    os.rename(built, final)


def need_space(folder: Path, needed_bytes: int) -> None:
    """Refuses early what would not fit on the disk.

    Raises: ModelLoadError saying how much is needed, and what to do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelLoadError(
            f"not enough disk space in {folder}: {needed_bytes / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; "
            "make room or set DRAFTWIRE_CACHE to a folder on another disk"
        )


def sha256_file(path: Path, on_bytes: Callable[[int], None]) -> str:
    """The SHA-256 of a file in hex; `on_bytes` hears how many bytes each read gave."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def _hashes(folder: Path, names: list[str], progress: Progress, label: str) -> dict[str, dict[str, Any]]:
    """Name → SHA-256 and size of each file; a file that is not there is left out."""
    present = [name for name in names if (folder / name).is_file()]
    total, done = sum((folder / name).stat().st_size for name in present), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(label, done, total)

    return {n: {"sha256": sha256_file(folder / n, advance), "bytes": (folder / n).stat().st_size} for n in present}


def seal(folder: Path, facts: dict[str, str], progress: Progress) -> None:
    """Writes the manifest: `facts` about the origin, and each file's SHA-256 and size."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    for name in names:
        (folder / name).chmod(0o644)
    manifest = {**facts, "files": _hashes(folder, names, progress, "hashing")}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def add_sealed(folder: Path, file: Path, progress: Progress) -> None:
    """Moves a file of the staging folder into a sealed folder, and into its manifest; whoever loads meanwhile may."""
    file.chmod(0o644)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"] |= _hashes(file.parent, [file.name], progress, "hashing")
    fresh = file.with_name(MANIFEST)
    fresh.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.rename(file, folder / file.name)
    os.rename(fresh, folder / MANIFEST)


def has_one_origin(folder: Path, other: Path) -> bool:
    """Whether the manifests of two sealed folders tell of the same weights."""
    return origin_of(folder) == origin_of(other) != {}


def origin_of(folder: Path) -> dict[str, str]:
    """What the manifest of a sealed folder tells of where it came from; nothing if it cannot be read."""
    try:
        said = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: str(said[name]) for name in ("hub_id", "source_sha256") if name in said}
    except (OSError, ValueError, TypeError):
        return {}


def _manifest_files(folder: Path) -> dict[str, dict[str, Any]] | None:
    """What the manifest says of each file; None if it cannot be read."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {str(name): {"sha256": str(said["sha256"]), "bytes": int(said["bytes"])} for name, said in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def size_damage(folder: Path, role: str = "") -> list[Damage]:
    """The files that are missing or of another size than the manifest says: quick, reads no weights.

    A draft's self-test does not count: a draft is used without one. `role` tokenizer: the tokenizer's files alone do.
    """
    return _size_damage(folder, lambda name: name in TOKENIZER_FILES if role == "tokenizer" else name != SELF_TEST)


def _size_damage(folder: Path, counts: Callable[[str], bool]) -> list[Damage]:
    files = _manifest_files(folder)
    if files is None:
        return [Damage(folder / MANIFEST, "is missing or cannot be read")]
    damages = []
    for name, said in files.items():
        path = folder / name
        if not counts(name):
            continue
        if not path.is_file():
            damages.append(Damage(path, "is missing"))
        elif path.stat().st_size != said["bytes"]:
            damages.append(Damage(path, f"is corrupt: {path.stat().st_size} bytes instead of {said['bytes']}"))
    return damages


def hash_damage(folder: Path, progress: Progress, role: str = "") -> list[Damage]:
    """The files that are missing or differ from the manifest in any byte: reads all, or the tokenizer's files."""

    def counts(name: str) -> bool:
        return role != "tokenizer" or name in TOKENIZER_FILES

    damages = _size_damage(folder, counts)
    said = _manifest_files(folder) or {}
    bad = {damage.path for damage in damages}
    names = [name for name in said if counts(name) and folder / name not in bad]
    found = _hashes(folder, names, progress, f"checking {folder.parent.name}/{folder.name}")
    for name in names:
        if found.get(name) != said[name]:
            damages.append(Damage(folder / name, "is corrupt: its SHA-256 is not the one that was stored"))
    return damages


def check_required(folder: Path, role: str) -> None:
    """Passes a folder that holds what its role needs.

    Raises: ModelLoadError naming what is missing.
    """
    missing = [pattern for pattern in REQUIRED[role] if not any(folder.glob(pattern))]
    if missing:
        lack = "holds no tokenizer" if role == "tokenizer" else f"is no {role} model"
        raise ModelLoadError(f"{folder} {lack}: {' and '.join(missing)} missing")


def check_quick(folder: Path, role: str = "") -> None:
    """The check at load time: existence and sizes of what the role reads, against the manifest if there is one.

    Raises: ModelLoadError naming the first missing or corrupt file.
    """
    if (folder / MANIFEST).exists():
        for damage in size_damage(folder, role):
            raise ModelLoadError(f"{damage}; copy or export it again")
