"""Everything that touches transformers: converting published weights, and loading a target.

Must not know: sessions, the wire, the model store. The only module that imports transformers.
Run by `shared.model_build` as `python -m cloud_verifier.hf convert-gguf SRC OUT`.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
import torch
import transformers
from tokenizers import normalizers, pre_tokenizers

from shared.errors import ModelLoadError

# ---------------------------------------------------------------- converting


def convert_gguf(gguf: Path, out: Path) -> None:
    """Writes a GGUF file's model as a target folder: fp32 safetensors, configuration, tokenizer, chat template."""
    quiet()
    out.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tie_if_equal(model)
    model.save_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    restore_text_rules(tokenizer.backend_tokenizer, _pre_tokenizer_name(gguf))
    tokenizer.save_pretrained(out)


def tie_if_equal(model: transformers.PreTrainedModel) -> bool:
    """Ties the output head to the input embeddings if they hold the same numbers; says whether it did.

    GGUF files often carry both, quantised differently: then they stay two.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings or not torch.equal(head.weight, embedding.weight):
        return False
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return True


def restore_text_rules(tokenizer: tokenizers.Tokenizer, name: str) -> None:
    """Gives a tokenizer back what its published form does before byte-level BPE, and GGUF conversion drops.

    Without it the same text has other ids than the model was trained on: digits in groups (smollm), decomposed
    letters (qwen2). `name` is what the GGUF file calls its pre-tokenizer; others are left alone.
    """
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()


def _pre_tokenizer_name(gguf: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field else ""


def quiet() -> None:
    """Silences transformers' progress bars, advice and warnings in this process."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of this module; the model store runs it in a child process."""
    parser = argparse.ArgumentParser(prog="python -m cloud_verifier.hf", description="Convert published weights.")
    commands = parser.add_subparsers(required=True)
    convert = commands.add_parser("convert-gguf", help="write a GGUF file's model as a fp32 target folder")
    convert.add_argument("gguf", type=Path, metavar="SRC", help="the GGUF file")
    convert.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    options = parser.parse_args(arguments)
    convert_gguf(options.gguf, options.out)
    return 0


# ---------------------------------------------------------------- loading a target


class KvWriter(Protocol):
    """Where a forward puts its keys and values."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new rows (1, H, n, D) after the kept ones; returns all rows (1, H, kept + n, D)."""
        ...

    @property
    def length(self) -> int:
        """Rows kept."""
        ...


class WriterCache(transformers.Cache):  # type: ignore[misc]
    """A transformers Cache that stores nothing itself: every layer's update goes to a KvWriter."""

    def __init__(self, writer: KvWriter) -> None:
        super().__init__(layers=[])
        self._writer = writer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer."""
        return self._writer.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows kept before this forward."""
        return self._writer.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Not used: every forward brings its own 4-D mask."""
        return self._writer.length + query_length, 0


class CausalLm:
    """A transformers causal model, its forward reduced to what a verifier needs."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config()
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.layer_types = tuple(getattr(self.config, "layer_types", None) or ())

    @property
    def sliding_window(self) -> int:
        """Tokens that a sliding layer sees, itself included; 0 if no layer slides."""
        window = getattr(self.config, "sliding_window", None)
        if not window or getattr(self.config, "use_sliding_window", True) is False:
            return 0
        return int(window) if not self.layer_types or "sliding_attention" in self.layer_types else 0

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[str, torch.Tensor],
        writer: KvWriter,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Scores of the wanted rows after one forward; keys and values go to `writer`.

        `masks`: additive, one per layer type ("full_attention", "sliding_attention").
        Shapes: ids, positions (1, n) int64; masks (1, 1, n, kept + n); wanted (w,) int64; result (w, V) float32.
        """
        mask: Any = dict(masks) if len(set(self.layer_types)) > 1 else next(iter(masks.values()))
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=wanted,
            **{self._cache_argument: WriterCache(writer)},
        )
        return torch.as_tensor(output.logits[0]).float()

    @torch.inference_mode()
    def own_causal_scores(self, ids: list[int]) -> torch.Tensor:
        """The model's own forward, without our cache or masks: what the self-check holds us to. Shapes: (n, V)."""
        device = self.model.device
        output = self.model(input_ids=torch.tensor([ids], device=device), use_cache=False)
        return torch.as_tensor(output.logits[0]).float()


def load_causal_lm(folder: Path, dtype: torch.dtype, device: str) -> CausalLm:
    """Loads a model folder; sdpa attention, or eager where the architecture refuses sdpa.

    Raises: ModelLoadError naming the folder and the reason.
    """
    quiet()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"model folder {folder} cannot be read: {_first_line(error)}") from error
    text_config = config.get_text_config()
    soft_capped = getattr(text_config, "attn_logit_softcapping", None) is not None
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager" if soft_capped else "sdpa", local_files_only=True
        )
        return CausalLm(_laid_out(model.to(device)))
    except Exception as error:
        raise ModelLoadError(f"model {folder} cannot be loaded: {_first_line(error)}") from error


def _laid_out(model: Any) -> Any:
    """On CPU in float32, lies linear weights in memory the way a forward over a few tokens reads them fastest.

    Same numbers, other strides: on one core 9 tokens through SmolLM2-135M take 89 ms instead of 110, one token takes
    as long as before (docs/adr/0007).
    """
    if model.device.type == "cpu" and model.dtype == torch.float32:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = module.weight.data.t().contiguous().t()
    return model


def generation_defaults(folder: Path) -> dict[str, Any]:
    """What generation_config.json says: eos ids and sampling values; without it, what config.json says of them."""
    try:
        return dict(transformers.GenerationConfig.from_pretrained(folder, local_files_only=True).to_dict())
    except OSError:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        return dict(transformers.GenerationConfig.from_model_config(config).to_dict())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
