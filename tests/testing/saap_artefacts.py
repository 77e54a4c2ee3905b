"""Build SAAP artefacts with random centroids and query networks for tiny models, and settings that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_sparse.methods import SAAP
from mlx_sparse.methods.saap.artefact import Artefact, Layer
from mlx_sparse.model_info import identity, kv_shapes

BUCKETS = 8
PROMPT, STEPS, LAYERS = 60, 30, 2
WINDOW = "sink_tokens=1,recent_tokens=16,merge_every=8,dense_below=0"
ONLINE = f"saap:mode=online,buckets={BUCKETS},dense_layers=0,{WINDOW}"


def attn(path: Path, probes: int = BUCKETS, **changes: Any) -> SAAP:
    """Return settings that use the artefact at ``path`` for short texts. The index is rebuilt every 8 tokens."""
    values: dict[str, Any] = {
        "artefact": str(path),
        "probes": probes,
        "recent_tokens": 16,
        "merge_every": 8,
        "dense_below": 0,
        "dense_layers": 0,
    }
    return SAAP(**{**values, **changes})


def artefact_of(
    model: Any, *, buckets: int = BUCKETS, hidden: int = 24, without: tuple[int, ...] = (), **changes: Any
) -> Artefact:
    """Return a random artefact for all layers of ``model`` whose indices are not in ``without``."""
    layers = {}
    for index, shape in enumerate(kv_shapes(model)):
        if shape is None or index in without:
            continue
        heads, D = shape
        key = mx.random.key(index)
        centroids = mx.random.normal((heads, buckets, D), key=key)
        centroids = centroids / mx.linalg.norm(centroids, axis=-1, keepdims=True)
        shapes = {
            "hidden_weight": (heads, D, hidden),
            "hidden_bias": (heads, hidden),
            "out_weight": (heads, hidden, buckets),
            "out_bias": (heads, buckets),
        }
        network = {name: 0.3 * mx.random.normal(size, key=key) for name, size in shapes.items()}
        layers[index] = Layer(centroids, **network)
    values = {"sink_tokens": 1, "recent_tokens": 16, "model": identity(model)} | changes
    return Artefact(layers, buckets, hidden, **values)


def write_artefact(path: Path, model: Any, **changes: Any) -> Path:
    """Write a random artefact for ``model``. Return its path, which is ``path`` with suffix ``.saap.safetensors``."""
    path = path.with_name(f"{path.name.partition('.')[0]}.saap.safetensors")
    artefact_of(model, **changes).save(path)
    return path
