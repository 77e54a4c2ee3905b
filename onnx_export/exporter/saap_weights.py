"""SAAP's centroids and query networks in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_sparse import artefact
from mlx_sparse.checks import ConfigError
from mlx_sparse.methods import SAAP

from .families import window_of
from .graph import Graph
from .weights import numpy_of

NETWORK = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")


@dataclass(frozen=True)
class Index:
    """What of an artefact goes into a file.

    Attributes:
        layers: by number, those that SAAP serves.
        trained: whether query networks route, and not the centroids.
        roped: whether queries and keys choose their buckets after RoPE.
    """

    layers: Mapping[int, artefact.Layer]
    trained: bool
    roped: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Head dim, buckets, and weights of the network that a step reads, of one KV head."""
        layer = next(iter(self.layers.values()))
        heads, buckets, D = layer.centroids.shape
        network = self._arrays(layer, 1.0)
        return D, buckets, sum(network[name].size for name in NETWORK) // heads

    def store(self, graph: Graph, layer: int, scale: float) -> list[str]:
        """Write a layer's weights; the last inputs of `SaapAttention`.

        All are float16 if the artefact's are, and float32 otherwise, as the networks of centroids are.
        """
        arrays = self._arrays(self.layers[layer], scale)
        half = all(array.dtype == mx.float16 for array in arrays.values())
        names = []
        for name in ("centroids", *NETWORK):
            array = numpy_of(arrays[name].astype(mx.float16 if half else mx.float32))
            made = f"model.layers.{layer}.self_attn.saap.{name}"
            # What is empty has no place in a data file.
            names.append(graph.weight(made, array) if array.size else graph.constant(array, array.dtype.type))
        return names

    def _arrays(self, layer: artefact.Layer, scale: float) -> dict[str, mx.array]:
        if self.trained:
            return layer.arrays()
        centroids = layer.centroids.astype(mx.float32)
        heads, buckets, D = centroids.shape
        empty = {"hidden_weight": mx.zeros((heads, D, 0)), "hidden_bias": mx.zeros((heads, 0))}
        linear = {"out_weight": scale * centroids.swapaxes(1, 2), "out_bias": mx.zeros((heads, buckets))}
        return {"centroids": centroids, **empty, **linear}


def index_of(config: SAAP, model: Any) -> Index:
    """The part of the artefact that ``config`` names which serves ``model``.

    Raises:
        ArtefactError: the file is damaged, or made for another model.
        ConfigError: there is no file, it has too few buckets or no networks, or no layer is left for SAAP.
    """
    if config.mode == "online":
        raise ConfigError(
            "mode: expected trained or kmeans for a file, which fits no centroids of its own, got online. "
            "Train an artefact with mlx-sparse train-saap."
        )
    file = config.file
    assert file is not None  # or config.file had refused
    loaded = artefact.load(file)
    loaded.check_model(model)
    if config.probes > loaded.buckets:
        raise ConfigError(f"probes: expected at most the {loaded.buckets} buckets of {file}, got {config.probes}.")
    if config.mode == "trained" and not loaded.hidden:
        raise ConfigError(f"mode: expected kmeans with {file}, which has no query networks, got trained.")
    layers = {
        i: layer
        for i, layer in loaded.layers.items()
        if i >= config.dense_layers and not window_of(model.layers[i], model)
    }
    if not layers:
        raise ConfigError(
            f"dense_layers: expected a layer that SAAP serves, got {config.dense_layers} dense ones, others with a "
            f"sliding window or not in {file}. Give fewer."
        )
    return Index(layers, config.mode == "trained", loaded.space == "roped")
