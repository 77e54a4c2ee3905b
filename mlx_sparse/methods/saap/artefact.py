"""Read and write the artefact of `mlx-sparse train-saap`: centroids and query networks for each layer and KV head."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from ... import __version__
from ...checks import MAX_BUCKETS, ArtefactError
from ...files import replace_file
from ...model_info import identity, kv_shapes, model_type, recorded_facts
from ...model_parts import Part, part_of

if TYPE_CHECKING:
    from mlx import nn

FORMAT = 1
SPACE = "before_rope"  # value of "space" in the file: keys are clustered before RoPE
NETWORK = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
NAME = re.compile(rf"layers\.(0|[1-9][0-9]{{0,8}})\.({'|'.join(('centroids', *NETWORK))})")
WORD = re.compile(r"[\w.-]{1,64}")  # model family or hash; limited, because error messages contain it
MAX_HIDDEN = 1024  # largest hidden size that the kernels support
TYPES = ("F16", "F32")
QUOTED = 120  # maximum length of a problem description in an error message, in characters


@dataclass(frozen=True)
class Layer:
    """Centroids and query networks of one layer. Batch norm is merged into the network weights.

    Shapes for C buckets and H hidden units: centroids ``(Hkv, C, D)``, hidden_weight ``(Hkv, D, H)``, hidden_bias
    ``(Hkv, H)``, out_weight ``(Hkv, H, C)``, out_bias ``(Hkv, C)``.
    """

    centroids: mx.array
    hidden_weight: mx.array
    hidden_bias: mx.array
    out_weight: mx.array
    out_bias: mx.array

    def arrays(self) -> dict[str, mx.array]:
        """Return the layer's arrays as a dict from name to array."""
        return {name: getattr(self, name) for name in ("centroids", *NETWORK)}


@dataclass(frozen=True)
class Artefact:
    """Content of an artefact file.

    Attributes:
        layers: dict from the index of a layer's KV cache in the model to the layer's centroids and query networks.
        sink_tokens, recent_tokens: numbers of first and last keys that every decode step attends to. The training
            targets exclude these keys.
        model: ``model_type`` and ``hash`` of the model that was used for training.
        training: training options and results, for information only.
        versions: dict from package name to the version that was used for training.
    """

    layers: dict[int, Layer]
    buckets: int
    hidden: int
    sink_tokens: int
    recent_tokens: int
    model: Mapping[str, str]
    training: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def check_model(self, model: nn.Module) -> None:
        """Raise `ArtefactError` unless the artefact was trained on ``model`` or a copy with the same `identity`."""
        self._check(identity(model), kv_shapes(model))

    def _check(self, found: Mapping[str, str], shapes: Sequence[tuple[int, int] | None]) -> None:
        self._check_family(found["model_type"])
        for index, layer in self.layers.items():
            here = shapes[index] if index < len(shapes) else None
            heads, _, D = layer.centroids.shape
            if here != (heads, D):
                has = "no keys" if here is None else f"{here[0]} KV heads of {here[1]}"
                raise ArtefactError(
                    f"artefact: expected the layers of this model, got {heads} KV heads of {D} for layer {index}, "
                    f"which has {has}. Train an artefact for this model."
                )
        if found["hash"] != self.model["hash"]:
            raise ArtefactError(
                "artefact: expected one trained on this model, got one for a model of the same family with another "
                "config or other weights. Train an artefact for this model."
            )

    def _check_family(self, found: str) -> None:
        if found != self.model["model_type"]:
            raise ArtefactError(
                f"artefact: expected one for {found}, got one for {self.model['model_type']}. Train an artefact."
            )

    def part_for(self, model: nn.Module) -> Artefact:
        """Return the part of this artefact for ``model``, which may have only some of the trained layers and KV heads.

        The artefact is checked as in `check_model`. If the model is split across processes, this check needs the facts
        from `model_info.record_facts`. If there are none, only the model type and KV head shapes are checked.

        Raises:
            ArtefactError: the artefact is for another model, or cannot be split in the same way as ``model``.
        """
        part, whole = part_of(model), recorded_facts(model)
        if part.whole:
            self.check_model(model)
            return self
        if whole is not None and whole.identity is not None:
            self._check(whole.identity, whole.shapes)
        self._check_family(model_type(model))
        shapes = kv_shapes(model)
        if part.layers not in (None, len(shapes)):
            raise ArtefactError(
                f"artefact: expected one cache for each of the {part.layers} layers of a part, got {len(shapes)}. "
                "Run the model in one process."
            )
        layers = {}
        for place, shape in enumerate(shapes):
            layer = self.layers.get(part.first_layer + place)
            if layer is not None:
                layers[place] = _share(part.first_layer + place, layer, shape, part)
        return replace(self, layers=layers)

    def save(self, path: str | Path) -> None:
        """Write the artefact atomically to a safetensors file.

        Raises:
            ArtefactError: a tensor has a name, shape or value that `load` rejects, or ``path`` does not end in
                .safetensors.
            OSError: the file cannot be written. An existing file is unchanged.
        """
        path = Path(path)
        tensors = {
            f"layers.{index}.{name}": array
            for index, layer in self.layers.items()
            for name, array in layer.arrays().items()
        }
        about = {
            "format": FORMAT,
            "kind": "saap",
            "space": SPACE,
            "buckets": self.buckets,
            "hidden": self.hidden,
            "sink_tokens": self.sink_tokens,
            "recent_tokens": self.recent_tokens,
            "model": dict(self.model),
            "training": dict(self.training),
            "versions": dict(self.versions) or versions(),
        }
        _layers(path, tensors, self.buckets, self.hidden)
        write_tensors(path, tensors, {"mlx_sparse": json.dumps(about, allow_nan=False)})


