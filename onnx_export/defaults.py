"""Choose the defaults of a file from the measurements in docs/results/onnx.md."""

from __future__ import annotations

import math

from mlx_sparse.methods import NEVER, SAAP, Method, SparQ

# Defaults of files that differ from `--attn`: only native kernels can read quantized scoring keys.
IN_FILES: dict[str, Method] = {"sparq": SparQ(key_bits=16)}
LANES = (4096, 2048, 1024, 512, 256, 128, 64)
# Elements per KV head that a step must save before the function body of SparQ or SAAP is faster than dense attention:
# its many small nodes cost as much.
ENOUGH_SAVED, SAAP_ENOUGH_SAVED = 1 << 19, 1 << 20
LOOKED_AT = 0.2  # cost of reading the bucket of a key in SAAP's function body, relative to attending to the key
# Tokens of a prefill chunk. SampleAttention scores one row block per chunk, so its chunks are as long as mlx-lm's.
CHUNK, SAMPLE_CHUNK = 512, 2048
# Keys below which prefill stays dense if `dense_below` is "auto". At this length and above SampleAttention was faster
# than dense attention with half of the blocks attended, both as function bodies and with native kernels.
SAMPLE_BELOW = 2048


def lanes_for(length: int) -> int:
    """Return the keys per chunk of component-major keys for caches of ``length`` tokens.

    Long chunks are read fastest. Rounding up to whole chunks may make the caches a sixteenth larger.
    """
    return next((lanes for lanes in LANES if -length % lanes * 16 <= length), LANES[-1])


def dense_below(config: SparQ, D: int) -> int:
    """Return the number of keys below which a decode step stays dense, with "auto" resolved.

    Function bodies and native kernels must give the same result, so both use the same number. Below it function bodies
    are slower than dense attention. Native kernels are already faster at about 500 keys.
    """
    shortest = config.shortest_context()
    if config.dense_below != "auto" or config.top_k < SparQ.top_k:
        return shortest
    return max(shortest, ENOUGH_SAVED // (2 * D - config.rank))  # elements saved for each key


def saap_dense_below(config: SAAP, D: int, buckets: int, network: int) -> int:
    """Return the number of keys below which a SAAP decode step stays dense, with "auto" resolved.

    The model assumes buckets of equal size and ``network`` weights that every step reads.
    """
    shortest = config.attended + 1
    if config.dense_below != "auto":
        return max(shortest, int(config.dense_below))
    if config.recent_tokens < SAAP.recent_tokens:
        return shortest
    saved = 2 * D * (1 - LOOKED_AT - config.probes / buckets)  # for each key beyond those that are always attended to
    return shortest + math.ceil((SAAP_ENOUGH_SAVED + network) / saved) if saved > 0 else NEVER
