"""Read the identity, the config and the cache shapes of a model, and hash its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .model_parts import Part

if TYPE_CHECKING:
    from mlx import nn

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
EXPERTS = ("SwitchLinear", "QuantizedSwitchLinear")  # classes of both libraries with the weights of all experts
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")


def identity(model: nn.Module) -> dict[str, str]:
    """Return ``model_type`` and a ``hash`` of the config, the RoPE scaling, and the first values of all vectors.

    The vectors are norms and biases. Quantization, conversion to bfloat16 and LoRA do not change the vectors, so the
    resulting copies have the identity of the original model. If a model has no vectors, the first values of its
    matrices are hashed. A quantized copy then has a different identity. Only a few bytes of each weight are read.
    """
    from mlx.utils import tree_flatten

    every = config_of(model)
    config = {name: value for name, value in every.items() if name in CONFIG} | _rope_scaling(every)
    family = model_type(model)
    digest = hashlib.sha256(json.dumps([family, config], sort_keys=True, default=str).encode())
    tree = dict(tree_flatten(model.parameters()))
    weights = {
        name.replace(".linear.", ".").replace(".embedding.", "."): array  # names inside an adapter
        for name, array in tree.items()
        if name.rpartition(".")[2] not in ADAPTERS and mx.issubdtype(array.dtype, mx.floating)
    }
    vectors = {name: array for name, array in weights.items() if array.ndim == 1}
    for name, array in sorted((vectors or weights).items()):
        values = array.reshape(-1)[:VALUES].astype(mx.bfloat16).astype(mx.float32)
        # float16 has fewer digits, or no value, below its smallest normal number.
        values = mx.where(mx.abs(values) < SMALLEST, 0.0, values)
        digest.update(f"{name} {array.shape}".encode() + np.array(values).tobytes())
    return {"model_type": family, "hash": digest.hexdigest()}


def weights_hash(model: nn.Module) -> str:
    """Return a hash of the whole config and of the first and last values of every weight.

    Quantization, a different dtype and fine-tuning change the measured results and the hash. Only a few bytes of each
    weight are read.
    """
    from mlx.utils import tree_flatten

    about = [model_type(model), config_of(model)]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    weights = dict(tree_flatten(model.parameters()))
    for name, array in sorted(weights.items()):
        flat = array.reshape(-1)
        ends = mx.concatenate([flat[:ENDS], flat[-ENDS:]]).view(mx.uint8)
        digest.update(f"{name} {array.shape} {array.dtype}".encode() + np.array(ends).tobytes())
    return digest.hexdigest()


def _rope_scaling(config: dict[str, object]) -> dict[str, object]:
    """Return a dict that contains the RoPE scaling of ``config`` under the key "rope_scaling".

    If ``config`` has no RoPE scaling, return an empty dict.
    """
    found: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        found |= value if isinstance(value, dict) else {}
    kind = found.pop("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    if kind == "default":
        return {}
    numbers = {name: float(value) if type(value) is int else value for name, value in found.items()}
    return {"rope_scaling": {**numbers, "type": kind}}


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the config of ``model`` as a flat dict that includes the config of its text model."""
    return _flat(getattr(model, "args", None) or getattr(model, "config", None))


def package_of(model: nn.Module) -> str:
    """Return "mlx_vlm" for a model of mlx-vlm, and "mlx_lm" for every other model."""
    packages = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    return "mlx_vlm" if "mlx_vlm" in packages else "mlx_lm"


def is_drafter(model: nn.Module) -> bool:
    """Return True if ``model`` only drafts tokens for another model of mlx-vlm."""
    return "drafters" in type(model).__module__


def text_model(model: nn.Module) -> Any:
    """Return the language model inside a model of mlx-vlm. Return every other model unchanged."""
    if package_of(model) == "mlx_lm":
        return model
    language = getattr(model, "language_model", model)
    inner = getattr(language, "_model", None)  # mlx-vlm 0.6 wraps models of mlx-lm
    return language if inner is None or package_of(inner) != "mlx_lm" else inner


def logits_of(model: nn.Module, tokens: mx.array, caches: list[object]) -> mx.array:
    """Call a model of mlx-lm, or a text model of mlx-vlm, and return the logits ``(B, L, vocabulary)``."""
    out = model(tokens, cache=caches)
    logits: mx.array = getattr(out, "logits", out)
    return logits


