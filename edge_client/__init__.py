"""The device: drafts hints, sends them, turns commits into text. Never torch or transformers.

What an app uses: SpeculativeClient (asyncio) or BlockingClient, ClientConfig, SamplingParams, and the events.
They are imported when they are first asked for: the command line can say plainly what is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_client.blocking import BlockingClient
    from edge_client.client import SpeculativeClient
    from edge_client.client_config import ClientConfig
    from edge_client.events import (
        Committed,
        Done,
        Event,
        FinishReason,
        OfflinePolicy,
        Preview,
        Report,
        Result,
        State,
        StateChanged,
    )
    from edge_client.trace import Trace
    from edge_client.user_text_file import UserTextFile
    from shared.errors import DraftwireError
    from shared.sampling import SamplingParams
    from shared.types import PaceKind, Rule

__all__ = [
    "BlockingClient",
    "ClientConfig",
    "Committed",
    "Done",
    "DraftwireError",
    "Event",
    "FinishReason",
    "OfflinePolicy",
    "PaceKind",
    "Preview",
    "Report",
    "Result",
    "Rule",
    "SamplingParams",
    "SpeculativeClient",
    "State",
    "StateChanged",
    "Trace",
    "UserTextFile",
]

_HOMES = {
    "BlockingClient": "edge_client.blocking",
    "ClientConfig": "edge_client.client_config",
    "SpeculativeClient": "edge_client.client",
    "DraftwireError": "shared.errors",
    "SamplingParams": "shared.sampling",
    "PaceKind": "shared.types",
    "Rule": "shared.types",
    "Trace": "edge_client.trace",
    "UserTextFile": "edge_client.user_text_file",
}
"""Where a public name lives; the others in edge_client.events."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "edge_client.events")), name)
