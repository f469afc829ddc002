"""The command `cloud-verifier`: settings, logging, exit codes.

Exit codes: 0 ended by a signal, 1 failed (one line on stderr says why), 2 usage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cloud_verifier.settings import VerifierConfig
from shared.config import load_config
from shared.errors import ConfigError, DraftwireError


def parser() -> argparse.ArgumentParser:
    """The command line; every default is in VerifierConfig."""
    result = argparse.ArgumentParser(
        prog="cloud-verifier",
        description="Serves a large model as Draftwire's verifier: devices send hints, it decides the text.",
        epilog="example: cloud-verifier --model smollm2-135m --port 50151\n"
        "Every option can also stand in a TOML file (--config, table [verifier]) or in the environment as "
        "DRAFTWIRE_VERIFIER_<OPTION>; arguments win.\n"
        "cloud-verifier top shows the figures of a running verifier (see cloud-verifier top --help).",
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
    add(
        "--kv-memory",
        metavar="SIZE",
        help="memory for keys and values: auto, 800MiB, 2GiB (default: auto, 1GiB on cpu)",
    )
    add("--compile", action="store_const", const=True, help="compile the model's layers with torch.compile")
    add("--max-sessions", metavar="N", help="sessions held at once (default: 64)")
    add("--max-queue", metavar="N", help="opens that wait for a place; more are refused (default: 64)")
    add("--max-queue-ms", metavar="N", help="how long an open waits for a place (default: 10000)")
    add("--principal-sessions", metavar="N", help="sessions of one connection, 0 for no limit (default: 0)")
    add("--principal-streams", metavar="N", help="open streams of one connection, 0 for no limit (default: 0)")
    add("--max-streams", metavar="N", help="open streams in all (default: 4096)")
    add("--hint-nodes-per-second", metavar="N", help="hint nodes of one connection, 0 for no limit (default: 0)")
    add("--max-context-tokens", metavar="N", help="tokens of one session (default: 8192)")
    add("--max-wait-ms", metavar="N", help="pace wait: run without hints after this long (default: 500)")
    add("--lease-ms", metavar="N", help="keep an absent device's session this long (default: 60000)")
    add(
        "--max-new-tokens", metavar="N", help="generated tokens of a session, 0 for what the context holds (default: 0)"
    )
    add("--step-nodes", metavar="N", help="hint nodes of one session verified in one step (default: 64)")
    add("--batch-nodes", metavar="N", help="hint nodes of all sessions verified in one step (default: 256)")
    add("--batch-sessions", metavar="N", help="sessions served in one step (default: 64)")
    add("--prefill-tokens", metavar="N", help="context tokens fed in one step (default: 256)")
    add("--drain-ms", metavar="N", help="at the first signal texts may still end for so long (default: 10000)")
    add(
        "--metrics-port",
        metavar="N",
        help="port of the Prometheus metrics, 0 for a free one, -1 for none (default: -1)",
    )
    add("--step-log", metavar="FILE", help="write one JSON line a step, with the time of each part (default: off)")
    add("--log-format", choices=("text", "json"), help="how log lines look (default: text)")
    add("--verbose", action="store_true", help="log to stderr what happens")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["top"]:
        return _top(words[1:])
    given = vars(parser().parse_args(words))
    file, verbose = given.pop("config"), given.pop("verbose")
    try:
        return _run(file, given, verbose)
    except DraftwireError as error:
        print(f"cloud-verifier: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(file: Path | None, given: dict[str, object], verbose: bool) -> int:
    config = load_config(VerifierConfig, "verifier", file=file, environment=os.environ, arguments=given)
    try:
        from cloud_verifier.logs import configure
        from cloud_verifier.server import check_free
        from cloud_verifier.verifier_process import serve  # torch is slow: not for --help
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: a verifier needs pip install 'draftwire[cloud]'") from error
    configure(verbose, config.log_format)
    check_free(config.host, config.port)
    return asyncio.run(serve(config, lambda line: print(line, flush=True)))


def _top(words: Sequence[str]) -> int:
    try:
        from cloud_verifier import top
    except ModuleNotFoundError as error:
        print(f"cloud-verifier: {error.name} is not installed: pip install 'draftwire[cloud]'", file=sys.stderr)
        return 1
    return top.main(words)


if __name__ == "__main__":
    sys.exit(main())
