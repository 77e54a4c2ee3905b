"""Export SampleAttention as the prefill method of a file."""

from __future__ import annotations

import dataclasses

import mlx.core as mx

import mlx_sparse
from mlx_sparse.checks import ConfigError
from mlx_sparse.core.decide import NEVER
from mlx_sparse.methods import Sample

SHORT_PROMPT, SHORT_BLOCK = 160, 32  # prompt length and block size of `shortened`, in tokens


def resolve(config: Sample, max_length: int) -> Sample:
    """Return ``config`` with one setting for all context lengths, because an operator has constant attributes."""
    if config.dense_above not in ("auto", 1):
        raise ConfigError(
            "dense_above: expected auto or 1, because an exported file uses its block lists at every density, got "
            f"{config.dense_above}. Set dense_below instead."
        )
    starts = (1, *(entry.up_to for entry in config.ranges if entry.up_to <= max_length))
    found = {dataclasses.replace(config.at(S), ranges=()) for S in starts}
    if len(found) > 1:
        raise ConfigError(
            f"ranges: expected one setting for all contexts up to {max_length} tokens, which a file has, got "
            f"{len(found)}. Set alpha_column, alpha_slash and chunks instead."
        )
    below = config.shortest_context()
    if below >= NEVER:
        raise ConfigError(
            "dense_below: expected the number of keys from which prefill is sparse, got auto. Without tuned ranges, "
            "auto is always dense."
        )
    return dataclasses.replace(found.pop(), dense_below=below)


def attributes(config: Sample) -> dict[str, float]:
    """Return the attributes of the SampleAttention operators except ``scale``."""
    return {**config.parameters(), "dense_prompt_below": int(config.dense_below)}


def attend(config: Sample, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Compute a prefill chunk with MLX for verification. Return its output ``(B, Hq, L, D)``."""
    made: mx.array = mlx_sparse.sample_attention(
        queries, keys, values, **config.parameters(), scale=scale, backend="ops"
    )
    return made


def shortened(config: Sample) -> Sample:
    """Return settings for verification that make a prefill of `SHORT_PROMPT` random tokens skip blocks."""
    return dataclasses.replace(
        config,
        alpha_column=config.alpha_column / 2,
        alpha_slash=config.alpha_slash / 2,
        chunks=min(config.chunks, 2),
        block_size=SHORT_BLOCK,
        dense_below=0,
    )
