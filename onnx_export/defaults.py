"""Choose the defaults of a file by the measurements in docs/results/onnx.md."""

from __future__ import annotations

import math

from mlx_sparse.methods import NEVER, SAAP, Method, SparQ

# Where a file's methods differ from those of `--attn`: only native kernels take scores from codes of the keys.
IN_FILES: dict[str, Method] = {"sparq": SparQ(key_bits=16)}
LANES = (4096, 2048, 1024, 512, 256, 128, 64)
# Elements per KV head that a step must save before the body of SparQ or SAAP pays: its many small nodes cost as much.
ENOUGH_SAVED, SAAP_ENOUGH_SAVED = 1 << 19, 1 << 20
LOOKED_AT = 0.2  # what it costs SAAP's body to look at the bucket of a key, relative to attending to the key
# Tokens of a prompt that go in at a time. A sampled one is scored piece by piece, at the cost of a row block each, so
# that they are as long as mlx-lm's.
PIECE, SAMPLE_PIECE = 512, 2048
# Keys below which prompts stay dense where that is "auto": from here on SampleAttention was faster than dense attention
# of its kind, bodies and native kernels alike, with half of the blocks attended.
SAMPLE_BELOW = 2048


def lanes_for(length: int) -> int:
    """Return the keys per chunk of component-major keys for caches of ``length`` tokens.

    Long runs are read fastest; whole chunks may add a sixteenth to the caches.
    """
    return next((lanes for lanes in LANES if -length % lanes * 16 <= length), LANES[-1])


def dense_below(config: SparQ, D: int) -> int:
    """Return the keys below which a decode step stays dense, where that is "auto".

    The number is the same for bodies and native kernels, which must give the same answer. Bodies are slower than dense
    attention below it; native kernels are faster from some 500 keys on.
    """
    shortest = config.shortest_context()
    if config.dense_below != "auto" or config.top_k < SparQ.top_k:
        return shortest
    return max(shortest, ENOUGH_SAVED // (2 * D - config.rank))  # elements saved for each key


def saap_dense_below(config: SAAP, D: int, buckets: int, network: int) -> int:
    """Return the same for SAAP with equal buckets; every step reads ``network`` weights."""
    shortest = config.attended + 1
    if config.dense_below != "auto":
        return max(shortest, int(config.dense_below))
    if config.recent_tokens < SAAP.recent_tokens:
        return shortest
    saved = 2 * D * (1 - LOOKED_AT - config.probes / buckets)  # for each key beyond those that are always attended to
    return shortest + math.ceil((SAAP_ENOUGH_SAVED + network) / saved) if saved > 0 else NEVER
