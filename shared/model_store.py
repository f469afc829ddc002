"""The model store: from a bundle's name, a path or a hub id to a folder that can be loaded.

Must not know: torch, transformers, onnxruntime (child processes convert), how progress is shown.
Called by both command lines and by whoever loads a model.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import ConfigError, DraftwireError, ModelLoadError
from shared.model_build import (
    SOURCES,
    Tools,
    build_draft,
    build_self_test,
    build_target,
    build_tokenizer,
    copy_tokenizer,
    needed_bytes,
    require_tools,
    uses_hub,
)
from shared.model_bundles import PRECISIONS, ROLES, TOKENIZER, Bundle, check_choice
from shared.model_cache import ModelCache, is_sound
from shared.model_folder import (
    Progress,
    add_sealed,
    check_required,
    has_one_origin,
    locked,
    need_space,
    origin_of,
    publish,
    seal,
    silent,
    size_damage,
    staging,
)
from shared.model_process import Job, not_installed, require
from shared.self_test import SELF_TEST, read_self_test

log = logging.getLogger("draftwire.models")


@dataclass(frozen=True)
class Store(ModelCache):
    """The cache, and the tools that fill it. Tests build their own."""

    tools: Tools = field(default_factory=Tools)

    def pull(
        self,
        name: str,
        role: str,
        progress: Progress = silent,
        precision: str = "auto",
        source: str = "auto",
        force: bool = False,
    ) -> Path:
        """The folder of a finished result, built if need be. Safe to interrupt, and to call from two processes at once.

        A result that is there is given back whatever its source; `force` builds it again. A draft without a
        self-test that can be read gets one if the target that it was exported from is there too.
        Raises: ConfigError for an unknown name or choice, ModelLoadError if it cannot be had.
        """
        bundle = self.find_or_hub(name)
        check_choice("source", source, SOURCES, "a model comes from")
        final = self.folder(bundle, role, precision)
        if not force and is_sound(final):
            if role == "draft":
                self._try_add_self_test(bundle, final, progress)
            return final
        with locked(self._lock(bundle.name), lambda: progress(f"waiting for another pull of {name}", 0, 1)) as lock:
            if not force and is_sound(final):
                return final
            found = self._tokenizer_to_copy(bundle, final) if role == TOKENIZER and source == "auto" else None
            if found is None:
                require_tools(self.tools, bundle, role, source)
            with staging(final.parent) as staged:
                if found is None:
                    need_space(staged, needed_bytes(bundle, role, bundle.precision(precision), source))
                job = self._job(bundle.name, staged, lock, progress)
                built = copy_tokenizer(job, found) if found else self._build(job, bundle, role, source, precision)
                origin = {"hub_id": bundle.hub_id} if uses_hub(bundle, source) else {"source_sha256": bundle.sha256}
                origin = origin_of(found) if found else origin
                seal(built, {"bundle": bundle.name, "result": bundle.result(role, precision), **origin}, progress)
                publish(built, final, staged / "replaced")
        return final

    def _try_add_self_test(self, bundle: Bundle, draft: Path, progress: Progress) -> None:
        """The draft is ready: what fails here is told, and nothing else follows."""
        try:
            self._maybe_add_self_test(bundle, draft, progress)
        except (OSError, DraftwireError) as error:
            log.warning("the draft in %s gets no self-test: %s", draft, error)

    def _maybe_add_self_test(self, bundle: Bundle, draft: Path, progress: Progress) -> bool:
        """Completes a draft whose self-test is missing or damaged, as in those that an older version pulled."""
        target = self._home(bundle) / "target"
        if _has_self_test(draft) or not has_one_origin(draft, target) or not_installed(self.tools.export_needs):
            return False
        with locked(self._lock(bundle.name), lambda: progress(f"waiting for {bundle.name}", 0, 1)) as lock:
            if _has_self_test(draft) or not (is_sound(draft) and is_sound(target)):
                return False
            with staging(draft.parent) as staged:
                job = self._job(bundle.name, staged, lock, progress)
                precision = draft.name.removeprefix("draft-")
                add_sealed(draft, build_self_test(job, self.tools, target, draft, precision), progress)
        return True

    def _build(self, job: Job, bundle: Bundle, role: str, source: str, precision: str) -> Path:
        """A result in the staging folder, not sealed yet."""
        if role == TOKENIZER:
            return build_tokenizer(job, self.tools, bundle, source, self._home(bundle))
        if role == "target":
            return build_target(job, self.tools, bundle, source, self._home(bundle))
        return build_draft(job, self.tools, self._exportable(job, bundle, source), bundle.precision(precision))

    def _exportable(self, job: Job, bundle: Bundle, source: str) -> Path:
        """The target's folder to export a draft from: the pulled one if there is one, else one built in passing."""
        pulled = self._home(bundle) / "target"
        if source == "auto" and is_sound(pulled):
            return pulled
        return build_target(job, self.tools, bundle, source, self._home(bundle))

    def export_draft(self, source: str, out: Path, precision: str = "int4", progress: Progress = silent) -> Path:
        """Exports a draft from a target's folder, a hub id or a bundle into `out`, which appears only when finished.

        Raises: ConfigError if `out` holds anything or `source` is nothing known, ModelLoadError if the export fails.
        """
        check_choice("precision", precision, PRECISIONS, "a draft's precision is")
        out = out.expanduser().absolute()
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(f"{out} exists and is not empty: name a new folder", field="out")
        local = self._local_folder(source, "target")
        bundle = None if local else self.find_or_hub(source)
        require(self.tools.export_needs, "exporting a draft")
        key = f"export-{hashlib.sha256(str(out).encode()).hexdigest()[:16]}"
        with (
            locked(self._lock(key), lambda: progress("waiting for another export to this folder", 0, 1)) as lock,
            staging(out.parent, f".{out.name}.tmp-") as staged,
        ):
            job = self._job(key, staged, lock, progress)
            target = local or self._exportable(job, bundle or self.find(source), "auto")
            built = build_draft(job, self.tools, target, precision)
            seal(built, {"exported_from": source, "result": f"draft-{precision}"}, progress)
            os.rename(built, out)
        return out

    def resolve(self, name: str, role: str, precision: str = "auto", progress: Progress = silent) -> Path:
        """The folder to load for a bundle's name, a folder's path or a hub id, after the quick check.

        A bundle's name wins over a folder of that name (write ./NAME for that). Only a hub id may use the network.
        As a tokenizer any folder will do that holds its files: a draft's and a target's too.
        Raises: ConfigError if it is none of these, ModelLoadError naming what is missing or corrupt and what to run.
        """
        check_choice("role", role, (*ROLES, TOKENIZER), "a model is loaded as")
        local = self._local_folder(name, role)
        if local:
            return local
        bundle = self.find_or_hub(name)
        final = self.folder(bundle, role, precision)
        found = self._with_tokenizer(bundle) if role == TOKENIZER else None
        if found is not None:
            return found
        run = f"run: edge-client models pull {name} --role {role}" + (f" --precision {precision}" * (role == "draft"))
        if final.is_dir():
            for damage in size_damage(final):
                raise ModelLoadError(f"{damage}; {run} --force")
            check_required(final, role)
            return final
        if self.knows(name):
            raise ModelLoadError(f"{name} is not pulled as {final.name}; {run}")
        return self.tools.snapshot(name, None) if role == "target" else self.pull(name, role, progress, precision)

    def _job(self, key: str, staged: Path, lock: int, progress: Progress) -> Job:
        log = self.root / "logs" / f"{key}.log"
        log.unlink(missing_ok=True)
        return Job(staged, log, lock, progress)


def _has_self_test(draft: Path) -> bool:
    try:
        return read_self_test(draft / SELF_TEST) is not None
    except ModelLoadError:
        return False


def list_bundles() -> list[Bundle]:
    """The bundles that can be pulled by name."""
    return list(Store().bundles)


def find_bundle(name: str) -> Bundle:
    """See `Store.find`."""
    return Store().find(name)


def pull(
    name: str,
    role: str,
    progress: Progress = silent,
    precision: str = "auto",
    source: str = "auto",
    force: bool = False,
) -> Path:
    """See `Store.pull`; in the user's cache."""
    return Store().pull(name, role, progress, precision, source, force)


def resolve(name: str, role: str, precision: str = "auto", progress: Progress = silent) -> Path:
    """See `Store.resolve`; in the user's cache."""
    return Store().resolve(name, role, precision, progress)


def has_tokenizer(name: str) -> bool:
    """See `Store.has_tokenizer`; in the user's cache."""
    return Store().has_tokenizer(name)


def verify(name: str, progress: Progress = silent) -> None:
    """See `Store.verify`; in the user's cache."""
    Store().verify(name, progress)
