"""Rows of branches that were left: found again for the ids that they are of, forgotten when the text leaves them.

A row here is the prefix that it is of, so a wrong one shows itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from edge_client.branch_rows import MAX_BRANCHES, MAX_TOKENS, BranchRows


def row(prefix: Sequence[int]) -> int:
    return hash(tuple(prefix)) % (1 << 62)


def rows(ids: Sequence[int], start: int) -> npt.NDArray[np.int64]:
    """What a model's cache holds of ids[start:]. Shapes: (2, 1, n, 1)."""
    values = np.array([row(ids[: n + 1]) for n in range(start, len(ids))], dtype=np.int64)
    return np.stack([values, values + 1])[:, None, :, None]


def found(branches: BranchRows, wanted: Sequence[int], at: int) -> list[int] | None:
    """Which rows came, as the positions that they are right for; asserts that they are right."""
    given = branches.find(wanted, at)
    if given is None:
        return None
    count = given.shape[2]
    assert count > 0
    assert np.array_equal(given, rows(wanted[: at + count], at))
    return list(range(at, at + count))


COMMITTED = [1, 2, 3, 4]


def saved(*branches: Sequence[int], start: int = len(COMMITTED)) -> BranchRows:
    kept = BranchRows()
    for path in branches:
        ids = [*COMMITTED, *path]
        kept.save(ids, len(COMMITTED), start, rows(ids, start))
    return kept


def test_nothing_is_found_where_nothing_was_saved() -> None:
    assert BranchRows().find([1, 2, 3], 0) is None


def test_rows_of_a_branch_are_found_from_wherever_the_cache_ends() -> None:
    branches = saved([5, 6, 7])
    wanted = [*COMMITTED, 5, 6, 7, 8]
    assert found(branches, wanted, 4) == [4, 5, 6]
    assert found(branches, wanted, 5) == [5, 6]
    assert found(branches, wanted, 7) is None
    assert found(branches, wanted, 3) is None, "a row before it is missing"


def test_rows_are_found_as_far_as_the_ids_agree_and_not_one_further() -> None:
    branches = saved([5, 6, 7])
    assert found(branches, [*COMMITTED, 5, 6, 9], 4) == [4, 5]
    assert found(branches, [*COMMITTED, 5], 4) == [4]
    assert found(branches, [*COMMITTED, 9, 6, 7], 4) is None


def test_of_several_branches_the_one_that_goes_furthest_is_taken() -> None:
    branches = saved([5, 6], [5, 6, 7, 8], [5, 9])
    assert found(branches, [*COMMITTED, 5, 6, 7, 8], 4) == [4, 5, 6, 7]
    assert found(branches, [*COMMITTED, 5, 9], 4) == [4, 5]


def test_a_branch_that_was_left_at_its_fork_is_found_behind_the_fork_only() -> None:
    """Only the rows behind the common part are saved: the rest is in the cache."""
    branches = saved([5, 6, 7, 8], start=6)
    wanted = [*COMMITTED, 5, 6, 7, 8]
    assert found(branches, wanted, 4) is None
    assert found(branches, wanted, 6) == [6, 7]
    assert found(branches, [*COMMITTED, 5, 9, 7, 8], 6) is None, "its rows are of other ids before them"


def test_commits_keep_the_branches_that_they_follow_and_forget_the_others() -> None:
    branches = saved([5, 6, 7], [8, 9])
    branches.keep_agreeing([*COMMITTED, 5])
    assert found(branches, [*COMMITTED, 5, 6, 7], 5) == [5, 6]
    assert found(branches, [*COMMITTED, 8, 9], 4) is None
    branches.keep_agreeing([*COMMITTED, 5, 6, 7])
    assert found(branches, [*COMMITTED, 5, 6, 7], 6) is None, "passed: the cache holds it all"


def test_a_new_epoch_keeps_nothing() -> None:
    branches = saved([5, 6, 7])
    branches.clear()
    assert found(branches, [*COMMITTED, 5, 6, 7], 4) is None


def test_the_newest_branches_are_kept_and_never_more_than_allowed() -> None:
    many = [[100 + n, 7] for n in range(2 * MAX_BRANCHES)]
    branches = saved(*many)
    kept = [path for path in many if found(branches, [*COMMITTED, *path], 4)]
    assert kept == many[-len(kept) :]
    assert 1 < len(kept) <= MAX_BRANCHES


def test_long_branches_push_old_ones_out_by_their_rows() -> None:
    length = MAX_TOKENS // 2
    paths = [[100 + n, *range(length - 1)] for n in range(3)]
    branches = saved(*paths)
    assert [found(branches, [*COMMITTED, *path], 4) is not None for path in paths] == [False, True, True]


def test_a_branch_longer_than_all_that_may_be_kept_is_not_kept() -> None:
    path = list(range(MAX_TOKENS + 1))
    assert found(saved(path), [*COMMITTED, *path], 4) is None


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_saved_and_committed_rows_found_are_those_of_the_ids_asked_for(seed: int) -> None:
    rng, branches = random.Random(seed), BranchRows()
    committed, hits = [0], 0
    for _ in range(200):
        ids = [*committed, *(rng.randrange(2) for _ in range(rng.randint(1, 6)))]
        if rng.random() < 0.5:
            start = rng.randint(len(committed), len(ids) - 1)
            branches.save(ids, len(committed), start, rows(ids, start))
        hits += found(branches, ids, rng.randint(len(committed), len(ids))) is not None
        if rng.random() < 0.1:
            committed = ids[: len(committed) + rng.randint(1, 3)]
            branches.keep_agreeing(committed)
    assert hits > 10
