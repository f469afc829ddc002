"""The Python in README.md and docs/: it compiles, its imports are there, and the input method's example works."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edge_client.events import (
    Committed,
    Done,
    Event,
    FinishReason,
    OfflinePolicy,
    Piece,
    Preview,
    Report,
    State,
    StateChanged,
)
from edge_client.transport import Traffic
from shared.types import Usage

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    (page, code)
    for page in PAGES
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize(
    ("page", "code"), EXAMPLES, ids=[f"{page.stem}-{number}" for number, (page, _) in enumerate(EXAMPLES)]
)
def test_an_example_compiles_and_what_it_imports_is_there(page: Path, code: str) -> None:
    tree = compile(code, page.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), page.name, "exec"), {})


class Editor:
    """Keeps what a user would see."""

    def __init__(self) -> None:
        self.text, self.ghost, self.badge = "", ("", ""), ""
        self.seen: list[tuple[str, tuple[str, str], str]] = []

    def insert(self, text: str) -> None:
        self.text += text
        self._note()

    def show_ghost(self, text: str, style: str) -> None:
        self.ghost = (text, style)
        self._note()

    def clear_ghost(self) -> None:
        self.ghost = ("", "")

    def show_badge(self, badge: str) -> None:
        self.badge = badge
        self._note()

    def _note(self) -> None:
        self.seen.append((self.text, self.ghost, self.badge))


class Client:
    """A client that tells a script."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    async def stream(self, prompt: str, **options: Any) -> AsyncIterator[Event]:
        assert options["previews"]
        assert options["offline"] is OfflinePolicy.LOCAL
        for event in self.events:
            yield event


async def test_the_input_methods_example_shows_what_stands_and_what_does_not() -> None:
    (code,) = [code for _, code in EXAMPLES if "async def complete" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    report = Report(Usage(), Traffic(), 1.0, 0.5, 0.0, 0, 0)
    script: list[Event] = [
        StateChanged(State.DRAFTING),
        Preview(" is blu", (1,), False),
        Committed(" is", (1,), (Piece(" is", 1, True),)),
        StateChanged(State.UNVERIFIED, "no answer"),
        Preview(" green", (2,), True),
        StateChanged(State.DRAFTING),
        Committed(" blue", (3,), (Piece(" blue", 3, False),)),
        Done(FinishReason.LENGTH, report),
    ]
    editor = Editor()
    assert await names["complete"](Client(script), editor, "The sky") is FinishReason.LENGTH
    assert editor.seen == [
        ("", ("", ""), ""),
        ("", (" is blu", "ghost"), ""),
        (" is", ("", ""), ""),
        (" is", ("", ""), "not verified"),
        (" is", (" green", "unverified"), "not verified"),
        (" is", (" green", "unverified"), ""),
        (" is blue", ("", ""), ""),
    ]
    assert editor.ghost == ("", "")
