"""Draws held against a second implementation in plain integers, its published vectors, and the laws of chance.

The chi-square tests are seeded; each would raise a false alarm for one in a million correct generators.
`python -m tests.pure.test_randomness` writes the vectors anew from the second implementation below.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import randomness
from shared.randomness import Purpose
from tests.statistics import FALSE_ALARM, goodness_p, independence_p, uniform_p

VECTORS_FILE = Path(__file__).parent / "vectors" / "randomness.json"
SEEDS = (0, 1, 2, 42, 0x0123456789ABCDEF, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
POSITIONS = (0, 1, 2, 255, 8191, 65536, 2**31 - 1, 2**31)
IDS = (0, 1, 2, 49151, 151_935, 2**31 - 1, 2**31)
EPOCHS = (0, 1, 7, 2**31, 2**32 - 1)
PREFIXES = ((), (0,), (1,), (1, 2, 3), (3, 2, 1), (0, 49151, 151_935), (2**32 - 1, 0, 2**31))
DRAWS = 20_000


# ---------------------------------------------------------------- the second implementation, from the definition


def mixed(x: int) -> int:
    """Splitmix64's finaliser with Stafford's Mix13, on plain integers modulo 2^64."""
    x %= 2**64
    x = (x ^ x // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x // 2**27) * 0x94D049BB133111EB % 2**64
    return x ^ x // 2**31


def expected_hash(seed: int, position: int, token: int) -> int:
    key = mixed(mixed(seed) + 0x9E3779B97F4A7C15 * (position + 1))
    return mixed(key + 0xD1B54A32D192ED03 * (token + 1))


def expected_unit(hashed: int) -> float:
    """(2·(h >> 12) + 1) / 2^53: numerator below 2^53, so the division is exact."""
    return (2 * (hashed // 4096) + 1) / 2**53


def expected_judge_hash(seed: int, epoch: int, position: int, purpose: int) -> int:
    key = mixed(mixed(seed) + 0x9E3779B97F4A7C15 * (epoch + 1))
    return mixed(mixed(key + 0x9E3779B97F4A7C15 * (position + 1)) + 0xD1B54A32D192ED03 * purpose)


def expected_digest(ids: tuple[int, ...]) -> bytes:
    return hashlib.sha256(b"".join(struct.pack("<I", i) for i in ids)).digest()[:16]


def expected_draft_hash(secret: int, epoch: int, digest: bytes) -> int:
    low, high = struct.unpack("<QQ", digest)
    key = mixed(mixed(secret) + 0x9E3779B97F4A7C15 * (epoch + 1))
    return mixed(mixed(mixed(key ^ low) ^ high) + 0xD1B54A32D192ED03 * 5)


def make_vectors() -> dict[str, Any]:
    """All vectors, as they stand in the file. Numbers beyond 2^53 and floats are text: no reader may round them."""
    noise = []
    for seed, position, token in itertools.product(SEEDS, POSITIONS, IDS):
        hashed = expected_hash(seed, position, token)
        u = expected_unit(hashed)
        noise.append([f"{seed:#x}", position, token, f"{hashed:#018x}", u.hex(), (-math.log(-math.log(u))).hex()])
    judge = [
        [
            f"{seed:#x}",
            epoch,
            position,
            purpose,
            expected_unit(expected_judge_hash(seed, epoch, position, purpose)).hex(),
        ]
        for seed, epoch, position in itertools.product(SEEDS[::2], EPOCHS, (0, 1, 8191, 2**31))
        for purpose in (1, 2, 3, 4)
    ]
    draft = [
        [f"{secret:#x}", epoch, list(ids), expected_digest(ids).hex(), expected_unit(hashed).hex()]
        for secret, epoch, ids in itertools.product(SEEDS[::2], EPOCHS, PREFIXES)
        for hashed in [expected_draft_hash(secret, epoch, expected_digest(ids))]
    ]
    return {
        "about": "Draws of shared/randomness.py. g may differ by 4 units in the last place; all else is exact.",
        "noise": {"columns": ["seed", "position", "id", "h", "u", "g"], "rows": noise},
        "judge_unit": {"columns": ["seed", "epoch", "position", "purpose", "u"], "rows": judge},
        "draft_unit": {"columns": ["secret", "epoch", "prefix_ids", "prefix_digest", "u"], "rows": draft},
    }


def written(vectors: dict[str, Any]) -> str:
    """One vector a line."""
    parts = [f' "about": {json.dumps(vectors["about"])}']
    for name in ("noise", "judge_unit", "draft_unit"):
        rows = ",\n  ".join(json.dumps(row) for row in vectors[name]["rows"])
        parts.append(f' "{name}": {{"columns": {json.dumps(vectors[name]["columns"])}, "rows": [\n  {rows}]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(VECTORS_FILE.read_text())
    return loaded


# ---------------------------------------------------------------- vectors


def test_the_published_vectors_are_those_of_the_second_implementation(vectors: dict[str, Any]) -> None:
    assert vectors == json.loads(json.dumps(make_vectors()))
    assert VECTORS_FILE.read_text() == written(make_vectors())


def test_integer_noise_equals_the_published_vectors(vectors: dict[str, Any]) -> None:
    rows = vectors["noise"]["rows"]
    assert len(rows) == len(SEEDS) * len(POSITIONS) * len(IDS)
    for seed, position, token, h, u, g in rows:
        hashed = randomness.noise_hash(int(seed, 16), position, token)
        assert f"{hashed:#018x}" == h
        assert randomness.unit(hashed).hex() == u
        assert abs(-math.log(-math.log(randomness.unit(hashed))) - float.fromhex(g)) <= 4 * math.ulp(float.fromhex(g))


def test_numpy_noise_equals_the_published_vectors_to_four_last_places(vectors: dict[str, Any]) -> None:
    for seed, position, token, _, _, g in vectors["noise"]["rows"]:
        expected = float.fromhex(g)
        [found] = randomness.noise(int(seed, 16), position, np.array([token], dtype=np.int64))
        assert abs(found - expected) <= 4 * math.ulp(expected)


def test_judge_draws_equal_the_published_vectors(vectors: dict[str, Any]) -> None:
    for seed, epoch, position, purpose, u in vectors["judge_unit"]["rows"]:
        assert randomness.judge_unit(int(seed, 16), epoch, position, Purpose(purpose)).hex() == u


def test_draft_draws_and_digests_equal_the_published_vectors(vectors: dict[str, Any]) -> None:
    for secret, epoch, ids, digest, u in vectors["draft_unit"]["rows"]:
        assert randomness.ids_digest(ids).hex() == digest
        assert randomness.draft_unit(int(secret, 16), epoch, bytes.fromhex(digest)).hex() == u


# ---------------------------------------------------------------- numpy against integers, and the ends of the range


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32),
    ids=st.lists(st.integers(0, 2**32), min_size=1, max_size=20),
)
def test_numpy_hashes_and_units_equal_the_integers_bit_for_bit(seed: int, position: int, ids: list[int]) -> None:
    units = units_seen_by_numpy(seed, position, np.array(ids, dtype=np.int64))
    assert [float(u).hex() for u in units] == [
        expected_unit(expected_hash(seed, position, token)).hex() for token in ids
    ]


def units_seen_by_numpy(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The very u that `noise` takes the logarithm of: numpy's log is swapped for one that keeps its first argument."""
    seen: list[npt.NDArray[np.float64]] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def log(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            seen.append(values)
            return np.asarray(np.log(values))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness, "np", Spy())
        randomness.noise(seed, position, ids)
    assert len(seen) == 2
    return seen[0]


