"""Decode steps and prompts as operators of torch, so that `torch.compile` and CUDA graphs capture them.

They change nothing that goes in, and their fake versions say what comes out without computing it. Arguments are not
checked beyond types: `api` does that.
"""

from __future__ import annotations

from typing import Any

import torch

from mlx_sparse.methods.block_layout import Layout
from mlx_sparse.methods.scoring_keys import KeyCodes

from . import attend, blocks, saap, sample, select, sparq


@torch.library.custom_op("mlx_sparse::sparq_decode", mutates_args=())
def sparq_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    keys_t: torch.Tensor,
    rank: int,
    top_k: int,
    local_window: int,
    component_weight: torch.Tensor | None,
    scale: float,
    left_padding: torch.Tensor | None,
    value_mean: torch.Tensor | None,
    lo: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
    centre: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of SparQ: ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``; reallocates to ``value_mean``.

    If ``keys_t`` holds the codes of a `KeyCodes`, ``lo``, ``step`` and ``centre`` are its other arrays.
    """
    return sparq.sparq_decode(
        queries.contiguous(),
        keys,
        values,
        keys_t if lo is None else KeyCodes(keys_t, lo, step, centre),
        rank=rank,
        top_k=top_k,
        local_window=local_window,
        component_weight=_packed(component_weight),
        scale=scale,
        left_padding=_packed(left_padding),
        value_mean=_packed(value_mean),
    )


@torch.library.custom_op("mlx_sparse::dense_decode", mutates_args=())
def dense_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of dense attention: ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``."""
    return attend.dense_decode(queries.contiguous(), keys, values, scale=scale, left_padding=_packed(left_padding))


