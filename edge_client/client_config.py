"""The settings of a device.

Must not know: what is done with them. Read by `client`; the command lines fill it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_client.session_stream import OVERLOAD_WAIT_S, RECONNECT_FOR_S
from shared.config import check_ranges
from shared.errors import ConfigError
from shared.types import DEFAULT_RUN_AHEAD


@dataclass(frozen=True)
class ClientConfig:
    """Settings of a device; the environment names are DRAFTWIRE_CLIENT_<FIELD>."""

    verifier: str = "127.0.0.1:50151"
    """HOST:PORT of the verifier."""
    draft: str = "smollm2-135m"
    """Bundle name, folder or hub id of the draft model. Where none is loaded only its tokenizer need be there."""
    precision: Literal["auto", "int4", "int8", "fp32"] = "auto"
    """Of a draft model given by name; auto is the bundle's own choice, int4 for hub ids."""
    target_name: str = ""
    """Refuse a verifier that serves another model; empty takes any whose vocabulary fits."""
    threads: int = 1
    """CPU threads of the draft model."""
    drafter: Literal["model", "retrieval", "both"] = "both"
    """Who drafts: the draft model, look-up in the text so far and the user's own (no model is loaded), or both."""
    hint_tokens: int = 24
    """Ids drafted ahead at most; 0 drafts nothing and streams from the verifier."""
    hint_width: int = 4
    """Alternatives of one id at most: 1 sends chains, more send trees. The rejection rule sends chains only."""
    hint_reach: float = 0.03
    """What the text reaches with a smaller chance than this, by measured acceptance, is not drafted."""
    pace: Literal["auto", "wait", "run_on"] = "auto"
    """When the verifier runs: it waits for hints (fewest forwards), runs on (never slower than streaming), or goes by
    its load."""
    offline: Literal["local", "wait", "fail"] = "wait"
    """While the verifier cannot be reached: go on with the draft alone, marked as unverified; wait; or raise."""
    run_ahead: int = DEFAULT_RUN_AHEAD
    """Ids the verifier may commit past what this device has acknowledged."""
    timeout_s: float = 5.0
    """How long to wait for a verifier to answer at all."""
    reconnect_for_s: float = RECONNECT_FOR_S
    """How long to try again after a cut in mid text before giving up; 0 gives up at once."""
    user_text_tokens: int = 65_536
    """How much of the user's own text is remembered for look-up (`SpeculativeClient.remember`); 0: none."""
    overload_wait_s: float = OVERLOAD_WAIT_S
    """How long a text may wait for room at a verifier that is full; 0 gives up at once."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {
                "threads": (1, 256),
                "hint_tokens": (0, 64),
                "hint_reach": (0, 1),
                "hint_width": (1, 16),
                "run_ahead": (1, 65536),
                "timeout_s": (0.05, 600),
                "reconnect_for_s": (0, 86_400),
                "overload_wait_s": (0, 86_400),
                "user_text_tokens": (0, 2**24),
            },
        )
        if self.user_text_tokens == 1:
            raise ConfigError("user_text_tokens must be 0 or at least 2, got 1", field="user_text_tokens")
