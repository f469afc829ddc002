"""The model cache: which models there are, where a pulled result lies, and whether it is whole.

Must not know: how a model is fetched or built. `model_store` fills it and is what others call.

    cache_root()/models/NAME/{target,draft-int4,tokenizer}/   finished results, each with a manifest.json
    cache_root()/models/NAME/.tmp-*/                          a build under way; removed if its process died
    cache_root()/{locks,logs}/                                one lock and one log per NAME
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import ConfigError, ModelLoadError
from shared.model_bundles import PRECISIONS, TOKENIZER, Bundle, hub_bundle, is_hub_id, load_bundles
from shared.model_folder import (
    REQUIRED,
    Damage,
    Progress,
    cache_root,
    check_quick,
    check_required,
    hash_damage,
    silent,
    size_damage,
)

_RESULTS = ("target", *(f"draft-{precision}" for precision in PRECISIONS), TOKENIZER)


@dataclass(frozen=True)
class ModelCache:
    """Its folder, and the bundles it knows. Nothing here uses the network or writes."""

    root: Path = field(default_factory=cache_root)
    bundles: tuple[Bundle, ...] = field(default_factory=load_bundles)

    def knows(self, name: str) -> bool:
        """Whether a bundle has this name."""
        return any(bundle.name == name for bundle in self.bundles)

    def find(self, name: str) -> Bundle:
        """The bundle with this name.

        Raises: ConfigError naming it and the known ones.
        """
        for bundle in self.bundles:
            if bundle.name == name:
                return bundle
        known = ", ".join(bundle.name for bundle in self.bundles)
        raise ConfigError(f"unknown model {name!r}; the bundles are: {known}", field="name")

    def find_or_hub(self, name: str) -> Bundle:
        """The bundle with this name, or one made up for a hub id.

        Raises: ConfigError naming it and the known ones.
        """
        return hub_bundle(name) if is_hub_id(name) and not self.knows(name) else self.find(name)

    def folder(self, bundle: Bundle, role: str, precision: str = "auto") -> Path:
        """Where a pulled result lies, whether or not it is there."""
        return self._home(bundle) / bundle.result(role, precision)

    def ready(self, bundle: Bundle) -> list[Path]:
        """The finished results of a bundle, damaged or not."""
        return [self._home(bundle) / result for result in _RESULTS if (self._home(bundle) / result).is_dir()]

    def _with_tokenizer(self, bundle: Bundle) -> Path | None:
        """The smallest pulled result whose tokenizer's files are whole; None if there is none."""
        return next((folder for folder in reversed(self.ready(bundle)) if _has_tokenizer(folder)), None)

    def _tokenizer_to_copy(self, bundle: Bundle, final: Path) -> Path | None:
        """(locked) Another result than `final` whose tokenizer's files are as they were stored, byte for byte."""
        others = [folder for folder in reversed(self.ready(bundle)) if folder != final and _has_tokenizer(folder)]
        return next((folder for folder in others if not hash_damage(folder, silent, TOKENIZER)), None)

    def has_tokenizer(self, name: str) -> bool:
        """Whether the tokenizer of this model is here: in a folder of that path, or in a pulled result."""
        try:
            return bool(self._local_folder(name, TOKENIZER) or self._with_tokenizer(self.find_or_hub(name)))
        except (ConfigError, ModelLoadError):
            return False

    def _local_folder(self, name: str, role: str) -> Path | None:
        """The folder that a name is the path of, checked for its role; None if it is a name to look up.

        Raises: ModelLoadError if it is a path and nothing is there, or what is there is no such model.
        """
        path = Path(name).expanduser()
        if self.knows(name) or not (path.is_dir() or path.is_absolute() or name.startswith(".")):
            return None
        if not path.is_dir():
            raise ModelLoadError(f"there is no model folder {name}")
        check_quick(path, role)
        check_required(path, role)
        return path.absolute()

    def damage(self, name: str, progress: Progress = silent) -> list[Damage]:
        """Reads every byte of a bundle's results and lists the files that are missing or corrupt.

        Raises: ModelLoadError if nothing of it is pulled.
        """
        folders = self.ready(self.find_or_hub(name))
        if not folders:
            raise ModelLoadError(f"{name} is not pulled; run: edge-client models pull {name}")
        return [damage for folder in folders for damage in hash_damage(folder, progress)]

    def verify(self, name: str, progress: Progress = silent) -> None:
        """Passes a bundle whose pulled results are as they were stored, byte for byte.

        Raises: ModelLoadError naming the missing and corrupt files.
        """
        if damages := self.damage(name, progress):
            listed = ", ".join(str(damage) for damage in damages)
            raise ModelLoadError(f"{listed}; run: {' && '.join(self.remedies(name, damages))}")

    def remedies(self, name: str, damages: list[Damage]) -> list[str]:
        """The commands that build the damaged results of a bundle again, one each."""
        home = self._home(self.find_or_hub(name))
        results = dict.fromkeys(damage.path.relative_to(home).parts[0] for damage in damages)
        asked = [f"--role {result}".replace("draft-", "draft --precision ") for result in results]
        return [f"edge-client models pull {name} {each} --force" for each in asked]

    def _home(self, bundle: Bundle) -> Path:
        return self.root / "models" / bundle.name

    def _lock(self, key: str) -> Path:
        return self.root / "locks" / f"{key}.lock"


def is_sound(folder: Path) -> bool:
    """Whether a finished result is there, each file of the size that the manifest says."""
    return folder.is_dir() and not size_damage(folder)


def _has_tokenizer(folder: Path) -> bool:
    return not size_damage(folder, TOKENIZER) and all((folder / name).is_file() for name in REQUIRED[TOKENIZER])
