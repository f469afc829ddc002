"""Two vocabularies are compatible exactly when every id means the same bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelMismatch, RemoteProtocolError
from shared.fingerprint import Fingerprint, check_compatible, fingerprint, first_difference
from shared.vocabulary import ABSENT, ADDED, NORMAL, SPECIAL, Vocabulary


def vocabulary(tokens: dict[int, bytes], *, size: int = 0, flags: dict[int, int] | None = None) -> Vocabulary:
    """The vocabulary with these tokens; ids up to `size` that are not named are holes or padding rows."""
    size = max(size, max(tokens, default=-1) + 1)
    marks = np.full(size, ABSENT, dtype=np.uint8)
    for token_id in tokens:
        marks[token_id] = (flags or {}).get(token_id, NORMAL)
    lengths = [len(tokens.get(token_id, b"")) for token_id in range(size)]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.uint32)
    return Vocabulary(b"".join(tokens[token_id] for token_id in sorted(tokens)), offsets, marks)


def usual(count: int = 3000) -> dict[int, bytes]:
    return {token_id: b"t%d" % token_id for token_id in range(count)}


def difference(left: Vocabulary, right: Vocabulary) -> str | None:
    forward = first_difference(fingerprint(left), fingerprint(right))
    assert forward == first_difference(fingerprint(right), fingerprint(left))
    assert (forward is None) == (fingerprint(left) == fingerprint(right))
    assert (forward is None) == (fingerprint(left).digest == fingerprint(right).digest)
    return forward


def test_the_same_tokens_have_the_same_fingerprint() -> None:
    assert difference(vocabulary(usual()), vocabulary(usual())) is None


@pytest.mark.parametrize("padding", [1, 72, 73, 128, 5000])
def test_padding_rows_at_the_end_count_as_absent(padding: int) -> None:
    assert difference(vocabulary(usual()), vocabulary(usual(), size=3000 + padding)) is None


def test_two_swapped_ids_are_named_by_their_block() -> None:
    swapped = usual()
    swapped[2050], swapped[2999] = swapped[2999], swapped[2050]
    assert difference(vocabulary(usual()), vocabulary(swapped)) == "ids 2048-3071 differ"


def test_the_first_of_several_differing_blocks_is_named() -> None:
    other = usual() | {1023: b"x", 2048: b"y"}
    assert difference(vocabulary(usual()), vocabulary(other)) == "ids 0-1023 differ"


def test_an_added_special_token_on_one_side_is_named_by_its_block() -> None:
    more = vocabulary(usual() | {3000: b"<|new|>"}, flags={3000: SPECIAL})
    assert difference(vocabulary(usual()), more) == "ids 2048-3071 differ"


def test_a_block_that_only_one_side_has_is_named() -> None:
    more = vocabulary(usual() | {3072: b"<|new|>"}, flags={3072: SPECIAL})
    assert difference(vocabulary(usual()), more) == "ids 3072-4095 differ"


def test_a_token_that_is_special_on_one_side_only_is_named() -> None:
    left = vocabulary(usual(), flags={7: ADDED, 9: SPECIAL})
    right = vocabulary(usual(), flags={7: SPECIAL, 9: SPECIAL})
    assert difference(left, right) == "special ids differ: 7 is special on one side only"


def test_a_token_that_is_added_on_one_side_only_differs() -> None:
    assert difference(vocabulary(usual()), vocabulary(usual(), flags={7: ADDED})) == "ids 0-1023 differ"


def test_a_hole_differs_from_an_empty_token() -> None:
    with_hole = usual()
    del with_hole[5]
    assert difference(vocabulary(with_hole), vocabulary(usual() | {5: b""})) == "ids 0-1023 differ"


def test_the_border_between_two_tokens_matters() -> None:
    assert difference(vocabulary({0: b"ab", 1: b"c"}), vocabulary({0: b"a", 1: b"bc"})) == "ids 0-1023 differ"


def test_another_tokenizer_of_the_same_size_differs() -> None:
    other = {token_id: b"u%d" % token_id for token_id in range(3000)}
    assert difference(vocabulary(usual()), vocabulary(other)) == "ids 0-1023 differ"


def test_the_place_of_the_bytes_in_the_blob_does_not_matter() -> None:
    whole = vocabulary(usual())
    moved = dataclasses.replace(whole, blob=b"unused" + whole.blob, offsets=whole.offsets + np.uint32(6))
    assert difference(whole, moved) is None


def test_an_incompatible_pair_is_refused_with_both_names_and_the_first_difference() -> None:
    left, right = fingerprint(vocabulary(usual())), fingerprint(vocabulary(usual(2000)))
    check_compatible(left, left, "small", "large")
    with pytest.raises(ModelMismatch) as caught:
        check_compatible(left, right, "small", "large")
    expected = "draft small and target large do not share a vocabulary: ids 1024-2047 differ"
    assert caught.value.message == expected


def test_the_wire_form_is_small_and_comes_back_equal() -> None:
    made = fingerprint(vocabulary(usual(), flags={7: SPECIAL, 9: SPECIAL}))
    parts = made.to_wire()
    assert [len(part) for part in parts] == [8, 8, 8, 8]
    assert Fingerprint.from_wire(parts) == made
    assert len(made.digest) == 32


VECTOR_BLOCKS = ["7bb66eea88ab475c", "714f633fcb569f37"]
VECTOR_DIGEST = "4cffd21e5994f69b9a8a17d10f971d2f2650d7e96d2e158dcff25c6e272d121f"


def test_the_published_test_vector_holds() -> None:
    """Fails when the hash changes, which breaks the protocol between versions."""
    made = fingerprint(vocabulary(usual(1500), flags={0: SPECIAL, 1: ADDED}))
    assert [block.hex() for block in made.blocks] == VECTOR_BLOCKS
    assert made.digest.hex() == VECTOR_DIGEST


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"abc"],
        [b"", b"short"],
        [b"", b"much too long"],
        [b"\x01\0\0\0"],
        [b"\0\4\0\0", b"12345678"],
        [b"\5\0\0\0\5\0\0\0", b"12345678"],
        [b"\6\0\0\0\5\0\0\0", b"12345678"],
        [b"", *[b"12345678"] * 20_000],
        [b"\0" * 400_000, b"12345678"],
    ],
)
def test_what_is_no_fingerprint_is_refused_with_the_field(parts: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError, match="fingerprint: ") as caught:
        Fingerprint.from_wire(parts)
    assert caught.value.field == "fingerprint"


@settings(derandomize=True, deadline=None)
@given(st.lists(st.binary(max_size=12) | st.binary(min_size=8, max_size=8), max_size=6))
def test_garbage_is_a_fingerprint_or_refused_and_nothing_else(parts: list[bytes]) -> None:
    try:
        made = Fingerprint.from_wire(parts)
    except RemoteProtocolError:
        return
    assert made.to_wire() == parts


@settings(derandomize=True, deadline=None)
@given(
    st.dictionaries(st.integers(0, 2100), st.binary(max_size=3), max_size=8),
    st.dictionaries(st.integers(0, 2100), st.binary(max_size=3), max_size=8),
)
def test_fingerprints_are_equal_exactly_when_the_tokens_are(left: dict[int, bytes], right: dict[int, bytes]) -> None:
    assert (difference(vocabulary(left), vocabulary(right)) is None) == (left == right)
