"""One frozen dataclass per method: validate, parse, print, presets, TOML.

``"sparq:rank=16,top_k=64"`` is the text form: METHOD[:key=value,...][+METHOD...]. `parse` reads it, ``str(config)``
prints it.
"""

from .base import NEVER, QK_NORMS, Dense, MethodConfig, Step
from .decode import ENOUGH_SAVED, H2O, MAX_BUCKETS, SAAP, FlexGen, OracleTopK, SparQ, Streaming, nvidia_kind
from .prefill import (
    SAMPLE_PAYS_FROM,
    SAMPLE_PAYS_UP_TO,
    BigBird,
    MInference,
    Prefill,
    Sample,
    SampleRange,
    StreamingPrefill,
)
from .text import CONFIGS, MAX_TOML_BYTES, load_toml, parse, split_methods

__all__ = [
    "CONFIGS",
    "ENOUGH_SAVED",
    "H2O",
    "MAX_BUCKETS",
    "MAX_TOML_BYTES",
    "NEVER",
    "QK_NORMS",
    "SAAP",
    "SAMPLE_PAYS_FROM",
    "SAMPLE_PAYS_UP_TO",
    "BigBird",
    "Dense",
    "FlexGen",
    "MInference",
    "MethodConfig",
    "OracleTopK",
    "Prefill",
    "Sample",
    "SampleRange",
    "SparQ",
    "Step",
    "Streaming",
    "StreamingPrefill",
    "load_toml",
    "nvidia_kind",
    "parse",
    "split_methods",
]
