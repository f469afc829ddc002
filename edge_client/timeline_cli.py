"""The command `timeline`: draws a trace file as a picture.

Must not know: how a trace is made, the wire, models. `edge_client.cli` calls `add_parser` and then the handler; errors
propagate to it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from edge_client.timeline import choose_window, lay_out
from edge_client.timeline_svg import draw
from edge_client.trace import write_whole
from edge_client.trace_file import read_trace
from shared.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `handler`, which takes the parsed arguments and gives the exit code."""
    command = subparsers.add_parser(
        "timeline",
        help="draw what device and verifier did, from a trace",
        description="Draws a recorded trace as one SVG picture: draft steps, hints on their way up, the target's\n"
        "steps, commits on their way down and the text they brought, on one time line. FILE itself can be opened\n"
        "in ui.perfetto.dev or chrome://tracing too.",
        epilog="example: edge-client timeline trace.json --from 0 --to 800",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("file", metavar="FILE", type=Path, help="a trace")
    add("--out", metavar="FILE.svg", type=Path, help="the picture (default: FILE with the suffix .svg)")
    add("--from", dest="from_ms", metavar="MS", type=float, help="first ms shown (default: where activity begins)")
    add("--to", dest="to_ms", metavar="MS", type=float, help="last ms shown (default: 2000 ms later, or the end)")
    command.set_defaults(handler=draw_timeline)


def draw_timeline(args: argparse.Namespace) -> int:
    """Draws the picture and prints where it lies."""
    source: Path = args.file
    recording = read_trace(source)
    out: Path = args.out if args.out is not None else source.with_suffix(".svg")
    if os.path.realpath(out) == os.path.realpath(source):
        raise ConfigError(f"--out {out} is the trace itself: name another file", field="--out")
    window = choose_window(recording, args.from_ms, args.to_ms)
    write_whole(out, draw(lay_out(recording, window), f"Time line of {source.name}"))
    print(out)
    return 0
