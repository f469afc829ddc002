"""The options of the commands that write texts, and what they say: settings, sampling, what is refused at once.

Must not know: what the commands do. Called by `cli` and `text_commands`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from edge_client.client_config import ClientConfig
from shared.config import load_config
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from shared.types import Rule

CONNECTION_OPTIONS = (
    ("--verifier", "HOST:PORT", "the verifier (default: 127.0.0.1:50151)"),
    ("--draft", "NAME", "bundle, folder or hub id of the draft model (default: smollm2-135m)"),
    ("--precision", "P", "of a draft given by name: auto, int4, int8 or fp32 (default: auto)"),
    ("--target-name", "NAME", "refuse a verifier that serves another model"),
    ("--threads", "N", "CPU threads of the draft model (default: 1)"),
    ("--drafter", "WHO", "model, retrieval (look-up in the text so far, no model is loaded) or both (default: both)"),
    ("--hint-tokens", "N", "ids drafted ahead at most, 0 drafts nothing and streams from the verifier (default: 24)"),
    ("--hint-width", "N", "alternatives of one id at most, 1 sends chains (default: 4)"),
    ("--hint-reach", "P", "what the text reaches with a smaller chance is not drafted (default: 0.03)"),
    ("--pace", "PACE", "the verifier waits for hints (wait), does not (run_on), or by load (auto) (default: auto)"),
    ("--offline", "POLICY", "verifier out of reach: wait, fail, or local, the draft goes on alone (default: wait)"),
    ("--run-ahead", "N", "ids the verifier may commit unacknowledged (default: 256)"),
    ("--timeout-s", "S", "how long to wait for a verifier (default: 5)"),
    ("--reconnect-for-s", "S", "how long to try again after a cut in mid text (default: 60)"),
    ("--user-text-tokens", "N", "how much of a file of --user-text is kept and drafted from (default: 65536)"),
    ("--overload-wait-s", "S", "how long to wait for room at a verifier that is full (default: 30)"),
)


def add_watching_options(command: argparse.ArgumentParser, which: str = "") -> None:
    """What shows how a text comes. `which`: what the help says of a trace besides."""
    add = command.add_argument
    add("--preview", action="store_true", help="on a terminal: show dimly where the text probably goes")
    add("--trace", type=Path, metavar="FILE", help=f"record what both sides do, for `edge-client timeline`{which}")
    add("--debug", action="store_true", help="tell after each commit on stderr what drafting goes by")


def add_generation_options(command: argparse.ArgumentParser) -> None:
    """How texts are sampled, and the settings of the client."""
    add = command.add_argument
    add("--max-new-tokens", type=int, default=256, metavar="N", help="length of the answer at most (default: 256)")
    for name, kind, text in (
        ("temperature", float, "0 is greedy (default: as the target's makers advise)"),
        ("top-k", int, "keep the k likeliest, 0 keeps all"),
        ("top-p", float, "keep the likeliest with this share of the mass"),
        ("min-p", float, "keep ids with this share of the best one's probability"),
        ("repetition-penalty", float, "once per id seen, 1 is off"),
        ("frequency-penalty", float, "per time generated, 0 is off"),
        ("presence-penalty", float, "once if generated, 0 is off"),
    ):
        add(f"--{name}", type=kind, metavar="X", help=text)
    add("--seed", type=int, metavar="N", help="the same seed gives the same text under the agreement rule")
    add("--rule", choices=[rule.value for rule in Rule], default="agreement", help="how drafts are judged")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--no-stats", action="store_true", help="no line of figures at the end")
    add("--config", type=Path, metavar="FILE", help="TOML file with a [client] table")
    group = command.add_argument_group("connection and draft (also in the environment as DRAFTWIRE_CLIENT_<OPTION>)")
    for name, metavar, text in CONNECTION_OPTIONS:
        group.add_argument(name, metavar=metavar, help=text)


# ---------------------------------------------------------------- what was said


def client_config(args: argparse.Namespace) -> ClientConfig:
    """The settings from file, environment and command line. Raises: ConfigError that names every bad one."""
    names = [option[0].removeprefix("--").replace("-", "_") for option in CONNECTION_OPTIONS]
    given = {name: getattr(args, name) for name in names}
    return load_config(ClientConfig, "client", file=args.config, environment=os.environ, arguments=given)


def sampling_of(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The target's defaults, with what the command line says instead."""
    return dataclasses.replace(defaults, **given_sampling(args))


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the command line names."""
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "logit_bias"]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def check_before_loading(args: argparse.Namespace) -> None:
    """What can be refused without a model or a verifier is refused at once."""
    sampling_of(args, SamplingParams())
    if args.seed is not None and not 0 <= args.seed < 2**64:
        raise ConfigError(f"seed must be from 0 to 2^64-1, got {args.seed}", field="seed")
    if args.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {args.max_new_tokens}", field="max_new_tokens")


def check_trace(path: Path | None) -> None:
    """A trace that cannot be written is refused before there is one."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--trace {path} is a folder: name a file", field="--trace")
    if not path.parent.is_dir():
        raise ConfigError(f"--trace {path}: there is no folder {path.parent}", field="--trace")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--trace {path}: nothing can be written to {path.parent}", field="--trace")