@torch.library.custom_op("mlx_sparse::attend_indices", mutates_args=())
def attend_indices(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over listed keys (sparq.7): ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``.

    Entries from ``counts (B, Hkv)`` int32 on are empty slots.
    """
    return attend.attend_indices(
        queries.contiguous(), keys, values, indices.contiguous(), counts=_packed(counts), scale=scale
    )


@torch.library.custom_op("mlx_sparse::top_k_select", mutates_args=())
def top_k_select(
    scores: torch.Tensor, top_k: int, local_window: int, left_padding: torch.Tensor | None
) -> torch.Tensor:
    """The keys to attend (sparq.6): ``(B, Hkv, min(top_k, S))`` int32."""
    return select.top_k_select(scores, top_k=top_k, local_window=local_window, left_padding=_packed(left_padding))


@torch.library.custom_op("mlx_sparse::sample_prefill", mutates_args=())
def sample_prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A prompt by SampleAttention: ``out``, float32 ``lse (B, Hq, L)``, and how many key blocks each row block attends.

    The last is int32 ``(B, Hq, R)``.
    """
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    alphas = {"alpha_column": alpha_column, "alpha_slash": alpha_slash}
    return sample.sample_prefill(queries, keys, values, layout, scale=scale, **alphas)


@torch.library.custom_op("mlx_sparse::sample_scores", mutates_args=())
def sample_scores(
    queries: torch.Tensor, keys: torch.Tensor, chunks: int, block_size: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention mass of the samples by key block and by distance: two float32 ``(B, Hq, C, Nk)``."""
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    return sample.sample_scores(queries, keys, layout, scale=scale)


@torch.library.custom_op("mlx_sparse::sample_select", mutates_args=())
def sample_select(
    queries: torch.Tensor,
    keys: torch.Tensor,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """The key blocks of every row block: ``(B, Hq, R, Nk)`` int32."""
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    alphas = {"alpha_column": alpha_column, "alpha_slash": alpha_slash}
    return sample.sample_select(queries, keys, layout, scale=scale, **alphas)


@torch.library.custom_op("mlx_sparse::attend_blocks", mutates_args=())
def attend_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    listed: torch.Tensor | None,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over listed key blocks, or over all (sample.8): ``out`` and float32 ``lse (B, Hq, L)``."""
    return blocks.attend_blocks(queries, keys, values, _packed(listed), block_size=block_size, scale=scale)


@torch.library.custom_op("mlx_sparse::saap_route", mutates_args=())
def saap_route(
    queries: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    hidden_weight: torch.Tensor | None,
    hidden_bias: torch.Tensor | None,
    probes: int,
) -> torch.Tensor:
    """The buckets that each KV head visits (saap.8): ``(B, Hkv, probes)`` int32."""
    network = saap.Network(out_weight.contiguous(), _packed(out_bias), _packed(hidden_weight), _packed(hidden_bias))
    return saap.saap_route(queries.contiguous(), network, probes=probes)


@torch.library.custom_op("mlx_sparse::saap_indices", mutates_args=())
def saap_indices(
    visited: torch.Tensor,
    offsets: torch.Tensor,
    key_ids: torch.Tensor,
    length: int,
    covered: int,
    sink_tokens: int,
    capacity: int,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of a step (saap.10): ``indices (B, Hkv, capacity)`` and ``counts (B, Hkv)`` int32."""
    indices, counts, _ = saap.saap_indices(
        visited.contiguous(),
        offsets.contiguous(),
        key_ids.contiguous(),
        length=length,
        covered=covered,
        sink_tokens=sink_tokens,
        capacity=capacity,
        left_padding=_packed(left_padding),
    )
    return indices, counts


@torch.library.custom_op("mlx_sparse::saap_decode", mutates_args=())
def saap_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visited: torch.Tensor,
    offsets: torch.Tensor,
    key_ids: torch.Tensor,
    covered: int,
    sink_tokens: int,
    capacity: int,
    scale: float,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step over visited buckets: ``out (B, Hq, 1, D)``, float32 ``lse (B, Hq, 1)`` and the lists' ``counts``."""
    index = saap.Index(offsets.contiguous(), key_ids.contiguous(), covered, sink_tokens, capacity)
    return saap.saap_decode(
        queries.contiguous(),
        keys,
        values,
        visited.contiguous(),
        index,
        scale=scale,
        left_padding=_packed(left_padding),
    )


def _packed(array: torch.Tensor | None) -> torch.Tensor | None:
    """As the kernels take all but keys and values."""
    return None if array is None else array.contiguous()


def _like_queries(queries: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(queries, memory_format=torch.contiguous_format), queries.new_empty(
        queries.shape[:3], dtype=torch.float32
    )


for _operator in (sparq_decode, dense_decode, attend_indices, attend_blocks):
    _operator.register_fake(_like_queries)


@top_k_select.register_fake
def _(scores: torch.Tensor, top_k: int, *_: object) -> torch.Tensor:
    B, Hkv, S = scores.shape
    return scores.new_empty(B, Hkv, min(top_k, S), dtype=torch.int32)


@sample_prefill.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = Layout(queries.shape[2], keys.shape[2], 1, given[-2])
    return *_like_queries(queries), queries.new_empty(*queries.shape[:2], layout.row_blocks, dtype=torch.int32)


@sample_scores.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    chunks, block_size, _ = given
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    shape = (*queries.shape[:2], min(chunks, layout.row_blocks), layout.key_blocks)
    return queries.new_empty(shape, dtype=torch.float32), queries.new_empty(shape, dtype=torch.float32)


@sample_select.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, *given: Any) -> torch.Tensor:
    layout = Layout(queries.shape[2], keys.shape[2], 1, given[-2])
    return queries.new_empty(*queries.shape[:2], layout.row_blocks, layout.key_blocks, dtype=torch.int32)


@saap_route.register_fake
def _(queries: torch.Tensor, out_weight: torch.Tensor, *given: Any) -> torch.Tensor:
    return queries.new_empty(queries.shape[0], out_weight.shape[0], given[-1], dtype=torch.int32)


@saap_indices.register_fake
def _(visited: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return visited.new_empty(*visited.shape[:2], given[-2]), visited.new_empty(visited.shape[:2])


@saap_decode.register_fake
def _(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visited: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *_like_queries(queries), visited.new_empty(visited.shape[:2])
