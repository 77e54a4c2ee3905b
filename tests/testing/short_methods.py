"""Write every method of the registry as text for ``--attn``, with settings that are sparse over a few dozen keys."""

from __future__ import annotations

import dataclasses
from typing import Any

from saap_artefacts import BUCKETS

from mlx_sparse.methods import METHODS

SPARSE = [name for name, method in METHODS.items() if method.sparse]
# By name of the setting. A method without a setting of a name does not get it.
SETTINGS = {
    **{"rank": 4, "top_k": 16, "page_size": 4, "dense_below": 0},
    **{"mode": "online", "buckets": BUCKETS, "probes": 3, "recent_tokens": 16, "merge_every": 8, "dense_layers": 0},
    **{"block_size": 32, "alpha_column": 0.3, "alpha_slash": 0.3, "window": 0.3},
    **{"share": 0.3, "chunk": 16, "samples": 4, "exact_tail": 3},
    **{"bucket_size": 16, "sampled_keys": 8, "exact_rows": 32},
}


def short(name: str, **changes: Any) -> str:
    """Return the text of a method. ``changes`` add or replace settings."""
    known = {field.name for field in dataclasses.fields(METHODS[name])}
    given = {key: value for key, value in SETTINGS.items() if key in known} | changes
    return f"{name}:{','.join(f'{key}={value}' for key, value in given.items())}"


def having(*settings: str) -> list[str]:
    """Return the names of the decode methods that have all ``settings``."""
    found = [name for name in SPARSE if METHODS[name].stage == "decode"]
    return [name for name in found if {*settings} <= {field.name for field in dataclasses.fields(METHODS[name])}]
