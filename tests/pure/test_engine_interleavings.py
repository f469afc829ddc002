"""Random interleavings of a device's engine with a verifier's session: whatever happens in whatever order, it holds.

After every event: the device's ids are a prefix of the verifier's, and both of the truth; no hint is refused; the
verifier's trie is sound; a node that the device counts as sent is under way, over budget, in the verifier's trie, or
overtaken by its commits; no frame is larger than allowed and no id past the end. At the end the text is the target's.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.controller import EngineSettings
from shared.types import Limits, PaceKind
from tests.pure.interleaved import Interleaving, Setting

STOPS = (5,)
NARROW = Limits(max_frame_nodes=3, max_held_nodes=4)
WAITS = EngineSettings(pace=PaceKind.WAIT)
SETTINGS = {
    "trees": Setting(),
    "shallow trees": Setting(engine=EngineSettings(depth=3, width=2)),
    "trees of two drafters": Setting(has_retrieval=True),
    "trees of two drafters, pace wait": Setting(has_retrieval=True, engine=WAITS, run_ahead=6, stop_ids=STOPS),
    "trees over budget": Setting(limits=NARROW, stop_ids=STOPS, max_new_tokens=40),
    "trees with little credit": Setting(run_ahead=4, stop_ids=STOPS, max_new_tokens=40),
    "chains": Setting(is_chain=True),
    "chains over budget": Setting(is_chain=True, limits=NARROW),
    "chains with little credit": Setting(is_chain=True, run_ahead=4, stop_ids=STOPS, max_new_tokens=40),
}
EXAMPLES = 1120
HAPPENS = """draft; nothing to say; late draft; draft lost; hint; late hint; over budget; accepted; several at once;
    resumed; reopened; edit; stopped"""


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_device_and_verifier_agree_whatever_happens_in_whatever_order(setting: Setting) -> None:
    seen: Counter[str] = Counter()

    @settings(derandomize=True, max_examples=EXAMPLES, deadline=None, database=None)
    @given(st.binary(min_size=30, max_size=90))
    def interleave(choices: bytes) -> None:
        seen["interleavings"] += 1
        Interleaving(setting, choices, seen).run()

    interleave()
    assert seen["interleavings"] >= EXAMPLES
    assert all(seen[what] >= EXAMPLES // 100 for what in re.split(r";\s+", HAPPENS)), seen
