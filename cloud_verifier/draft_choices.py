"""What the source of a draft, in float32, chooses after two fixed texts: the truth of the draft's self-test.

Must not know: onnxruntime, the draft but for its tokenizer. Run by `shared.model_build` as
`python -m cloud_verifier.draft_choices SOURCE DRAFT PRECISION FILE`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cloud_verifier.hf import load_causal_lm, text_ids
from shared.self_test import BOUNDS, TEXT_IDS, SelfTest

BEGINNINGS = (
    'def is_prime(number: int) -> bool:\n    """',
    "The river rose for three days, and on the fourth",
)
"""Code, where a model is mostly sure, and a story, where it often is not."""
BEGINNING_IDS = 12
"""Ids of a beginning at most; the model itself goes on, for texts of its own are what it is asked to foretell."""


def choices_of(source: Path, draft: Path, precision: str) -> SelfTest:
    """The self-test of a draft of that precision, not yet measured. Its tokenizer.json is one that a device can read.

    Raises: ModelLoadError if the source or the tokenizer cannot be loaded.
    """
    lm = load_causal_lm(source, torch.float32, "cpu")
    beginnings = [text_ids(draft, beginning)[:BEGINNING_IDS] for beginning in BEGINNINGS]
    texts = [lm.own_text(beginning, TEXT_IDS) for beginning in beginnings]
    choices = (lm.own_causal_scores(text).argmax(dim=-1).tolist() for text in texts)
    return SelfTest(precision, BOUNDS[precision], 0.0, tuple(map(tuple, texts)), tuple(map(tuple, choices)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m cloud_verifier.draft_choices", description="Begin a self-test.")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of the weights that a draft is made of")
    parser.add_argument("draft", type=Path, metavar="DRAFT", help="folder of the draft")
    parser.add_argument("precision", choices=BOUNDS, metavar="PRECISION", help="of the draft")
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a few small forwards; where others work too, threads that wait for each other cost more
    choices_of(options.source, options.draft, options.precision).write(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