def new_caches(model: nn.Module) -> list[Any]:
    """Return empty caches for the layers of ``model``, made by the library that loaded the model."""
    caches: list[Any] = import_module(f"{package_of(model)}.models.cache").make_prompt_cache(model)
    return caches


def _flat(args: object) -> dict[str, Any]:
    known = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    return {**_flat(known["text_config"]), **known} if "text_config" in known else dict(known)


def weights_read(model: nn.Module) -> int:
    """Return the number of weight bytes that a decode step reads.

    If the config sets the number of active experts, count only that many experts. Count an embedding only if it is also
    the output matrix.
    """
    from mlx import nn

    modules = [module for _, module in model.named_modules()]
    config = config_of(model)
    head = {len(module.weight) for module in modules if isinstance(module, (nn.Linear, nn.QuantizedLinear))}
    active = next((config[name] for name in ACTIVE if isinstance(config.get(name), int) and config[name] > 0), None)
    found = 0
    for module in modules:
        own = sum(array.nbytes for array in module.values() if isinstance(array, mx.array))
        if type(module).__name__ in EXPERTS:
            experts = len(module.weight)
            own = own * min(active or experts, experts) // experts
        elif isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)) and not _is_output(module, config, head):
            own = 0
        found += own
    return found


def _is_output(module: nn.Module, config: dict[str, object], head: set[int]) -> bool:
    """Return True if the embedding ``module`` is also the output matrix of the model.

    The embedding must have the shape of the output matrix. Its number of rows must not be in ``head``, which contains
    the number of rows of each linear layer.
    """
    rows, columns = module.weight.shape
    columns = columns * 32 // module.bits if hasattr(module, "bits") else columns
    sizes = rows == config.get("vocab_size", rows) and columns == config.get("hidden_size", columns)
    return sizes and rows not in head


def kv_shapes(model: nn.Module) -> list[tuple[int, int] | None]:
    """Return (number of KV heads, head dim) of each cache; None if a cache has no keys. No array is evaluated."""
    caches = new_caches(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    shapes: list[tuple[int, int] | None] = []
    for cache in leaves(caches):
        keys = getattr(cache, "keys", None)
        shapes.append((keys.shape[1], keys.shape[3]) if isinstance(keys, mx.array) and keys.ndim == 4 else None)
    return shapes


def leaves(caches: object) -> list[Any]:
    """Return all caches of a prompt cache, including the caches inside a CacheList."""
    if isinstance(caches, (list, tuple)):
        return [leaf for entry in caches for leaf in leaves(entry)]
    return leaves(caches.caches) if hasattr(caches, "caches") else [caches]


def model_type(model: nn.Module) -> str:
    """Return the name of the model family in mlx-lm, such as "llama"."""
    declared = getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2]
    return str(declared)


def kv_heads(model: nn.Module, part: Part, here: int) -> int:
    """Return the number of KV heads that a layer had before sharding.

    Args:
        part: layers and heads of this rank.
        here: number of KV heads on this rank. Several ranks may have copies of the same head.
    """
    known = config_of(model).get("num_key_value_heads")
    return min(here * part.size, known) if isinstance(known, int) and known >= here else here * part.size


@dataclass(frozen=True)
class ModelFacts:
    """Identity and cache shapes of a whole model, recorded before the model is split across processes.

    Attributes:
        identity: result of `identity`; None if this process does not have all weights.
        shapes: result of `kv_shapes`.
    """

    identity: Mapping[str, str] | None
    shapes: Sequence[tuple[int, int] | None]


def record_facts(model: nn.Module, *, complete: bool) -> None:
    """Record the `ModelFacts` of ``model`` before it is split. ``complete`` is True if this process has all weights."""
    # With setattr, nn.Module would list the attribute among the parameters.
    object.__setattr__(model, NOTE, ModelFacts(identity(model) if complete else None, kv_shapes(model)))


def recorded_facts(model: nn.Module) -> ModelFacts | None:
    """Return the `ModelFacts` that `record_facts` recorded for ``model``, or None."""
    noted: ModelFacts | None = getattr(model, NOTE, None)
    return noted
