"""Chat messages to ids, by the target's Jinja template, such that no message can speak for the template.

Must not know: sessions, the network, models. Called by the client when a chat opens or goes on.

The rule for special tokens spelt out in a message: they are encoded as the plain text that they are. Each one is
broken up by a character that occurs nowhere else before the template runs; what stands unbroken in the rendered text
comes from the template and is a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_client.tokenizer import SpecialLiteral, TextTokenizer, without_surrogates
from shared.errors import ConfigError, ModelLoadError

Message = Mapping[str, Any]

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_PRIVATE_USE = range(0xE000, 0xF900)


class ChatTemplate:
    """A chat template with its model's named special tokens; the same environment as Hugging Face documents."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`now` answers templates that ask for the date.

        Raises: ConfigError when the template does not compile.
        """
        self.source = source
        self.special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise _error(f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # a hostile template may break the compiler in other ways (RecursionError)
            raise _error(str(error) or type(error).__name__) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The whole chat as text.

        Raises: ConfigError for bad messages, or when the template fails or refuses them.
        """
        return self._render(_checked(messages), add_generation_prompt)

    def encode_chat(
        self, messages: Sequence[Message], tokenizer: TextTokenizer, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of the whole chat, with at most one BOS; special tokens spelt out in messages are plain text.

        Raises: ConfigError for bad messages, or when the template fails or refuses them.
        """
        checked = _checked(messages)
        literals = {literal.text: literal for literal in tokenizer.special_literals}
        guard = self._unused_character(checked)
        guarded = [_guarded(message, _any_of(literals.values()), guard) for message in checked]
        rendered = self._render(guarded, add_generation_prompt)
        if guard in rendered:
            ids = list(_encode_pieces(rendered, guard, literals, tokenizer))
        else:
            ids = tokenizer.encode(rendered, parse_special=True)
        while tokenizer.bos_id is not None and ids[:2] == [tokenizer.bos_id] * 2:
            del ids[0]
        return ids

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except Exception as error:  # an expression of the template may raise anything
            raise _error(str(error) or type(error).__name__) from error

    def _unused_character(self, messages: Sequence[Message]) -> str:
        """A private-use character that occurs neither in the messages nor in the template."""
        present = set(self.source).union(*self.special_tokens.values(), _to_json(messages))
        for code in _PRIVATE_USE:
            if chr(code) not in present:
                return chr(code)
        raise ConfigError("messages: they hold every private-use character", field="messages")


def read_chat_template(folder: Path | str) -> str | None:
    """The template of a model folder: chat_template.jinja, else the one in tokenizer_config.json, else None.

    Raises: ModelLoadError when a file cannot be read.
    """
    own, config = Path(folder) / "chat_template.jinja", Path(folder) / "tokenizer_config.json"
    try:
        if own.is_file():
            return own.read_text(encoding="utf-8")
        found = json.loads(config.read_bytes()).get("chat_template") if config.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{folder}: the chat template cannot be read: {error}") from error
    if isinstance(found, list):  # several named templates
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of the messages, each with a plain role and text as content, in characters that UTF-8 can hold."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError("messages: must be a list of at least one message", field="messages")
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ConfigError(f"{at}: must be a dict with role and content", field=at)
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise ConfigError(f"{at}.role: must be a short word such as user, not {role!r}", field=f"{at}.role")
        if not isinstance(content, str):
            raise ConfigError(f"{at}.content: must be a string, not {type(content).__name__}", field=f"{at}.content")
    return [_map_strings(without_surrogates, message) for message in messages]


def _map_strings(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _map_strings(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(change, item) for item in value]
    return value


def _any_of(literals: Iterable[SpecialLiteral], unless_after: str = "") -> re.Pattern[str]:
    """Matches the special literals, the longest first, as the tokenizer does; not right after `unless_after`."""
    ordered = sorted(literals, key=lambda literal: -len(literal.text))
    choices = "|".join(_one(literal) for literal in ordered) or r"(?!)"
    return re.compile(f"(?<!{re.escape(unless_after)})(?:{choices})" if unless_after else choices)


def _one(literal: SpecialLiteral) -> str:
    text = re.escape(literal.text)
    return rf"(?<!\w){text}(?!\w)" if literal.single_word else text


def _guarded(message: Message, literal: re.Pattern[str], guard: str) -> Any:
    """The message with the guard before every character of each special literal, so that no part of it can match."""
    return _map_strings(lambda text: literal.sub(lambda found: "".join(guard + c for c in found[0]), text), message)


def _encode_pieces(
    rendered: str, guard: str, literals: Mapping[str, SpecialLiteral], tokenizer: TextTokenizer
) -> Iterator[int]:
    """The ids of a rendered chat, split at the special tokens that the template wrote."""
    start, after_rstrip = 0, False
    for found in _any_of(literals.values(), unless_after=guard).finditer(rendered):
        literal = literals[found[0]]
        piece = _piece(rendered[start : found.start()], guard, strip_start=after_rstrip, strip_end=literal.lstrip)
        yield from tokenizer.encode(piece, at_start=start == 0)
        yield literal.token_id
        start, after_rstrip = found.end(), literal.rstrip
    piece = _piece(rendered[start:], guard, strip_start=after_rstrip, strip_end=False)
    yield from tokenizer.encode(piece, at_start=start == 0)


def _piece(text: str, guard: str, *, strip_start: bool, strip_end: bool) -> str:
    text = text.lstrip() if strip_start else text
    text = text.rstrip() if strip_end else text
    return text.replace(guard, "")


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own `tojson`, characters stay as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _error(reason: str) -> ConfigError:
    first_line = reason.strip().splitlines()[0] if reason.strip() else "failed"
    return ConfigError(f"chat template: {first_line}", field="chat_template")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
