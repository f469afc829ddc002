"""What a device reads from its disk to draft: the tokenizer, and a draft model if the settings ask for one.

Must not know: the verifier, sessions; onnxruntime is imported when a model is loaded. Called by `client` on a worker
thread.
"""

from __future__ import annotations

from pathlib import Path

from edge_client.draft_check import warn_if_unlike_its_source
from edge_client.drafter import Drafter, ModelDrafter
from edge_client.tokenizer import TextTokenizer
from shared.errors import ModelLoadError
from shared.model_store import has_tokenizer, resolve


def load_tokenizer(draft: str, precision: str, *, with_model: bool) -> TextTokenizer:
    """Takes a phone a second. Without a model the tokenizer's files alone need be there.

    Raises: ConfigError, ModelLoadError.
    """
    return TextTokenizer(draft_folder(draft, precision) if with_model else resolve(draft, "tokenizer", precision))


def load_drafters(draft: str, precision: str, tokenizer: TextTokenizer, threads: int, count: int) -> list[Drafter]:
    """So many drafters over one copy of the weights, after the draft's self-test.

    Raises: ConfigError, ModelError.
    """
    from edge_client.onnx_drafter import RUNTIME_VERSION, OnnxModel  # onnxruntime: not before a drafter is wanted

    folder = draft_folder(draft, precision)
    model = OnnxModel(folder, threads)
    warn_if_unlike_its_source(model.another(), folder, RUNTIME_VERSION)
    valid = tokenizer.vocabulary.valid_mask(model.vocabulary_rows)
    models = [model, *(model.another() for _ in range(count - 1))]
    return [ModelDrafter(each, valid) for each in models]


def draft_folder(draft: str, precision: str) -> Path:
    """The draft model's folder; where there is none, but its tokenizer is there, the user is told what that is for.

    Raises: ConfigError, ModelLoadError.
    """
    try:
        return resolve(draft, "draft", precision)
    except ModelLoadError as error:
        if not has_tokenizer(draft):
            raise
        raise ModelLoadError(
            f"{error.message}; or draft without a model, its tokenizer is here: --drafter retrieval"
        ) from error
