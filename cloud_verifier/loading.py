"""From a model folder to a target that is ready to serve, and the card that describes it.

Must not know: sessions, grpc. Called by `server` at start.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cloud_verifier import hf
from cloud_verifier.self_check import self_check
from cloud_verifier.target_model import TorchTarget
from shared.errors import ConfigError, ModelLoadError
from shared.fingerprint import fingerprint
from shared.model_folder import MANIFEST
from shared.sampling import SamplingParams
from shared.types import Limits, ModelCard
from shared.vocabulary import Vocabulary

log = logging.getLogger("draftwire.loading")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SELF_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Allowed root mean square difference of scores, relative to theirs. On SmolLM2 a right forward differs by 1e-6, 0.003
and 0.03, one with a wrong tree mask by 0.13 or more."""


CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85


@dataclass(frozen=True)
class LoadedTarget:
    """A target that passed its self-check."""

    model: TorchTarget
    card: ModelCard
    valid_ids: npt.NDArray[np.bool_]
    """Shape (V,): ids that exist; padding rows and holes are False."""


def load_target(
    folder: Path, name: str, dtype: str, device: str, limits: Limits, kv_bytes: int = 0, is_compiled: bool = False
) -> LoadedTarget:
    """Loads, checks and describes a target. `kv_bytes`: memory for keys and values, 0 for what the device has to spare.

    Raises: ModelLoadError naming the file or the reason; ConfigError for a device that is not there, or too small a
    `kv_bytes`.
    """
    _check_device(device)
    torch_dtype = DTYPES[dtype]
    vocabulary = Vocabulary.from_tokenizer_json(folder / "tokenizer.json")
    lm = hf.load_causal_lm(folder, torch_dtype, device)
    rows = int(lm.config.vocab_size)
    if vocabulary.size > rows:
        raise ModelLoadError(f"{folder / 'tokenizer.json'}: {vocabulary.size} ids, but the model has {rows} rows")
    context_size = min(_usable_context(lm.config), limits.max_context_tokens)
    model = TorchTarget(lm, context_size, kv_bytes or spare_bytes(device))
    context_size = model.context_size
    if is_compiled:
        lm.compile()
    worst = self_check(model, SELF_CHECK_TOLERANCE[torch_dtype])
    log.info("self-check of %s: relative difference %.2g", name, worst)
    card = _card(folder, name, dtype, vocabulary, context_size, limits)
    return LoadedTarget(model, card, vocabulary.valid_mask(rows))


def spare_bytes(device: str) -> int:
    """Memory for keys and values if nobody said how much: on a GPU 85 % of what the weights left free, else 1 GiB."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free * CUDA_KV_SHARE)
    return CPU_KV_BYTES


def _usable_context(config: Any) -> int:
    """The context up to which positions mean the same whatever the length of a forward.

    Rope kinds that switch frequencies by length would make the text depend on how it was cut into forwards.
    """
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") not in ("longrope", "dynamic"):
        return longest
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return min(longest, int(original or longest))


def _check_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device} is not available: this PyTorch sees no CUDA device", field="device")


def _card(folder: Path, name: str, dtype: str, vocabulary: Vocabulary, context_size: int, limits: Limits) -> ModelCard:
    print_ = fingerprint(vocabulary)
    defaults = hf.generation_defaults(folder)
    return ModelCard(
        model_name=name,
        target_id=target_id(folder, dtype),
        fingerprint=print_.digest,
        fingerprint_blocks=tuple(print_.to_wire()),
        vocabulary_size=vocabulary.size,
        context_size=context_size,
        limits=limits,
        chat_template=_chat_template(folder),
        special_tokens=_special_tokens(folder),
        stop_ids=_stop_ids(defaults, vocabulary),
        generation_defaults=_sampling(defaults),
    )


def target_id(folder: Path, dtype: str) -> bytes:
    """32 bytes that name weights, dtype and configuration: texts may be continued only by the same target.

    Raises: ModelLoadError naming a file that is not what the folder's manifest says.
    """
    digest = hashlib.sha256(f"draftwire.target.1\0{dtype}\0".encode())
    recorded = _json(folder / MANIFEST).get("files", {})
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256")
        if content.hexdigest() != recorded.get(file.name, {}).get("sha256", content.hexdigest()):
            raise ModelLoadError(f"{file} is corrupt: it is not what was pulled; pull it again with --force")
        digest.update(file.name.encode() + b"\0" + content.digest())
    return digest.digest()


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _chat_template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else ""


def _special_tokens(folder: Path) -> dict[str, str]:
    tokens = {}
    for key, value in _json(folder / "tokenizer_config.json").items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _stop_ids(defaults: dict[str, Any], vocabulary: Vocabulary) -> tuple[int, ...]:
    eos = defaults.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return tuple(token for token in ids if isinstance(token, int) and 0 <= token < vocabulary.size)


def _sampling(defaults: dict[str, Any]) -> SamplingParams:
    """Generation defaults of the model's makers; greedy where they say do_sample false or nothing."""
    if not defaults.get("do_sample"):
        return SamplingParams(temperature=0.0, repetition_penalty=float(defaults.get("repetition_penalty") or 1.0))
    return SamplingParams(
        temperature=float(defaults.get("temperature") or 1.0),
        top_k=int(defaults.get("top_k") or 0),
        top_p=float(defaults.get("top_p") or 1.0),
        min_p=float(defaults.get("min_p") or 0.0),
        repetition_penalty=float(defaults.get("repetition_penalty") or 1.0),
    )