def load(path: str | Path) -> Artefact:
    """Read an artefact file and validate its metadata and all tensors.

    Raises:
        ArtefactError: the file is missing, truncated or damaged, has the wrong format, or contains NaN or inf.
    """
    path = Path(path)
    tensors, metadata = read_tensors(path)
    about = _about(path, metadata)
    buckets, hidden = about["buckets"], about["hidden"]
    layers = _layers(path, tensors, buckets, hidden)
    names = ("sink_tokens", "recent_tokens", "model", "training", "versions")
    return Artefact(layers, buckets, hidden, **{name: about[name] for name in names})


def _share(index: int, layer: Layer, shape: tuple[int, int] | None, part: Part) -> Layer:
    """Return ``layer`` with only the KV heads that this process runs. MLX assigns consecutive heads to each rank.

    ``index`` is the layer's index in the whole model, and ``shape`` is (KV heads, head dim) in this process.
    """
    heads, _, D = layer.centroids.shape
    if shape == (heads, D):  # every rank has all KV heads
        return layer
    if shape is None or shape[1] != D or shape[0] * part.size != heads:
        has = "no keys" if shape is None else f"{shape[0]} KV heads of {shape[1]}"
        raise ArtefactError(
            f"artefact: expected the {heads} KV heads of {D} of layer {index} to be split into {part.size} equal "
            f"parts, got a part with {has}. Train an artefact for this model, or run the model in one process."
        )
    mine = slice(part.rank * shape[0], (part.rank + 1) * shape[0])
    return Layer(**{name: mx.contiguous(array[mine]) for name, array in layer.arrays().items()})


def versions() -> dict[str, str]:
    """Return a dict from package name to installed version for mlx-sparse-attention, mlx and mlx-lm."""
    return {"mlx-sparse-attention": __version__, **{name: version(name) for name in ("mlx", "mlx-lm")}}


