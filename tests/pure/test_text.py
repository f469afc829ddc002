"""Final text from forced ids: whole characters, and not a character of a stop string."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_client.text import Detokenizer, StopStrings, TextDelta, TextStream
from shared.errors import ConfigError
from shared.vocabulary import NORMAL, SPECIAL, Vocabulary

WORDS = [b"own", b" fox", b"\nUs", b"er:", "你".encode(), "好".encode()[:2], "👍🏽".encode()[:5], b" a", b"end"]
SPECIAL_ID = 256 + len(WORDS)


def byte_vocabulary(*, drops_leading_space: bool = False) -> Vocabulary:
    """Ids 0-255 are the bytes, then some longer tokens, then one special token."""
    tokens = [bytes([byte]) for byte in range(256)] + WORDS + [b"<|end|>"]
    offsets = np.cumsum([0, *map(len, tokens)]).astype(np.uint32)
    flags = np.full(len(tokens), NORMAL, dtype=np.uint8)
    flags[SPECIAL_ID] = SPECIAL
    return Vocabulary(b"".join(tokens), offsets, flags, drops_leading_space)


VOCABULARY = byte_vocabulary()

TEXTS = {
    "rare Han": "𠮷野家で𪚥と龘",
    "four-byte emoji": "ok 👍😀🚀.",
    "ZWJ families": "👩‍👩‍👧‍👦 and 🏳️‍🌈",
    "flags": "🇩🇪🇯🇵🇧🇷",
    "skin tones": "👍🏽👋🏿",
    "combining marks": "e\u0301 o\u0308\u0304 Z͑ͫ̓",
    "Hebrew": "שָׁלוֹם עוֹלָם",
    "no byte-order mark is lost": "\ufeffa\ufeff",
}

INVALID = {
    "half a character at the end": "好".encode()[:2],
    "half a character inside": b"a" + "👍".encode()[:3] + b"b",
    "two half characters": "好".encode()[:2] + "好".encode()[:1] + "好".encode(),
    "stray continuation bytes": b"\x80\xbfa\x80",
    "a surrogate in UTF-8": b"\xed\xa0\x80x",
    "overlong forms": b"\xc0\xaf\xe0\x80\xaf\xf0\x80\x80\xaf",
    "beyond Unicode": b"\xf4\x90\x80\x80\xf8\x88\x80\x80\x80",
    "bytes never allowed": b"\xff\xfe\xff",
}
FORCED = {name: text.encode() for name, text in TEXTS.items()} | INVALID


def pieces(items: Any, size: int) -> Iterable[Any]:
    return (items[start : start + size] for start in range(0, len(items), size))


def streamed(data: Iterable[int], size: int) -> str:
    detokenizer = Detokenizer(VOCABULARY)
    return "".join(detokenizer.push(piece) for piece in pieces(list(data), size)) + detokenizer.finish()


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("data", FORCED.values(), ids=FORCED.keys())
def test_streamed_text_is_the_one_shot_decoding_for_every_block_size(data: bytes, size: int) -> None:
    assert streamed(data, size) == data.decode(errors="replace")


@pytest.mark.parametrize("data", FORCED.values(), ids=FORCED.keys())
def test_streamed_text_is_the_one_shot_decoding_for_a_block_border_at_every_byte(data: bytes) -> None:
    for border in range(len(data) + 1):
        detokenizer = Detokenizer(VOCABULARY)
        text = detokenizer.push(data[:border]) + detokenizer.push(data[border:]) + detokenizer.finish()
        assert text == data.decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_every_piece_of_valid_text_is_final(text: str) -> None:
    detokenizer, shown = Detokenizer(VOCABULARY), ""
    for done, byte in enumerate(text.encode(), start=1):
        shown += detokenizer.push([byte])
        assert shown == text.encode()[:done].decode(errors="ignore")  # whole characters at once, never half of one
    assert detokenizer.finish() == ""


def test_a_dangling_half_character_is_flushed_once() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    assert detokenizer.push([*b"a", *"👍".encode()[:3]]) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_character_is_released_as_invalid_as_soon_as_that_is_sure() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    assert detokenizer.push("👍".encode()[:2]) == ""
    assert detokenizer.push(b"x") == "\ufffdx"


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.lists(st.integers(0, SPECIAL_ID - 1), max_size=30), st.integers(1, 8))
def test_any_ids_in_any_blocks_give_the_one_shot_decoding(ids: list[int], size: int) -> None:
    data = b"".join(VOCABULARY.token_bytes(i) or b"" for i in ids)
    assert streamed(ids, size) == data.decode(errors="replace")


def test_special_tokens_give_no_text_unless_asked_for() -> None:
    ids = [*b"a", SPECIAL_ID, *b"b"]
    assert Detokenizer(VOCABULARY).push(ids) == "ab"
    assert Detokenizer(VOCABULARY, keep_special=True).push(ids) == "a<|end|>b"


def test_ids_that_do_not_exist_give_no_text() -> None:
    assert Detokenizer(VOCABULARY).push([-1, *b"a", 10_000]) == "a"


def test_only_one_space_at_the_start_of_a_text_is_dropped_and_only_where_the_tokenizer_added_it() -> None:
    spacing = byte_vocabulary(drops_leading_space=True)
    ids = [SPECIAL_ID, *b"  a", *b" b"]
    assert Detokenizer(spacing, at_text_start=True).push(ids) == " a b"
    assert Detokenizer(spacing).push(ids) == "  a b"
    assert Detokenizer(VOCABULARY, at_text_start=True).push(ids) == "  a b"


def test_the_space_is_dropped_when_it_comes_in_a_later_block_than_a_token_without_text() -> None:
    detokenizer = Detokenizer(byte_vocabulary(drops_leading_space=True), at_text_start=True)
    assert [detokenizer.push(block) for block in ([], [SPECIAL_ID], b" ", b" ", b"a")] == ["", "", "", " ", "a"]


# Stop strings


def plain_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The readable slow twin: try each end in turn."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stopped(chunks: Iterable[str], stops: str | Sequence[str]) -> tuple[list[str], str | None]:
    matcher, shown, found = StopStrings(stops), [], None
    for chunk in chunks:
        text, found = matcher.push(chunk)
        shown.append(text)
    shown.append(matcher.finish())
    return shown, found


def random_cuts(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


STORY = "The quick brown fox jumps.\nUser: own fox 你好👍🏽\n\nUs own"


def test_a_stop_cut_from_the_text_at_every_offset_ends_it_there_for_every_block_size() -> None:
    for start in range(len(STORY)):
        for length in (1, 2, 5, 9):
            stop = STORY[start : start + length]
            expected = plain_stop(STORY, [stop])
            assert expected[1] == stop
            for size in (1, 3, 8, len(STORY)):
                shown, found = stopped(pieces(STORY, size), [stop])
                assert ("".join(shown), found) == expected


@pytest.mark.parametrize(
    "stops", [["\nUser:"], ["own fox"], ["own fox", "fox jumps"], ["\n\n", "\nUs", "x"], ["never", "STOP"], []]
)
def test_the_shown_text_does_not_depend_on_how_it_is_cut(stops: list[str]) -> None:
    rng = random.Random(1)
    for _ in range(300):
        shown, found = stopped(random_cuts(rng, STORY), stops)
        assert ("".join(shown), found) == plain_stop(STORY, stops)


@settings(derandomize=True, deadline=None, max_examples=1000)
@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.randoms(use_true_random=False),
)
def test_overlapping_stops_agree_with_the_slow_twin(text: str, stops: list[str], rng: random.Random) -> None:
    shown, found = stopped(random_cuts(rng, text), stops)
    assert ("".join(shown), found) == plain_stop(text, stops)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
@example(text="aaaba", stops=["aaabb"])
def test_what_is_held_back_is_exactly_what_may_still_become_a_stop(text: str, stops: list[str]) -> None:
    matcher, shown = StopStrings(stops), ""
    for done, character in enumerate(text, start=1):
        piece, found = matcher.push(character)
        shown += piece
        if found:
            return
        seen = text[:done]
        ambiguous = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert shown == seen[: done - ambiguous]


def test_a_false_start_is_released_whole_by_the_next_piece() -> None:
    matcher = StopStrings("\nUser:")
    assert matcher.push("Hi\nUse") == ("Hi", None)
    assert matcher.push(" it") == ("\nUse it", None)


def test_a_false_start_is_released_at_the_end_once() -> None:
    matcher = StopStrings(["\nUser:"])
    assert matcher.push("Hi\nUse") == ("Hi", None)
    assert matcher.finish() == "\nUse"
    assert matcher.finish() == ""


def test_the_stop_that_completes_first_wins_although_another_began_before_it() -> None:
    assert stopped(["abcd"], ["abcd", "bc"]) == (["a", ""], "bc")


def test_of_two_stops_with_the_same_end_the_longest_wins() -> None:
    assert stopped(["xabc"], ["bc", "abc"]) == (["x", ""], "abc")


def test_nothing_is_shown_after_a_stop() -> None:
    matcher = StopStrings("end")
    assert matcher.push("the end of") == ("the ", "end")
    assert matcher.push("it") == ("", "end")
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", ["", [""], ["a", ""], [None], [3]])
def test_an_empty_stop_or_one_that_is_no_string_is_refused_by_name(stops: list[str]) -> None:
    with pytest.raises(ConfigError, match="stop: ") as caught:
        StopStrings(stops)
    assert caught.value.field == "stop"


# Ids, stops and positions together

STREAM_IDS = [*b"br", 256, 257, *b"!", 258, 259, *"好".encode(), SPECIAL_ID, 262, *"👍🏽".encode()[5:], *b"."]
STREAM_TEXT = "brown fox!\nUser:好👍🏽."


def run_stream(ids: Sequence[int], size: int, stops: Sequence[str]) -> TextDelta:
    """The whole text, the stop, and how many ids counted before and with it."""
    stream, text, used = TextStream(VOCABULARY, stops), "", 0
    for block in pieces(ids, size):
        delta = stream.push(block)
        text, used = text + delta.text, used + delta.tokens_used
        if delta.stop_matched:
            break
    last = stream.finish()
    return TextDelta(text + last.text, last.stop_matched, used)


def first_prefix_with(text: str) -> int:
    """How many ids it takes until their text holds `text`."""
    lengths = range(1, len(STREAM_IDS) + 1)
    return next(n for n in lengths if text in run_stream(STREAM_IDS[:n], 1, ()).text.removesuffix("\ufffd"))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_a_text_without_a_stop_uses_every_id(size: int) -> None:
    assert run_stream(STREAM_IDS, size, ["none"]) == TextDelta(STREAM_TEXT, None, len(STREAM_IDS))
    assert run_stream(STREAM_IDS, size, []) == TextDelta(STREAM_TEXT, None, len(STREAM_IDS))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_a_stop_at_every_offset_names_the_id_that_completed_it(size: int) -> None:
    for start in range(len(STREAM_TEXT)):
        for length in (1, 2, 4, 7):
            stop = STREAM_TEXT[start : start + length]
            text, found = plain_stop(STREAM_TEXT, [stop])
            assert found == stop
            used = first_prefix_with(text + stop)
            assert run_stream(STREAM_IDS, size, [stop]) == TextDelta(text, stop, used)


def test_a_stop_that_ends_inside_a_token_cuts_the_text_inside_it() -> None:
    assert TextStream(VOCABULARY, ["wn fo"]).push([*b"br", 256, 257, *b"!"]) == TextDelta("bro", "wn fo", 4)


def test_after_a_stop_no_id_is_used_and_no_text_shown() -> None:
    stream = TextStream(VOCABULARY, "n")
    assert stream.push([256, 256]) == TextDelta("ow", "n", 1)
    assert stream.push([256]) == TextDelta("", "n", 0)
    assert stream.finish() == TextDelta("", "n", 0)


def test_an_unfinished_character_at_the_end_may_complete_a_stop() -> None:
    stream = TextStream(VOCABULARY, "b\ufffd")
    assert stream.push([*b"ab", 0xF0]) == TextDelta("a", None, 3)
    assert stream.finish() == TextDelta("", "b\ufffd", 0)


def test_the_end_releases_a_false_start_and_a_half_character_once() -> None:
    stream = TextStream(VOCABULARY, "bcd")
    assert stream.push([*b"abc", 0xF0]) == TextDelta("a", None, 4)
    assert stream.finish() == TextDelta("bc\ufffd", None, 0)
    assert stream.finish() == TextDelta("", None, 0)


def test_special_tokens_can_be_kept_and_matched() -> None:
    assert TextStream(VOCABULARY, "<|e", keep_special=True).push([97, SPECIAL_ID]) == TextDelta("a", "<|e", 2)
    assert TextStream(VOCABULARY, "<|e").push([97, SPECIAL_ID]) == TextDelta("a", None, 2)
