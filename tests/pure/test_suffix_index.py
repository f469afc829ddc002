"""The suffix index: its rules by example, then random histories against a slow twin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.suffix_index import MAX_HOPS, MAX_ID, MAX_MATCH, Place, SuffixIndex

IDS = st.integers(0, 2)


class SlowIndex:
    """The same answers by comparing every place with the tail."""

    def __init__(self, groups: tuple[int, ...]) -> None:
        self.groups = groups
        self.start = 0
        self.held: list[int] = []

    def match(self, tail: Sequence[int], index: int) -> int:
        length = 0
        while length < min(MAX_MATCH, len(tail), index) and tail[-length - 1] == self.held[index - length - 1]:
            length += 1
        return length

    def find(self, tail: Sequence[int], shortest: int, most: int) -> list[Place]:
        found: dict[int, int] = {}
        for group in sorted(self.groups, reverse=True):
            for index in reversed(range(len(self.held))):
                length = self.match(tail, index)
                if length >= max(group, shortest) and len(found) < most:
                    found.setdefault(self.start + index, length)
        return sorted((Place(p, n) for p, n in found.items()), key=lambda place: (-place.length, -place.position))


def index_of(ids: Sequence[int], groups: tuple[int, ...] = (2, 4, 8)) -> SuffixIndex:
    index = SuffixIndex(groups)
    index.extend(ids)
    return index


def test_a_place_is_the_position_of_what_followed() -> None:
    index = index_of([1, 2, 3, 4, 9, 1, 2])
    assert index.find([1, 2], 2, 16) == [Place(2, 2)]
    assert index.ids(2, 4) == [3, 4]


def test_the_longest_match_comes_first_and_of_equal_ones_the_newest() -> None:
    index = index_of([7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 5, 7, 1, 2])
    assert index.find([7, 1, 2], 2, 16) == [Place(3, 3), Place(11, 2), Place(7, 2)]


def test_matches_shorter_than_asked_for_do_not_count() -> None:
    index = index_of([7, 1, 2, 3, 8, 1, 2])
    assert index.find([7, 1, 2], 3, 16) == [Place(3, 3)]
    assert index.find([6, 1, 2], 3, 16) == []


def test_no_more_places_come_than_asked_for_and_the_long_matches_are_among_them() -> None:
    index = index_of([1, 2, 3, 4, 5, *[9, 3, 4] * 10, 0])
    found = index.find([1, 2, 3, 4], 2, 3)
    assert [place.length for place in found] == [4, 2, 2]


def test_a_match_counts_back_no_further_than_it_matters() -> None:
    ids = list(range(100))
    assert index_of([*ids, 5]).find(ids, 2, 16) == [Place(100, MAX_MATCH)]


def test_an_empty_index_and_an_empty_tail_match_nothing() -> None:
    assert index_of([]).find([1, 2], 2, 16) == []
    assert index_of([1, 2, 3]).find([], 2, 16) == []


def test_the_end_is_no_place_since_nothing_stands_there() -> None:
    assert index_of([1, 2]).find([1, 2], 2, 16) == []


def test_places_of_ids_that_were_taken_back_are_gone_and_older_ones_are_found_again() -> None:
    index = index_of([1, 2, 3, 1, 2, 4, 1, 2])
    index.truncate(5)
    index.extend([6])
    assert index.find([1, 2], 2, 16) == [Place(5, 2), Place(2, 2)]
    assert index.ids(0, 9) == [1, 2, 3, 1, 2, 6]


def test_forgotten_ids_are_not_found_and_the_others_keep_their_positions() -> None:
    index = index_of([1, 2, 3, 1, 2, 4, 1, 2])
    index.forget_before(3)
    assert (index.start, index.end) == (3, 8)
    assert index.find([1, 2], 2, 16) == [Place(5, 2)]
    assert index.ids(5, 7) == [4, 1]


def test_ids_may_be_taken_back_to_where_the_groups_were_forgotten() -> None:
    index = index_of([1, 2, 1, 2, 1, 2])
    index.forget_before(2)
    index.truncate(3)
    assert index.find([2, 1], 2, 16) == []
    index.extend([2, 1, 2])
    assert index.find([1, 2], 2, 16) == [Place(4, 2)]


def test_the_common_length_says_where_ids_part() -> None:
    index = index_of([1, 2, 3, 4])
    assert [index.common_length(ids) for ids in ([], [1, 2], [1, 2, 9, 4], [1, 2, 3, 4, 5], [9])] == [0, 2, 2, 4, 0]


def test_an_id_that_is_too_large_changes_nothing() -> None:
    index = index_of([1, 2, 3])
    with pytest.raises(OverflowError):
        index.extend([1, MAX_ID + 1])
    assert index.end == 3
    index.extend([1, 2, MAX_ID])
    assert index.find([1, 2], 2, 16) == [Place(5, 2), Place(2, 2)]


def test_a_text_of_one_id_looks_at_a_bounded_number_of_places() -> None:
    index = index_of([5] * 10_000)
    found = index.find([5] * MAX_MATCH, 2, 10_000)
    assert len(found) <= 3 * MAX_HOPS
    assert found[0] == Place(9_999, MAX_MATCH)


def test_memory_is_a_few_numbers_an_id_and_falls_with_what_is_forgotten() -> None:
    index = SuffixIndex((2, 4, 8), buckets=16)
    empty = index.size_bytes
    index.extend(range(1000))
    assert index.size_bytes - empty == 1000 * 4 * 4
    index.forget_before(900)
    index.truncate(950)
    assert index.size_bytes - empty == 50 * 4 * 4


@settings(max_examples=400, deadline=None)
@given(
    groups=st.sampled_from([(1,), (2, 4, 8), (1, 2, 3), (3, 6)]),
    buckets=st.sampled_from([1, 4, 1 << 10]),
    acts=st.lists(
        st.one_of(
            st.tuples(st.just("extend"), st.lists(IDS, max_size=10)),
            st.tuples(st.just("truncate"), st.integers(0, 60)),
            st.tuples(st.just("forget"), st.integers(0, 60)),
        ),
        max_size=6,
    ),
    other=st.lists(IDS, max_size=12),
    shortest=st.integers(1, 5),
    most=st.integers(1, 9),
)
def test_any_history_answers_as_the_slow_twin(
    groups: tuple[int, ...],
    buckets: int,
    acts: list[tuple[str, list[int] | int]],
    other: list[int],
    shortest: int,
    most: int,
) -> None:
    """At most 60 ids: no chain is longer than what is looked at, even if all share one bucket."""
    index, slow = SuffixIndex(groups, buckets), SlowIndex(groups)
    for act, value in acts:
        if isinstance(value, list):
            index.extend(value)
            slow.held += value
        elif act == "truncate":
            index.truncate(value)
            del slow.held[max(0, value - slow.start) :]
        else:
            index.forget_before(value)
            count = min(max(0, value - slow.start), len(slow.held))
            del slow.held[:count]
            slow.start += count
        for tail in (slow.held, other, slow.held + other):
            assert index.find(tail, shortest, most) == slow.find(tail, shortest, most)
    assert index.ids(index.start, index.end) == slow.held
    assert (index.start, index.end) == (slow.start, slow.start + len(slow.held))
