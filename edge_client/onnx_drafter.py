"""The draft model on ONNX Runtime: int4 or fp32 graphs with GroupQueryAttention over shared KV buffers.

Must not know: sessions, sampling, wire. The only module that imports onnxruntime. Called by `drafter.ModelDrafter`.
Past and present are bound to the same preallocated buffers, so a roll-back is one integer. Known limits of the
operator on CPU: several tokens in one forward only at batch 1, no tree mask, an error past the buffer's length.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from shared.errors import ModelError, ModelLoadError

FIRST_ROWS = 256
MAX_CHUNK = 32
"""Ids in one forward at most: scores come for all of them, and a long prefill would peak in memory."""

RUNTIME_VERSION = str(onnxruntime.__version__)
"""Whichever package brought the runtime: onnxruntime, onnxruntime-gpu, a nightly build."""

_NUMPY_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class OnnxModel:
    """A NextTokenModel over one ONNX Runtime session. One sequence, one thread at a time; `another` for more."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        """`threads` CPU threads, never spinning. Raises: ModelLoadError naming the folder or file."""
        config = _read_config(folder)
        try:
            decoder = config["model"]["decoder"]
            self.layers = int(decoder["num_hidden_layers"])
            self._heads = int(decoder["num_key_value_heads"])
            self._head_size = int(decoder["head_size"])
            self.context_size = _context_size(config["model"])
            self._names = {**decoder["inputs"], **decoder["outputs"]}
            graph = folder / decoder["filename"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{folder / 'genai_config.json'} is not a draft's: {error!r}") from error
        self._session = _open_session(graph, threads)
        self._type = self._kv_type(graph)
        self._empty()

    def another(self) -> OnnxModel:
        """A model over the same weights with an empty cache of its own; the two may run at once on two threads."""
        twin = copy.copy(self)
        twin._empty()
        return twin

    def _empty(self) -> None:
        """Buffers are made when ids come: a model that is not used costs nothing."""
        self._binding = self._session.io_binding()
        self._store: npt.NDArray[Any] = np.zeros(0)
        self._capacity = 0
        self._length = 0

    @property
    def vocabulary_rows(self) -> int:
        """Width of a row of scores, padding rows included."""
        shapes = {node.name: node.shape for node in self._session.get_outputs()}
        return int(shapes[self._names["logits"]][-1])

    @property
    def length(self) -> int:
        """Ids in the cache."""
        return self._length

    def rewind(self, length: int) -> None:
        """Forgets ids from `length` on; costs nothing."""
        assert 0 <= length <= self._length
        self._length = length

    def feed(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Appends ids in chunks; returns the scores after the last one. Shapes: (V,) float32.

        Raises: ModelError if the context is full or the forward fails; the cache is as before.
        """
        return np.asarray(self._append(ids)[-1], dtype=np.float32)

    def feed_chunk(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As `feed`, for MAX_CHUNK ids at most; returns the scores after each. Shapes: (n, V) float32."""
        assert 0 < len(ids) <= MAX_CHUNK
        return np.asarray(self._append(ids), dtype=np.float32)

    def _append(self, ids: Sequence[int]) -> npt.NDArray[Any]:
        """The scores of the last chunk. Shapes: (n, V)."""
        start = self._length
        if start + len(ids) > self.context_size:
            raise ModelError(
                f"draft context full: {start + len(ids)} tokens, the draft model holds {self.context_size}"
            )
        self._reserve(start + len(ids))
        try:
            for offset in range(0, len(ids), MAX_CHUNK):
                scores = self._forward(ids[offset : offset + MAX_CHUNK])
        except Exception as error:
            self._length = start
            raise ModelError(f"the draft model failed: {str(error).splitlines()[0]}") from error
        return scores

    def save_rows(self, start: int) -> npt.NDArray[Any]:
        """Copies of the cached keys and values from `start` on. Shapes: (2L, H, length - start, D)."""
        return self._store[:, 0, :, start : self._length].copy()

    def append_rows(self, rows: npt.NDArray[Any]) -> None:
        """Takes back saved rows that follow what is cached: as if their ids were fed again, without scores."""
        start, stop = self._length, self._length + rows.shape[2]
        self._reserve(stop)
        self._store[:, 0, :, start:stop] = rows
        self._length = stop

    def kv_rows(self) -> list[npt.NDArray[Any]]:
        """Copies of all cached keys and values, for tests. Shapes: per tensor (H, length, D)."""
        return [] if not self._capacity else [buffer[0, :, : self._length].copy() for buffer in self._store]

    def _forward(self, ids: Sequence[int]) -> npt.NDArray[Any]:
        total = self._length + len(ids)
        tokens = np.array([ids], dtype=np.int64)
        mask = np.ones((1, total), dtype=np.int64)
        self._binding.bind_cpu_input(self._names["input_ids"], tokens)
        self._binding.bind_cpu_input(self._names["attention_mask"], mask)
        self._binding.bind_output(self._names["logits"])
        self._session.run_with_iobinding(self._binding)
        self._length = total
        return np.asarray(self._binding.get_outputs()[-1].numpy()[0])

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        capacity = min(max(FIRST_ROWS, 1 << (rows - 1).bit_length()), self.context_size)
        grown = np.zeros((2 * self.layers, 1, self._heads, capacity, self._head_size), dtype=self._type)
        if self._capacity:
            grown[:, :, :, : self._length] = self._store[:, :, :, : self._length]
        self._store, self._capacity = grown, capacity
        self._bind_buffers()

    def _bind_buffers(self) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        for layer in range(self.layers):
            for offset, kind in enumerate(("key", "value")):
                value = onnxruntime.OrtValue.ortvalue_from_numpy(self._store[2 * layer + offset])
                self._binding.bind_ortvalue_input(self._names[f"past_{kind}_names"] % layer, value)
                self._binding.bind_ortvalue_output(self._names[f"present_{kind}_names"] % layer, value)

    def _kv_type(self, graph: Path) -> Any:
        types = {node.name: node.type for node in self._session.get_inputs()}
        pasts = [self._names[f"past_{kind}_names"] % n for n in range(self.layers) for kind in ("key", "value")]
        other = types.keys() ^ {self._names["input_ids"], self._names["attention_mask"], *pasts}
        if other:
            raise ModelLoadError(
                f"{graph}: a draft holds keys and values in each of its {self.layers} layers and nothing else, for "
                f"nothing else can be rolled back; see {', '.join(sorted(other)[:2])}"
            )
        kind = types[pasts[0]]
        if kind not in _NUMPY_TYPES:
            raise ModelLoadError(f"{graph}: its past keys are {kind}; export it with edge-client export-draft")
        return _NUMPY_TYPES[kind]


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "genai_config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{file}: {error.strerror}; a draft is made by edge-client export-draft") from error
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    return dict(content)


def _context_size(model: dict[str, Any]) -> int:
    """Ids up to which the graph is the model. The exporter knows some models' sliding window (Mistral's) and applies it
    to no layer: beyond the window such a graph is another model."""
    size, window = int(model["context_length"]), model["decoder"].get("sliding_window") or {}
    return min(size, int(window["window_size"])) if window.get("layers") == [] else size


def _open_session(graph: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelLoadError(f"draft model {graph} cannot be loaded: {str(error).splitlines()[0]}") from error
