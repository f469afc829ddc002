"""C13 over real gRPC: texts that begin near the end of the target's context; the draft's is shorter, or longer."""

from __future__ import annotations

import random
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.loading import LoadedTarget, load_target
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.events import Committed, Done, FinishReason, State, StateChanged
from edge_client.transport import GrpcConnection, GrpcTransport, Traffic
from shared.errors import ConfigError
from shared.sampling import GREEDY
from shared.types import Hint, Limits, PaceKind, UpFrame
from tests.oracle import PlainTarget
from tests.rig import serving
from tests.synthetic.test_draft_windows import changed_draft
from tests.tiny_pair import TinyPair

LIMIT = 64
"""Ids that the target holds."""
SHORT = 48
"""Ids that the short draft holds."""
FIRST = 40
DRAFTS = ["short, model", "short, both", "long, model"]
"""Whose context, and who drafts; the long one holds 512 ids."""


class Watched(GrpcTransport):
    """The product's transport, which notes what is sent."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.sent: list[UpFrame] = []

    async def connect(self, traffic: Traffic) -> GrpcConnection:
        """See Transport."""
        connection = await super().connect(traffic)
        plain = connection.send

        async def send(frame: UpFrame) -> None:
            self.sent.append(frame)
            await plain(frame)

        connection.send = send  # type: ignore[method-assign]
        return connection

    def hinted_positions(self) -> set[int]:
        """Those of the nodes that were sent since the last look."""
        places: dict[int, int] = {}
        for frame in self.sent:
            if isinstance(frame, Hint):
                before = places[frame.base_node] if frame.base_node else frame.base_position - 1
                for index in range(len(frame.ids)):
                    back = frame.parents[index] if frame.parents else min(1, index)
                    number = frame.first_node + index
                    places[number] = (places[number - back] if back else before) + 1
        self.sent.clear()
        return set(places.values())


@pytest.fixture(scope="module")
def loaded(tiny_pair: TinyPair) -> LoadedTarget:
    """The tiny target with a context of 64."""
    limits = Limits(max_context_tokens=LIMIT)
    return load_target(tiny_pair.target, "tiny-target", "float32", "cpu", limits)


@pytest.fixture(scope="module")
def short(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own weights with a context of 48."""
    return changed_draft(tiny_pair.same_draft, tmp_path_factory.mktemp("short") / "draft", context_length=SHORT)


@pytest.fixture(scope="module")
def truth(plain: PlainTarget) -> list[int]:
    """A text that fills the target's context; as a prompt, any beginning of it leads to the rest."""
    rng = random.Random(64)
    prompt = [rng.randrange(4, 300) for _ in range(FIRST)]
    return [*prompt, *plain.ids(prompt, LIMIT - FIRST, GREEDY)]


async def written(
    device: SpeculativeClient, prompt: list[int], count: int, pace: PaceKind
) -> tuple[list[int], list[StateChanged], Done]:
    """The ids of a greedy text, its states, its end."""
    ids: list[int] = []
    states: list[StateChanged] = []
    async with aclosing(device.stream(prompt, max_new_tokens=count, sampling=GREEDY, stop_ids=(), pace=pace)) as events:
        async for event in events:
            if isinstance(event, Committed):
                ids += event.ids
            elif isinstance(event, StateChanged):
                states.append(event)
            elif isinstance(event, Done):
                return ids, states, event
    raise AssertionError("a text ends with Done")


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("pace", [PaceKind.WAIT, PaceKind.RUN_ON], ids=lambda pace: pace.value)
@pytest.mark.parametrize("draft", DRAFTS)
async def test_a_text_begun_at_any_length_ends_at_the_targets_last_position_and_nothing_is_hinted_beyond(
    loaded: LoadedTarget, short: Path, tiny_pair: TinyPair, truth: list[int], draft: str, pace: PaceKind
) -> None:
    """C13: the right ids to position 63, whether just those are asked for or more, and past the draft's 48 too.

    At pace wait the verifier would wait a minute for hints that cannot come: a device that is out of room says so.
    """
    context, drafter = draft.split(", ")
    is_short, looks_up = context == "short", drafter == "both"
    folder = short if is_short else tiny_pair.same_draft
    settings: dict[str, Any] = {"hint_tokens": 8, "hint_reach": 0.0, "drafter": drafter}
    hinted: set[int] = set()
    full: list[bool] = []
    alone: list[bool] = []
    async with serving(loaded, max_wait_ms=60_000) as running:
        watched = Watched(running.address)
        async with SpeculativeClient(ClientConfig(draft=str(folder), **settings), transport=watched) as device:
            if looks_up:
                device.remember(truth)
            for length in range(FIRST, LIMIT):
                excess = length % 3
                count = LIMIT - length + excess
                ids, states, done = await written(device, truth[:length], count, pace)
                assert ids == truth[length:]
                assert done.reason is (FinishReason.CONTEXT_FULL if excess else FinishReason.LENGTH)
                is_full = done.report.engine.is_context_full
                is_alone = states[-1] == StateChanged(State.VERIFIED, "the draft model's context is full")
                assert is_full or not is_alone
                full.append(is_full)
                alone.append(is_alone)
                places = watched.hinted_positions()
                assert all(length <= place < LIMIT for place in places)
                hinted |= places
            with pytest.raises(ConfigError, match=f"the prompt of {LIMIT} tokens is too long"):
                await device.generate(truth, max_new_tokens=1)
    assert any(full) == is_short
    assert any(alone) == (is_short and not looks_up), "then it streams, and says so, unless look-up goes on"
    most = SHORT if is_short and not looks_up else LIMIT
    assert max(hinted, default=0) < most
    if pace is PaceKind.WAIT:  # run on, it is a race whether a hint comes in time, or any is needed
        assert max(hinted) == most - 1
