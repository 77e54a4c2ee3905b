"""Run an exported model on onnxruntime: prefill, decode steps and generation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from google.protobuf.message import DecodeError

from mlx_sparse.checks import ArtefactError, ConfigError, ShapeError, check_int

from .. import build
from ..defaults import PREFILL_CHUNK
from ..domain import DOMAIN, SPEC
from ..operators import RECURRENT
from . import memory
from . import native as kernels

MODEL = "model.onnx"
TYPES = (*build.TYPES.values(), onnx.TensorProto.INT64, onnx.TensorProto.INT16, onnx.TensorProto.UINT8)
STATES = {"past_key_values.": "present.", **{f"past_{name}.": f"present_{name}." for name in (*RECURRENT, "conv")}}
MAX_CHUNK = 1 << 20  # largest prefill chunk in tokens that a file may request
MASK_STEP = 1024  # the attention mask grows in steps of this size, because the graph reads all of it for every token

Array = np.ndarray
Pick = Callable[[Array], int]
State = tuple[np.dtype | None, list[int]]


class Runner:
    """An exported model and its caches, for decoding one batch of sequences.

    Args:
        path: the folder that export-onnx wrote, or its model.onnx.
        native: "auto" to run the native kernels if they were built, "off" to run the function bodies.
        threads: number of threads; None selects onnxruntime's default.
        batch: number of sequences that are decoded together.

    Attributes:
        length: number of tokens in the caches, padding included.
        caches: dict from graph input name to array. The runtime reads these arrays and appends to them in place.
        max_length: largest possible ``length``.
        native: True if the native kernels run.
        eos: ids of end-of-sequence tokens.
        metadata: dict from name to text that the exporter stored in model.onnx.

    Raises:
        ArtefactError: model.onnx is missing or damaged, was not written by export-onnx, or uses a different version of
            the operators.
        BackendUnavailable: the version of the native kernels differs from the version of this package.
    """

    def __init__(self, path: str | Path, *, native: str = "auto", threads: int | None = None, batch: int = 1) -> None:
        self.path = _model_file(Path(path))
        self.batch = check_int("batch", batch, 1)
        proto = _read(self.path)
        # protobuf returns bytes for text that is not UTF-8.
        self.metadata: Mapping[str, str] = {str(entry.key): str(entry.value) for entry in proto.metadata_props}
        _check_version(self.path, self.metadata)
        self.eos = _eos(self.path, self.metadata)
        states, vocabulary = _states(self.path, proto.graph)
        self._capacity = states["past_key_values.0.key"][1][2]
        self.max_length = _number(self.path, self.metadata, "max_length", self._capacity)
        self._chunk = PREFILL_CHUNK
        if "mlx_sparse.prefill_chunk" in self.metadata:
            self._chunk = _number(self.path, self.metadata, "prefill_chunk", MAX_CHUNK)
        ours = any(opset.domain == DOMAIN for opset in proto.opset_import)  # False for files exported with --inline
        self._session = self._open(_options(native, threads))
        self.native = ours and native == "auto" and kernels.unavailable() is None

        self._binding = self._session.io_binding()
        self.caches: dict[str, Array] = {}
        for name, (dtype, shape) in states.items():
            assert dtype is not None  # _states raises otherwise
            array = self._zeros((self.batch, *shape[1:]), dtype)
            value = memory.ort_value(array)
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(_present(name), value)  # same buffer: append in place
            self.caches[name] = array
        self._mask = self._bound_input("attention_mask", (self.batch, min(MASK_STEP, self._capacity)))
        self._logits = self._zeros((self.batch, 1, vocabulary), np.float32)
        self._binding.bind_ortvalue_output("logits", memory.ort_value(self._logits))
        self._tokens = self._bound_input("input_ids", (self.batch, 1))
        self.length = 0

    def reset(self) -> None:
        """Remove all tokens. Keys and values are not cleared, because slots after the last token are never read."""
        self.length = 0
        self._mask[:] = 0
        for name, array in self.caches.items():
            if name.startswith(("past_sums.", "past_summary.")):
                array[:] = 0

    def resume_at(self, length: int) -> None:
        """Resume after ``length`` tokens whose keys and values you have written to `caches`. Padding is not allowed.

        If the model has caches named ``past_sums`` or ``past_summary``, also write these caches before the call. These
        caches contain statistics over all tokens, so this method cannot remove tokens.

        Raises:
            ConfigError: ``length`` is less than 1 or greater than ``max_length``.
        """
        check_int("length", length, 1, self.max_length)
        wanted = min(-(-length // MASK_STEP) * MASK_STEP, self._capacity)
        self._mask = self._bound_input("attention_mask", (self.batch, wanted))
        self._mask[:, :length] = 1
        self.length = length

    def step(self, tokens: npt.ArrayLike, left_padding: Sequence[int] | None = None) -> Array:
        """Append ``tokens (batch, L)`` and return the logits ``(batch, vocabulary)`` of the last token.

        The next step overwrites the returned array.

        Args:
            left_padding: number of padding tokens at the start of each row, less than L. Only the first step allows
                padding.

        Raises:
            ShapeError: the shape of the tokens is not (batch, L), or the tokens exceed ``max_length``.
            ConfigError: ``left_padding`` is out of range, has the wrong length, or sets padding after the first step.
            ArtefactError: onnxruntime raised an error. After an error or Ctrl-C, all tokens are removed.
        """
        wanted = (self.batch, "L")
        try:
            given = np.asarray(tokens).astype(np.int64, casting="same_kind")
        except (TypeError, ValueError):  # rows of unequal length, or not integers
            raise ShapeError(f"tokens: expected integers of shape {wanted}, got other values. Pad the rows.") from None
        if given.ndim != 2 or not given.size or len(given) != self.batch:
            raise ShapeError(f"tokens: expected shape {wanted}, got {given.shape}.")
        L = given.shape[1]
        self._check_length("tokens", L)
        padding = [0] * self.batch if left_padding is None else list(left_padding)
        if len(padding) != self.batch or not all(n in range(L) for n in padding) or (any(padding) and self.length):
            raise ConfigError(
                f"left_padding: expected {self.batch} numbers below {L} in the first step, and none later, "
                f"got {padding} after {self.length} tokens."
            )
        if self._tokens.shape[1] != L:
            self._tokens = self._bound_input("input_ids", (self.batch, L))
        self._tokens[:] = given
        if self.length + L > self._mask.shape[1]:
            old, longer = self._mask, -(-(self.length + L) // MASK_STEP) * MASK_STEP
            self._mask = self._bound_input("attention_mask", (self.batch, min(longer, self._capacity)))
            self._mask[:, : old.shape[1]] = old
        for row, first in enumerate(padding):
            self._mask[row, self.length + first : self.length + L] = 1
        try:
            self._session.run_with_iobinding(self._binding)
            self.length += L
        except BaseException as error:  # onnxruntime's exceptions have no common base class; Ctrl-C raises here
            self.reset()  # the caches may be incomplete
            if not isinstance(error, Exception):
                raise
            raise ArtefactError(f"model: expected {self.path} to run, got: {first_line(error)}") from None
        return self._logits[:, 0]

    def prefill(self, prompt: Sequence[int]) -> Array:
        """Append a prompt in chunks and return the logits of its last token. The batch size must be 1.

        As in mlx-lm, the last token is a separate decode step.
        """
        if not len(prompt):
            raise ConfigError("prompt: expected at least one token, got none.")
        self._check_length("prompt", len(prompt))
        start, last = 0, len(prompt) - 1
        while start < last:
            chunk = self._chunk
            if chunk == last - start - 1:
                chunk += 1  # a chunk of one token would be a sparse decode step
            self.step([list(prompt[start : min(start + chunk, last)])])
            start += chunk
        return self.step([list(prompt[last:])])

    def generate(self, prompt: Sequence[int], max_tokens: int, pick: Pick | None = None) -> Iterator[int]:
        """Append a prompt and yield at most ``max_tokens`` new tokens. Stop before an end-of-sequence token.

        Every new token except the last is appended to the caches.

        Args:
            pick: function that returns a token id for logits ``(vocabulary,)``; None selects the argmax.

        Raises:
            ShapeError: the prompt and the new tokens exceed ``max_length``. The error is raised before anything runs.
            ArtefactError: onnxruntime raised an error, or the logits are NaN.
        """
        if self.batch != 1:
            raise ConfigError(f"batch: expected 1 to generate, got {self.batch}. Use step().")
        check_int("max_tokens", max_tokens, 1)
        self._check_length("prompt", len(prompt))
        self._check_length("prompt and max_tokens", len(prompt) + max_tokens - 1)  # the last token is not appended
        return self._generate(prompt, max_tokens, pick or most_likely)

    def _generate(self, prompt: Sequence[int], max_tokens: int, pick: Pick) -> Iterator[int]:
        logits = self.prefill(prompt)
        for n in range(1, max_tokens + 1):
            if np.isnan(logits[0].max()):
                raise ArtefactError(
                    f"model: expected logits, got NaN from {self.path}. Its numbers may be too large for its caches: "
                    "export it with --dtype float32."
                )
            token = pick(logits[0])
            if token in self.eos:
                return
            yield token
            if n < max_tokens:
                logits = self.step([[token]])

    def _open(self, options: onnxruntime.SessionOptions, **how: Any) -> onnxruntime.InferenceSession:
        try:
            return onnxruntime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"], **how)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise ArtefactError(f"model: expected {self.path} to load, got: {first_line(error)}") from None

    def _check_length(self, what: str, count: int) -> None:
        if self.length + count > self.max_length:
            after = f" after {self.length}" if self.length else ""
            raise ShapeError(
                f"{what}: expected at most {self.max_length} tokens, which the model was exported for, "
                f"got {count}{after}. Shorten it, or export with a larger --max-length."
            )

    def _zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        try:
            return memory.zeros(shape, dtype)
        except MemoryError:
            raise ArtefactError(
                f"model: expected sizes that fit into memory, got {shape} in {self.path}. Export it with a smaller "
                "--max-length."
            ) from None

    def _bound_input(self, name: str, shape: tuple[int, int]) -> Array:
        array = self._zeros(shape, np.int64)
        self._binding.bind_ortvalue_input(name, memory.ort_value(array))
        return array


def most_likely(logits: Array) -> int:
    """Return the token with the largest logit."""
    return int(logits.argmax())


def _present(past: str) -> str:
    prefix = next(prefix for prefix in STATES if past.startswith(prefix))
    return STATES[prefix] + past.removeprefix(prefix)


def _options(mode: str, threads: int | None) -> onnxruntime.SessionOptions:
    options = kernels.session_options(mode)
    options.log_severity_level = 4  # errors are raised as exceptions
    if threads is not None:
        options.intra_op_num_threads = check_int("threads", threads, 1)
    return options


def _model_file(path: Path) -> Path:
    file = path / MODEL if path.is_dir() else path
    if not file.is_file():
        raise ArtefactError(f"model: expected a folder that export-onnx wrote, got {path}, without {MODEL}.")
    return file


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError:
        raise ArtefactError(f"model: expected an ONNX file, got something else in {path}.") from None


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_version(path: Path, metadata: Mapping[str, str]) -> None:
    spec = metadata.get("mlx_sparse.spec")
    if spec is None:
        raise ArtefactError(f"model: expected a file that export-onnx wrote, got another file: {path}.")
    if spec != str(SPEC):
        raise ArtefactError(
            f"model: expected version {SPEC} of the operators, got {spec!r} in {path}. "
            "Update mlx-sparse-attention, or export the model again."
        )


def _states(path: Path, graph: onnx.GraphProto) -> tuple[dict[str, State], int]:
    """Validate the inputs and outputs of ``graph``, because the file may come from an untrusted source.

    Return a dict from cache name to dtype and shape, and the size of the vocabulary.
    """

    def fail(what: str) -> ArtefactError:
        return ArtefactError(f"model: expected {what}, got another in {path}. Export the model again.")

    inputs, outputs = ({str(info.name): _state(info) for info in side} for side in (graph.input, graph.output))
    ids, mask = (inputs.pop(name, (None, [])) for name in ("input_ids", "attention_mask"))
    if any(len(shape) != 2 or kind != np.int64 for kind, shape in (ids, mask)):
        raise fail("inputs input_ids and attention_mask")
    kind, logits = outputs.pop("logits", (None, []))
    if kind != np.float32 or len(logits) != 3 or logits[1] != 1 or logits[2] < 1:
        raise fail("logits of one token")
    for name, (dtype, shape) in inputs.items():
        if not name.startswith(tuple(STATES)) or outputs.get(_present(name)) != (dtype, shape):
            raise fail(f"caches and their successors (not {name!r})")
        if dtype is None or len(shape) < 3 or shape[0] or min(shape[1:]) < 1:
            raise fail(f"{name} with a type and a size")
    capacities = {shape[2] for name, (_, shape) in inputs.items() if name.startswith("past_key_values.")}
    if len(capacities) != 1 or "past_key_values.0.key" not in inputs:
        raise fail("caches of one length")
    if any((*ids[1], *mask[1])):
        raise fail("open sizes of input_ids and attention_mask")
    return inputs, logits[2]


def _state(info: onnx.ValueInfoProto) -> State:
    """Return the dtype of a cache (None if it is unsupported) and its axis lengths (0 for a symbolic axis)."""
    tensor = info.type.tensor_type
    kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type in TYPES else None
    return kind, [dim.dim_value for dim in tensor.shape.dim]


def _number(path: Path, metadata: Mapping[str, str], name: str, most: int) -> int:
    text = metadata.get(f"mlx_sparse.{name}", "")
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ArtefactError(f"model: expected {name} to be a number from 1 to {most}, got {text!r} in {path}.")
    return int(text)


def _eos(path: Path, metadata: Mapping[str, str]) -> frozenset[int]:
    try:
        tokens = json.loads(metadata.get("mlx_sparse.eos_token_ids", "[]"))
        return frozenset(check_int("eos_token_ids", token, 0) for token in tokens)
    except (ValueError, TypeError, RecursionError):
        raise ArtefactError(f"model: expected a list of numbers as eos_token_ids, got another in {path}.") from None
