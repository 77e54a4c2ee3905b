"""Wrong arguments of the oracle, and the counts it reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from naive import Array, every_method, make

from mlx_sparse.checks import BackendUnavailable, ConfigError, ShapeError
from mlx_sparse.oracle import (
    attend_indices,
    flexgen_attention,
    h2o_attention,
    oracle_top_k_attention,
    sparq_attention,
    streaming_attention,
)


def test_stats_are_the_formulae_of_the_shapes() -> None:
    qkv = make(G=4, S=40, D=16)
    out, info = sparq_attention(*qkv, rank=4, top_k=9, return_stats=True)
    assert (out == sparq_attention(*qkv, rank=4, top_k=9)).all()
    assert info.elements == 40 * 4 + 2 * 9 * 16 + 4 * 16
    assert info.dense_elements == 2 * 40 * 16 + 2 * 16
    assert info.density == 9 / 40
    assert info.retained_mass is None
    info = sparq_attention(*qkv, rank=4, top_k=40, return_stats=True)[1]
    assert (info.elements, info.density) == (info.dense_elements, 1), "nothing to choose"


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"rank": 0}, ConfigError, "rank"),
        ({"rank": -1}, ConfigError, "rank"),
        ({"rank": 17}, ConfigError, "rank"),
        ({"rank": 2.0}, ConfigError, "rank"),
        ({"rank": True}, ConfigError, "rank"),
        ({"top_k": 0}, ConfigError, "top_k"),
        ({"top_k": -4}, ConfigError, "top_k"),
        ({"top_k": None}, ConfigError, "top_k"),
        ({"local_window": -1}, ConfigError, "local_window"),
        ({"local_window": 10}, ConfigError, "local_window"),
        ({"reallocate": "yes"}, ConfigError, "reallocate"),
        ({"reallocate": 1}, ConfigError, "reallocate"),
        ({"component_score": "auto"}, ConfigError, "component_score"),
        ({"backend": "cuda"}, BackendUnavailable, "backend"),
        ({"queries": np.zeros((4, 1, 16))}, ShapeError, "queries"),
        ({"queries": np.zeros((1, 3, 1, 16))}, ShapeError, "queries"),
        ({"queries": np.zeros((1, 4, 0, 16))}, ShapeError, "queries"),
        ({"queries": np.zeros((2, 4, 1, 16))}, ShapeError, "keys"),
        ({"queries": np.zeros((1, 4, 1, 8))}, ShapeError, "keys"),
        ({"queries": np.zeros((1, 4, 41, 16))}, ShapeError, "keys"),
        ({"values": np.zeros((1, 2, 39, 16))}, ShapeError, "values"),
        ({"left_padding": np.zeros(2)}, ShapeError, "left_padding"),
        ({"left_padding": 3}, ShapeError, "left_padding"),
        ({"keys_t": np.zeros((1, 2, 40, 16))}, ShapeError, "keys_t"),
        ({"value_mean": np.zeros((1, 4, 16))}, ShapeError, "value_mean"),
    ],
    ids=lambda value: (
        "-".join(f"{k}={getattr(v, 'shape', v)}" for k, v in value.items()) if type(value) is dict else ""
    ),
)
def test_a_wrong_argument_is_named_in_one_line(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    q, k, v = make(G=2)
    with pytest.raises(error, match=rf"^{argument}: expected .*, got .*\.$") as caught:
        sparq_attention(**{"queries": q, "keys": k, "values": v, "rank": 4, "top_k": 9, **change})
    assert "\n" not in str(caught.value)


@every_method
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"backend": "metal"}, BackendUnavailable),
        ({"left_padding": np.zeros(3)}, ShapeError),
        ({"keys": np.zeros((2, 40, 16))}, ShapeError),
    ],
    ids=["backend", "left_padding", "keys"],
)
def test_every_method_checks_its_arguments(
    method: Callable[..., Any], options: dict[str, Any], change: dict[str, Any], error: type[Exception]
) -> None:
    q, k, v = make(G=2)
    with pytest.raises(error, match=rf"^{next(iter(change))}: expected"):
        method(**{"queries": q, "keys": k, "values": v, **options, **change})


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (streaming_attention, {"sink_tokens": -1}),
        (streaming_attention, {"recent_tokens": 0}),
        (flexgen_attention, {"top_k": 0}),
        (oracle_top_k_attention, {"top_k": 0}),
        (oracle_top_k_attention, {"top_k": 4, "local_window": 5}),
        (h2o_attention, {"scores": np.zeros((1, 2, 40)), "top_k": 0}),
        (h2o_attention, {"scores": np.zeros((1, 2, 40)), "top_k": 4, "local_window": 5}),
    ],
)
def test_baseline_parameters_out_of_range_raise(method: Callable[..., Any], change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected .*, got "):
        method(*make(G=2), **change)


@pytest.mark.parametrize("shape", [(1, 4, 40), (1, 2, 39), (2, 40)])
def test_h2o_scores_of_the_wrong_shape_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"^scores: expected"):
        h2o_attention(*make(G=2), scores=np.zeros(shape))


def test_h2o_takes_one_query_only() -> None:
    _, k, v = make()
    with pytest.raises(ShapeError, match=r"^queries: expected one query"):
        h2o_attention(np.zeros((1, 2, 3, 16)), k, v, scores=np.zeros((1, 2, 40)))


@pytest.mark.parametrize("indices", [np.zeros((2, 3)), np.zeros((1, 4, 3)), np.zeros((2, 2, 3))])
def test_indices_that_do_not_fit_the_keys_raise(indices: Array) -> None:
    with pytest.raises(ShapeError, match=r"^indices: expected"):
        attend_indices(*make(), indices.astype(np.int32), scale=1.0)


# --- Baselines -------------------------------------------------------------------------------------------------------
