"""The torch twin of the shared noise against numpy and the published vectors."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloud_verifier import noise as torch_noise
from shared import randomness

EDGES = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    words = np.array([seeds, positions], dtype=np.uint64).view(np.int64)
    return torch_noise.row_keys(*torch.from_numpy(words)[..., None])


def test_torch_draws_the_same_bits_as_numpy_for_any_seed_position_and_id() -> None:
    generator = np.random.default_rng(5)
    seeds = generator.integers(0, 2**64, 200, dtype=np.uint64).tolist()
    positions = generator.integers(0, 2**31, 200).tolist()
    ids = generator.integers(0, 2**31, (200, 64))
    units = torch_noise.noise_units(keys_of(seeds, positions), torch.from_numpy(ids)).tolist()
    for seed, position, tokens, drawn in zip(seeds, positions, ids.tolist(), units, strict=True):
        assert drawn == [randomness.unit(randomness.noise_hash(seed, position, token)) for token in tokens]


def test_torch_hashes_keep_all_64_bits_at_the_edges() -> None:
    ids = torch.tensor([0, 1, 2**31 - 1])
    keys = keys_of(list(EDGES), [2**31 - 1] * len(EDGES))
    assert keys[:, 0].numpy().view(np.uint64).tolist() == [randomness.row_key(seed, 2**31 - 1) for seed in EDGES]
    hashes = torch_noise.noise_hashes(keys, ids).numpy().view(np.uint64).tolist()
    for seed, hashed in zip(EDGES, hashes, strict=True):
        assert hashed == [randomness.noise_hash(seed, 2**31 - 1, int(token)) for token in ids]


def test_torch_noise_is_within_the_last_places_of_numpys_in_every_row() -> None:
    ids = np.arange(5000)
    ours = torch_noise.noise(keys_of([9, 2**64 - 1], [77, 2**31]), torch.from_numpy(ids)).numpy()
    np.testing.assert_allclose(ours[0], randomness.noise(9, 77, ids), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(ours[1], randomness.noise(2**64 - 1, 2**31, ids), rtol=1e-14, atol=1e-14)


def test_drawing_changes_neither_seeds_nor_keys_nor_ids() -> None:
    seeds, positions, ids = torch.tensor([[5]]), torch.tensor([[7]]), torch.arange(3)
    keys = torch_noise.row_keys(seeds, positions)
    copy = keys.clone()
    torch_noise.noise(keys, ids)
    assert (seeds.item(), positions.item(), ids.tolist()) == (5, 7, [0, 1, 2])
    assert torch.equal(keys, copy)


def loud_rows(seed: int, positions: list[int], needed: list[float], size: int) -> list[npt.NDArray[np.int64]]:
    keys = keys_of([seed] * len(positions), positions)
    return list(torch_noise.loud_ids(keys, torch.tensor(needed, dtype=torch.float64)[:, None], size).numpy())


@pytest.mark.parametrize("need", [-4.0, -1.0, 0.0, 2.5, 5.0, 9.0, 12.0, 20.0])
def test_the_loud_ids_are_all_that_are_loud_and_hardly_any_other(need: float) -> None:
    """Others: hashes just below the bound, 2^-31 of all. Odds of one in these seeded rows: 20 * 20000 / 2^31 = 2e-4."""
    size = 20_000
    for position, found in zip(range(20), loud_rows(3, list(range(20)), [need] * 20, size), strict=True):
        loud = np.flatnonzero(randomness.noise(3, position, np.arange(size)) >= need)
        assert set(loud.tolist()) == set(found.tolist()) - ({0} if 0 not in loud else set())


def test_an_id_is_loud_enough_for_its_own_noise() -> None:
    size = 3000
    noise = randomness.noise(11, 4, np.arange(size))
    for token in np.argsort(-noise)[[0, 1, 5, 100, 1000, -2, -1]].tolist():
        (found,) = loud_rows(11, [4], [float(noise[token])], size)
        assert token in found


def test_no_noise_reaches_the_limit() -> None:
    assert -math.log(-math.log(randomness.unit(2**64 - 1))) < torch_noise.LOUDEST
    assert loud_rows(1, [1, 2, 3], [torch_noise.LOUDEST + 1e-9, math.inf, math.nan], 100)[0].tolist() == []


def test_the_bound_on_words_leaves_room_for_rounding() -> None:
    """The upper 31 bits are compared: what rounding would lose first is the last hash of those that share them."""
    generator = np.random.default_rng(6)
    for top in [2**31 - 1, 2**31 - 2, 2**31 - 1000, 0, 1, 1000, *generator.integers(0, 2**31, 5000).tolist()]:
        noise = -math.log(-math.log(randomness.unit((top << 33) + 2**33 - 1)))
        for need in (noise, noise + 2e-14):  # a difference of scores is rounded too
            assert torch_noise._lowest_word(need) <= top << 33


def test_the_last_step_of_the_hash_leaves_the_upper_31_bits_alone() -> None:
    ids = np.arange(1000)
    words = torch_noise._steps(1000) + np.uint64(randomness.row_key(3, 5))
    for shift, factor in ((30, randomness.MIX_1), (27, randomness.MIX_2)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    hashes = torch_noise.noise_hashes(keys_of([3], [5]), torch.from_numpy(ids)).numpy()[0].view(np.uint64)
    assert (words >> np.uint64(33) == hashes >> np.uint64(33)).all()
    assert not (words == hashes).any()
