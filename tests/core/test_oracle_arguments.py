"""Test wrong arguments of the oracle, and the element counts that it reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from naive import every_method, make

from mlx_sparse import oracle
from mlx_sparse.checks import BackendUnavailable, ConfigError, ShapeError


def test_stats_follow_the_formulae() -> None:
    qkv = make(G=4, S=40, D=16)
    out, info = oracle.sparq_attention(*qkv, rank=4, top_k=9, return_stats=True)
    assert (out == oracle.sparq_attention(*qkv, rank=4, top_k=9)).all()
    assert info.elements == 40 * 4 + 2 * 9 * 16 + 4 * 16
    assert info.dense_elements == 2 * 40 * 16 + 2 * 16
    assert info.density == 9 / 40
    assert info.recall is None
    info = oracle.sparq_attention(*qkv, rank=4, top_k=40, return_stats=True)[1]
    assert (info.elements, info.density) == (info.dense_elements, 1), "all keys are attended"


INDICES: dict[str, Any] = {"scale": 1.0}
SAAP = {"bucket_ids": np.zeros((1, 2, 40), int), "visited": np.zeros((1, 2, 3), int)}
H2O = {"scores": np.zeros((1, 2, 40))}
# Function, its arguments besides queries, keys and values, the wrong arguments, and the error.
BAD: list[tuple[str, dict[str, Any], dict[str, Any], type[Exception]]] = [
    *(
        ("sparq_attention", {"rank": 4, "top_k": 9}, {name: value}, error)
        for name, value, error in [
            *(("rank", wrong, ConfigError) for wrong in (0, 17, 2.0, True)),
            *(("top_k", wrong, ConfigError) for wrong in (0, None)),
            *(("local_window", wrong, ConfigError) for wrong in (-1, 10)),
            *(("reallocate", wrong, ConfigError) for wrong in ("yes", 1)),
            ("component_score", "auto", ConfigError),
            ("key_bits", 5, ConfigError),
            ("backend", "cuda", BackendUnavailable),
            *(("queries", np.zeros(shape), ShapeError) for shape in ((4, 1, 16), (1, 3, 1, 16), (1, 4, 0, 16))),
            ("values", np.zeros((1, 2, 39, 16)), ShapeError),
            *(("left_padding", wrong, ShapeError) for wrong in (np.zeros(2), 3)),
            ("keys_t", np.zeros((1, 2, 40, 16)), ShapeError),
            ("value_mean", np.zeros((1, 4, 16)), ShapeError),
        ]
    ),
    ("streaming_attention", {}, {"sink_tokens": -1}, ConfigError),
    ("streaming_attention", {}, {"recent_tokens": 0}, ConfigError),
    ("flexgen_attention", {}, {"top_k": 0}, ConfigError),
    ("oracle_top_k_attention", {}, {"top_k": 0}, ConfigError),
    ("oracle_top_k_attention", {"top_k": 4}, {"local_window": 5}, ConfigError),
    ("h2o_attention", H2O, {"top_k": 0}, ConfigError),
    ("h2o_attention", {**H2O, "top_k": 4}, {"local_window": 5}, ConfigError),
    *(("h2o_attention", {}, {"scores": np.zeros(shape)}, ShapeError) for shape in ((1, 4, 40), (1, 2, 39), (2, 40))),
    ("h2o_attention", H2O, {"queries": np.zeros((1, 2, 3, 16))}, ShapeError),
    *(
        ("attend_indices", INDICES, {"indices": np.zeros(shape, np.int32)}, ShapeError)
        for shape in ((2, 3), (1, 4, 3), (2, 2, 3))
    ),
    ("saap_attention", SAAP, {"bucket_ids": SAAP["bucket_ids"][..., :8]}, ShapeError),
    ("saap_attention", SAAP, {"visited": SAAP["visited"][0]}, ShapeError),
    ("saap_attention", SAAP, {"recent_tokens": 0}, ConfigError),
    *(("sample_attention", {}, {"alpha_column": wrong}, ConfigError) for wrong in (0, 1.01, np.nan, "0.9")),
    ("sample_attention", {}, {"alpha_slash": 1.01}, ConfigError),
    *(("sample_attention", {}, {"chunks": wrong}, ConfigError) for wrong in (0, 1.5)),
    ("sample_attention", {}, {"block_size": 48}, ConfigError),
]


@pytest.mark.parametrize(
    ("function", "arguments", "wrong", "error"),
    BAD,
    ids=[f"{row[0]}-{n}-{next(iter(row[2]))}" for n, row in enumerate(BAD)],
)
def test_a_wrong_argument_is_named_in_one_line(
    function: str, arguments: dict[str, Any], wrong: dict[str, Any], error: type[Exception]
) -> None:
    q, k, v = make(G=2)
    with pytest.raises(error, match=rf"^{next(iter(wrong))}: expected .*, got .*\.$") as caught:
        getattr(oracle, function)(**{"queries": q, "keys": k, "values": v, **arguments, **wrong})
    assert "\n" not in str(caught.value)


@every_method
@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"backend": "metal"}, BackendUnavailable, "backend"),
        ({"left_padding": np.zeros(3)}, ShapeError, "left_padding"),
        ({"keys": np.zeros((2, 40, 16))}, ShapeError, "keys"),
        *(
            ({"queries": np.zeros(shape)}, ShapeError, "keys")
            for shape in ((2, 4, 1, 16), (1, 4, 1, 8), (1, 4, 41, 16))
        ),
    ],
    ids=["backend", "left_padding", "keys", "batch", "head dim", "more queries than keys"],
)
def test_every_method_checks_its_arguments(
    method: Callable[..., Any], options: dict[str, Any], change: dict[str, Any], error: type[Exception], argument: str
) -> None:
    q, k, v = make(G=2)
    with pytest.raises(error, match=rf"^{argument}: expected"):
        method(**{"queries": q, "keys": k, "values": v, **options, **change})
