"""Everything that touches transformers: converting published weights, and loading a target.

Must not know: sessions, the wire, the model store. The only module that imports transformers.
Run by `shared.model_build` as `python -m cloud_verifier.hf convert-gguf SRC OUT`, or `convert-gguf-tokenizer`.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import normalizers, pre_tokenizers

from cloud_verifier.attention import RaggedAttention
from cloud_verifier.kv_pool import LayerShape
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
    convert_gguf_tokenizer(gguf, out)


def convert_gguf_tokenizer(gguf: Path, out: Path) -> None:
    """Writes the tokenizer and chat template of a GGUF file; no weights are read."""
    quiet()
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
    convert.set_defaults(handler=convert_gguf)
    tokenizer = commands.add_parser("convert-gguf-tokenizer", help="write a GGUF file's tokenizer alone")
    tokenizer.set_defaults(handler=convert_gguf_tokenizer)
    for command in (convert, tokenizer):
        command.add_argument("gguf", type=Path, metavar="SRC", help="the GGUF file")
        command.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    options = parser.parse_args(arguments)
    options.handler(options.gguf, options.out)
    return 0


# ---------------------------------------------------------------- loading a target


ATTENTION = "draftwire"
ATTENTION_KINDS = ("full_attention", "sliding_attention")
_running = threading.local()
"""`step`: the RaggedAttention of the forward that this thread runs."""


class _StepCache(transformers.Cache):  # type: ignore[misc]
    """A transformers Cache that stores nothing itself: every layer's new rows go to the step's pages."""

    def __init__(self, step: RaggedAttention) -> None:
        super().__init__(layers=[])
        self._step = step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer; what the layer then reads is gathered in `_attend`."""
        self._step.write(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not used: every forward brings its own positions."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Not used: the step holds its own masks."""
        return query_length, 0


class _ProbeCache(_StepCache):
    """Notes what each layer keeps for a token."""

    def __init__(self) -> None:
        transformers.Cache.__init__(self, layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer."""
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in each layer of our forward."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(getattr(module, "layer_idx"))  # noqa: B009 (an attribute that mypy does not know)
    return _running.step.attend(layer, query, scale, softcap).contiguous(), None


transformers.AttentionInterface.register(ATTENTION, _attend)


class CausalLm:
    """A transformers causal model, its forward reduced to what a verifier needs."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.layer_types = tuple(getattr(self.config, "layer_types", None) or ())
        self._own_attention = str(self.config._attn_implementation)
        self._lock = threading.Lock()
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.model.set_attn_implementation(ATTENTION)

    @property
    def sliding_window(self) -> int:
        """Tokens that a sliding layer sees, itself included; 0 if no layer slides."""
        window = getattr(self.config, "sliding_window", None)
        if not window or getattr(self.config, "use_sliding_window", True) is False:
            return 0
        return int(window) if not self.layer_types or "sliding_attention" in self.layer_types else 0

    def layer_kind(self, layer: int) -> str:
        """Which mask a layer takes: "full_attention" or "sliding_attention"."""
        if self.layer_types:
            return self.layer_types[layer] if self.sliding_window else "full_attention"
        return "sliding_attention" if self.sliding_window else "full_attention"

    @torch.inference_mode()
    def kv_shapes(self) -> list[LayerShape]:
        """What each layer keeps for a token.

        Raises: ModelLoadError if some layer keeps something else than keys and values: it could not be rolled back.
        """
        strange = [index for index, kind in enumerate(self.layer_types) if kind not in ATTENTION_KINDS]
        if strange:
            kinds = ", ".join(sorted({self.layer_types[index] for index in strange}))
            raise ModelLoadError(
                f"this architecture is not supported: layers {strange} are {kinds}; only "
                f"{' and '.join(ATTENTION_KINDS)} can be rolled back"
            )
        cache = _ProbeCache()
        with self._own():
            try:
                ids = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
                self.model(input_ids=ids, use_cache=True, **{self._cache_argument: cache})
            except Exception as error:
                raise ModelLoadError(
                    f"this architecture does not run with our KV cache: {_first_line(error)}"
                ) from error
        layers = int(self.config.num_hidden_layers)
        if sorted(cache.shapes) != list(range(layers)):
            missing = sorted(set(range(layers)) - set(cache.shapes))
            raise ModelLoadError(
                f"this architecture is not supported: layers {missing} of {layers} keep no keys and values of their "
                f"own (a recurrent state, or a cache shared between layers), so they can't be rolled back"
            )
        return [cache.shapes[layer] for layer in range(layers)]

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, step: RaggedAttention, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Scores of the wanted tokens after one forward over the packed tokens of a step.

        Shapes: ids, positions (N,) int64; wanted (R,) int64, R >= 1; result (R, V) float32.
        """
        with self._lock:
            _running.step = step
            try:
                output = self.model(
                    input_ids=ids[None],
                    position_ids=positions[None],
                    use_cache=True,
                    logits_to_keep=wanted,
                    **{self._cache_argument: _StepCache(step)},
                )
            finally:
                del _running.step
        return torch.as_tensor(output.logits[0]).float()

    @torch.inference_mode()
    def own_causal_scores(self, ids: list[int]) -> torch.Tensor:
        """The model's own forward, without our cache or masks: what the self-check holds us to. Shapes: (n, V)."""
        device = self.model.device
        with self._own():
            output = self.model(input_ids=torch.tensor([ids], device=device), use_cache=False)
        return torch.as_tensor(output.logits[0]).float()

    @torch.inference_mode()
    def own_text(self, beginning: list[int], length: int) -> list[int]:
        """A beginning and the ids that the model itself finds likeliest after it, `length` in all."""
        ids = list(beginning)
        held: Any = None
        with self._own():
            while len(ids) < length:
                fresh = torch.tensor([ids if held is None else ids[-1:]], device=self.model.device)
                output = self.model(input_ids=fresh, use_cache=True, past_key_values=held)
                held = output.past_key_values
                ids.append(int(output.logits[0, -1].argmax()))
        return ids

    def compile(self) -> None:
        """Compiles the layers with torch.compile; attention and pages stay outside, so that shapes may vary."""
        self.model.compile(dynamic=True)

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Attention as transformers runs it. Whoever shares this model on another thread waits."""
        with self._lock:
            self.model.set_attn_implementation(self._own_attention)
            try:
                yield
            finally:
                self.model.set_attn_implementation(ATTENTION)


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


def text_ids(folder: Path, text: str) -> list[int]:
    """A text's ids by a model folder's tokenizer.json, without special tokens. Raises: ModelLoadError naming it."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{folder / 'tokenizer.json'} cannot be read: {_first_line(error)}") from error
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


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
