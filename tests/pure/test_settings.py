"""The verifier's settings: sizes of memory, ranges, where each goes, and that the command line knows every one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from cloud_verifier.cli import parser
from cloud_verifier.settings import VerifierConfig, memory_bytes
from shared.config import load_config
from shared.errors import ConfigError

NUMBERS = [name for name, kind in get_type_hints(VerifierConfig).items() if kind is int]
NOT_SETTINGS = {"help", "config", "verbose"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", 0),
        ("1000000", 1_000_000),
        ("1b", 1),
        ("5kb", 5_000),
        ("5KiB", 5 * 1024),
        ("5k", 5 * 1024),
        ("800MiB", 800 * 2**20),
        ("800 MiB", 800 * 2**20),
        ("800mib", 800 * 2**20),
        ("3M", 3 * 2**20),
        ("3MB", 3_000_000),
        ("2GiB", 2 * 2**30),
        ("2g", 2 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("1TiB", 2**40),
        ("1tb", 10**12),
        (" 64MiB ", 64 * 2**20),
    ],
)
def test_sizes_of_memory_are_read_with_their_units(text: str, expected: int) -> None:
    assert memory_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "0", "0GiB", "-1GiB", "lots", "GiB", "1.GiB", "1e9", "nan", "5XB", "5iB", "1 2", "1,5GB", "5GiBs"]
)
def test_a_size_that_is_none_is_refused_by_the_name_of_the_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_memory") as caught:
        memory_bytes(text)
    assert caught.value.field == "kv_memory"
    assert repr(text) in caught.value.message
    with pytest.raises(ConfigError) as caught:
        VerifierConfig(kv_memory=text)
    assert caught.value.field == "kv_memory"


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range_and_is_refused_by_name_outside_it(name: str) -> None:
    for wrong in (-2, 10**12):
        with pytest.raises(ConfigError, match=rf"^{name} must be from ") as caught:
            VerifierConfig(**{name: wrong})
        assert caught.value.field == name
        assert str(wrong) in caught.value.message


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("port", 0, 65535),
        ("max_sessions", 1, 100_000),
        ("max_queue", 0, 100_000),
        ("max_queue_ms", 1, 600_000),
        ("batch_sessions", 1, 4096),
        ("batch_nodes", 0, 65_536),
        ("prefill_tokens", 1, 65_536),
        ("max_streams", 1, 1_000_000),
        ("metrics_port", -1, 65535),
        ("drain_ms", 0, 600_000),
    ],
)
def test_the_ends_of_a_range_belong_to_it(name: str, lowest: int, highest: int) -> None:
    for value in (lowest, highest):
        assert getattr(VerifierConfig(**{name: value}), name) == value  # type: ignore[arg-type]
    for value in (lowest - 1, highest + 1):
        with pytest.raises(ConfigError):
            VerifierConfig(**{name: value})  # type: ignore[arg-type]


def test_all_numbers_out_of_range_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        VerifierConfig(max_sessions=0, max_queue=-1, prefill_tokens=0)
    for name in ("max_sessions", "max_queue", "prefill_tokens"):
        assert f"{name} must be from" in caught.value.message


@pytest.mark.parametrize("device", ["gpu", "", "mps", "CPU", "cud"])
def test_a_device_that_is_unknown_is_refused_by_name(device: str) -> None:
    with pytest.raises(ConfigError, match="device") as caught:
        VerifierConfig(device=device)
    assert caught.value.field == "device"


def test_auto_is_float32_on_a_cpu_and_bfloat16_on_a_gpu() -> None:
    assert VerifierConfig().dtype_name == "float32"
    assert VerifierConfig(device="cuda:1").dtype_name == "bfloat16"
    assert VerifierConfig(device="cuda", dtype="float16").dtype_name == "float16"


def test_every_setting_goes_where_it_belongs() -> None:
    config = VerifierConfig(
        max_sessions=11,
        max_queue=12,
        principal_sessions=13,
        hint_nodes_per_second=14,
        batch_sessions=15,
        prefill_tokens=16,
        batch_nodes=17,
        max_context_tokens=18,
        max_new_tokens=19,
        step_nodes=20,
        max_wait_ms=21,
        lease_ms=22,
    )
    admission, budget, limits = config.admission, config.budget, config.limits
    assert (admission.max_sessions, admission.max_queue) == (11, 12)
    assert (admission.principal_sessions, admission.hint_nodes_per_second) == (13, 14)
    assert (budget.sessions, budget.prefill_tokens, budget.nodes) == (15, 16, 17)
    assert (limits.max_context_tokens, limits.max_new_tokens, limits.max_step_nodes) == (18, 19, 20)
    assert (limits.max_wait_ms, limits.lease_ms) == (21, 22)
    assert dataclasses.replace(config, max_new_tokens=0).limits.max_new_tokens == 18


def test_every_option_of_the_command_line_is_a_setting_and_every_setting_an_option() -> None:
    options = {action.dest for action in parser()._actions} - NOT_SETTINGS
    assert options == {field.name for field in dataclasses.fields(VerifierConfig)}


def test_options_are_spelled_like_their_settings_and_default_to_nothing() -> None:
    for action in parser()._actions:
        if action.dest not in NOT_SETTINGS:
            assert action.option_strings == [f"--{action.dest.replace('_', '-')}"]
            assert action.default is None  # or a default would beat file and environment


@pytest.mark.parametrize(("name", "expected"), [("port", 50151), ("max_sessions", 64), ("max_queue_ms", 10_000)])
def test_the_help_tells_the_default_that_holds(name: str, expected: Any) -> None:
    assert getattr(VerifierConfig(), name) == expected
    (action,) = [action for action in parser()._actions if action.dest == name]
    assert f"default: {expected})" in str(action.help)


def test_help_and_settings_agree_on_every_plain_default() -> None:
    told = {action.dest: str(action.help) for action in parser()._actions}
    wrong = [
        field.name
        for field in dataclasses.fields(VerifierConfig)
        if field.name in NUMBERS and f"default: {field.default}" not in told[field.name]
    ]
    assert not wrong


def test_arguments_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[verifier]\nmax_sessions = 3\nmax_queue = 4\nkv_memory = '64MiB'\n")
    given = vars(parser().parse_args(["--max-sessions", "9", "--compile"]))
    config = load_config(
        VerifierConfig,
        "verifier",
        file=file,
        environment={"DRAFTWIRE_VERIFIER_MAX_QUEUE": "7", "DRAFTWIRE_VERIFIER_MAX_SESSIONS": "8"},
        arguments={name: value for name, value in given.items() if name not in NOT_SETTINGS},
    )
    assert (config.max_sessions, config.max_queue, config.kv_memory) == (9, 7, "64MiB")
    assert config.compile
