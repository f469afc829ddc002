"""The agreement rule: the id is the argmax of log-probability plus shared noise, so draft and target mostly agree.

Must not know: torch, sessions. Called by the verifier's judge (the truth) and by drafters (the guess).

Source: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
arXiv 2408.07978.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.randomness import noise
from shared.sampling import Warped


def noised_scores(warped: Warped, seed: int, position: int) -> npt.NDArray[np.float64]:
    """Scores plus the noise of this position, on kept ids only. Shapes: (k,) float64."""
    return np.asarray(warped.scores + noise(seed, position, warped.ids), dtype=np.float64)


def choose(warped: Warped, seed: int, position: int) -> int:
    """The id at `position`; ties go to the lowest id. One kept id needs no noise."""
    if len(warped.ids) == 1:
        return int(warped.ids[0])
    return int(warped.ids[int(np.argmax(noised_scores(warped, seed, position)))])
