"""Describe the model families that can be exported.

Most differences (biases, q/k norms, fused projections, position encodings, windows, tied embeddings) are read from the
modules that mlx-lm builds. All other properties are in the table `FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import rope_utils
from mlx_lm.utils import MODEL_REMAPPING

from mlx_sparse.checks import ConfigError, did_you_mean

from .quantized import BITS, REMAKE, REMEDY


@dataclass(frozen=True)
class Family:
    """Properties of a model family that cannot be read from mlx-lm's modules.

    Attributes:
        activation: activation of the MLP's gate: silu, gelu or gelu_tanh.
        norm_shift: number added to the weights of all norms.
        embedding_scale: function from the model's arguments to the factor that multiplies the embeddings.
        after_attention: name of the norm of the attention output, or None.
        before_mlp: name of the norm of the MLP input.
        after_mlp: name of the norm of the MLP output, or None.
    """

    activation: str = "silu"
    norm_shift: float = 0.0
    embedding_scale: Callable[[Any], float] = lambda args: 1.0
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None


def _root(args: Any) -> float:
    return math.sqrt(args.hidden_size)


def _root_in_bfloat16(args: Any) -> float:
    return float(np.array(mx.array(_root(args), mx.bfloat16).astype(mx.float32)))


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(activation="gelu", norm_shift=1.0, embedding_scale=_root),
    "gemma3_text": Family(
        activation="gelu_tanh",
        norm_shift=1.0,
        embedding_scale=_root_in_bfloat16,
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    "phi3": Family(),
    "smollm3": Family(),
    "glm4": Family(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
}


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family of a model from its config.json."""
    named = config.get("model_type")
    family = FAMILIES.get(MODEL_REMAPPING.get(str(named), str(named)))
    if family is None or "model_file" in config:
        known = sorted([*FAMILIES, *(alias for alias, name in MODEL_REMAPPING.items() if name in FAMILIES)])
        raise ConfigError(
            f"--model: expected one of the architectures {', '.join(known)}, got {named}.{did_you_mean(named, known)}"
        )
    return family


@dataclass(frozen=True)
class Rope:
    """A rotary position encoding, which rotates component pair i by ``position * scale * frequencies[i]`` radians.

    Attributes:
        frequencies: rotation frequencies of n component pairs, in radians per position. Only the first ``2 * n``
            components of a head are rotated.
        scale: factor by which positions are multiplied.
        factor: factor by which rotated components are multiplied.
        traditional: True if the two components of a pair are adjacent, False if their distance is n.
    """

    frequencies: tuple[float, ...]
    scale: float
    factor: float
    traditional: bool


def rope_of(module: nn.Module) -> Rope | None:
    """Return the parameters of an attention layer's ``rope`` module, or None if the layer has no RoPE."""
    kind = type(module).__name__
    if kind == "NoPE":
        return None
    if isinstance(module, nn.RoPE):
        half = module.dims // 2
        if not (half > 0 and module.base > 0):
            raise ConfigError(
                "--model: expected rope_theta above 0 and at least 2 rotated components, got "
                f"{module.base} and {module.dims}."
            )
        # Compute in float32 like MLX, because other rounding would change the angles of distant positions.
        frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(module.base) / half))
        return Rope(tuple(np.array(frequencies).tolist()), module.scale, 1.0, module.traditional)
    factors: dict[type, Callable[[], tuple[float, bool]]] = {
        rope_utils.Llama3RoPE: lambda: (1.0, module.traditional),
        rope_utils.ProportionalRoPE: lambda: (1.0, module.traditional),
        rope_utils.YarnRoPE: lambda: (module.mscale, module.traditional),
        rope_utils.SuScaledRoPE: lambda: (module._scale, False),
    }
    if type(module) not in factors:
        raise ConfigError(
            "--model: expected position encodings of type default, linear, llama3, yarn, longrope or proportional, "
            f"got {kind}."
        )
    factor, traditional = factors[type(module)]()
    return Rope(tuple(np.array(mx.reciprocal(module._freqs)).tolist()), 1.0, float(factor), bool(traditional))


def window_of(layer: nn.Module, model: nn.Module) -> int:
    """Return the number of keys in a layer's sliding window, or 0 if the layer attends to all keys."""
    if getattr(layer, "use_sliding", False):
        window = model.model.sliding_window
    elif getattr(layer.self_attn, "is_sliding", False):
        window = model.args.sliding_window
    else:
        return 0
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f"--model: expected sliding_window to be at least 1, got {window}.")
    return window


def head_dim(attention: nn.Module) -> int:
    """Return the head dimension of an attention layer."""
    if "qkv_proj" in attention:
        return int(attention.qkv_proj.weight.shape[0] // (attention.n_heads + 2 * attention.n_kv_heads))
    return int(attention.k_proj.weight.shape[0]) // int(attention.n_kv_heads)


def check_modules(model: nn.Module, *, dequantize: bool) -> None:
    """Check the modules and the quantization of a model before anything is written."""
    for name, module in dict(tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)).items():
        kind = type(module).__name__
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            if module.mode != "affine":
                raise ConfigError(f"{name}: expected affine quantized weights, got mode {module.mode}. {REMAKE}")
            if module.bits not in BITS and not dequantize:
                raise ConfigError(f"{name}: expected a weight of 4 or 8 bits, got {module.bits}. {REMEDY}")
        elif not (isinstance(module, (nn.Linear, nn.Embedding)) or kind == "RMSNorm" or name.endswith(".rope")):
            raise ConfigError(f"--model: expected modules that the exporter supports, got {kind} at {name}.")
