"""Settings: which source wins, and that every bad one is named at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from shared.config import check_ranges, load_config, masked
from shared.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    name: str = "default"
    port: int = 1
    share: float = 0.5
    is_on: bool = False
    kind: Literal["a", "b"] = "a"
    limit: int | None = None
    token: str = field(default="", metadata={"secret": True})

    def __post_init__(self) -> None:
        check_ranges(self, {"port": (0, 65535), "share": (0, 1)})


def test_defaults_lose_to_the_file_the_file_to_the_environment_and_that_to_arguments(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[verifier]\nname = "file"\nport = 2\nshare = 0.25\nkind = "b"\n[client]\nname = "other side"\n')
    environment = {"DRAFTWIRE_VERIFIER_PORT": "3", "DRAFTWIRE_VERIFIER_IS_ON": "yes", "DRAFTWIRE_CACHE": "elsewhere"}
    arguments = {"share": "0.125", "name": None}
    settings = load_config(Settings, "verifier", file=file, environment=environment, arguments=arguments)
    assert settings == Settings(name="file", port=3, share=0.125, is_on=True, kind="b")


def test_every_bad_setting_is_named_at_once_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[client]\nport = "x"\nunknown = 1\nis_on = 1.5\n')
    environment = {"DRAFTWIRE_CLIENT_SHARE": "much", "DRAFTWIRE_CLIENT_NOPE": "1"}
    with pytest.raises(ConfigError) as caught:
        load_config(Settings, "client", file=file, environment=environment, arguments={"kind": "c"})
    for part in ("port", "unknown", "is_on", "DRAFTWIRE_CLIENT_SHARE", "DRAFTWIRE_CLIENT_NOPE", "one of a, b"):
        assert part in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("given", [{"port": 65536}, {"share": float("nan")}, {"share": -0.1}])
def test_a_value_out_of_range_is_refused_by_name(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        load_config(Settings, "client", arguments=given)


@pytest.mark.parametrize(
    ("text", "part"), [("[nobody]\n", "nobody"), ("client = 3\n", "table"), ("[client", "settings")]
)
def test_a_file_that_is_not_settings_says_what_is_wrong(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=part):
        load_config(Settings, "client", file=file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        load_config(Settings, "client", file=tmp_path / "gone.toml")


def test_whole_numbers_are_not_cut_from_fractions_nor_taken_from_booleans() -> None:
    for value in (1.5, True):
        with pytest.raises(ConfigError, match="port"):
            load_config(Settings, "client", arguments={"port": value})


def test_an_optional_number_may_be_empty() -> None:
    assert load_config(Settings, "client", environment={"DRAFTWIRE_CLIENT_LIMIT": ""}).limit is None
    assert load_config(Settings, "client", environment={"DRAFTWIRE_CLIENT_LIMIT": "7"}).limit == 7


def test_secrets_are_masked_where_settings_are_shown() -> None:
    assert masked(Settings(token="hunter2"))["token"] == "***"
    assert masked(Settings())["token"] == ""
    assert masked(Settings(name="x"))["name"] == "x"
