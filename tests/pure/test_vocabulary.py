"""Bytes behind ids, for each family of tokenizers, against the tokenizers library itself."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from edge_client.text import Detokenizer
from shared.errors import ModelLoadError
from shared.vocabulary import Vocabulary

CORPUS = [
    "The quick brown fox doesn't jump; it can't. ",
    "def f(x):\n    return x  # 你好，世界 𠮷野家",
    "👩‍👩‍👧 🇩🇪 👍🏽 é שלום ...  !! ?",
] * 3
SEQUENCES = 10_000


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    # Characters inside and outside the byte-level alphabet, with blanks on either side taken in.
    made.add_tokens([AddedToken("é", lstrip=True), AddedToken("a b", rstrip=True), AddedToken("你Ġ"), AddedToken("xĠ")])
    made.add_special_tokens([AddedToken("<｜begin▁of▁text｜>", special=True)])
    return made


def byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def words() -> list[str]:
    return ["▁", "▁▁", "▁▁▁▁", "a", "b", ".", "!", "▁a", "▁the", "ing", "▁.", "你", "好", "é", "שלום", "a▁b"]


def metaspace(*, strip: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2 (with the strip) or Gemma (without)."""
    ids = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *byte_tokens(), *words()])}
    made = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unigram() -> tokenizers.Tokenizer:
    """As T5 and its kin, with byte fallback."""
    table = [(token, -1.0 - i / 100) for i, token in enumerate(["<unk>", *byte_tokens(), *words()])]
    made = tokenizers.Tokenizer(models.Unigram(table, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made.add_special_tokens(["<unk>"])
    return made


def word_piece() -> tokenizers.Tokenizer:
    names = ["[UNK]", "[CLS]", "the", "fox", "##es", "##ing", ".", "!", "'", "n't", "'s", "do", "##.", "你", "##é", ","]
    made = tokenizers.Tokenizer(models.WordPiece(vocab={n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]", "[CLS]"])
    return made


def saved(made: tokenizers.Tokenizer, folder: Path) -> Vocabulary:
    made.save(str(folder / "tokenizer.json"))
    return Vocabulary.from_tokenizer_json(folder / "tokenizer.json")


def changed(made: tokenizers.Tokenizer, folder: Path, **parts: Any) -> Vocabulary:
    spec = json.loads(made.to_str())
    spec.update(parts)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return Vocabulary.from_tokenizer_json(path)


def one_shot(vocabulary: Vocabulary, ids: list[int]) -> str:
    data = b"".join(vocabulary.token_bytes(i) or b"" for i in ids if not vocabulary.is_special(i))
    return data.decode(errors="replace")


def streamed(vocabulary: Vocabulary, ids: list[int], rng: random.Random) -> str:
    detokenizer = Detokenizer(vocabulary, at_text_start=True)
    text, start = "", 0
    while start < len(ids):
        stop = start + rng.randint(1, 8)
        text += detokenizer.push(ids[start:stop])
        start = stop
    return text + detokenizer.finish()


def random_ids(rng: random.Random, choices: list[int]) -> list[int]:
    return rng.choices(choices, k=rng.randint(1, 24))


def test_byte_level_ids_stream_to_exactly_what_the_library_decodes(tmp_path: Path) -> None:
    made, rng = byte_level(), random.Random(1)
    vocabulary = saved(made, tmp_path)
    every = list(range(vocabulary.size))
    for _ in range(SEQUENCES):
        ids = random_ids(rng, every)
        assert streamed(vocabulary, ids, rng) == made.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("strip", [True, False])
def test_metaspace_ids_stream_to_exactly_what_the_library_decodes(tmp_path: Path, strip: bool) -> None:
    made, rng = metaspace(strip=strip), random.Random(2)
    vocabulary = saved(made, tmp_path)
    assert vocabulary.drops_leading_space is strip
    whole_words = [i for i in range(vocabulary.size) if not 3 <= i < 259]
    for _ in range(SEQUENCES):
        ids = random_ids(rng, whole_words)
        for character in rng.choices("𠮷👍é\n", k=rng.randint(0, 2)):  # valid runs of byte tokens, anywhere
            at = rng.choice([i for i in range(len(ids) + 1) if i == len(ids) or not 3 <= ids[i] < 259])
            ids[at:at] = [3 + byte for byte in character.encode()]
        assert streamed(vocabulary, ids, rng) == made.decode(ids, skip_special_tokens=True)


def test_unigram_ids_stream_to_exactly_what_the_library_decodes(tmp_path: Path) -> None:
    made, rng = unigram(), random.Random(3)
    vocabulary = saved(made, tmp_path)
    first = vocabulary.size - len(words())
    # The library drops every ▁ of the first token; we drop one, as SentencePiece does: begin where both agree.
    starts = [made.token_to_id(token) for token in ("a", "▁", "▁a", "▁the", "你")]
    for _ in range(SEQUENCES):
        ids = [rng.choice(starts), *random_ids(rng, list(range(first, vocabulary.size)))]
        ids += [1 + byte for byte in "𠮷".encode()]
        ids += random_ids(rng, list(range(first, vocabulary.size)))
        assert streamed(vocabulary, ids, rng) == made.decode(ids, skip_special_tokens=True)


def test_word_piece_ids_stream_to_exactly_what_the_library_decodes(tmp_path: Path) -> None:
    made, rng = word_piece(), random.Random(4)
    vocabulary = saved(made, tmp_path)
    for _ in range(SEQUENCES):
        ids = [rng.choice([2, 3, 6, 13]), *random_ids(rng, list(range(vocabulary.size)))]
        assert streamed(vocabulary, ids, rng) == made.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [byte_level, metaspace, unigram])
def test_encoded_text_comes_back_from_the_bytes_of_its_ids(make: Any, tmp_path: Path) -> None:
    made = make()
    vocabulary = saved(made, tmp_path)
    for text in ["a b.", "a  b", "你好 𠮷", "👩‍👩‍👧 🇩🇪 👍🏽", "שלום", "a\n\tb"]:
        back = one_shot(vocabulary, made.encode(text, add_special_tokens=False).ids)
        assert back.removeprefix(" " if vocabulary.drops_leading_space else "") == text


def test_invalid_runs_of_byte_tokens_follow_pythons_replacement_rule(tmp_path: Path) -> None:
    made, rng = metaspace(), random.Random(5)
    vocabulary = saved(made, tmp_path)
    for _ in range(2_000):
        data = bytes(rng.choices([0x61, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x91, 0x8D, 0xFF], k=12))
        assert streamed(vocabulary, [3 + byte for byte in data], rng) == data.decode(errors="replace")


def test_added_and_special_tokens_are_told_apart(tmp_path: Path) -> None:
    made = byte_level()
    vocabulary = saved(made, tmp_path)
    special = {made.token_to_id("<|end|>"), made.token_to_id("<｜begin▁of▁text｜>")}
    assert set(vocabulary.special_ids) == special
    assert {i for i in range(vocabulary.size) if vocabulary.is_special(i)} == special
    assert vocabulary.flags[made.token_to_id("a b")] == 1
    assert vocabulary.flags[made.token_to_id("a")] == 0


def test_holes_and_ids_out_of_range_have_no_bytes(tmp_path: Path) -> None:
    vocabulary = changed(byte_level(), tmp_path, model={"type": "BPE", "vocab": {"a": 0, "Ġb": 5}}, added_tokens=[])
    assert vocabulary.size == 6
    assert [vocabulary.token_bytes(i) for i in (-1, 0, 1, 4, 5, 6)] == [None, b"a", None, None, b" b", None]
    assert vocabulary.valid_mask(8).tolist() == [True, False, False, False, False, True, False, False]
    assert vocabulary.valid_mask(3).tolist() == [True, False, False]
    assert not vocabulary.is_special(1)
    assert not vocabulary.is_special(-1)
    assert not vocabulary.is_special(6)


def test_padding_rows_of_a_converted_model_do_not_exist(tmp_path: Path) -> None:
    table = {"a": 0, "[PAD1]": 1, "[PAD7]": 2, "[PAD3]": 3}
    vocabulary = changed(byte_level(), tmp_path, model={"type": "BPE", "vocab": table}, added_tokens=[])
    assert vocabulary.size == 3
    assert [vocabulary.token_bytes(i) for i in range(4)] == [b"a", None, b"[PAD7]", None]


def test_an_added_token_named_like_a_padding_row_is_kept(tmp_path: Path) -> None:
    added = [{"id": 1, "content": "[PAD1]", "special": True}]
    vocabulary = changed(byte_level(), tmp_path, model={"type": "BPE", "vocab": {"a": 0}}, added_tokens=added)
    assert vocabulary.special_ids == (1,)


@pytest.mark.parametrize("token", ['"merges":[', '"merges": [["a', "]", '\\"', "merges", '"]]', '\\\\"merges":['])
def test_tokens_that_look_like_the_merges_of_the_file_survive(token: str, tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {token: 0, "z": 1}, "merges": [[token, "]"], ['"', "\\"], ["[", "x"]]}
    vocabulary = changed(byte_level(), tmp_path, model=model, added_tokens=[])
    assert (vocabulary.token_bytes(0), vocabulary.token_bytes(1)) == (token.replace(" ", "\x20").encode(), b"z")


def test_merges_written_as_strings_are_read_over(tmp_path: Path) -> None:
    model = {"type": "BPE", "merges": ["a ]", '" \\', "[ b"], "vocab": {"a": 0, "b": 1}}
    assert changed(byte_level(), tmp_path, model=model, added_tokens=[]).size == 2


def test_without_a_decoder_the_pre_tokenizer_tells_the_kind(tmp_path: Path) -> None:
    assert changed(byte_level(), tmp_path, decoder=None).token_bytes(byte_level().token_to_id("Ġ")) == b" "
    llama = changed(metaspace(), tmp_path, decoder=None)
    assert llama.token_bytes(3 + 0xFF) == b"\xff"
    assert llama.token_bytes(metaspace().token_to_id("▁the")) == b" the"
    assert changed(word_piece(), tmp_path, decoder=None).token_bytes(4) == b"es"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}, "CTC"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]}, "ByteLevel + Fuse"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}, "Regex"),
        ({"type": "Strip", "content": " ", "start": 1, "stop": 0}, "Strip"),
    ],
)
def test_an_unknown_kind_of_decoder_is_refused_by_name(decoder: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: unknown kind") as caught:
        changed(byte_level(), tmp_path, decoder=decoder)
    assert named in caught.value.message
    assert "\n" not in caught.value.message


def test_a_plain_word_table_is_refused_by_name(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    with pytest.raises(ModelLoadError, match="WordLevel"):
        changed(byte_level(), tmp_path, decoder=None, pre_tokenizer=None, model=model)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"model": {"vocab": 3}, "decoder": {"type": "ByteLevel"}}'])
def test_a_file_that_is_no_tokenizer_is_refused_by_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not a tokenizer"):
        Vocabulary.from_tokenizer_json(path)


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nothing\.json: cannot be read"):
        Vocabulary.from_tokenizer_json(tmp_path / "nothing.json")


@pytest.mark.parametrize("token_id", [-1, 1 << 24, 1 << 60])
def test_an_id_beyond_reason_is_refused_before_memory_is_taken(token_id: int, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="token ids"):
        changed(byte_level(), tmp_path, model={"type": "BPE", "vocab": {"a": token_id}}, added_tokens=[])


def test_a_loaded_vocabulary_keeps_no_object_per_id(tmp_path: Path) -> None:
    table = {f"token{i}": i for i in range(20_000)}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": table}, "decoder": {"type": "ByteLevel"}}))
    del table
    tracemalloc.start()
    vocabulary = Vocabulary.from_tokenizer_json(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert vocabulary.size == 20_000
    arrays = len(vocabulary.blob) + vocabulary.offsets.nbytes + vocabulary.flags.nbytes
    assert held < arrays + 20_000 * 16  # an object per id would take at least 33 bytes each
    assert vocabulary.offsets.dtype == np.uint32
