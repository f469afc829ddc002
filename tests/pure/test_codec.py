"""The rim: what goes in comes out the same, what is out of range is refused by name, and garbage does nothing else."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import codec, errors
from shared import types as t
from shared.errors import DraftwireError, RemoteProtocolError
from shared.hint_trie import HintTrie
from shared.pb import verifier_pb2 as pb
from shared.rejection import ROW_TOTAL, QRow, quantise
from shared.sampling import SamplingParams, Warped

RIM = codec.Rim()
LARGEST = 2**32 - 1
FINGERPRINT, TARGET, SESSION, DIGEST = bytes(range(32)), bytes(range(1, 33)), bytes(range(16)), bytes(range(2, 18))

# ---------------------------------------------------------------- strategies: frames with every value in range

uint32 = st.integers(0, LARGEST)
uint64 = st.integers(0, 2**64 - 1)
some_ids = st.lists(uint32, max_size=12).map(tuple)
float32 = st.floats(width=32, allow_nan=False)
epochs = st.builds(t.Epoch, uint32)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high)


samplings = st.builds(
    SamplingParams,
    temperature=between(0, 1000),
    top_k=st.integers(0, 2**31 - 1),
    top_p=between(0, 1),
    min_p=between(0, 1),
    repetition_penalty=between(1e-3, 1e3),
    frequency_penalty=between(-100, 100),
    presence_penalty=between(-100, 100),
    logit_bias=st.dictionaries(uint32, between(-1000, 1000) | st.just(-math.inf), max_size=5),
)


@st.composite
def opens(draw: st.DrawFn) -> t.Open:
    ids = draw(st.lists(uint32, min_size=1, max_size=12).map(tuple))
    low, high = sorted((draw(uint32), draw(uint32)))
    return t.Open(
        ids=ids,
        generated_from=draw(st.integers(1, len(ids))),
        fingerprint=draw(st.binary(min_size=32, max_size=32)),
        sampling=draw(samplings),
        max_new_tokens=draw(st.integers(1, 8192)),
        epoch=draw(epochs),
        seed=draw(st.none() | uint64),
        rule=draw(st.sampled_from(t.Rule)),
        stop_ids=draw(some_ids),
        pace=draw(st.sampled_from(t.PaceKind)),
        run_ahead=draw(uint32 | st.just(t.DEFAULT_RUN_AHEAD)),
        target_id=draw(st.just(b"") | st.binary(min_size=32, max_size=32)),
        logprobs=draw(st.booleans()),
        lowest_version=low,
        highest_version=high,
    )


@st.composite
def rows(draw: st.DrawFn, hinted: int) -> QRow:
    others = draw(st.lists(uint32, max_size=6, unique=True))
    ids = tuple(dict.fromkeys([*others, hinted]))
    weights = draw(st.lists(st.integers(1, 5000), min_size=len(ids) - 1, max_size=len(ids) - 1))
    return QRow(ids, (*weights, ROW_TOTAL - sum(weights)))


@st.composite
def hints(draw: st.DrawFn) -> t.Hint:
    ids = draw(some_ids)
    first = draw(st.integers(1, 2**31))
    base_node = draw(st.integers(0, first - 1))
    kind = draw(st.sampled_from(["chain", "tree", "rows"]))
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    if kind == "tree":
        parents = tuple(draw(st.integers(0, first + n - 1)) for n in range(len(ids)))
        confidence = tuple(2.0 ** (-draw(st.integers(0, 255)) / 16) for _ in ids)
    return t.Hint(
        epoch=draw(epochs),
        first_node=first,
        ids=ids,
        ack=draw(uint32),
        base_node=base_node,
        base_position=0 if base_node else draw(uint32),
        base_digest=draw(st.none() | uint32),
        parents=parents,
        confidence=confidence,
        rows=tuple(draw(rows(token)) for token in ids) if kind == "rows" else (),
    )


@st.composite
def scores(draw: st.DrawFn) -> t.Score:
    ids = draw(some_ids)
    parents = tuple(draw(st.integers(0, n)) for n in range(len(ids))) if draw(st.booleans()) else ()
    return t.Score(draw(uint32), draw(epochs), draw(uint32), ids, parents)


@st.composite
def openeds(draw: st.DrawFn) -> t.Opened:
    generated_from, committed_length = sorted((draw(uint32), draw(uint32)))
    return t.Opened(
        session_id=t.SessionId(draw(st.binary(min_size=16, max_size=16))),
        seed=draw(uint64),
        epoch=draw(epochs),
        generated_from=generated_from,
        committed_length=committed_length,
        next_node=draw(uint32),
        target_id=draw(st.binary(min_size=32, max_size=32)),
        limits=draw(limits),
        reused_tokens=draw(uint32),
        version=draw(uint32),
    )


@st.composite
def commits(draw: st.DrawFn) -> t.Commit:
    ids = draw(some_ids)
    names = "seen_node last_accepted_node queue_us step_us batch_size dropped_late dropped_disagreeing"
    numbers = {name: draw(uint32) for name in (*names.split(), "dropped_over_budget")}
    return t.Commit(
        epoch=draw(epochs),
        start=draw(uint32),
        ids=ids,
        accepted=draw(st.integers(0, len(ids))),
        logprobs=tuple(draw(float32) for _ in ids) if draw(st.booleans()) else (),
        hint_wait_us=draw(st.none() | uint32) if numbers["seen_node"] else None,
        **numbers,
    )


limits = st.builds(t.Limits, **dict.fromkeys(t.Limits.__dataclass_fields__, uint32))
usages = st.builds(t.Usage, **dict.fromkeys(t.Usage.__dataclass_fields__, uint32))
UP = {
    "open": opens(),
    "resume": st.builds(
        t.Resume,
        st.binary(min_size=16, max_size=16).map(t.SessionId),
        epochs,
        uint32,
        st.binary(min_size=16, max_size=16),
    ),
    "hint": hints(),
    "edit": st.builds(t.Edit, epochs, uint32, some_ids, st.none() | uint64, st.none() | samplings),
    "score": scores(),
    "pace": st.builds(t.Pace, epochs, st.sampled_from(t.PaceKind), uint32, uint32),
    "close": st.builds(t.Close, epochs, uint32),
}
DOWN = {
    "opened": openeds(),
    "commit": commits(),
    "scores": st.builds(t.Scores, uint32, epochs, st.lists(float32, max_size=8).map(tuple)),
    "finished": st.builds(t.Finished, epochs, st.sampled_from(t.Reason), usages),
    "fault": st.builds(t.Fault, st.text(), st.text(), st.text(), st.text(), st.booleans(), uint32),
    "draining": st.builds(t.Draining, uint32),
}
cards = st.builds(
    t.ModelCard,
    model_name=st.text(max_size=8),
    target_id=st.binary(max_size=32),
    fingerprint=st.binary(max_size=32),
    fingerprint_blocks=st.lists(st.binary(max_size=8), max_size=4).map(tuple),
    vocabulary_size=uint32,
    context_size=uint32,
    limits=limits,
    chat_template=st.text(max_size=8),
    special_tokens=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
    stop_ids=some_ids,
    generation_defaults=samplings,
    rules=st.lists(st.sampled_from(t.Rule), max_size=2).map(tuple),
    lowest_version=uint32,
    highest_version=uint32,
)


def up_again(frame: t.UpFrame, rim: codec.Rim = RIM) -> t.UpFrame:
    return codec.decode_up(pb.Up.FromString(codec.encode_up(frame).SerializeToString()), rim)


def down_again(frame: t.DownFrame, rim: codec.Rim = RIM) -> t.DownFrame:
    return codec.decode_down(pb.Down.FromString(codec.encode_down(frame).SerializeToString()), rim)


# ---------------------------------------------------------------- round trips


def test_every_kind_of_frame_in_the_proto_has_a_strategy_here() -> None:
    assert UP.keys() == {f.name for f in pb.Up.DESCRIPTOR.fields}
    assert DOWN.keys() == {f.name for f in pb.Down.DESCRIPTOR.fields}


@pytest.mark.parametrize("kind", UP)
@settings(derandomize=True, max_examples=80, deadline=None)
@given(data=st.data())
def test_what_goes_up_comes_out_the_same(kind: str, data: st.DataObject) -> None:
    frame = data.draw(UP[kind])
    assert codec.encode_up(frame).WhichOneof("frame") == kind
    assert up_again(frame) == frame


@pytest.mark.parametrize("kind", DOWN)
@settings(derandomize=True, max_examples=80, deadline=None)
@given(data=st.data())
def test_what_goes_down_comes_out_the_same(kind: str, data: st.DataObject) -> None:
    frame = data.draw(DOWN[kind])
    assert codec.encode_down(frame).WhichOneof("frame") == kind
    assert down_again(frame) == frame


@settings(derandomize=True, max_examples=80, deadline=None)
@given(cards)
def test_a_model_card_comes_out_the_same(card: t.ModelCard) -> None:
    assert codec.decode_card(pb.DescribeReply.FromString(codec.encode_card(card).SerializeToString())) == card


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.0, 1, 0.0, 1.0, 1.5, -1.0, 2.0, {3: -math.inf})])
def test_zero_and_default_parameters_are_not_taken_for_each_other(params: SamplingParams) -> None:
    message = pb.Sampling.FromString(codec.encode_sampling(params).SerializeToString())
    assert codec.decode_sampling(message, codec.Rim()) == params


def test_absent_parameters_mean_off() -> None:
    assert codec.decode_sampling(pb.Sampling(), codec.Rim()) == SamplingParams()
    assert codec.encode_sampling(SamplingParams()).ByteSize() == 0


def test_an_absent_seed_sampling_digest_and_credit_are_told_from_zero() -> None:
    plain, zero = replace_all(VALID_UP["edit"], seed=None, sampling=None), replace_all(VALID_UP["edit"], seed=0)
    assert up_again(plain) == plain
    assert up_again(zero) == zero
    for digest in (None, 0):
        hint = replace_all(VALID_UP["hint"], base_digest=digest)
        assert up_again(hint) == hint
    for run_ahead in (0, 1, t.DEFAULT_RUN_AHEAD):
        assert up_again(replace_all(VALID_UP["open"], run_ahead=run_ahead)).run_ahead == run_ahead  # type: ignore[union-attr]


def test_a_wait_of_a_hint_that_is_not_told_differs_from_one_of_0_us_and_takes_no_bytes() -> None:
    commit = t.Commit(t.Epoch(1), 3, (1,), 1, seen_node=10)
    size = codec.encode_down(commit).ByteSize()
    for wait_us, more in ((None, 0), (0, 2), (127, 2), (LARGEST, 6)):
        told = replace_all(commit, hint_wait_us=wait_us)
        assert down_again(told) == told
        assert codec.encode_down(told).ByteSize() == size + more


@pytest.mark.parametrize(
    ("wire", "heard"),
    [
        (b"\x70" + b"\xff" * 9 + b"\x01", LARGEST),  # 2^64-1
        (b"\x70\x80\x80\x80\x80\x10", 0),  # 2^32
        (b"\x70\x05\x70\x06", 6),  # said twice
        (b"\x75\x05\x00\x00\x00", None),  # of another wire type: an unknown field
        (b"\x72\x01\x05", None),
    ],
)
def test_a_wait_of_a_hint_in_any_form_is_a_number_of_32_bits_or_not_told(wire: bytes, heard: int | None) -> None:
    plain = codec.encode_down(t.Commit(t.Epoch(1), 3, (1,), 1, seen_node=10)).commit
    found = codec.decode_down(pb.Down(commit=pb.Commit.FromString(plain.SerializeToString() + wire)), RIM)
    assert isinstance(found, t.Commit)
    assert found.hint_wait_us == heard
    assert down_again(found) == found


def test_confidence_is_kept_to_a_sixteenth_of_a_bit_and_never_leaves_0_to_1() -> None:
    probabilities = (1.0, 0.999, 0.5, 0.031, 1e-4, 1e-9, 0.0)
    hint = dataclasses.replace(t.Hint(t.Epoch(0), 1, tuple(range(7)), 0), confidence=probabilities, parents=(0,) * 7)
    found = up_again(hint)
    assert isinstance(found, t.Hint)
    for told, heard in zip(probabilities, found.confidence, strict=True):
        assert 0 < heard <= 1
        if told > 2 ** (-255 / 16):
            assert abs(math.log2(told / heard)) <= 1 / 32 + 1e-12
    assert sorted(found.confidence, reverse=True) == list(found.confidence)


# ---------------------------------------------------------------- sizes on the wire


def test_a_chain_of_eight_ids_from_the_middle_of_the_vocabulary_takes_under_40_bytes() -> None:
    for size in (49_152, 151_936):
        ids = tuple(size // 2 + 17 * n for n in range(8))
        for hint in (
            t.Hint(t.Epoch(3), 900, ids, 1500, base_node=899),
            t.Hint(t.Epoch(3), 900, ids, 1500, base_position=1500),
        ):
            assert codec.encode_up(hint).ByteSize() < 40


def test_a_draft_row_of_32_ids_takes_100_to_170_bytes_as_its_ids_are_low_or_high() -> None:
    rng = np.random.default_rng(8)
    for size, most in ((16_000, 140), (49_152, 165), (151_936, 170)):
        for spread in (1.0, 2.0, 3.0):
            ids = np.sort(rng.choice(size, size=1000, replace=False))
            row = quantise(Warped(ids, rng.standard_normal(1000) * spread))
            assert len(row.ids) == 32
            bare = codec.encode_up(t.Hint(t.Epoch(0), 1, row.ids[:1], 5, base_position=5)).ByteSize()
            full = codec.encode_up(t.Hint(t.Epoch(0), 1, row.ids[:1], 5, base_position=5, rows=(row,))).ByteSize()
            assert 100 < full - bare <= most


# ---------------------------------------------------------------- each field out of range

PARAMS = SamplingParams(0.7, 40, 0.9, 0.01, 1.1, 0.2, 0.3, {5: -2.0})
VALID_UP: dict[str, Any] = {
    "open": t.Open((1, 2, 3), 2, FINGERPRINT, PARAMS, 100, t.Epoch(1), 42, stop_ids=(2,), target_id=TARGET),
    "resume": t.Resume(t.SessionId(SESSION), t.Epoch(1), 3, DIGEST),
    "hint": t.Hint(t.Epoch(1), 10, (1, 2), 3, 0, 3, 7, (0, 1), (0.5, 0.25)),
    "edit": t.Edit(t.Epoch(2), 2, (1, 2), 9, PARAMS),
    "score": t.Score(4, t.Epoch(1), 3, (1, 2), (0, 1)),
    "pace": t.Pace(t.Epoch(1), t.PaceKind.WAIT, 10, 3),
    "close": t.Close(t.Epoch(1), 3),
}
WITH_ROWS = t.Hint(t.Epoch(1), 10, (1, 2), 3, 9, rows=(QRow((1, 2), (65534, 1)), QRow((2,), (65535,))))
VALID_DOWN: dict[str, Any] = {
    "opened": t.Opened(t.SessionId(SESSION), 5, t.Epoch(1), 2, 3, 11, TARGET, t.Limits()),
    "commit": t.Commit(t.Epoch(1), 3, (1, 2), 1, 10, 10, 1, 2, 3, 4, 5, 6, (-0.5, -1.5), 7),
    "scores": t.Scores(4, t.Epoch(1), (-0.5, -0.25)),
    "finished": t.Finished(t.Epoch(1), t.Reason.LENGTH, t.Usage(1, 2, 3, 4, 5, 6)),
    "fault": t.Fault("hint", "RemoteProtocolError", "hint.ids holds id 9", "hint.ids", False, 0),
    "draining": t.Draining(500),
}
HOLES = np.array([True] * 4 + [False] + [True] * 3)
STRICT = codec.Rim(t.Limits(max_context_tokens=6, max_new_tokens=200, max_frame_nodes=4, max_row_ids=3), HOLES)
SAMPLING_OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -1.0),
    ("temperature", 1001.0),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", 2**31),
    ("top_p", 1.5),
    ("top_p", -0.5),
    ("top_p", math.nan),
    ("min_p", 1.5),
    ("min_p", -0.5),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e4),
    ("repetition_penalty", math.nan),
    ("frequency_penalty", 101.0),
    ("frequency_penalty", math.nan),
    ("presence_penalty", -101.0),
    ("presence_penalty", math.nan),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {5: math.inf}),
    ("logit_bias", {5: 1001.0}),
]
UP_OUT_OF_RANGE: list[tuple[str, str, dict[str, Any]]] = [
    ("open", "open.ids", {"ids": []}),
    ("open", "open.ids", {"ids": [1] * 7}),
    ("open", "open.ids", {"ids": [1, 8]}),
    ("open", "open.ids", {"ids": [1, 4]}),
    ("open", "open.ids", {"ids": [LARGEST, 1]}),
    ("open", "open.generated_from", {"generated_from": 0}),
    ("open", "open.generated_from", {"generated_from": 4}),
    ("open", "open.max_new_tokens", {"max_new_tokens": 0}),
    ("open", "open.max_new_tokens", {"max_new_tokens": 201}),
    ("open", "open.fingerprint", {"fingerprint": b""}),
    ("open", "open.fingerprint", {"fingerprint": bytes(33)}),
    ("open", "open.target_id", {"target_id": bytes(31)}),
    ("open", "open.lowest_version", {"lowest_version": 2}),
    ("open", "open.rule", {"rule": 2}),
    ("open", "open.rule", {"rule": -1}),
    ("open", "open.pace", {"pace": 3}),
    ("open", "open.stop_ids", {"stop_ids": [1] * 65}),
    ("open", "open.stop_ids", {"stop_ids": [4]}),
    ("resume", "resume.session_id", {"session_id": bytes(15)}),
    ("resume", "resume.session_id", {"session_id": b""}),
    ("resume", "resume.digest", {"digest": bytes(17)}),
    ("hint", "hint.ids", {"ids": [1] * 5}),
    ("hint", "hint.ids", {"ids": [1, 4]}),
    ("hint", "hint.ids", {"ids": [8, 1]}),
    ("hint", "hint.first_node", {"first_node": 0}),
    ("hint", "hint.base_node", {"base_node": 9}),
    ("hint", "hint.base_node", {"base_node": 10, "base_position": 0}),
    ("hint", "hint.base_node", {"base_node": LARGEST, "base_position": 0}),
    ("hint", "hint.parents", {"parents": [0]}),
    ("hint", "hint.parents", {"parents": [0, 1, 1]}),
    ("hint", "hint.parents", {"parents": [0, 11]}),
    ("hint", "hint.parents", {"parents": [10, 1]}),
    ("hint", "hint.confidence", {"confidence": b"a"}),
    ("hint", "hint.confidence", {"confidence": b"abc"}),
    ("hint", "hint.rows", {"rows": [pb.QRow(ids=[1], weights=[65535])]}),
    ("edit", "edit.append_ids", {"append_ids": [4]}),
    ("edit", "edit.append_ids", {"append_ids": [1] * 7}),
    ("score", "score.ids", {"ids": [1, 9]}),
    ("score", "score.ids", {"ids": [1] * 5}),
    ("score", "score.parents", {"parents": [0]}),
    ("score", "score.parents", {"parents": [0, 2]}),
    ("score", "score.parents", {"parents": [1, 0]}),
    ("pace", "pace.pace", {"pace": 3}),
    ("pace", "pace.pace", {"pace": -1}),
]
ROWS_OUT_OF_RANGE: list[tuple[str, list[int], list[int]]] = [
    ("hint.rows.ids", [1, 4], [65534, 1]),
    ("hint.rows.ids", [1, 8], [65534, 1]),
    ("hint.rows.ids", [0, 1, 2, 3], [65532, 1, 1, 1]),
    ("hint.rows.ids", [1, 1], [65534, 1]),
    ("hint.rows.weights", [1, 2], [65535]),
    ("hint.rows.weights", [1], [65534, 1]),
    ("hint.rows.weights", [1, 2], [65535, 0]),
    ("hint.rows.weights", [1, 2], [65533, 1]),
    ("hint.rows.weights", [1, 2], [65535, 1]),
    ("hint.rows.weights", [1, 2], [LARGEST, 65536]),
    ("hint.rows.weights", [], []),
    ("hint.rows", [2, 3], [65534, 1]),
]
DOWN_OUT_OF_RANGE: list[tuple[str, str, dict[str, Any]]] = [
    ("opened", "opened.session_id", {"session_id": bytes(17)}),
    ("opened", "opened.committed_length", {"committed_length": 1}),
    ("commit", "commit.ids", {"ids": [1, 4]}),
    ("commit", "commit.ids", {"ids": [1] * 7}),
    ("commit", "commit.accepted", {"accepted": 3}),
    ("commit", "commit.logprobs", {"logprobs": [-1.0]}),
    ("commit", "commit.logprobs", {"logprobs": [-1.0] * 3}),
    ("commit", "commit.hint_wait_us", {"seen_node": 0}),
    ("commit", "commit.hint_wait_us", {"seen_node": 0, "hint_wait_us": 0}),
    ("finished", "finished.reason", {"reason": 0}),
    ("finished", "finished.reason", {"reason": 5}),
]


def replace_all(frame: Any, **changes: Any) -> Any:
    return dataclasses.replace(frame, **changes)


def with_fields(message: Message, changes: dict[str, Any]) -> None:
    """Sets fields in place, lists, maps and messages included."""
    for name, value in changes.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                getattr(message, name)[key] = item
        else:
            setattr(message, name, value)


def decoded_or_refused(decode: Callable[[], Any]) -> Any:
    """The frame, or the only error that a decoder may raise; any other passes through."""
    try:
        return decode()
    except RemoteProtocolError as refused:
        return refused


def assert_refused(decode: Callable[[], Any], field: str) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        decode()
    assert refused.value.field == field
    assert field.rsplit(".", 1)[-1] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", UP)
def test_the_valid_frames_that_are_spoilt_below_are_valid(kind: str) -> None:
    assert up_again(VALID_UP[kind], STRICT) == VALID_UP[kind]
    assert up_again(WITH_ROWS, STRICT) == WITH_ROWS


@pytest.mark.parametrize("kind", DOWN)
def test_the_valid_answers_that_are_spoilt_below_are_valid(kind: str) -> None:
    assert down_again(VALID_DOWN[kind], STRICT) == VALID_DOWN[kind]


@pytest.mark.parametrize(("kind", "field", "changes"), UP_OUT_OF_RANGE)
def test_a_value_out_of_range_from_a_device_is_refused_by_name(kind: str, field: str, changes: dict[str, Any]) -> None:
    message = codec.encode_up(VALID_UP[kind])
    with_fields(getattr(message, kind), changes)
    assert_refused(lambda: codec.decode_up(message, STRICT), field)


@pytest.mark.parametrize(("field", "ids", "weights"), ROWS_OUT_OF_RANGE)
@pytest.mark.parametrize("place", [0, 1])
def test_a_draft_row_out_of_range_is_refused_by_name(
    field: str, ids: list[int], weights: list[int], place: int
) -> None:
    message = codec.encode_up(dataclasses.replace(WITH_ROWS, ids=(1, 1), rows=(QRow((1,), (65535,)),) * 2))
    codec.decode_up(message, STRICT)
    message.hint.rows[place].CopyFrom(pb.QRow(ids=ids, weights=weights))
    assert_refused(lambda: codec.decode_up(message, STRICT), field)


@pytest.mark.parametrize(("kind", "field", "changes"), DOWN_OUT_OF_RANGE)
def test_a_value_out_of_range_from_a_verifier_is_refused_by_name(
    kind: str, field: str, changes: dict[str, Any]
) -> None:
    message = codec.encode_down(VALID_DOWN[kind])
    with_fields(getattr(message, kind), changes)
    assert_refused(lambda: codec.decode_down(message, STRICT), field)


@pytest.mark.parametrize(("name", "value"), SAMPLING_OUT_OF_RANGE)
@pytest.mark.parametrize("kind", ["open", "edit"])
def test_a_sampling_parameter_out_of_range_is_refused_by_name(kind: str, name: str, value: Any) -> None:
    message = codec.encode_up(VALID_UP[kind])
    with_fields(getattr(message, kind).sampling, {name: value})
    assert_refused(lambda: codec.decode_up(message, STRICT), f"sampling.{name}")


def test_every_sampling_parameter_has_a_value_out_of_range_above() -> None:
    assert {name for name, _ in SAMPLING_OUT_OF_RANGE} == {f.name for f in pb.Sampling.DESCRIPTOR.fields}


def test_a_rule_that_no_version_knows_is_refused_in_a_card() -> None:
    assert_refused(lambda: codec.decode_card(pb.DescribeReply(rules=[0, 7])), "describe.rules")  # type: ignore[list-item]


def test_a_frame_of_no_kind_is_refused() -> None:
    assert_refused(lambda: codec.decode_up(pb.Up(), RIM), "frame")
    assert_refused(lambda: codec.decode_down(pb.Down(), RIM), "frame")
    assert_refused(lambda: codec.decode_up(pb.Up.FromString(b"\xa2\x06\x02hi"), RIM), "frame")  # field 100


def test_a_frame_over_the_size_limit_is_refused_even_if_only_unknown_fields_make_it_so() -> None:
    rim = codec.Rim(t.Limits(max_frame_bytes=100))
    codec.decode_up(codec.encode_up(t.Edit(t.Epoch(1), 1, (1,) * 80)), rim)
    assert_refused(lambda: codec.decode_up(codec.encode_up(t.Edit(t.Epoch(1), 1, (1,) * 100)), rim), "edit")
    padded = codec.encode_up(VALID_UP["close"]).SerializeToString() + b"\xa2\x06\x7f" + bytes(127)
    assert_refused(lambda: codec.decode_up(pb.Up.FromString(padded), rim), "close")


def test_an_error_names_the_id_and_the_limit() -> None:
    message = codec.encode_up(VALID_UP["open"])
    message.open.ids.append(4)
    with pytest.raises(RemoteProtocolError, match="id 4, which is not in the vocabulary of 8 ids"):
        codec.decode_up(message, STRICT)


@pytest.mark.parametrize("first_node", [LARGEST, LARGEST - 1])
def test_node_numbers_that_the_answer_could_not_carry_are_refused(first_node: int) -> None:
    # Once wrong: with first_node 2^32-1 and two ids the highest number is 2^32: encode_commit(seen_node=...) and
    # encode_opened(next_node=...) then raise ValueError on the verifier. One frame from any device does it.
    message = codec.encode_up(t.Hint(t.Epoch(0), first_node, (1, 2), 3, base_position=3))
    outcome = decoded_or_refused(lambda: codec.decode_up(message, RIM))
    if isinstance(outcome, RemoteProtocolError):
        assert outcome.field == "hint.first_node"
        return
    assert isinstance(outcome, t.Hint)
    trie = HintTrie(3, 10, 10)
    trie.insert(outcome, [1, 2, 3])
    commit = t.Commit(t.Epoch(0), 3, (1,), 1, seen_node=trie.highest_number)
    opened = dataclasses.replace(VALID_DOWN["opened"], next_node=trie.highest_number + 1)
    assert down_again(commit) == commit
    assert down_again(opened) == opened


# ---------------------------------------------------------------- garbage

ANY_UP = (t.Open, t.Resume, t.Hint, t.Edit, t.Score, t.Pace, t.Close)
ANY_DOWN = (t.Opened, t.Commit, t.Scores, t.Finished, t.Fault, t.Draining)
FUZZ_RIM = codec.Rim(t.Limits(max_frame_nodes=64), np.arange(60_000) % 97 != 5)
MUTATIONS = 60_000


def fate_up(wire: bytes) -> str:
    """What became of bytes from a device; anything but the three fates passes through as an exception."""
    try:
        message = pb.Up.FromString(wire)
    except DecodeError:
        return "unparsed"
    frame = decoded_or_refused(lambda: codec.decode_up(message, FUZZ_RIM))
    if isinstance(frame, RemoteProtocolError):
        assert frame.field
        return "refused"
    assert isinstance(frame, ANY_UP)
    assert up_again(frame, FUZZ_RIM) == frame  # every value is in range, or it would not encode or decode again
    return "frame"


def fate_down(wire: bytes) -> str:
    try:
        message = pb.Down.FromString(wire)
    except DecodeError:
        return "unparsed"
    frame = decoded_or_refused(lambda: codec.decode_down(message, FUZZ_RIM))
    if isinstance(frame, RemoteProtocolError):
        assert frame.field
        return "refused"
    assert isinstance(frame, ANY_DOWN)
    assert type(down_again(frame, FUZZ_RIM)) is type(frame)  # not equal if a logprob is NaN
    return "frame"


def mutated(rng: np.random.Generator, wire: bytes, others: list[bytes]) -> bytes:
    """One of: bits flipped, bytes put in, cut out, doubled, set to extremes, or another frame's fields appended."""
    data, kind = bytearray(wire), rng.integers(6)
    at = int(rng.integers(len(data)))
    size = int(rng.integers(1, 6))
    if kind == 0:
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        data[at:at] = rng.bytes(size)
    elif kind == 2:
        del data[at : at + size]
    elif kind == 3:
        data[at:at] = data[at : at + size]
    elif kind == 4:
        data[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
    else:
        data += others[int(rng.integers(len(others)))]
    return bytes(data)


def spoilt(rng: np.random.Generator, message: Message) -> None:
    """One field, at any depth, set to an extreme value, or cleared, or made longer: always parses."""
    fields = list(message.DESCRIPTOR.fields)
    descriptor = fields[int(rng.integers(len(fields)))]
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        getattr(message, descriptor.name)[int(rng.integers(9))] = float(rng.choice([0.0, math.nan, 1e9, -math.inf]))
    elif descriptor.message_type is not None:
        inner = getattr(message, descriptor.name)
        spoilt(rng, inner.add() if descriptor.is_repeated else inner)
    elif rng.random() < 0.2:
        message.ClearField(descriptor.name)
    elif descriptor.is_repeated:
        getattr(message, descriptor.name).extend([extreme(rng, descriptor)] * int(rng.choice([1, 2, 70])))
    else:
        setattr(message, descriptor.name, extreme(rng, descriptor))


def extreme(rng: np.random.Generator, descriptor: Any) -> Any:
    choices: dict[int, list[Any]] = {
        descriptor.CPPTYPE_UINT32: [0, 1, 2, 5, 255, 59_999, 60_000, 2**31, LARGEST],
        descriptor.CPPTYPE_UINT64: [0, 1, 2**63, 2**64 - 1],
        descriptor.CPPTYPE_DOUBLE: [0.0, -0.0, 1.0, -1.0, 5e-324, 1e308, math.nan, math.inf, -math.inf],
        descriptor.CPPTYPE_FLOAT: [0.0, -1.0, math.nan, math.inf, -math.inf],
        descriptor.CPPTYPE_BOOL: [False, True],
        descriptor.CPPTYPE_ENUM: [-(2**31), -1, 0, 1, 2, 3, 4, 5, 2**31 - 1],
    }
    if descriptor.cpp_type == descriptor.CPPTYPE_STRING:
        if descriptor.type == descriptor.TYPE_BYTES:
            return rng.bytes(int(rng.choice([0, 1, 2, 15, 16, 17, 31, 32, 33])))
        return str(rng.choice(["", "x", "\x00", "RemoteProtocolError", "𝔘" * 50]))
    values = choices[descriptor.cpp_type]
    return values[int(rng.integers(len(values)))]


def up_samples() -> list[bytes]:
    return [codec.encode_up(frame).SerializeToString() for frame in (*VALID_UP.values(), WITH_ROWS)]


def down_samples() -> list[bytes]:
    return [codec.encode_down(frame).SerializeToString() for frame in VALID_DOWN.values()]


@pytest.mark.parametrize("way", ["up", "down"])
def test_mutated_frames_are_frames_or_are_refused_and_nothing_else(way: str) -> None:
    rng = np.random.default_rng(1000)
    samples, fate = (up_samples(), fate_up) if way == "up" else (down_samples(), fate_down)
    fates = Counter[str]()
    for n in range(MUTATIONS):
        wire = samples[n % len(samples)]
        for _ in range(int(rng.integers(1, 4))):
            wire = mutated(rng, wire or b"\x00", samples)
        fates[fate(wire)] += 1
    assert fates["frame"] + fates["refused"] > MUTATIONS / 6
    assert min(fates.values()) > MUTATIONS / 200


@pytest.mark.parametrize("way", ["up", "down"])
def test_frames_with_spoilt_fields_are_frames_or_are_refused_and_nothing_else(way: str) -> None:
    rng = np.random.default_rng(2000)
    samples, fate = (up_samples(), fate_up) if way == "up" else (down_samples(), fate_down)
    parse: Callable[[bytes], Any] = pb.Up.FromString if way == "up" else pb.Down.FromString
    fates = Counter[str]()
    for n in range(MUTATIONS // 6):
        message = parse(samples[n % len(samples)])
        kind = message.WhichOneof("frame")
        for _ in range(int(rng.integers(1, 4))):
            spoilt(rng, getattr(message, kind))
        fates[fate(message.SerializeToString())] += 1
    assert fates["unparsed"] == 0
    assert min(fates["frame"], fates["refused"]) > MUTATIONS / 100


@pytest.mark.parametrize("way", ["up", "down"])
def test_random_bytes_are_frames_or_are_refused_and_nothing_else(way: str) -> None:
    rng = np.random.default_rng(3000)
    fate = fate_up if way == "up" else fate_down
    fates = Counter[str]()
    for _ in range(4000):
        body = rng.bytes(int(rng.integers(0, 30)))
        if rng.random() < 0.7:  # a plausible envelope, so that more than the first byte is read
            body = bytes([int(rng.integers(1, 8)) << 3 | 2, len(body)]) + body
        fates[fate(body)] += 1
    assert fates["refused"] > 20


def test_a_garbled_card_is_a_card_or_is_refused() -> None:
    rng = np.random.default_rng(4000)
    wire = codec.encode_card(
        t.ModelCard(
            "m", TARGET, FINGERPRINT, (b"a", b"b"), 100, 50, t.Limits(), "{{x}}", {"eos_token": "</s>"}, (2,), PARAMS
        )
    ).SerializeToString()
    fates = Counter[str]()
    for _ in range(3000):
        try:
            message = pb.DescribeReply.FromString(mutated(rng, wire, [wire]))
        except DecodeError:
            fates["unparsed"] += 1
            continue
        card = decoded_or_refused(functools.partial(codec.decode_card, message))
        assert isinstance(card, t.ModelCard) or card.field
        fates["refused" if isinstance(card, RemoteProtocolError) else "card"] += 1
    assert min(fates["card"], fates["refused"], fates["unparsed"]) > 10


# ---------------------------------------------------------------- faults


def all_error_classes() -> Iterator[type[DraftwireError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, DraftwireError):
            yield value


@pytest.mark.parametrize("error_class", list(all_error_classes()), ids=lambda c: c.__name__)
def test_an_error_crosses_the_wire_as_a_fault_and_is_the_same_error_again(error_class: type[DraftwireError]) -> None:
    error = error_class("hint.ids holds id 9 — no such id", field="hint.ids", retry_after_ms=250)
    fault = down_again(codec.fault_of(error, "hint"))
    assert isinstance(fault, t.Fault)
    again = codec.error_of(fault)
    assert type(again) is error_class
    assert (str(again), again.message, again.field, again.retry_after_ms) == (str(error), *error.args, "hint.ids", 250)
    assert (fault.answers, fault.retry) == ("hint", error_class.retryable)


def test_there_are_as_many_error_classes_as_the_tree_draws() -> None:
    drawn = {word for word in (errors.__doc__ or "").replace("─", " ").split() if word in vars(errors)}
    assert len(drawn) >= 15
    assert drawn <= {c.__name__ for c in all_error_classes()}


@pytest.mark.parametrize("name", ["", "Exception", "SystemExit", "NoSuchError", "object", "__class__"])
def test_a_fault_of_an_unknown_class_is_a_plain_error_and_runs_nothing(name: str) -> None:
    assert type(codec.error_of(t.Fault("", name, "boo"))) is DraftwireError
