"""Reasons why a call or a layer was dense. The report prints ``"12 " + reason`` after "dense calls:"."""

from __future__ import annotations

# More queries than this in one call are prefill. Fewer queries are a verification step or a short turn.
VERIFY_QUERIES = 16

# Properties of a layer.
NO_CACHE = "without a KV cache"
OTHER_HEAD_DIMS = "with key and value head dims that differ (MLA)"
OTHER_ROWS = "with keys or values that are not the cache's (MLA)"
SINKS = "with attention sinks"
OWN_ATTENTION = "that compute attention themselves or have none"
KEEPS_A_STATE = "that keep a state of fixed size and no keys"  # in the table of models
NO_ATTENTION = "without attention"

# Properties of a call.
ARRAY_MASK = "with an array mask"
NOT_CAUSAL = "without a causal mask"
A_FEW = "in multi-token decode (verification step or short prompt)"
PROMPT = "in prefill"
LAST_OF_PROMPT = "of the prompt's last token"
NO_DECODE = "of a single query (no decode method)"
CHECKED = "that verify drafts, or decode without drafts (lossless)"
OWN_KERNEL = "in a kernel of the model"
UNKNOWN_PADDING = "of a batch padded on the right by an unknown number"
SHORT_SEQUENCES = "of the short sequences of a batch"

# Calls in which sparse attention would save nothing.
NOTHING_SAVED = "whose selection of keys would cost more than it saves"
TOO_FULL = "whose sample selects too many blocks"
ALPHA_OF_ONE = "with an alpha of 1"
ALL_SAMPLED = "with a sample in every row block"
BETWEEN_RANKS = "that begins inside a block of a shard"
LARGE_SAMPLE = "with a sample of more than an eighth of the queries"

# H2O.
UNCOUNTED = "over keys with unknown attention scores"

# SAAP: its layers and their pre-RoPE tensors.
FIRST_LAYERS = "among the first (dense_layers)"
NOT_IN_ARTEFACT = "that the artefact does not have"
NOT_WRITTEN = "with keys that another layer wrote"
ROPE_NOT_A_MODULE = "with a rope that is no module of its own"
CHANGED_AFTER_ROPE = "with a norm or another change after RoPE"
ROPE_BY_LENGTH = "with a rope that depends on the length (dynamic NTK), of keys that were not recorded"
ROPE_NOT_INVERTIBLE = "with a rope that is not invertible, of keys that were not recorded"


def shorter_than(keys: int) -> str:
    """Return the reason why a context shorter than ``keys`` keys stays dense."""
    return f"over fewer than {keys:,} keys"


def other_cache(name: str) -> str:
    """Return the reason for a cache of a class that no method supports."""
    return f"with a sliding window ({name})" if "Rotating" in name else f"with a {name}"
