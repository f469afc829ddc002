"""Writes a laid-out picture as SVG: what each kind of shape looks like, and the escaping of all text.

Must not know: traces, time, lanes. Called by `timeline_cli` with the Picture that `timeline` laid out.
Colours are Okabe and Ito's, which people with any colour vision can tell apart; bars carry words and numbers besides.
"""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

from edge_client.picture import Box, Label, Line, Picture

INK, FAINT = "#222222", "#666666"
SKY, BLUE, GREEN, ORANGE = "#56B4E9", "#0072B2", "#009E73", "#E69F00"
RED, PINK, YELLOW = "#D55E00", "#CC79A7", "#F0E442"

BOXES = {
    "network": "#F5F5F5",
    "draft-0": SKY,
    "draft-1": PINK,
    "draft-2": YELLOW,
    "draft-3": "#999999",
    "hint-mark": BLUE,
    "commit-mark": RED,
    "step-accepted": GREEN,
    "step-none": ORANGE,
    "queue": "#C8C8C8",
    "text-accepted": GREEN,
    "text-none": ORANGE,
    "state-drafting": "#D6EAF8",
    "state-verified": "#E4E4E4",
    "state-unverified": "#FBE7A1",
    "state-offline": "#F5C9B0",
}
OTHER_BOX = "#EBD6E4"
"""A state without a colour of its own."""

LINES = {
    "grid": 'stroke="#DDDDDD" stroke-width="1"',
    "hint": f'stroke="{BLUE}" stroke-width="1" stroke-opacity="0.75"',
    "hint-unseen": f'stroke="{BLUE}" stroke-width="1" stroke-opacity="0.75" stroke-dasharray="3 3"',
    "commit": f'stroke="{RED}" stroke-width="2"',
}
LABELS = {
    "title": (f'font-size="16" font-weight="bold" fill="{INK}"', "start"),
    "subtitle": (f'font-size="12" fill="{FAINT}"', "start"),
    "legend": (f'font-size="12" fill="{INK}"', "start"),
    "tick": (f'font-size="11" fill="{FAINT}"', "middle"),
    "axis": (f'font-size="11" font-style="italic" fill="{FAINT}"', "end"),
    "lane": (f'font-size="12" fill="{INK}"', "end"),
    "side": (f'font-size="11" font-weight="bold" fill="{INK}"', "end"),
    "text": (f'font-size="11" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" fill="{INK}"', "start"),
}
FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML 1.0 document may hold, escaped or not: controls, lone surrogates."""


def draw(picture: Picture, description: str) -> str:
    """The whole SVG document; `description` is what a screen reader says."""
    width, height = f"{picture.width:.0f}", f"{picture.height:.0f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="{FONT}">',
        f"<title>{_xml(description)}</title>",
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>',
        *(_box(box) for box in picture.boxes if box.kind == "network"),
        *(_line(line) for line in picture.lines),
        *(_box(box) for box in picture.boxes if box.kind != "network"),
        *(_label(label) for label in picture.labels),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _box(box: Box) -> str:
    fill = BOXES.get(box.kind, OTHER_BOX)
    place = f'x="{box.x:.2f}" y="{box.y:.1f}" width="{box.width:.2f}" height="{box.height:.1f}"'
    edge = ' stroke="#FFFFFF" stroke-width="0.5"' if box.width > 3 and box.kind != "network" else ""
    shape = f'<rect {place} fill="{fill}"{edge}'
    shape += f"><title>{_xml(box.tip)}</title></rect>" if box.tip else "/>"
    if not box.label:
        return shape
    x, y = box.x + box.width / 2, box.y + box.height / 2 + 4
    return f'{shape}\n<text x="{x:.2f}" y="{y:.1f}" font-size="11" text-anchor="middle">{_xml(box.label)}</text>'


def _line(line: Line) -> str:
    shape = f'<line x1="{line.x1:.2f}" y1="{line.y1:.1f}" x2="{line.x2:.2f}" y2="{line.y2:.1f}" {LINES[line.kind]}'
    return shape + (f"><title>{_xml(line.tip)}</title></line>" if line.tip else "/>")


def _label(label: Label) -> str:
    look, anchor = LABELS[label.kind]
    place = f'x="{label.x:.2f}" y="{label.y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} {look} xml:space="preserve">{_xml(label.text)}</text>'


def _xml(text: str) -> str:
    """Text as XML may hold it; what it may not is shown as the replacement character."""
    return escape(_NOT_XML.sub("\ufffd", text))
