"""C33: a draft that chooses otherwise than the model it was made of, on this machine, is warned of at load."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloud_verifier import draft_choices
from edge_client import draft_check
from edge_client.client import SpeculativeClient
from edge_client.client_config import ClientConfig
from edge_client.draft_check import SINGLY, agreement_of, this_machine
from edge_client.drafter import ModelDrafter
from edge_client.onnx_drafter import RUNTIME_VERSION, OnnxModel
from shared.errors import ModelLoadError
from shared.model_build import Tools, build_self_test
from shared.model_folder import locked, silent
from shared.model_process import Job
from shared.self_test import SELF_TEST, TEXT_IDS, SelfTest, read_self_test
from tests.oracle import PlainTarget
from tests.tiny_pair import TinyPair

LOGGER = "draftwire.draft"


@pytest.fixture(scope="module")
def right(tiny_pair: TinyPair) -> SelfTest:
    """The self-test of a draft of the tiny target."""
    return draft_choices.choices_of(tiny_pair.target, tiny_pair.same_draft, "fp32")


@pytest.fixture
def load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., list[logging.LogRecord]]:
    """Loads a copy of a draft as a client does, with a self-test beside it; what was logged."""

    def loaded(draft: Path, test: SelfTest | str | None) -> list[logging.LogRecord]:
        folder = tmp_path / "draft"
        shutil.copytree(draft, folder, dirs_exist_ok=True)
        if isinstance(test, SelfTest):
            test.write(folder / SELF_TEST)
        elif test is not None:
            (folder / SELF_TEST).write_text(test)
        client = SpeculativeClient(ClientConfig(draft=str(folder)), concurrency=2)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, LOGGER):
            client._load_text()
            drafters = client._build_drafters()
        for drafter in drafters:
            assert isinstance(drafter, ModelDrafter)
            assert isinstance(drafter.model, OnnxModel)
            assert drafter.model.length == drafter.model._capacity == 0, "nothing of the test is kept"
        return [record for record in caplog.records if record.name == LOGGER]

    return loaded


def test_the_source_is_asked_after_every_id_of_texts_that_it_wrote_itself(
    right: SelfTest, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    assert [len(text) for text in right.texts] == [TEXT_IDS] * 2
    for text, choices in zip(right.texts, right.choices, strict=True):
        assert list(choices) == plain.rows(text).argmax(axis=1).tolist()
        assert text[draft_choices.BEGINNING_IDS :] == choices[draft_choices.BEGINNING_IDS - 1 : -1]
    assert len(set(right.texts)) == 2


def test_a_draft_that_agrees_is_loaded_in_silence(load: Any, right: SelfTest, tiny_pair: TinyPair) -> None:
    (record,) = load(tiny_pair.same_draft, right)
    assert record.levelno == logging.DEBUG
    assert "agrees with the model it was made of in 1.00" in record.getMessage()


def test_a_draft_that_chooses_otherwise_is_warned_of_by_folder_figure_bound_and_remedy(
    load: Any, right: SelfTest, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    (record,) = load(tiny_pair.noisy_draft, right)
    agreement = agreement_of(OnnxModel(tiny_pair.noisy_draft), right)
    assert 0.1 < agreement < right.bound
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith(f"the draft in {tmp_path / 'draft'} agrees")
    for part in (f" {agreement:.2f} of its self-test", "below the bound of 0.97 for fp32", "--precision int8", "stays"):
        assert part in message
    assert "\n" not in message


def test_where_the_draft_was_exported_the_test_is_not_taken_again(
    load: Any, right: SelfTest, tiny_pair: TinyPair
) -> None:
    here = replace(right, agreement=0.99, machine=this_machine(RUNTIME_VERSION))
    (record,) = load(tiny_pair.noisy_draft, here)
    assert record.levelno == logging.DEBUG
    assert "0.99" in record.getMessage()
    (record,) = load(tiny_pair.noisy_draft, replace(here, machine="of another processor"))
    assert record.levelno == logging.WARNING
    (record,) = load(tiny_pair.noisy_draft, replace(here, agreement=0.2))
    assert record.levelno == logging.WARNING, "it was bad where it was made"


def test_another_processor_or_runtime_is_another_machine(tmp_path: Path) -> None:
    told = (
        "processor\t: 0\nmodel name\t: A\nflags\t\t: fma avx2\n\nprocessor\t: 1\nmodel name\t: A\nflags\t\t: fma avx2\n"
    )
    (tmp_path / "one").write_text(told)
    (tmp_path / "same").write_text(told.replace("processor\t: 1", "processor\t: 7").replace("fma avx2", "avx2 fma"))
    (tmp_path / "other").write_text(told.replace("avx2", "avx2 avx_vnni"))
    one, same, other = (this_machine("1.27.0", tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other
    assert this_machine("1.27.1", tmp_path / "one") not in (one, other)


def test_a_machine_that_does_not_tell_what_it_is_takes_the_test(
    load: Any, right: SelfTest, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert this_machine("1.27.0", tmp_path / "none") == ""
    monkeypatch.setattr(draft_check, "this_machine", lambda version: "")
    (record,) = load(tiny_pair.noisy_draft, replace(right, agreement=0.99, machine=""))
    assert record.levelno == logging.WARNING


def test_the_runtime_may_come_in_a_package_of_another_name(
    load: Any, right: SelfTest, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    (record,) = load(tiny_pair.same_draft, replace(right, machine="of another processor"))
    assert record.levelno == logging.DEBUG


def test_whatever_goes_wrong_in_the_check_is_a_warning_and_the_draft_is_used(
    load: Any, right: SelfTest, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(version: str) -> str:
        raise LookupError("no such thing")

    monkeypatch.setattr(draft_check, "this_machine", fails)
    (record,) = load(tiny_pair.same_draft, replace(right, machine="here"))
    assert record.levelno == logging.WARNING
    assert "could not be tested: LookupError('no such thing')" in record.getMessage()


def test_a_draft_without_a_self_test_is_loaded_with_a_debug_line(load: Any, tiny_pair: TinyPair) -> None:
    (record,) = load(tiny_pair.noisy_draft, None)
    assert record.levelno == logging.DEBUG
    assert "it is not tested" in record.getMessage()


DAMAGE = ["", "{}", "\0" * 50, '{"version": 1}', "[" * 100_000]


@pytest.mark.parametrize("content", DAMAGE, ids=["empty", "bare", "zeros", "half", "deep"])
def test_a_damaged_self_test_is_a_warning_and_the_draft_is_used(load: Any, tiny_pair: TinyPair, content: str) -> None:
    (record,) = load(tiny_pair.same_draft, content)
    assert record.levelno == logging.WARNING
    assert "could not be tested" in record.getMessage()
    assert SELF_TEST in record.getMessage()


def test_ids_that_the_draft_does_not_have_are_a_warning_too(load: Any, right: SelfTest, tiny_pair: TinyPair) -> None:
    """A file of another model."""
    foreign = SelfTest("fp32", 0.97, 1.0, ((5, 1 << 20), (6,)), ((1, 2), (3,)))
    (record,) = load(tiny_pair.same_draft, foreign)
    assert record.levelno == logging.WARNING
    assert "could not be tested: the draft model failed" in record.getMessage()


def test_a_draft_of_a_short_context_is_tested_up_to_it(load: Any, right: SelfTest, tiny_pair: TinyPair) -> None:
    model = OnnxModel(tiny_pair.same_draft)
    model.context_size = 5
    assert agreement_of(model, right) == 1.0
    assert model.length == 5


class Scripted:
    """Chooses as the source does, but for the first so many ids that it is fed alone, or together with others."""

    context_size = 512

    def __init__(self, test: SelfTest, wrong_alone: int = 0, wrong_together: int = 0) -> None:
        self.told: dict[tuple[int, ...], int] = {}
        for text, choices in zip(test.texts, test.choices, strict=True):
            self.told |= {text[: place + 1]: choice for place, choice in enumerate(choices)}
        self.wrong_alone, self.wrong_together = wrong_alone, wrong_together
        self.held: tuple[int, ...] = ()
        self.fed: list[int] = []

    def rewind(self, length: int) -> None:
        self.held = self.held[:length]

    def feed_chunk(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        self.fed.append(len(ids))
        scores = np.zeros((len(ids), 512), dtype=np.float32)
        for row, token in enumerate(ids):
            self.held += (token,)
            kind = "wrong_alone" if len(ids) == 1 else "wrong_together"
            is_wrong = getattr(self, kind) > 0
            setattr(self, kind, getattr(self, kind) - is_wrong)
            scores[row, (self.told[self.held] + is_wrong) % 512] = 1
        return scores


def test_instructions_that_fail_for_one_row_or_for_many_are_both_found_out(right: SelfTest) -> None:
    """Two chunks and eight ids alone: a processor has other instructions for them, and drafts are mostly alone."""
    model = Scripted(right)
    assert agreement_of(model, right) == 1.0
    assert model.fed == [TEXT_IDS, TEXT_IDS, *[1] * SINGLY]
    assert agreement_of(Scripted(right, wrong_together=16), right) == 0.75
    assert agreement_of(Scripted(right, wrong_alone=1), right) == 1 - 1 / SINGLY
    assert agreement_of(Scripted(right, wrong_alone=SINGLY), right) == 0.0
    assert agreement_of(Scripted(right, wrong_together=8, wrong_alone=1), right) == 1 - 1 / SINGLY


def test_both_halves_run_as_the_model_store_runs_them(right: SelfTest, tiny_pair: TinyPair, tmp_path: Path) -> None:
    """With the product's own commands, each in a process of its own."""
    with locked(tmp_path / "lock", lambda: None) as lock:
        job = Job(tmp_path, tmp_path / "log", lock, silent)
        file = build_self_test(job, Tools(), tiny_pair.target, tiny_pair.same_draft, "fp32")
    assert file == tmp_path / SELF_TEST
    found = read_self_test(file)
    assert found == replace(right, agreement=1.0, machine=this_machine(RUNTIME_VERSION))


def test_what_fails_to_be_measured_is_an_error(tiny_pair: TinyPair, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no file"):
        draft_check.main([str(tiny_pair.same_draft), str(tmp_path / "none")])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        draft_choices.choices_of(tiny_pair.target, tmp_path, "fp32")