def test_noise_of_an_id_does_not_depend_on_the_ids_beside_it() -> None:
    ids = np.arange(5000, dtype=np.int64)
    whole = randomness.noise(7, 11, ids)
    order = np.random.default_rng(0).permutation(5000)
    assert np.array_equal(randomness.noise(7, 11, ids[order]), whole[order])
    for size in (1, 2, 3, 5, 17):
        assert np.array_equal(randomness.noise(7, 11, ids[100 : 100 + size]), whole[100 : 100 + size])


def test_noise_leaves_its_argument_alone_and_takes_no_ids_at_all() -> None:
    ids = np.array([3, 1, 2], dtype=np.int64)
    randomness.noise(1, 2, ids)
    assert ids.tolist() == [3, 1, 2]
    assert randomness.noise(1, 2, np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("hashed", [0, 1, 4095, 4096, 2**63, 2**64 - 4096, 2**64 - 1])
def test_a_unit_is_never_0_or_1_and_its_noise_is_finite(hashed: int) -> None:
    u = randomness.unit(hashed)
    assert 0.0 < u < 1.0
    assert math.isfinite(-math.log(-math.log(u)))
    assert math.isfinite(float(-np.log(-np.log(np.float64(u)))))
    assert u == expected_unit(hashed)


def test_the_ends_of_the_range_are_the_finest_that_float64_can_tell_from_0_and_1() -> None:
    assert randomness.unit(0) == 2.0**-53
    assert randomness.unit(2**64 - 1) == 1 - 2.0**-53


@pytest.mark.parametrize("hashed", [0, 2**64 - 1])
def test_numpy_noise_is_finite_at_the_smallest_and_the_largest_hash(hashed: int) -> None:
    # The finaliser is a bijection, so some id has this hash: run it backwards to find the id.
    key = randomness.row_key(5, 9)
    inside = unmixed(hashed)
    token_plus_1 = (inside - key) * pow(randomness.STEP, -1, 2**64) % 2**64
    assert randomness.mix64(key + randomness.STEP * token_plus_1) == hashed
    ids = np.array([(token_plus_1 - 1) % 2**64], dtype=np.uint64).astype(np.int64)
    [found] = randomness.noise(5, 9, ids)
    assert found == pytest.approx(-math.log(-math.log(expected_unit(hashed))), rel=1e-15)


def unmixed(x: int) -> int:
    """The inverse of the finaliser: that it exists shows that no two numbers share a hash."""
    x ^= x >> 31 ^ x >> 62
    x = x * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x ^= x >> 27 ^ x >> 54
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return x ^ x >> 30 ^ x >> 60


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_the_mixer_is_a_bijection(x: int) -> None:
    assert unmixed(randomness.mix64(x)) == x
    assert randomness.mix64(x) == mixed(x)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_the_digest_is_sha256_of_little_endian_uint32(ids: list[int]) -> None:
    expected = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).digest()[:16]
    assert randomness.ids_digest(ids) == randomness.ids_digest(tuple(ids)) == expected
    assert randomness.short_digest(ids) == int.from_bytes(expected, "little") % 2**32


