"""What a caller asks for, as ids and bounds that the target can take, or an error that names the field.

Must not know: sessions, drafting. Called by `client` before a session is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from edge_client.chat_template import ChatTemplate
from edge_client.tokenizer import TextTokenizer
from shared.errors import ConfigError
from shared.types import ModelCard
from shared.vocabulary import Vocabulary

Messages = Sequence[Mapping[str, Any]]
MAX_STOPS = 16


def encode_prompt(
    prompt: str | Messages, card: ModelCard, tokenizer: TextTokenizer, now: Callable[[], datetime]
) -> list[int]:
    """See `SpeculativeClient.encode`. Raises: ConfigError."""
    if isinstance(prompt, str):
        ids = tokenizer.encode_prompt(prompt)
    elif not card.chat_template:
        raise ConfigError(f"{card.model_name} has no chat template: give a raw prompt", field="messages")
    else:
        template = ChatTemplate(card.chat_template, card.special_tokens, now=now)
        ids = template.encode_chat(prompt, tokenizer)
    if not ids:
        raise ConfigError("the prompt is empty", field="prompt")
    return ids


def known_ids(ids: Sequence[Any], field: str, vocabulary: Vocabulary) -> list[int]:
    """Ids that are all in the vocabulary. Raises: ConfigError naming the first that is not."""
    valid = vocabulary.valid_mask(vocabulary.size)
    bad = next((i for i in ids if not isinstance(i, int) or not 0 <= i < len(valid) or not valid[i]), None)
    if bad is not None:
        raise ConfigError(f"{field} holds id {bad!r}, which is not in the vocabulary", field=field)
    return list(ids)


def checked_length(context: int, max_new_tokens: int, card: ModelCard) -> int:
    """How long a text may become after a prompt of `context` ids. Raises: ConfigError if there is no room."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}", field="max_new_tokens")
    room = card.context_size - context
    if room <= 0:
        raise ConfigError(
            f"the prompt of {context} tokens is too long: {card.model_name} holds {card.context_size}",
            field="prompt",
        )
    return min(max_new_tokens, card.limits.max_new_tokens)


def checked_stops(stop: str | Sequence[str]) -> list[str]:
    """Stop strings as a list. Raises: ConfigError for too many."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    if len(stops) > MAX_STOPS:
        raise ConfigError(f"stop: {len(stops)} stop strings given, at most {MAX_STOPS} are allowed", field="stop")
    return stops
