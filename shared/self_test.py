"""A draft's self-test: what its source, in float32, chooses after each id of two fixed texts. Kept beside the draft.

Must not know: models, tokenizers. Begun by `cloud_verifier.draft_choices` and finished by `edge_client.draft_check`
when a draft is exported; the device takes it when it loads the draft, and `models list` shows what was measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.errors import ModelLoadError

SELF_TEST = "self_test.json"
"""The file's name in a draft's folder."""
TEXT_IDS = 32
"""Ids of each text."""
BOUNDS = {"fp32": 0.97, "int8": 0.85, "int4": 0.5}
"""The share of choices, by precision, below which a draft is not what was exported: docs/models.md."""

_VERSION = 1
Texts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SelfTest:
    """What a draft is held to."""

    precision: str
    bound: float
    """The share of the source's choices that the draft has to share, from 0 to 1."""
    agreement: float
    """The share where the draft was exported; 0 before it was measured."""
    texts: Texts
    """Ids to feed. Shapes: texts (ragged), up to TEXT_IDS each."""
    choices: Texts
    """The id with the source's highest score after each of them. Shapes: as `texts`."""
    machine: str = ""
    """Tells the processor and the runtime that `agreement` was measured on from others; empty: not known."""

    def write(self, file: Path) -> None:
        """Writes the file."""
        file.write_text(json.dumps({"version": _VERSION, **asdict(self)}) + "\n", encoding="utf-8")


def read_self_test(file: Path) -> SelfTest | None:
    """The self-test in a file; None if there is no such file.

    Raises: ModelLoadError naming the file if it holds no self-test.
    """
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        found = SelfTest(
            str(said["precision"]),
            float(said["bound"]),
            float(said["agreement"]),
            _texts(said["texts"]),
            _texts(said["choices"]),
            str(said.get("machine", "")),
        )
        shapes = [[len(text) for text in texts] for texts in (found.texts, found.choices)]
        lengths = shapes[0]
        is_sound = said["version"] == _VERSION and shapes[0] == shapes[1] and lengths and min(lengths) > 0
        if not is_sound or max(lengths) > TEXT_IDS or not 0 <= found.bound <= 1 or not 0 <= found.agreement <= 1:
            raise ValueError("its values are not those of a self-test")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelLoadError(f"{file} holds no self-test: {error!r}") from error
    return found


def _texts(said: list[list[int]]) -> Texts:
    """Raises: TypeError or ValueError for anything but ids."""
    texts = tuple(tuple(text) for text in said)
    if any(type(token) is not int or not 0 <= token < 1 << 31 for text in texts for token in text):
        raise ValueError("it holds what is no id")
    return texts
