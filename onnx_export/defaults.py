"""Compute the default settings of an exported file from measurements on two CPU cores."""

from __future__ import annotations

import math

from mlx_sparse.core.base import Method
from mlx_sparse.core.decide import NEVER, Facts, decide
from mlx_sparse.methods import SAAP, SparQ

# Defaults that differ from `--attn`, because only native kernels can read quantized scoring keys.
IN_FILES: dict[str, Method] = {"sparq": SparQ(key_bits=16)}
LANES = (4096, 2048, 1024, 512, 256, 128, 64)
# Number of elements per KV head that a sparse step must skip to be faster than dense attention, if both are function
# bodies. The many small nodes in the function body of SparQ or SAAP cost as much as reading this number of elements.
ENOUGH_SAVED, SAAP_ENOUGH_SAVED = 1 << 19, 1 << 20
BUCKET_READ_COST = 0.2  # cost of reading the bucket of a key in SAAP's function body, relative to attending to the key
# Tokens per prefill chunk. SampleAttention scores one row block per chunk, so its chunks are as long as in mlx-lm.
PREFILL_CHUNK, SAMPLE_CHUNK = 512, 2048
# Number of keys below which prefill stays dense if `dense_below` is "auto". At this length and longer, SampleAttention
# over half of the blocks was faster than dense attention, both as function bodies and with native kernels.
SAMPLE_BELOW = 2048


def lanes_for(length: int) -> int:
    """Return the number of keys per chunk of component-major keys, for caches of ``length`` tokens.

    Longer chunks are faster to read, but the caches consist of whole chunks. The result is the longest chunk that makes
    the caches at most 1/16 longer than ``length``. If there is no such chunk, the result is the shortest chunk.
    """
    return next((lanes for lanes in LANES if -length % lanes * 16 <= length), LANES[-1])


def dense_below(config: SparQ, D: int) -> int:
    """Return the number of keys below which SparQ decode steps are dense, as set by ``config.dense_below``.

    If the setting is "auto", the number is an estimate. At this length, SparQ's function body becomes faster than
    dense attention for head dim ``D``. If native kernels run, SparQ becomes faster at only about 500 keys. The estimate
    is nevertheless the same, so that the result of a file does not depend on the kernels that run.
    """
    modeled = max(config.modeled_context(None), ENOUGH_SAVED // (2 * D - config.rank))  # elements saved per key
    return decide(config, Facts(estimate=modeled), ()).crossover


def saap_dense_below(config: SAAP, D: int, buckets: int, network: int) -> int:
    """Return the number of keys below which SAAP decode steps are dense, as set by ``config.dense_below``.

    If the setting is "auto", the number is an estimate, which assumes that all ``buckets`` have equal size.
    ``D`` is the head dim, and ``network`` is the number of query network weights per KV head.
    """
    saved = 2 * D * (1 - BUCKET_READ_COST - config.probes / buckets)  # per key, except the sink and recent tokens
    modeled = config.attended + 1 + math.ceil((SAAP_ENOUGH_SAVED + network) / saved) if saved > 0 else NEVER
    return decide(config, Facts(estimate=modeled), ()).crossover
