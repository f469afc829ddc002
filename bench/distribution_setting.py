"""What one case of `bench.distribution` fixes for its sessions, and how a rule is broken from outside.

Must not know: how a session runs (`distribution_world`). Times in ms of virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.distribution_device import Device
from bench.toy_pair import ToyPair
from edge_client.drafter import ModelDrafter
from edge_client.edge_engine import EdgeEngine
from shared.hint_trie import HintTrie
from shared.sampling import SamplingParams
from shared.types import Hint, Limits, PaceKind, Rule

TEXT_IDS = 4
"""How many of the first generated ids are compared with the truth."""
Patch = tuple[Any, str, Any]
"""(module or class, attribute, value that stands there during a case)."""


@dataclass(frozen=True)
class Link:
    """What the network does. Delays are uniform between two bounds; hints may be lost, repeated or overtaken."""

    up_ms: tuple[float, float] = (5.0, 5.0)
    down_ms: tuple[float, float] = (5.0, 5.0)
    loss: float = 0.0
    loses: Callable[[Hint], float] | None = None
    """A probability of loss that looks into the frame, as frame length does in effect."""
    duplicate: float = 0.0
    overtakes: bool = False
    cut_ms: tuple[float, float] | None = None
    """When the stream is cut, once; what is under way is lost. It is back 15 ms later."""
    up_bytes_per_ms: float | None = None
    """A slow uplink: a frame takes as long as its bytes, those behind it wait. None: bytes take no time."""
    padded_node_bytes: int = 0
    """As if each hint frame were padded to so many bytes an id; 0: frames are as long as they are."""
    verifier_dies: bool = False
    """The cut takes the session with it: the device reopens with `continued`."""


@dataclass(frozen=True)
class Setting:
    """All that one case fixes for its sessions. Defaults are the product's own ways."""

    rule: Rule = Rule.REJECTION
    sampling: SamplingParams = field(default_factory=SamplingParams)
    draft_sampling: SamplingParams | None = None
    pair: ToyPair = field(default_factory=ToyPair)
    depth: int = 3
    width: int = 1
    pace: PaceKind = PaceKind.WAIT
    limits: Limits = field(default_factory=lambda: Limits(max_wait_ms=60))
    run_ahead: int = 256
    new_ids: int = TEXT_IDS
    stop_ids: tuple[int, ...] = ()
    link: Link = field(default_factory=Link)
    frame_nodes: int = 256
    draft_ms: float = 2.0
    step_ms: float = 10.0
    scatter: float = 0.0
    """Draft steps and the verifier's steps take up to this share more or less, evenly."""
    overlap_ms: tuple[float, float] | None = None
    """Draft on after such a time even while a hint is open; None: only when the last one has been judged."""
    resend_ms: float = 0.0
    """Say again what is open after this time; 0 never."""
    resends_bytes: bool = True
    """Say it again byte for byte; False: draft it again."""
    is_local: bool = False
    """The product's device drafts on while the stream is cut."""
    device: type[Device] = Device
    engine: type[EdgeEngine] = EdgeEngine
    """Of `EdgeDevice`."""
    drafter: type[ModelDrafter] = ModelDrafter
    trie: type[HintTrie] = HintTrie
    secret_of: Callable[[int, int], int] = lambda seed, secret: secret
    patches: tuple[Patch, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One session's first ids (`ENDED` behind a stop id), and the first node of each hint judged: ids before, accepted?

    `whole`: context and all generated ids.
    """

    text: tuple[int, ...]
    judged: tuple[tuple[tuple[int, ...], bool], ...]
    whole: tuple[int, ...] = ()


@contextmanager
def patched(patches: tuple[Patch, ...]) -> Iterator[None]:
    """Breaks the product on purpose, from outside, for as long as the block lasts."""
    before = [getattr(owner, name) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(patches, before, strict=True):
            setattr(owner, name, value)
