"""One frozen dataclass per method, which answers for itself: what it is, its settings, when it pays, what it moves.

``"sparq:rank=16,top_k=64"`` is the text form: ``METHOD[:key=value,...][+METHOD...]``. `parse` reads it, ``str(method)``
prints it. `METHODS` has them all by name; `mlx_sparse.methods.table` says which function runs each of them where, and
what keeps what they keep beside a cache.
"""

from .base import NEVER, QK_NORMS, Dense, Method, Prefill, Step
from .bigbird import BigBird
from .cost import ENOUGH_SAVED, SAMPLE_PAYS_FROM, SAMPLE_PAYS_UP_TO, nvidia_kind
from .flexgen import FlexGen
from .h2o import H2O
from .minference import MInference
from .oracle_top_k import OracleTopK
from .saap import SAAP
from .sample import Sample, SampleRange
from .sparq import SparQ
from .streaming import Streaming, StreamingPrefill
from .text import MAX_TOML_BYTES, METHODS, load_toml, parse, read_toml, split_methods

__all__ = [
    "ENOUGH_SAVED",
    "H2O",
    "MAX_TOML_BYTES",
    "METHODS",
    "NEVER",
    "QK_NORMS",
    "SAAP",
    "SAMPLE_PAYS_FROM",
    "SAMPLE_PAYS_UP_TO",
    "BigBird",
    "Dense",
    "FlexGen",
    "MInference",
    "Method",
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
    "read_toml",
    "split_methods",
]
