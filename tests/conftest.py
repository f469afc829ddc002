"""Fixtures that more than one rung uses: the tiny pair, the real models, plain targets to compare with."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from tests.tiny_pair import TinyPair, build_pair

SMOLLM2 = "smollm2-135m"


def pytest_configure() -> None:
    """A run that was started in the background ignores Ctrl-C, and so would the processes that tests interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that never rest: whether hints pay is measured in seconds, and on a busy machine they may not.

    Neither the model rests nor look-up.
    """
    from edge_client.controller import Controller

    monkeypatch.setattr(Controller, "expected_gain", lambda *args, **named: math.inf)
    monkeypatch.setattr(Controller, "_is_losing", lambda *args: False)


@pytest.fixture(scope="session")
def one_torch_thread() -> None:
    """Tiny forwards are faster, and the same to the last bit, on one thread."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory, one_torch_thread: None) -> TinyPair:
    """A tiny random Llama and its two ONNX drafters."""
    return build_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def plain(tiny_pair: TinyPair):
    """The tiny target as transformers alone runs it."""
    from tests.oracle import PlainTarget

    return PlainTarget(tiny_pair.target, tiny_pair.vocabulary_size)


@pytest.fixture(scope="session")
def loaded_tiny(tiny_pair: TinyPair):
    """The tiny target as the verifier loads it, self-check passed."""
    from cloud_verifier.loading import load_target
    from shared.types import Limits

    return load_target(tiny_pair.target, "tiny-target", "float32", "cpu", Limits())


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_pair: TinyPair):
    """The pair's tokenizer, as the device reads it."""
    from edge_client.tokenizer import TextTokenizer

    return TextTokenizer(tiny_pair.same_draft)


def _pulled(role: str, precision: str = "auto") -> Path:
    from shared.model_store import Store

    return Store().pull(SMOLLM2, role, precision=precision)


@pytest.fixture(scope="session")
def smollm2_target_folder() -> Path:
    """SmolLM2-135M as a fp32 target."""
    return _pulled("target")


@pytest.fixture(scope="session")
def smollm2_draft_folder(smollm2_target_folder: Path) -> Path:
    """SmolLM2-135M as the draft that a user gets (int8), with a self-test: an older cache is completed."""
    return _pulled("draft")


@pytest.fixture(scope="session")
def smollm2_fp32_draft_folder() -> Path:
    """SmolLM2-135M as a draft with the target's own weights."""
    return _pulled("draft", "fp32")
