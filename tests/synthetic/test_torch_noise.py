"""The torch twin of the shared noise against numpy and the published vectors."""

import numpy as np
import torch

from cloud_verifier import noise as torch_noise
from shared import randomness


def test_torch_draws_the_same_bits_as_numpy_for_any_seed_position_and_id() -> None:
    generator = np.random.default_rng(5)
    for _ in range(200):
        seed, position = int(generator.integers(0, 2**64, dtype=np.uint64)), int(generator.integers(0, 2**31))
        ids = generator.integers(0, 2**31, 64)
        units = torch_noise.noise_units(seed, position, torch.from_numpy(ids)).numpy()
        expected = [randomness.unit(randomness.noise_hash(seed, position, int(token))) for token in ids]
        assert units.tolist() == expected


def test_torch_hashes_keep_all_64_bits_at_the_edges() -> None:
    ids = torch.tensor([0, 1, 2**31 - 1])
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        hashes = torch_noise.noise_hashes(seed, 2**31 - 1, ids).numpy().view(np.uint64).tolist()
        assert hashes == [randomness.noise_hash(seed, 2**31 - 1, int(token)) for token in ids]


def test_torch_noise_is_within_the_last_places_of_numpys() -> None:
    ids = np.arange(5000)
    ours = torch_noise.noise(9, 77, torch.from_numpy(ids)).numpy()
    np.testing.assert_allclose(ours, randomness.noise(9, 77, ids), rtol=1e-14, atol=1e-14)
