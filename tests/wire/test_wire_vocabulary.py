"""Which pairs may speak to each other, and what a session costs on the wire."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_models import FreeTokens
from cloud_verifier.loading import LoadedTarget, load_target
from edge_client.tokenizer import TextTokenizer
from shared.errors import ModelMismatch
from shared.sampling import GREEDY, SamplingParams
from shared.types import Limits, PaceKind
from shared.vocabulary import Vocabulary
from tests.oracle import PlainTarget
from tests.proxy import proxying
from tests.rig import RawStream, ScriptedDrafter, client, open_frame, raw, serving
from tests.tiny_pair import TinyPair, build_tokenizer

PROMPT = [70, 71, 72]


def pad_rows(spec: dict[str, Any]) -> None:
    table = spec["model"]["vocab"]
    table.update((f"[PAD{token}]", token) for token in range(300, 428))


def swap_two(spec: dict[str, Any]) -> None:
    table = spec["model"]["vocab"]
    table["a"], table["b"] = table["b"], table["a"]


def add_a_special(spec: dict[str, Any]) -> None:
    added = dict(spec["added_tokens"][0], id=300, content="<|more|>")
    spec["added_tokens"].append(added)


def make_one_special(spec: dict[str, Any]) -> None:
    added = dict(spec["added_tokens"][0], id=270, special=True)
    token = next(text for text, token in spec["model"]["vocab"].items() if token == 270)
    spec["added_tokens"].append(dict(added, content=token))


Change = Callable[[dict[str, Any]], None]


def changed_folder(pair: TinyPair, folder: Path, change: Change) -> Path:
    """The draft's tokenizer files with another tokenizer.json."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair.same_draft / name, folder / name)
    spec = json.loads((folder / "tokenizer.json").read_text())
    change(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def test_the_padding_rows_of_this_test_are_padding_rows(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = changed_folder(tiny_pair, tmp_path / "padded", pad_rows)
    assert '"[PAD427]"' in (folder / "tokenizer.json").read_text()
    assert Vocabulary.from_tokenizer_json(folder / "tokenizer.json").size == 300


async def test_more_padding_rows_on_one_side_are_no_difference(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget, tmp_path: Path
) -> None:
    """C17 a: and no padding id is ever drafted, sent or drawn."""
    tokenizer = TextTokenizer(changed_folder(tiny_pair, tmp_path / "padded", pad_rows))
    params = SamplingParams(temperature=2.0)
    async with serving(loaded_tiny) as running, client(running, tiny_pair, "same", tokenizer=tokenizer) as device:
        result = await device.generate(PROMPT, max_new_tokens=60, sampling=params, seed=1, stop_ids=())
    assert list(result.ids) == plain.ids(PROMPT, 60, params, 1)
    assert max(result.ids) < 300


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (swap_two, "ids 0-1023 differ"),
        (add_a_special, "ids 0-1023 differ"),
        (make_one_special, "270 is special on one side only|ids 0-1023 differ"),
    ],
    ids=["two ids swapped", "one more special token", "one id special"],
)
async def test_another_vocabulary_is_refused_with_both_names_and_the_first_difference(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path, change: Change, difference: str
) -> None:
    """C17 b, c."""
    tokenizer = TextTokenizer(changed_folder(tiny_pair, tmp_path / "other", change))
    async with serving(loaded_tiny) as running:
        with pytest.raises(ModelMismatch, match=difference) as caught:
            async with client(running, tiny_pair, "same", tokenizer=tokenizer):
                pass
        assert "tiny-draft" in caught.value.message
        assert "tiny-target" in caught.value.message
        assert running.sessions == 0


async def test_another_tokenizer_is_refused(loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path) -> None:
    """C17 d."""
    build_tokenizer(tmp_path / "strange", 280, ["<s>", "</s>"])
    tokenizer = TextTokenizer(tmp_path / "strange")
    async with serving(loaded_tiny) as running:
        with pytest.raises(ModelMismatch, match="tiny-draft and target tiny-target"):
            async with client(running, tiny_pair, tokenizer=tokenizer):
                pass


