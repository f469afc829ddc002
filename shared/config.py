"""Settings from four places: defaults < file < environment < arguments; every bad one is named at once.

Must not know: what the settings are for. Called by both command lines with their own frozen dataclass.
A file is TOML with a table per side ([verifier], [client]); the environment is DRAFTWIRE_<SIDE>_<FIELD>.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import ConfigError

C = TypeVar("C")


def load_config(
    kind: type[C],
    side: str,
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> C:
    """Settings of one side. `arguments` that are None count as not given.

    Raises: ConfigError listing every unknown, unparsable or out-of-range setting and where it came from.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    problems: list[str] = []
    values: dict[str, Any] = {}
    prefix = f"DRAFTWIRE_{side.upper()}_"
    given_by_environment = {
        key[len(prefix) :].lower(): value for key, value in (environment or {}).items() if key.startswith(prefix)
    }
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    sources: list[tuple[str, Mapping[str, object]]] = [
        (f"file {file}", _table(file, side) if file else {}),
        ("environment", given_by_environment),
        ("argument", given),
    ]
    for where, settings in sources:
        for name, value in settings.items():
            shown = prefix + name.upper() if where == "environment" else name
            if name not in fields:
                problems.append(f"{shown} ({where}) is not a setting")
                continue
            try:
                values[name] = _parse(value, fields[name])
            except (ValueError, OverflowError, TypeError):
                problems.append(f"{shown} ({where}) must be {_spoken(fields[name])}, got {value!r}")
    if problems:
        raise ConfigError("; ".join(problems))
    return kind(**values)


def check_ranges(settings: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """For `__post_init__`: raises ConfigError naming every field outside its closed range."""
    problems = [
        f"{name} must be from {low:g} to {high:g}, got {getattr(settings, name)!r}"
        for name, (low, high) in ranges.items()
        if not low <= getattr(settings, name) <= high
    ]
    if problems:
        raise ConfigError("; ".join(problems), field=problems[0].split()[0])


def masked(settings: Any) -> dict[str, Any]:
    """Settings for a log or a screen; those whose metadata says `secret` read ***."""
    return {
        field.name: "***"
        if field.metadata.get("secret") and getattr(settings, field.name)
        else getattr(settings, field.name)
        for field in dataclasses.fields(settings)
    }


def _table(file: Path, side: str) -> Mapping[str, object]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {file}: {error}") from error
    unknown = sorted(set(content) - {"verifier", "client"})
    if unknown:
        raise ConfigError(f"settings file {file}: unknown table {unknown[0]}; there are [verifier] and [client]")
    table = content.get(side, {})
    if not isinstance(table, dict):
        raise ConfigError(f"settings file {file}: {side} must be a table")
    return table


def _parse(value: object, kind: Any) -> Any:
    choices = [choice for choice in typing.get_args(kind) if choice is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise ValueError
        return value
    if isinstance(kind, types.UnionType):
        return None if value in (None, "") else _parse(value, choices[0])
    if kind is bool:
        return _parse_bool(value)
    if isinstance(value, bool):
        raise ValueError
    if kind is int and isinstance(value, float) and value != int(value):
        raise ValueError
    if kind is str and not isinstance(value, str):
        raise ValueError
    return kind(value)


def _parse_bool(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError
    return words[str(value).lower()]


def _spoken(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    choices = [choice for choice in typing.get_args(kind) if choice is not type(None)]
    return names.get(choices[0] if choices else kind, str(kind))
