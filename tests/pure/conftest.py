"""Fixtures of this rung: a model store over wheels and tools that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.model_store import Store


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with the wheels of a made-up bundle; the tools keep their state there, and the store its cache."""
    from tests.pure.test_model_store import PAYLOAD, write_wheels

    write_wheels(tmp_path / "state" / "wheels", PAYLOAD)
    return tmp_path


@pytest.fixture
def store(base: Path) -> Store:
    """A store there."""
    from tests.pure.test_model_store import make_store

    return make_store(base)