def test_the_digest_of_no_ids_is_the_digest_of_nothing() -> None:
    assert randomness.ids_digest(()) == hashlib.sha256(b"").digest()[:16]


def test_ids_that_uint32_cannot_hold_are_not_digested_as_others() -> None:
    for ids in ((2**32,), (-1,)):
        with pytest.raises(OverflowError):
            randomness.ids_digest(ids)


def test_draws_are_the_same_each_time_and_differ_in_every_key() -> None:
    base = randomness.judge_unit(3, 1, 20, Purpose.ACCEPT)
    assert base == randomness.judge_unit(3, 1, 20, Purpose.ACCEPT)
    others = [
        randomness.judge_unit(4, 1, 20, Purpose.ACCEPT),
        randomness.judge_unit(3, 2, 20, Purpose.ACCEPT),
        randomness.judge_unit(3, 1, 21, Purpose.ACCEPT),
        *(randomness.judge_unit(3, 1, 20, purpose) for purpose in Purpose if purpose != Purpose.ACCEPT),
        randomness.judge_unit(3, 20, 1, Purpose.ACCEPT),
    ]
    assert len({base, *others}) == 1 + len(others)
    digest = randomness.ids_digest((1, 2, 3))
    swapped = digest[8:] + digest[:8]
    drafts = [
        randomness.draft_unit(*key)
        for key in (
            (3, 1, digest),
            (4, 1, digest),
            (3, 2, digest),
            (3, 1, randomness.ids_digest((1, 2))),
            (3, 1, swapped),
        )
    ]
    assert len(set(drafts)) == len(drafts)
    assert drafts[0] == randomness.draft_unit(3, 1, digest)


# ---------------------------------------------------------------- the laws of chance (false-alarm rate 1e-6 each)


def noise_unit(seed: int, position: int, token: int) -> float:
    return randomness.unit(randomness.noise_hash(seed, position, token))


def judge(purpose: Purpose, seed: int = 8, epoch: int = 0) -> list[float]:
    return [randomness.judge_unit(seed, epoch, t, purpose) for t in range(DRAWS)]