def _about(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Validate the metadata of a file and return the decoded JSON description.

    Raises:
        ArtefactError: the description is missing or damaged, or has the wrong kind or format.
    """
    try:
        about = json.loads(metadata["mlx_sparse"])
        kind, form = about["kind"], about["format"]
    except (KeyError, ValueError, TypeError, RecursionError):
        raise refuse(path, "a safetensors file of something else") from None
    if kind != "saap" or form != FORMAT:
        raise refuse(path, f"kind {str(kind)[:20]!r}, format {str(form)[:20]!r}, not 'saap' and {FORMAT}")
    bounds = {
        "buckets": (1, MAX_BUCKETS),
        "hidden": (1, MAX_HIDDEN),
        "sink_tokens": (0, 1 << 30),
        "recent_tokens": (0, 1 << 30),
    }
    right = about.get("space") == SPACE
    right &= all(type(about.get(name)) is int and low <= about[name] <= high for name, (low, high) in bounds.items())
    right &= all(isinstance(about.get(name), dict) for name in ("model", "training", "versions"))
    words = [about["model"].get(name) for name in ("model_type", "hash")] if right else []
    right &= all(isinstance(word, str) and WORD.fullmatch(word) for word in words)
    if not right:
        raise refuse(path, "one whose description is damaged")
    return dict(about)


def _layers(path: Path, tensors: Mapping[str, mx.array], buckets: int, hidden: int) -> dict[int, Layer]:
    """Validate the names, shapes and values of the tensors. Return a dict from layer index to `Layer`."""
    by_layer: dict[int, dict[str, mx.array]] = {}
    for name, array in tensors.items():
        found = NAME.fullmatch(name)
        if found is None:
            raise refuse(path, f"an unknown tensor {name[:40]!r}")
        if not mx.all(mx.isfinite(array)).item():
            raise refuse(path, f"numbers that are not finite in {name}")
        by_layer.setdefault(int(found[1]), {})[found[2]] = array
    if not by_layer:
        raise refuse(path, "one without layers")
    for index, parts in by_layer.items():
        shapes = {name: array.shape for name, array in parts.items()}
        centroids = shapes.get("centroids", ())
        heads, _, D = centroids if len(centroids) == 3 else (0, 0, 0)
        wanted = {
            "centroids": (heads, buckets, D),
            "hidden_weight": (heads, D, hidden),
            "hidden_bias": (heads, hidden),
            "out_weight": (heads, hidden, buckets),
            "out_bias": (heads, buckets),
        }
        if shapes != wanted or min(heads, D) < 1:
            raise refuse(path, f"tensors of other shapes in layer {index}")
    return {index: Layer(**by_layer[index]) for index in sorted(by_layer)}


def read_tensors(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a safetensors file. Return a dict from tensor name to tensor, and the metadata.

    Raises:
        ArtefactError: the file cannot be read, is truncated or damaged, or has tensors of unsupported types.
    """
    if not os.path.isfile(path):  # noqa: PTH113 - reading a pipe could block; False for a name that is too long
        raise refuse(path, f"none that can be read ({'a folder' if path.is_dir() else 'no file'})")
    try:
        with safe_open(path, framework="mlx") as file:
            names = list(file.keys())
            if any(file.get_slice(name).get_dtype() not in TYPES for name in names):
                raise refuse(path, f"tensors of other types than {' and '.join(TYPES)}")
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise refuse(path, f"none that can be read ({error})") from None


def write_tensors(path: Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None) -> None:
    """Write float16 and float32 tensors to a safetensors file.

    Raises:
        ArtefactError: ``path`` does not end in .safetensors. MLX would append this suffix.
        OSError: the file cannot be written. An existing file is unchanged.
    """
    if path.suffix != ".safetensors":
        raise ArtefactError(f"path: expected a file name that ends in .safetensors, got {path}.")
    whole = {name: mx.contiguous(array) for name, array in tensors.items()}

    def write(new: Path) -> None:
        try:
            mx.save_safetensors(str(new), whole, dict(metadata or {}))
            with safe_open(new, framework="mlx"):
                pass
        except (SafetensorError, RuntimeError):
            # MLX does not report why a write failed, and sometimes reports no error. safe_open above detects that.
            raise OSError(errno.ENOSPC, "the file was not written completely (disk full?)", str(path)) from None

    replace_file(path, write)


def refuse(path: Path, found: str) -> ArtefactError:
    """Return an `ArtefactError` about ``path``. ``found`` describes the problem and is cut to `QUOTED` characters."""
    found = " ".join(found.split())
    found = found if len(found) <= QUOTED else f"{found[:QUOTED]}..."
    return ArtefactError(f"{path}: expected a file written by mlx-sparse train-saap, got {found}. Train it again.")
