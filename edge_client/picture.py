"""The shapes of a picture, in pixels, and the geometry that placing them takes. Pure.

Must not know: traces, SVG, colours (each shape names its kind; `timeline_svg` knows what a kind looks like).
Used by `timeline`, which places shapes, and `timeline_svg`, which draws them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from unicodedata import east_asian_width

CHARACTER_PX = 6.7
"""Width of a character of text; wide ones (CJK) take two."""
TICK_PX = 80.0
"""Between ticks at least."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle. `label` stands in it, `tip` is shown when one points at it."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    label: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Line:
    """A straight line."""

    kind: str
    x1: float
    y1: float
    x2: float
    y2: float
    tip: str = ""


@dataclass(frozen=True)
class Label:
    """Words beside the shapes. `kind` says how they look and on which side of x they stand."""

    kind: str
    x: float
    y: float
    text: str


@dataclass
class Picture:
    """Shapes in the order in which they are drawn."""

    width: float
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


def tick_step(length_ms: float, length_px: float) -> float:
    """1, 2 or 5 times a power of ten: the smallest that keeps ticks TICK_PX apart."""
    least = length_ms / length_px * TICK_PX
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= least)


def cut_line(tail: Point, head: Point, left: float, right: float) -> tuple[Point, Point] | None:
    """The part of a line (x of tail <= x of head) between two verticals; None if it has none there."""
    (x1, y1), (x2, y2) = tail, head
    if x2 < left or x1 >= right:
        return None
    slope = (y2 - y1) / (x2 - x1) if x2 > x1 else 0.0
    cut_tail = (left, y1 + slope * (left - x1)) if x1 < left else tail
    cut_head = (right, y1 + slope * (right - x1)) if x2 > right else head
    return cut_tail, cut_head


def text_px(text: str) -> float:
    """About how wide a text is."""
    return CHARACTER_PX * sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def visible(text: str) -> str:
    """A text in one line: ends of lines and tabs as signs."""
    return text.replace("\r\n", "\n").replace("\n", "↵").replace("\r", "↵").replace("\t", "→")