def draft(secret: int, epoch: int = 0) -> list[float]:
    return [randomness.draft_unit(secret, epoch, randomness.ids_digest((t,))) for t in range(DRAWS)]


RUNS = {
    "positions": [noise_unit(1, t, 5) for t in range(DRAWS)],
    "later positions": [noise_unit(1, t + 1, 5) for t in range(DRAWS)],
    "positions, next seed": [noise_unit(2, t, 5) for t in range(DRAWS)],
    "positions, next id": [noise_unit(1, t, 6) for t in range(DRAWS)],
    "ids": [noise_unit(1, 9, v) for v in range(DRAWS)],
    "later ids": [noise_unit(1, 9, v + 1) for v in range(DRAWS)],
    "ids, next position": [noise_unit(1, 10, v) for v in range(DRAWS)],
    "ids, next seed": [noise_unit(2, 9, v) for v in range(DRAWS)],
    "seeds": [noise_unit(s, 3, 4) for s in range(DRAWS)],
    "later seeds": [noise_unit(s + 1, 3, 4) for s in range(DRAWS)],
    "seeds, next position": [noise_unit(s, 4, 4) for s in range(DRAWS)],
    "high seeds": [noise_unit(s << 44, 3, 4) for s in range(DRAWS)],
    "accept": judge(Purpose.ACCEPT),
    "residual": judge(Purpose.RESIDUAL),
    "bonus": judge(Purpose.BONUS),
    "plain": judge(Purpose.PLAIN),
    "accept, next seed": judge(Purpose.ACCEPT, seed=9),
    "accept, next epoch": judge(Purpose.ACCEPT, epoch=1),
    "draft": draft(8),
    "draft, next secret": draft(9),
    "draft, next epoch": draft(8, epoch=1),
    "noise of the judge's seed": [noise_unit(8, t, 0) for t in range(DRAWS)],
}
PAIRS = [
    ("positions", "later positions"),
    ("positions", "positions, next seed"),
    ("positions", "positions, next id"),
    ("ids", "later ids"),
    ("ids", "ids, next position"),
    ("ids", "ids, next seed"),
    ("seeds", "later seeds"),
    ("seeds", "seeds, next position"),
    *itertools.combinations(("accept", "residual", "bonus", "plain", "draft"), 2),
    ("accept", "accept, next seed"),
    ("accept", "accept, next epoch"),
    ("draft", "draft, next secret"),
    ("draft", "draft, next epoch"),
    ("accept", "noise of the judge's seed"),
    ("draft", "noise of the judge's seed"),
]


@pytest.mark.parametrize("run", RUNS)
def test_units_are_uniform_over(run: str) -> None:
    assert uniform_p(RUNS[run]) > FALSE_ALARM
    assert uniform_p(np.array(RUNS[run]) * 2**20 % 1) > FALSE_ALARM  # the low bits too


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_units_are_independent_of_each_other(first: str, second: str) -> None:
    assert independence_p(RUNS[first], RUNS[second]) > FALSE_ALARM


def test_three_neighbours_are_jointly_uniform() -> None:
    bins = 6
    cells = np.zeros(bins**3, dtype=np.int64)
    for t in range(8000):
        a, b, c = (int(noise_unit(77, t + shift, 1) * bins) for shift in range(3))
        cells[(a * bins + b) * bins + c] += 1
    assert goodness_p(cells, [1 / bins**3] * bins**3) > FALSE_ALARM


def test_each_bit_of_seed_position_and_id_flips_each_bit_of_the_hash_half_the_time() -> None:
    rng = np.random.default_rng(5)
    trials = 250
    for argument, width in ((0, 64), (1, 31), (2, 31)):
        flips = np.zeros(64, dtype=np.int64)
        for bit in range(width):
            for _ in range(trials):
                key = [int(rng.integers(2**63)), int(rng.integers(2**31)), int(rng.integers(2**31))]
                other = list(key)
                other[argument] ^= 1 << bit
                changed = randomness.noise_hash(*key) ^ randomness.noise_hash(*other)
                flips += np.array([changed >> n & 1 for n in range(64)])
        total = width * trials
        for count in flips:
            assert goodness_p([int(count), total - int(count)], [0.5, 0.5]) > FALSE_ALARM


if __name__ == "__main__":
    VECTORS_FILE.write_text(written(make_vectors()))
