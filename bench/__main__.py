"""`python -m bench COMMAND`: measurements and the demo. Every figure in bench/LOG.md names the command that made it."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from bench import capacity, demo, distribution, exactness, gpu_check, link, loopback, outage, overload, simulate, traces
from shared.errors import DraftwireError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measurements of Draftwire.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (
        exactness,
        distribution,
        loopback,
        link,
        capacity,
        overload,
        outage,
        gpu_check,
        traces,
        simulate,
        demo,
    ):
        module.add_parser(commands)
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        return int(args.handler(args))
    except DraftwireError as error:
        print(f"bench: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
