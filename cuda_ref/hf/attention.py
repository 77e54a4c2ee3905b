"""Implement ``attn_implementation="sparq"``: run SparQ from the crossover length on and dense attention below it."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from mlx_sparse.api.call_report import Counts
from mlx_sparse.checks import ConfigError
from mlx_sparse.core.base import QK_NORMS, Step
from mlx_sparse.core.decide import Facts, chunk_refusal, decide, nvidia_kind, refusal
from mlx_sparse.core.stats import dense_elements
from mlx_sparse.methods import SparQ

from .. import interpreted
from ..checks import DTYPES, HEAD_DIMS, LARGEST_GROUP
from ..launchers import configs
from . import require
from .buffers import Padding, mask, padding_of
from .cache import Origin, SparQCache, dense_layer, origin_of

NAME = "sparq"


def register() -> None:
    """Register ``attn_implementation="sparq"`` with transformers. Call this function before you load the model.

    Raises:
        BackendUnavailable: the Triton kernels cannot run on this machine.
    """
    require()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement transformers' attention interface for ``query (B, Hq, L, D)``, ``key`` and ``value (B, Hkv, S, D)``.

    Returns:
        ``out (B, L, Hq, D)`` and None in place of the attention weights.
    """
    origin = origin_of(key)
    dense = partial(_dense, module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if origin is None:
        if query.shape[2] == 1 < key.shape[2]:
            _warn_once()
        return dense()
    padding = None if attention_mask is None else padding_of(attention_mask)
    facts = Facts(query.shape[1] // key.shape[1], sinks=kwargs.get("s_aux") is not None)
    layer = _layer_reasons(origin, module, query, key, value, facts, kwargs)
    call = _call_reasons(origin, query, key, attention_mask, padding, facts, dropout)
    if (reason := next(chain(layer, call), None)) is not None:
        origin.cache.report.add(Counts(dense_calls=Counter([reason])))
        return dense()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    config = origin.cache.attn
    out, lse = origin.layer.attend(query, config, scale=scale, padding=padding)
    origin.cache.report.add(_counts(config, query, key))
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        # An attention sink adds a logit without a value to the softmax.
        out = (out * torch.sigmoid(lse - sinks.float()[None, :, None])[..., None]).to(out.dtype)
    return out.transpose(1, 2), None


def _counts(config: SparQ, query: torch.Tensor, key: torch.Tensor) -> Counts:
    B, Hkv, S, D = key.shape
    item, G = key.element_size(), query.shape[1] // Hkv
    moved = config.step_bytes(S, D, itemsize=item, row_bytes=D * item, G=G, backend="triton")
    return Counts(1, modeled_bytes=B * Hkv * moved, dense_bytes=B * Hkv * item * dense_elements(S, D))


def _resolve(cache: SparQCache, module: torch.nn.Module, *, grouped: bool) -> SparQ:
    """Replace "auto" in the SparQ settings of ``cache`` by values for this model, and return the settings."""
    attn = cache.attn
    if attn.component_score == "auto" or (attn.component_score == "query_key" and attn.reallocate == "auto"):
        cache.attn = attn.for_model(qk_norm=has_qk_norm(module), grouped=grouped)
        cache.report.attn = str(cache.attn)
    return cache.attn


def has_qk_norm(module: torch.nn.Module) -> bool:
    """Return True if the attention module normalizes its queries or keys."""
    return any(
        name.rpartition(".")[2] in QK_NORMS and not isinstance(child, torch.nn.Identity)
        for name, child in module.named_modules()
    )


def _layer_reasons(
    origin: Origin,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    facts: Facts,
    kwargs: dict[str, Any],
) -> Iterator[str]:
    """Yield the reasons why the layer of ``origin`` always attends densely. The caller uses the first reason only."""
    if (reason := dense_layer(origin.layer)) is not None:
        yield reason
    if not origin.current(value):
        yield "with keys or values that differ from the KV cache"
    low, high = HEAD_DIMS
    D = query.shape[-1]
    if not key.shape[-1] == value.shape[-1] == D:
        yield "with different head dims of queries, keys and values"
    if D % 8 != 0 or not low <= D <= high:
        yield f"with a head dim of {D}"
    if origin.cache.attn.rank > D:
        yield f"with a head dim of {D}, less than the rank"
    if query.shape[1] > LARGEST_GROUP * key.shape[1]:
        yield f"with more than {LARGEST_GROUP} query heads per KV head"
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        yield "with mixed types, or a type other than float32, float16 and bfloat16"
    if kwargs.get("softcap") is not None:
        yield "with soft-capped scores"
    if (reason := refusal(_resolve(origin.cache, module, grouped=facts.G > 1), facts)) is not None:
        yield reason
    if kwargs.get("position_bias") is not None:
        yield "with a position bias"


def _call_reasons(
    origin: Origin,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    padding: Padding | None,
    facts: Facts,
    dropout: float,
) -> Iterator[str]:
    """Yield the reasons why an attention call is dense. Checks that wait for the GPU come last."""
    L, S = query.shape[2], key.shape[2]
    if L > 1 and (reason := chunk_refusal(None, facts, L, S)) is not None:
        yield reason
    if not (query.is_cuda or interpreted()):
        yield "on a device without Triton"
    config = origin.cache.attn
    known = replace(facts, estimate=_estimate(origin.cache, config, key, facts.G))
    if (reason := decide(config, known, [S]).reason) is not None:
        yield reason
    if dropout > 0:
        yield "with dropout"
    if torch.is_grad_enabled() and query.requires_grad:
        yield "with gradients"
    if attention_mask is not None and padding is None:
        yield "with a custom attention mask"
    if padding is not None and padding.first is None:
        yield "with a mask that is not left padding"


def _estimate(cache: SparQCache, config: SparQ, key: torch.Tensor, G: int) -> int:
    """Return the crossover length in keys that the cost model estimates for a layer, unless `dense_below` sets it."""
    B, Hkv, _, D = key.shape
    step = Step(B * Hkv, G, D, key.element_size(), gpu_kind(key.device))
    if step not in cache.thresholds:
        cache.thresholds[step] = config.shortest_context(step)
    return cache.thresholds[step]


def gpu_kind(device: torch.device) -> str:
    """Return the name of the GPU type for the cost model (see `Step`), or an empty string for the CPU."""
    return nvidia_kind(configs.capability(device)) if device.type == "cuda" else ""


@cache
def _warn_once() -> None:
    warnings.warn(
        "attn_implementation='sparq' attends densely: these keys are not a SparQCache's. Pass "
        "past_key_values=SparQCache(model.config); a model that changes what its cache returns stays dense.",
        stacklevel=3,
    )


def _dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run transformers' sdpa, or the model's eager attention if the model uses soft caps or attention sinks."""
    given = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if not given:
        dense: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return dense
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ConfigError(
            f"attn_implementation: expected a model without {given[0]}, got {type(module).__name__}. "
            "Load it with another attn_implementation."
        )
    B, _, L, _ = query.shape
    S = key.shape[2]
    if attention_mask is None and getattr(module, "is_causal", True):
        attention_mask = eager_mask(B, L, S, q_offset=S - L, dtype=query.dtype, device=query.device)
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.where(attention_mask, 0.0, lowest).to(query.dtype)
    result: tuple[torch.Tensor, torch.Tensor] = eager(module, query, key, value, attention_mask, **kwargs)
    return result
