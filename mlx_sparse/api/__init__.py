"""The public functions on MLX arrays: arguments are checked here, then the backend's function runs.

Shapes: ``queries (B, Hq, L, D)``, ``keys`` and ``values (B, Hkv, S, D)`` with the current tokens included; query i of L
sits at position ``S - L + i``; ``left_padding (B,)`` int is the first valid key of each row. Every function returns
``out (B, Hq, L, D)`` in the type of ``queries`` and, with ``return_stats=True``, a `Stats`; ``return_stats="mass"``
also measures the retained attention mass, which costs one dense pass over the keys. Decode methods attend densely when
there is more than one query (``L > 1``) or nothing to leave out.

All raise `ShapeError` for arrays that do not fit together, `ConfigError` for parameters out of range and
`BackendUnavailable` for a backend that cannot run here.
"""

from .decode import (
    attend_indices,
    dense_attention,
    flexgen_attention,
    h2o_attention,
    h2o_scores,
    oracle_top_k_attention,
    sparq_attention,
    streaming_attention,
)
from .prefill import (
    attend_blocks,
    bigbird_attention,
    minference_attention,
    sample_attention,
    sample_select,
    streaming_prefill_attention,
)
from .saap import saap_assign, saap_attention, saap_route

__all__ = [
    "attend_blocks",
    "attend_indices",
    "bigbird_attention",
    "dense_attention",
    "flexgen_attention",
    "h2o_attention",
    "h2o_scores",
    "minference_attention",
    "oracle_top_k_attention",
    "saap_assign",
    "saap_attention",
    "saap_route",
    "sample_attention",
    "sample_select",
    "sparq_attention",
    "streaming_attention",
    "streaming_prefill_attention",
]
