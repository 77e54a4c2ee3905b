"""List the reasons why calls or layers stay dense. The report prints, for example, "dense calls: 12 in prefill"."""

from __future__ import annotations

# A call with more queries than this is prefill. A call with fewer queries is a verification step or a short prompt.
VERIFY_QUERIES = 16

# Properties of a layer.
NO_CACHE = "without a KV cache"
OTHER_HEAD_DIMS = "with key and value head dims that differ"
OTHER_ROWS = "with keys or values that differ from the KV cache"
LATENT = "with multi-head latent attention (MLA)"
SINKS = "with attention sinks"
OWN_ATTENTION = "with custom attention code or without attention"

# Properties of a call.
ARRAY_MASK = "with an array mask"
NOT_CAUSAL = "without a causal mask"
A_FEW = "in multi-token decode (verification step or short prompt)"
PROMPT = "in prefill"
UNTUNED = "in prefill without tuned ranges or dense_below (`mlx-sparse tune` finds ranges)"
LAST_OF_PROMPT = "for the last token of a prompt"
NO_DECODE = "with a single query (no decode method)"
CHECKED = "in lossless mode (verification or decoding without drafts)"
OWN_KERNEL = "in a kernel of the model"
UNKNOWN_PADDING = "on a batch with unknown right padding"
SHORT_SEQUENCES = "for the short sequences of a batch"

# Calls in which sparse attention would save nothing.
NOTHING_SAVED = "where selecting keys would cost more than it saves"
TOO_FULL = "with too many selected key blocks"
ALPHA_OF_ONE = "with alpha_column=1 or alpha_slash=1"
ALL_KEPT = "with all earlier keys selected"
ALL_SAMPLED = "with sampled queries in every row block"
LARGE_SAMPLE = "with more than an eighth of the queries sampled"

# H2O.
UNCOUNTED = "over keys with unknown attention scores"

# Properties of layers that exclude SAAP.
FIRST_LAYERS = "at the start of the model (dense_layers)"
NOT_IN_ARTEFACT = "without centroids in the artefact"
NOT_WRITTEN = "with keys written by another layer"
ROPE_NOT_A_MODULE = "with RoPE outside of a separate module"
CHANGED_AFTER_ROPE = "with a norm or another operation after RoPE"
ROPE_BY_LENGTH = "with RoPE that depends on the length (dynamic NTK), and unrecorded pre-RoPE keys"
ROPE_NOT_INVERTIBLE = "with RoPE that is not invertible, and unrecorded pre-RoPE keys"


SHORTER = "over fewer than "  # start of the reason that `shorter_than` returns


def shorter_than(keys: int) -> str:
    """Return the reason why a context stays dense if it is shorter than ``keys``, the crossover length in keys."""
    return f"{SHORTER}{keys:,} keys"


def other_cache(name: str) -> str:
    """Return the reason why a layer stays dense if no method supports its cache class ``name``."""
    return f"with a sliding window ({name})" if "Rotating" in name else f"with a {name}"
