"""Compute the default settings of an exported file from measurements on two CPU cores."""

from __future__ import annotations

import math

from mlx_sparse.core.base import Method
from mlx_sparse.core.decide import NEVER, Facts, decide
from mlx_sparse.methods import SAAP, SparQ

# Defaults of files for every runtime that differ from `--attn`, because only native kernels read int4 scoring keys.
FOR_ALL: dict[str, Method] = {"sparq": SparQ(key_bits=16)}
LANES = (4096, 2048, 1024, 512, 256, 128, 64)
# Number of elements that a sparse step must skip to be faster than dense attention, if both are function bodies: per
# layer for SparQ, per KV head for SAAP. The many small nodes of the body cost as much as reading these elements.
ENOUGH_SAVED, SAAP_ENOUGH_SAVED = 1 << 21, 1 << 20
# With native kernels, SparQ's steps are not slower from this multiple of `top_k` keys.
NATIVE_CONTEXT = 4
BUCKET_READ_COST = 0.2  # cost of reading the bucket of a key in SAAP's function body, relative to attending to the key
# Tokens per prefill chunk. SampleAttention scores one row block per chunk, so its chunks are as long as in mlx-lm.
PREFILL_CHUNK, SAMPLE_CHUNK = 512, 2048


def lanes_for(length: int) -> int:
    """Return the number of keys per chunk of component-major keys, for caches of ``length`` tokens.

    Longer chunks are faster to read, but the caches consist of whole chunks. The result is the longest chunk that makes
    the caches at most 1/16 longer than ``length``. If there is no such chunk, the result is the shortest chunk.
    """
    return next((lanes for lanes in LANES if -length % lanes * 16 <= length), LANES[-1])


def dense_below(config: SparQ, heads: int, D: int, *, native: bool) -> int:
    """Return the number of keys below which SparQ decode steps are dense, as set by ``config.dense_below``.

    If the setting is "auto", the number is an estimate for layers with ``heads`` KV heads of head dim ``D``. At this
    length, SparQ becomes faster than dense attention: as native kernels if ``native`` is set, else as function bodies.
    """
    if native:
        modeled = NATIVE_CONTEXT * config.attended
    else:
        modeled = max(config.modeled_context(None), ENOUGH_SAVED // (heads * (2 * D - config.rank)))
    return decide(config, Facts(estimate=modeled), ()).crossover


def saap_dense_below(config: SAAP, D: int, buckets: int, network: int) -> int:
    """Return the number of keys below which SAAP decode steps are dense, as set by ``config.dense_below``.

    If the setting is "auto", the number is an estimate, which assumes that all ``buckets`` have equal size.
    ``D`` is the head dim, and ``network`` is the number of query network weights per KV head.
    """
    saved = 2 * D * (1 - BUCKET_READ_COST - config.probes / buckets)  # per key, except the sink and recent tokens
    modeled = config.attended + 1 + math.ceil((SAAP_ENOUGH_SAVED + network) / saved) if saved > 0 else NEVER
    return decide(config, Facts(estimate=modeled), ()).crossover
