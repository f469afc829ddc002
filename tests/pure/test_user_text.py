"""The user's own text: what is held and found, and its bounds."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.suffix_index import Continuation
from edge_client.user_text import UserText
from shared.errors import ConfigError


def held(*texts: list[int], max_tokens: int = 1000) -> UserText:
    text = UserText(max_tokens)
    for ids in texts:
        text.add(ids)
    return text


def found(text: UserText, tail: list[int], depth: int = 4) -> list[tuple[int, ...]]:
    return [each.ids for each in text.find(tail, depth, 3, 16)]


# ---------------------------------------------------------------- held and found


def test_what_followed_in_an_earlier_text_is_found() -> None:
    text = held([1, 2, 3, 4, 5], [9, 2, 3, 7])
    assert text.find([1, 2, 3], 4, 3, 16) == [Continuation(3, (4, 5))]


def test_no_match_and_no_continuation_goes_from_one_text_to_the_next() -> None:
    text = held([1, 2, 3], [4, 5, 6, 7])
    assert found(text, [1, 2, 3]) == []
    assert found(text, [3, 4, 5]) == []
    assert found(text, [4, 5, 6]) == [(7,)]


def test_a_continuation_is_no_longer_than_asked_for() -> None:
    assert found(held(list(range(20))), [3, 4, 5], depth=2) == [(6, 7)]


def test_nothing_is_found_after_clear_and_texts_may_be_added_again() -> None:
    text = held([1, 2, 3, 4])
    text.clear()
    assert (len(text), text.texts(), found(text, [1, 2, 3])) == (0, [], [])
    text.add([1, 2, 3, 5])
    assert found(text, [1, 2, 3]) == [(5,)]


def test_an_empty_text_leaves_nothing() -> None:
    assert len(held([])) == 0


# ---------------------------------------------------------------- bounds


def test_the_oldest_texts_make_room() -> None:
    text = held([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], max_tokens=10)
    assert text.texts() == [[1, 2, 3, 5], [1, 2, 3, 6]]
    assert found(text, [1, 2, 3]) == [(6,), (5,)]


def test_of_a_text_larger_than_everything_the_end_is_kept() -> None:
    assert held([7, 7], list(range(30)), max_tokens=10).texts() == [list(range(21, 30))]


def test_room_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens must be at least 2"):
        UserText(1)


def test_memory_does_not_grow_with_the_number_of_texts_that_came() -> None:
    draws = random.Random(5)
    text = UserText(500)
    sizes = []
    for _ in range(400):
        text.add([draws.randrange(50) for _ in range(draws.randrange(40))])
        sizes.append(text.size_bytes)
        assert len(text) <= 500
    assert max(sizes[200:]) <= max(sizes[:200]) <= 500 * 12 + 2 * 4 * 512


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=12), st.integers(2, 30))
def test_the_newest_texts_that_fit_are_held(texts: list[list[int]], max_tokens: int) -> None:
    kept: list[list[int]] = []
    for ids in texts:
        ids = ids[max(0, len(ids) - max_tokens + 1) :]
        if ids:
            kept.append(ids)
        while sum(len(each) + 1 for each in kept) > max_tokens:
            del kept[0]
    assert held(*texts, max_tokens=max_tokens).texts() == kept


def test_threads_may_add_clear_and_look_at_once() -> None:
    """Each text is a run of one id: a torn look-up would give a mixture."""
    text = UserText(400)

    def use(number: int) -> None:
        for round_ in range(150):
            text.add([number] * 20)
            for ids in found(text, [number] * 3, depth=8):
                assert set(ids) == {number}
            if round_ % 50 == number:
                text.clear()

    with often_switched(), ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(use, number) for number in range(4)]:
            done.result()
    assert len(text) <= 400


@contextmanager
def often_switched() -> Iterator[None]:
    """Threads take turns after a few lines."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
