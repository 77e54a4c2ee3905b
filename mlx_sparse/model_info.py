"""Identity of a model for artefacts, and of its weights for results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np

from .model_parts import Part

CONFIG = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rope_theta",
)
ADAPTERS = ("lora_a", "lora_b", "m")  # parameters that LoRA and DoRA add
VALUES = 16  # values of each vector that are hashed
SMALLEST = 2.0**-14  # smallest normal float16
ENDS = 64  # values at each end of each weight that are hashed
NOTE = "_mlx_sparse_whole"


def identity(model: Any) -> dict[str, str]:
    """Return ``model_type`` and a ``hash`` of the config, the RoPE scaling, and the first values of all vectors.

    Vectors are norms and biases, which quantization does not change. So a quantized copy is the same model, and so is a
    copy in bfloat16, or a copy with tuned matrices (LoRA). Few bytes are read, independent of the size of the model. If
    a model has no vectors, the first values of its matrices are hashed, and a quantized copy is another model.
    """
    from mlx.utils import tree_flatten

    every = config_of(model)
    config = {name: value for name, value in every.items() if name in CONFIG} | _rope_scaling(every)
    family = model_type(model)
    digest = hashlib.sha256(json.dumps([family, config], sort_keys=True, default=str).encode())
    tree: Any = tree_flatten(model.parameters())
    weights = {
        name.replace(".linear.", ".").replace(".embedding.", "."): array  # names inside an adapter
        for name, array in tree
        if name.rpartition(".")[2] not in ADAPTERS and mx.issubdtype(array.dtype, mx.floating)
    }
    vectors = {name: array for name, array in weights.items() if array.ndim == 1}
    for name, array in sorted((vectors or weights).items()):
        values = array.reshape(-1)[:VALUES].astype(mx.bfloat16).astype(mx.float32)
        # float16 has fewer digits, or no value, below its smallest normal number.
        values = mx.where(mx.abs(values) < SMALLEST, 0.0, values)
        digest.update(f"{name} {array.shape}".encode() + np.array(values).tobytes())
    return {"model_type": family, "hash": digest.hexdigest()}


def weights_hash(model: Any) -> str:
    """Return a hash of the whole config and of both ends of every weight.

    A quantized copy, another type or tuned matrices give another hash, because they change measured results. Few bytes
    are read, independent of the size of the model.
    """
    from mlx.utils import tree_flatten

    about = [model_type(model), config_of(model)]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    weights: Any = tree_flatten(model.parameters())
    for name, array in sorted(weights):
        flat = array.reshape(-1)
        ends = mx.concatenate([flat[:ENDS], flat[-ENDS:]]).view(mx.uint8)
        digest.update(f"{name} {array.shape} {array.dtype}".encode() + np.array(ends).tobytes())
    return digest.hexdigest()


def _rope_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE scaling under any of its names; empty if there is none."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        found |= value if isinstance(value, dict) else {}
    kind = found.pop("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    if kind == "default":
        return {}
    numbers = {name: float(value) if type(value) is int else value for name, value in found.items()}
    return {"rope_scaling": {**numbers, "type": kind}}


def config_of(model: Any) -> dict[str, Any]:
    """Return the arguments of ``model``, including the arguments of its text model."""
    return _flat(getattr(model, "args", None) or getattr(model, "config", None))


def package_of(model: Any) -> str:
    """Return "mlx_vlm" for a model of mlx-vlm, and "mlx_lm" for every other model."""
    packages = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    return "mlx_vlm" if "mlx_vlm" in packages else "mlx_lm"


def text_model(model: Any) -> Any:
    """Return the language model inside a model of mlx-vlm, which generation calls, and every other model itself."""
    if package_of(model) == "mlx_lm":
        return model
    language = getattr(model, "language_model", model)
    inner = getattr(language, "_model", None)  # mlx-vlm 0.6 wraps models of mlx-lm
    return language if inner is None or package_of(inner) != "mlx_lm" else inner


def new_caches(model: Any) -> list[Any]:
    """Return the caches of an empty prompt for ``model``, made by the library of the model."""
    caches: list[Any] = import_module(f"{package_of(model)}.models.cache").make_prompt_cache(model)
    return caches


def _flat(args: Any) -> dict[str, Any]:
    known = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    return {**_flat(known["text_config"]), **known} if "text_config" in known else dict(known)


def kv_shapes(model: Any) -> list[tuple[int, int] | None]:
    """Return KV heads and head dim of each cache of ``model``; None for a cache without keys. Nothing is evaluated."""
    caches = new_caches(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    shapes: list[tuple[int, int] | None] = []
    for cache in leaves(caches):
        keys = getattr(cache, "keys", None)
        shapes.append((keys.shape[1], keys.shape[3]) if isinstance(keys, mx.array) and keys.ndim == 4 else None)
    return shapes


def leaves(caches: Any) -> list[Any]:
    """Return all caches of a prompt cache, including the caches inside a CacheList."""
    if isinstance(caches, (list, tuple)):
        return [leaf for entry in caches for leaf in leaves(entry)]
    return leaves(caches.caches) if hasattr(caches, "caches") else [caches]


def model_type(model: Any) -> str:
    """Return mlx-lm's name of the model's family."""
    declared = getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2]
    return str(declared)


def kv_heads(model: Any, part: Part, here: int) -> int:
    """Return the KV heads of a layer in the whole model, given the ``here`` heads of a ``part``. Parts can overlap."""
    known = config_of(model).get("num_key_value_heads")
    return min(here * part.size, known) if isinstance(known, int) and known >= here else here * part.size


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a whole model that are needed after the model was cut into parts.

    Attributes:
        identity: result of `identity`; None if not all weights are on this process.
        shapes: KV heads and head dim of each cache.
    """

    identity: Mapping[str, str] | None
    shapes: Sequence[tuple[int, int] | None]


def record_facts(model: Any, *, complete: bool) -> None:
    """Record the facts of ``model`` before it is cut. ``complete``: all of its weights are on this process."""
    # nn.Module would list the attribute among the parameters.
    object.__setattr__(model, NOTE, ModelFacts(identity(model) if complete else None, kv_shapes(model)))


def recorded_facts(model: Any) -> ModelFacts | None:
    """Return the recorded facts of ``model``, or None."""
    noted: ModelFacts | None = getattr(model, NOTE, None)
    return noted
