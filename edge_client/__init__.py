"""The device: drafts hints, sends them, turns commits into text. Never torch or transformers.

What an app uses: SpeculativeClient (asyncio) or BlockingClient, ClientConfig, SamplingParams, and the events.
"""

from edge_client.blocking import BlockingClient
from edge_client.client import ClientConfig, SpeculativeClient
from edge_client.events import Committed, Done, FinishReason, Report, Result, State, StateChanged
from shared.errors import DraftwireError
from shared.sampling import SamplingParams
from shared.types import PaceKind, Rule

__all__ = [
    "BlockingClient",
    "ClientConfig",
    "Committed",
    "Done",
    "DraftwireError",
    "FinishReason",
    "PaceKind",
    "Report",
    "Result",
    "Rule",
    "SamplingParams",
    "SpeculativeClient",
    "State",
    "StateChanged",
]
