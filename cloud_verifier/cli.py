"""The command `cloud-verifier`: settings, logging, exit codes.

Exit codes: 0 ended by a signal, 1 failed (one line on stderr says why), 2 usage.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from shared.config import load_config
from shared.errors import ConfigError, DraftwireError


def parser() -> argparse.ArgumentParser:
    """The command line; every default is in VerifierConfig."""
    result = argparse.ArgumentParser(
        prog="cloud-verifier",
        description="Serves a large model as Draftwire's verifier: devices send hints, it decides the text.",
        epilog="example: cloud-verifier --model smollm2-135m --port 50151\n"
        "Every option can also stand in a TOML file (--config, table [verifier]) or in the environment as "
        "DRAFTWIRE_VERIFIER_<OPTION>; arguments win.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML file with a [verifier] table")
    add("--model", metavar="NAME", help="bundle name, folder or hub id of the target (default: smollm2-135m)")
    add("--host", help="address to listen on (default: 127.0.0.1; there is no access control yet)")
    add("--port", metavar="N", help="port, 0 for a free one (default: 50151)")
    add("--device", help="cpu, cuda or cuda:N (default: cpu)")
    add("--dtype", help="auto, float32, bfloat16 or float16 (default: auto: float32 on cpu, bfloat16 on cuda)")
    add("--threads", metavar="N", help="CPU threads, 0 for PyTorch's default (default: 0)")
    add("--max-sessions", metavar="N", help="sessions held at once (default: 64)")
    add("--max-context-tokens", metavar="N", help="tokens of one session (default: 8192)")
    add("--max-wait-ms", metavar="N", help="pace wait: run without hints after this long (default: 500)")
    add("--lease-ms", metavar="N", help="keep an absent device's session this long (default: 60000)")
    add("--step-nodes", metavar="N", help="hint nodes verified in one step (default: 64)")
    add("--verbose", action="store_true", help="log to stderr what happens")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = vars(parser().parse_args(arguments))
    file, verbose = given.pop("config"), given.pop("verbose")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        return _run(file, given)
    except DraftwireError as error:
        print(f"cloud-verifier: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(file: Path | None, given: dict[str, object]) -> int:
    try:
        from cloud_verifier.server import VerifierConfig, check_free, load, serve  # torch is slow: not for --help
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: a verifier needs pip install 'draftwire[cloud]'") from error

    assert set(given) == {field.name for field in fields(VerifierConfig)}
    config = load_config(VerifierConfig, "verifier", file=file, environment=os.environ, arguments=given)
    check_free(config.host, config.port)
    loaded = load(config)
    return asyncio.run(serve(config, loaded, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
