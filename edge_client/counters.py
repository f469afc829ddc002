"""What the device's engine counted in one text.

Must not know: anything else. Filled by `edge_engine`, told in `events.Report`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts of one text."""

    draft_steps: int = 0
    late_drafts: int = 0
    """Draft steps that ended when the text had left their path, or passed it."""
    hints: int = 0
    hint_nodes: int = 0
    rebases: int = 0
    """Times that the verifier had no room for hints and all were sent again."""
    rests: int = 0
    """Times that drafting was given up for a while because it did not pay."""
    slow_rests: int = 0
    """Of those, because a draft step takes longer than a step of the verifier."""
    is_context_full: bool = False
    """True once the draft model could hold no more of the text."""
    judged_by_depth: tuple[int, ...] = ()
    """Commits that had a hint for their first, second, ... id."""
    right_by_depth: tuple[int, ...] = ()
    """Of those, how many had the right one."""
