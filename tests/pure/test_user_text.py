"""The user's own text: what is held and found, its bounds, its file."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client import user_text
from edge_client.suffix_index import Continuation
from edge_client.user_text import UserText
from shared.errors import ConfigError

VOCABULARY = b"one vocabulary"


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


# ---------------------------------------------------------------- the file


def test_what_was_saved_is_held_again_after_load(tmp_path: Path) -> None:
    path = tmp_path / "user.text"
    text = held([1, 2, 3, 4], [5], [6, 2**31 - 1])
    text.save(path, VOCABULARY)
    again = held([8, 8, 8, 8])
    again.load(path, VOCABULARY)
    assert again.texts() == text.texts()
    assert found(again, [1, 2, 3]) == [(4,)]


def test_a_smaller_holder_loads_the_newest_texts(tmp_path: Path) -> None:
    held([1, 2, 3, 4], [5, 6, 7]).save(tmp_path / "user.text", VOCABULARY)
    small = UserText(5)
    small.load(tmp_path / "user.text", VOCABULARY)
    assert small.texts() == [[5, 6, 7]]


def test_only_the_owner_may_read_the_file_even_if_it_was_open_to_all_before(tmp_path: Path) -> None:
    path = tmp_path / "user.text"
    path.write_bytes(b"older")
    path.chmod(0o644)
    held([1, 2]).save(path, VOCABULARY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_save_that_fails_leaves_the_older_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "user.text"
    held([1, 2, 3]).save(path, VOCABULARY)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"user\.text: No space left"):
        held([4, 5, 6]).save(path, VOCABULARY)
    assert os.listdir(tmp_path) == ["user.text"]
    again = UserText()
    again.load(path, VOCABULARY)
    assert again.texts() == [[1, 2, 3]]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "user.text"
    with pytest.raises(ConfigError, match=r"none/user\.text: No such file"):
        held([1]).save(path, VOCABULARY)
    with pytest.raises(ConfigError, match=r"none/user\.text: No such file"):
        held([1]).load(path, VOCABULARY)


def sealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def test_each_bad_file_is_named_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "user.text"
    held([1, 2, 3], [4]).save(path, VOCABULARY)
    good = path.read_bytes()
    start = len(user_text._MAGIC)
    other_format = good[:start] + struct.pack("<H", 9) + good[start + 2 : -32]
    many_texts = good[: start + 34] + struct.pack("<I", 99) + good[start + 38 : -32]
    large_id = good[:-36] + struct.pack("<I", 2**31)
    bad = {
        "not a file of a user's text": [b"", b"hello", good[:5]],
        "damaged": [good[:-1], good[:-4], good + b"1234", good[:60] + b"x" + good[61:], good[: start + 3]],
        "of format 9, this version reads 1": [sealed(other_format)],
        "damaged$": [sealed(many_texts), sealed(large_id), sealed(good[:-36])],
    }
    monkeypatch.setattr(user_text, "MAX_FILE_BYTES", 1000)
    bad["larger than 1000 bytes"] = [sealed(good[:-32] + bytes(2000))]
    text = held([7, 7])
    for message, contents in bad.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(ConfigError, match=rf"user\.text: {message}"):
                text.load(path, VOCABULARY)
            assert text.texts() == [[7, 7]]


def test_a_file_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "user.text"
    held([1, 2, 3]).save(path, VOCABULARY)
    with pytest.raises(ConfigError, match=r"user\.text: of another vocabulary"):
        UserText().load(path, b"another")


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "user.text"
    held([1, 2, 3], [4]).save(path, VOCABULARY)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(ConfigError, match=r"user\.text"):
            UserText().load(path, VOCABULARY)
