"""The self-test of a draft on this machine: does it choose as the model that it was exported from?

Must not know: sessions, the wire. Called by `draft_loading` when a draft is loaded; run by `shared.model_build` as
`python -m edge_client.draft_check DRAFT FILE` when one is exported. A draft never changes the text: this only warns.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError, ModelLoadError
from shared.self_test import SELF_TEST, SelfTest, read_self_test

log = logging.getLogger("draftwire.draft")

SINGLY = 8
"""So many ids are fed one by one too, as drafts are: one row takes other instructions of a processor than many."""


class ScoringModel(Protocol):
    """What is asked of a draft model here."""

    context_size: int

    def rewind(self, length: int) -> None:
        """Forgets ids from `length` on."""
        ...

    def feed_chunk(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Appends ids; returns the scores after each. Shapes: (n, V) float32."""
        ...


def agreement_of(model: ScoringModel, test: SelfTest) -> float:
    """The share, from 0 to 1, of places where the model chooses as its source did. Fills the model's cache.

    If the last ids, fed one by one, lead to other choices than together, the share that stays if that is lower.
    Raises: ModelError if it fails.
    """
    right: list[bool] = []
    for text, choices in zip(test.texts, test.choices, strict=True):
        ids = text[: model.context_size]
        model.rewind(0)
        found = model.feed_chunk(ids).argmax(axis=1).tolist()
        right += [choice == said for choice, said in zip(found, choices, strict=False)]
    first = max(0, len(ids) - SINGLY)
    model.rewind(first)
    alone = [int(model.feed_chunk((token,)).argmax()) for token in ids[first:]]
    known = zip(alone, found[first:], choices[first:], strict=False)
    return min(_share(right), _share([choice in others for choice, *others in known]))


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def warn_if_unlike_its_source(model: ScoringModel, folder: Path, runtime_version: str) -> None:
    """(worker thread) Takes the self-test beside a draft, and logs a warning if the draft fails it.

    A folder without one is not tested: an export of the user's own, or one of an older version. On the machine where
    the draft was exported the test was taken then. Whatever goes wrong here is a warning: the draft is used.
    """
    try:
        test = read_self_test(folder / SELF_TEST)
        if test is None:
            log.debug("%s has no %s: it is not tested", folder, SELF_TEST)
            return
        is_measured_here = bool(test.machine) and test.machine == this_machine(runtime_version)
        agreement = test.agreement if is_measured_here else agreement_of(model, test)
    except Exception as error:
        reason = error.message if isinstance(error, ModelError) else repr(error)
        log.warning(
            "the draft in %s could not be tested: %s; pull it again with --force, or export it again", folder, reason
        )
        return
    level, says = logging.DEBUG, "within"
    if agreement < test.bound:
        level, says = logging.WARNING, "below"
    log.log(
        level,
        "the draft in %s agrees with the model it was made of in %.2f of its self-test on this machine (%.2f where it "
        "was exported), %s the bound of %.2f for %s%s",
        folder,
        agreement,
        test.agreement,
        says,
        test.bound,
        test.precision,
        _remedy(test.precision) if level == logging.WARNING else "",
    )


def this_machine(runtime_version: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A digest of what decides which instructions a draft runs with: the processor, what it can do, and the runtime.

    Empty where the system does not tell what the processor can do.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    told = {"machine": platform.machine(), "processor": platform.processor(), "onnxruntime": runtime_version}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "flags", "Features", "CPU part"):
            told.setdefault(name.strip(), " ".join(sorted(value.split())))
    return hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()[:32]


def _remedy(precision: str) -> str:
    others = " or ".join(f"--precision {each}" for each in ("fp32", "int8") if each != precision)
    return (
        f": the text stays right, but hints will seldom come true; pull or export the draft with {others} and use "
        "that, or draft without a model (--drafter retrieval)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of this module: writes into a self-test what a draft's agreement is here."""
    from edge_client.onnx_drafter import RUNTIME_VERSION, OnnxModel

    parser = argparse.ArgumentParser(prog="python -m edge_client.draft_check", description="Measure a draft.")
    parser.add_argument("draft", type=Path, metavar="DRAFT", help="the draft's folder")
    parser.add_argument("file", type=Path, metavar="FILE", help="the self-test, which is written again")
    options = parser.parse_args(arguments)
    test = read_self_test(options.file)
    if test is None:
        raise ModelLoadError(f"there is no file {options.file}")
    agreement = agreement_of(OnnxModel(options.draft), test)
    replace(test, agreement=agreement, machine=this_machine(RUNTIME_VERSION)).write(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
