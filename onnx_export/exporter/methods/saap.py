"""Export SAAP decoding with the centroids and query networks of an artefact."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx

import mlx_sparse
from mlx_sparse.checks import ConfigError
from mlx_sparse.methods import SAAP
from mlx_sparse.methods.saap import artefact

from ...defaults import saap_dense_below
from ..families import window_of
from ..graph import Graph
from ..weights import numpy_of
from .base import KEYS, Decoding, Step

if TYPE_CHECKING:
    from mlx import nn


@dataclass(frozen=True)
class SaapDecoding(Decoding):
    """Decode method SAAP.

    Attributes:
        layers: dict from layer number to centroids and query networks. Layers that have no entry are dense.
    """

    operator: ClassVar[str] = "SaapAttention"
    method: SAAP
    layers: Mapping[int, artefact.Layer]

    @classmethod
    def resolve(cls, config: SAAP, model: nn.Module, *, native: bool) -> SaapDecoding:
        made = cls(config, _saap_layers(config, model))
        below = saap_dense_below(config, *made._sizes)
        return dataclasses.replace(made, method=dataclasses.replace(config, dense_below=below))

    @property
    def text(self) -> str:
        """Return the method as text. The artefact's folder is left out, because it may be private."""
        assert self.method.artefact is not None  # resolve() raises otherwise
        return str(dataclasses.replace(self.method, artefact=Path(self.method.artefact).name))

    def supports(self, layer: int) -> bool:
        return layer in self.layers

    def attributes(self, lanes: int) -> dict[str, float]:
        names = ("probes", "sink_tokens", "recent_tokens", "dense_below")
        return {name: int(getattr(self.method, name)) for name in names}

    def routing(self, before: Sequence[str], after: Sequence[str]) -> dict[str, str]:
        return dict(zip(("query_before", "key_before"), before, strict=True))

    def weights(self, graph: Graph, layer: int, scale: float) -> dict[str, str]:
        """Add the artefact's arrays for ``layer``. They become float16 if all of them are float16, else float32."""
        arrays = self.layers[layer].arrays()
        half = all(array.dtype == mx.float16 for array in arrays.values())
        places = {}
        for name, array in arrays.items():
            stored = numpy_of(array.astype(mx.float16 if half else mx.float32))
            places[name] = graph.weight(f"model.layers.{layer}.self_attn.saap.{name}", stored)
        return places

    def attend(self, call: Step) -> mx.array:
        query, keys = call.before
        network = {name: array.astype(mx.float32) for name, array in self.layers[call.layer].arrays().items()}
        centroids = network.pop("centroids")
        made: mx.array = mlx_sparse.saap_attention(
            call.query,
            call.keys,
            call.values,
            bucket_ids=mlx_sparse.saap_assign(keys, centroids, backend="ops"),
            visited=mlx_sparse.saap_route(query, **network, probes=self.method.probes, backend="ops"),
            sink_tokens=self.method.sink_tokens,
            recent_tokens=self.method.recent_tokens,
            scale=call.scale,
            backend="ops",
        )
        return made

    def shortened(self) -> SaapDecoding:
        sinks = min(self.method.sink_tokens, 1)
        recent = KEYS - sinks
        # An exported file assigns every key to a bucket as soon as the key leaves the recent window.
        short = dataclasses.replace(self.method, sink_tokens=sinks, recent_tokens=recent, dense_below=0, merge_every=1)
        return dataclasses.replace(self, method=short)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        layer = next(iter(self.layers.values()))
        heads, buckets, D = layer.centroids.shape
        return D, buckets, sum(layer.arrays()[name].size for name in artefact.NETWORK) // heads


def _saap_layers(config: SAAP, model: nn.Module) -> Mapping[int, artefact.Layer]:
    """Load the artefact of ``config``. Return a dict from layer number to `Layer` for the layers that use SAAP."""
    if config.mode == "online":
        raise ConfigError(
            "mode: expected trained, because an exported file cannot fit centroids, got online. "
            "Train an artefact with mlx-sparse train-saap."
        )
    file = config.file
    assert file is not None  # config.file raises otherwise
    loaded = artefact.load(file)
    loaded.check_model(model)
    if config.probes > loaded.buckets:
        raise ConfigError(f"probes: expected at most the {loaded.buckets} buckets of {file}, got {config.probes}.")
    layers = {
        i: layer
        for i, layer in loaded.layers.items()
        if i >= config.dense_layers and not window_of(model.layers[i], model)
    }
    if not layers:
        raise ConfigError(
            f"dense_layers: expected at least one layer for SAAP, got {config.dense_layers} dense layers; the "
            f"others have a sliding window or are not in {file}. Set a smaller number."
        )
    return layers