async def test_an_open_with_another_fingerprint_is_refused_by_the_verifier_itself(loaded_tiny: LoadedTarget) -> None:
    async with serving(loaded_tiny) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.send(open_frame(loaded_tiny, PROMPT, fingerprint=bytes(32)))
        fault = await stream.fault()
        assert (fault.error, fault.field) == ("ModelMismatch", "open.fingerprint")
        assert "tiny-target" in fault.message


async def test_a_target_of_another_name_is_refused_if_one_is_wanted(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair
) -> None:
    async with serving(loaded_tiny) as running:
        with pytest.raises(ModelMismatch, match="serves tiny-target, not gpt"):
            async with client(running, tiny_pair, target_name="gpt"):
                pass


async def test_a_text_is_not_continued_by_another_target(loaded_tiny: LoadedTarget) -> None:
    other = replace(loaded_tiny, card=replace(loaded_tiny.card, target_id=b"o" * 32))
    async with serving(other) as running, raw(running) as stub:
        stream = RawStream(stub)
        await stream.send(open_frame(loaded_tiny, [*PROMPT, 9], generated_from=3, target_id=bytes(32)))
        assert (await stream.fault()).field == "open.target_id"
        same = RawStream(stub)
        await same.open(open_frame(loaded_tiny, [*PROMPT, 9], generated_from=3, target_id=b"o" * 32))
        await same.rest()


def test_the_target_id_follows_weights_and_dtype(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_pair.target, tmp_path / "copy"))
    limits = Limits()
    assert load_target(copy, "copy", "float32", "cpu", limits).card.target_id == loaded_tiny.card.target_id
    assert load_target(copy, "copy", "bfloat16", "cpu", limits).card.target_id != loaded_tiny.card.target_id
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert load_target(copy, "copy", "float32", "cpu", limits).card.target_id != loaded_tiny.card.target_id


# ---------------------------------------------------------------- bytes


@pytest.mark.usefixtures("always_drafts")
async def test_the_bytes_that_are_counted_are_those_that_travel(
    loaded_tiny: LoadedTarget, tiny_pair: TinyPair, plain: PlainTarget
) -> None:
    """Chains of 8, all accepted: a proxy sees what Traffic counts, and the framing of gRPC and HTTP/2."""
    truth = plain.ids(PROMPT, 100, GREEDY)
    drafter = ScriptedDrafter([*PROMPT, *truth])
    async with (
        serving(loaded_tiny, max_wait_ms=60_000, engine_options={"cost": FreeTokens()}) as running,
        proxying(running.port) as proxy,
        client(f"127.0.0.1:{proxy.port}", tiny_pair, drafter=drafter, hint_tokens=8) as device,
    ):
        before = proxy.up_bytes, proxy.down_bytes
        result = await device.generate(
            PROMPT, max_new_tokens=100, sampling=GREEDY, stop_ids=(), pace=PaceKind.WAIT, seed=1
        )
        seen_up, seen_down = proxy.up_bytes - before[0], proxy.down_bytes - before[1]
    assert list(result.ids) == truth
    traffic = result.report.traffic
    assert traffic.up_frames == sum(
        traffic.kinds[kind] for kind in ("open", "hint", "pace", "close") if kind in traffic.kinds
    )
    assert traffic.down_frames == sum(traffic.kinds[kind] for kind in ("opened", "commit", "finished"))
    for seen, counted, frames, other_way in (
        (seen_up, traffic.up_bytes, traffic.up_frames, traffic.down_frames),
        (seen_down, traffic.down_bytes, traffic.down_frames, traffic.up_frames),
    ):
        framing = 14 * frames  # 5 bytes of gRPC and 9 of HTTP/2 for each frame
        assert counted + framing <= seen
        assert seen <= counted + framing + 60 * (frames + other_way) + 1500  # windows, pings, headers
    assert traffic.hint_bytes < traffic.up_bytes
    nodes = result.report.engine.hint_nodes
    assert nodes >= result.report.usage.hint_nodes >= 80  # some may have come behind the last id
    assert 2 * nodes <= traffic.hint_bytes <= 5 * nodes + 10 * traffic.kinds["hint"]  # how many frames is a race
