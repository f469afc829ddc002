"""A tiny random target with its tokenizer, its own ONNX export, and the export of a disturbed copy.

Must not know: sessions, the wire. Built once per test session by tests/conftest.py, in about 10 seconds.
Rows 300-319 of the model are padding rows, with scores so wild that they would win often if anything let them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

ROWS = 320
SPECIAL_TOKENS = ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>"]
STOP_ID = 0
CONTEXT = 512
NOISE = 0.04
"""Weight noise of the half-right drafter, in standard deviations of each matrix."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the other thing that they thought of.",
    "def function(argument):\n    return argument + 1\n",
    "你好，世界。 你好，世界。",
]


@dataclass(frozen=True)
class TinyPair:
    """Folders of the pair, and how many ids its tokenizer has."""

    target: Path
    same_draft: Path
    noisy_draft: Path
    vocabulary_size: int


def build_tokenizer(folder: Path, vocabulary_size: int = 300, special_tokens: list[str] | None = None) -> int:
    """Writes a byte-level BPE tokenizer with a chat template; returns its number of ids."""
    folder.mkdir(parents=True, exist_ok=True)
    special_tokens = SPECIAL_TOKENS if special_tokens is None else special_tokens
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special_tokens,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special_tokens[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return int(tokenizer.get_vocab_size())


def build_model(folder: Path, vocabulary_size: int, noise: float = 0.0) -> None:
    """Writes the tiny model, with `noise` standard deviations of noise on every matrix."""
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=STOP_ID,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(20)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
        model.lm_head.weight[vocabulary_size:].mul_(2.0)
        for parameter in model.parameters():
            if noise and parameter.dim() == 2:
                disturbance = torch.randn(parameter.shape, generator=generator)
                parameter.add_(disturbance * parameter.std() * noise)
    model.save_pretrained(folder)


def export(pairs: list[tuple[Path, Path]], precisions: tuple[str, ...] = ()) -> None:
    """Exports target folders to ONNX draft folders, side by side, as users would; fp32 unless `precisions` says."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
    running = [
        subprocess.Popen(
            [
                *command,
                "-i",
                str(source),
                "-o",
                str(out),
                "-c",
                str(out.parent / f"{out.name}-scratch"),
                "-p",
                precision,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for (source, out), precision in zip(pairs, precisions or ["fp32"] * len(pairs), strict=True)
    ]
    for process in running:
        output, _ = process.communicate(timeout=110)
        assert process.returncode == 0, output.decode(errors="replace")[-2000:]


def build_pair(root: Path) -> TinyPair:
    """The pair in a fresh folder."""
    target, disturbed = root / "tiny-target", root / "disturbed"
    size = build_tokenizer(target)
    build_tokenizer(disturbed)
    build_model(target, size)
    build_model(disturbed, size, NOISE)
    same, noisy = root / "tiny-draft", root / "tiny-noisy-draft"
    export([(target, same), (disturbed, noisy)])
    return TinyPair(target, same, noisy, size)
