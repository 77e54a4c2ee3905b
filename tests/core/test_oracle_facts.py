"""Compare the oracle with published numbers.

Sources:

* SparQ paper, arXiv 2312.04985 (transfer formulae, theoretical speed-ups);
* graphcore-research/llm-inference-research: unit tests (branch main) and ``Results.ipynb`` (branch notebooks);
* graphcore-research/sparq-llama.cpp: ``test_sparq.cpp``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from reference import sparq_select

from mlx_sparse.core import stats
from mlx_sparse.methods.baselines import config as baselines
from mlx_sparse.oracle import (
    attend_indices,
    dense_attention,
    flexgen_attention,
    oracle_top_k_attention,
    sparq_attention,
    streaming_attention,
    top_k_select,
)

Array = npt.NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)  # n rounded operations cause an error of at most n EPS


def one_head(rows: object) -> Array:
    """Return ``rows (length, D)`` as an array ``(1, 1, length, D)``."""
    return np.asarray(rows, dtype=np.float64)[None, None]


def softmax(logits: object) -> Array:
    exps = np.exp(np.asarray(logits, dtype=np.float64))
    return exps / exps.sum()


def weights_of(function: object, logits: object, **arguments: object) -> Array:
    """Return the weights that a method gives to keys with ``logits (Hkv, G, S)``, by means of unit values."""
    x = np.asarray(logits, dtype=np.float64)
    Hkv, G, S = x.shape
    unit = np.broadcast_to(np.eye(S), (1, Hkv, S, S))
    return function(x.reshape(1, Hkv * G, 1, S), unit, unit, scale=1.0, **arguments).reshape(Hkv, G, S)  # type: ignore[operator]


# --- Transfers -------------------------------------------------------------------------------------------------------

# Results.ipynb prints transfers with 7 digits, for Llama 3 8B: 8 KV heads x 32 layers, D = 128, averaged over examples
# of different lengths. The notebook does not print the mean length S. The tests compute S from one row of each task and
# compare the other rows.
KV_HEADS = 8 * 32
D = 128
DENSE_WIKITEXT = 8.804014e7
FLEXGEN_K2_REPETITION = 5.454742e7
HALF_DIGIT = 5.0  # a printed 8.804014e+07 is within 5 elements of the exact number


def released_sparq(S: float, *, rank: int, top_k: int) -> float:
    """Return SparQ's transfers as the released code counts them, with 3 D in place of the paper's 4 D.

    Without reallocation the code counts the writes of the new key, of the key's copy in the second key cache and of the
    new value. The paper counts the new key, the new value, and a read and a write of the mean value.
    """
    return stats.sparq_elements(S, D, rank=rank, top_k=top_k) - D  # type: ignore[arg-type]


def released_h2o(S: float, *, top_k: int) -> float:
    """Return H2O's transfers as the released code counts them: with the score of the new key, unlike the paper."""
    return stats.h2o_elements(S, D, top_k=top_k) + 1  # type: ignore[arg-type]


def released_flexgen(S: float, *, top_k: int) -> float:
    """Return FlexGen's transfers, which the released code counts like the paper."""
    return baselines.flexgen_elements(S, D, top_k=top_k)  # type: ignore[arg-type]


def assert_printed(count: float, printed: float, slope: float) -> None:
    """Assert that ``count`` rounds to ``printed``, if S comes from another row that is printed with 7 digits.

    ``slope`` is the change of ``count`` if the other row changes by one.
    """
    assert abs(KV_HEADS * count - printed) <= HALF_DIGIT * (1 + slope)


@pytest.mark.parametrize(("rank", "printed"), [(64, 3.048056e7), (32, 1.948374e7), (16, 1.398533e7), (8, 1.123612e7)])
def test_sparq_transfers_equal_the_released_numbers_of_llama_3(rank: int, printed: float) -> None:
    S = (DENSE_WIKITEXT / KV_HEADS - 2 * D) / (2 * D)
    assert stats.dense_elements(S, D) * KV_HEADS == pytest.approx(DENSE_WIKITEXT, rel=EPS)  # type: ignore[arg-type]
    assert_printed(released_sparq(S, rank=rank, top_k=128), printed, slope=rank / (2 * D))


@pytest.mark.parametrize(
    ("method", "top_k", "printed"),
    [("flexgen", 256, 6.287049e7), ("flexgen", 32, 5.553046e7), ("h2o", 768, 5.124770e7), ("h2o", 512, 3.447048e7)],
)
def test_baseline_transfers_equal_the_released_numbers_of_llama_3(method: str, top_k: int, printed: float) -> None:
    S = FLEXGEN_K2_REPETITION / KV_HEADS / D - 2 - 2
    count, slope = {"flexgen": (released_flexgen, 1.0), "h2o": (released_h2o, 2 / D)}[method]
    assert_printed(count(S, top_k=top_k), printed, slope)


@pytest.mark.parametrize(("S", "printed"), [(4096, "6.40"), (16384, "7.53")])
def test_theoretical_speedup_equals_the_papers(S: int, printed: str) -> None:
    rank, top_k = 32, 128
    assert f"{2 * S * D / (rank * S + 2 * top_k * D):.2f}" == printed  # (sparq.16)


@pytest.mark.parametrize(("S", "expected"), [(4096, "6.3816"), (16384, "7.5230")])
def test_exact_formulae_give_a_little_less_than_the_theoretical_speedup(S: int, expected: str) -> None:
    exact = stats.dense_elements(S, 128) / stats.sparq_elements(S, 128, rank=32, top_k=128)
    assert f"{exact:.4f}" == expected


@pytest.mark.parametrize(
    ("method", "S", "parameters", "expected"),
    [
        ("sparq", 2048, {"rank": 8, "top_k": 128}, ".09468"),
        ("sparq", 2048, {"rank": 16, "top_k": 128}, ".12592"),
        ("sparq", 2048, {"rank": 32, "top_k": 128}, ".18838"),
        ("sparq", 2048, {"rank": 64, "top_k": 128}, ".31332"),
        ("sparq", 1024, {"rank": 32, "top_k": 128}, ".25171"),
        ("sparq", 65536, {"rank": 32, "top_k": 128}, ".12698"),
        ("h2o", 2048, {"top_k": 192}, ".10200"),
        ("h2o", 2048, {"top_k": 768}, ".38311"),
        ("streaming", 2048, {"top_k": 192}, ".09419"),
        ("streaming", 2048, {"top_k": 768}, ".37531"),
        ("flexgen", 2048, {"top_k": 2}, ".50073"),
        ("flexgen", 2048, {"top_k": 256}, ".56271"),
    ],
)
def test_compression_equals_the_papers_formulae(method: str, S: int, parameters: dict[str, int], expected: str) -> None:
    formulas = {**vars(stats), **vars(baselines)}
    elements = formulas[f"{method}_elements"](S, 128, **parameters)
    ratio = stats.Stats(elements, stats.dense_elements(S, 128), density=1.0).compression
    assert f"{ratio:.5f}".lstrip("0") == expected


# --- The authors' unit tests -----------------------------------------------------------------------------------------

GQA_QUERIES = np.array([[1, 10], [-20, 2], [30, 3], [4, 40]], dtype=np.float64).reshape(1, 4, 1, 2)
GQA_KEYS = np.array([[1, 10], [20, 2]], dtype=np.float64).reshape(1, 2, 1, 2)
# The first KV head selects component 0, the second component 1. The root contains its share of |q|, and D = 2.
GQA_LOGITS = np.array([1, -20, 6, 80]) / np.sqrt(np.array([1 / 11, 20 / 22, 3 / 33, 40 / 44]) * 2)


def test_sparse_q_gqa_logit_of_every_query_head() -> None:
    # If the other key has logit 0, alpha of the selected key is the logistic function of its logit.
    keys = np.concatenate([GQA_KEYS, np.zeros_like(GQA_KEYS)], axis=2)
    choice = sparq_select(GQA_QUERIES, keys, rank=1, top_k=1, local_window=0)
    sign = np.where(choice.indices[0, :, 0] == 0, 1, -1).repeat(2)
    np.testing.assert_allclose(choice.alpha[0], 1 / (1 + np.exp(-sign * GQA_LOGITS)), rtol=64 * EPS)


@pytest.mark.parametrize("S, causal_index", [(2, [-1, 0]), (3, [-1, 1, 0]), (4, [-1, 2, 1, 0])])
@pytest.mark.parametrize("local_window", [1, 2, 3])
def test_causal_index_counts_the_local_window_in_valid_keys(S: int, causal_index: list[int], local_window: int) -> None:
    indices = top_k_select(np.zeros((1, 1, S)), top_k=local_window, local_window=local_window, left_padding=[1])
    expected = [key for key, age in enumerate(causal_index) if 0 <= age < local_window]
    assert indices[indices >= 0].tolist() == expected


def test_eviction_mask_keeps_local_keys_and_the_heavy_hitter() -> None:
    # The authors' k=2 and l=1 exclude the current token: 3 keys, 2 of them local.
    seen = np.array([0.1, 0.7, 0.2])
    assert top_k_select(seen[None, None], top_k=3, local_window=2).tolist() == [[[0, 1, 2]]]
    seen = np.pad(seen, (0, 2)) + np.array([0.1, 0.0, 0.0, 0.0, 0.9])
    indices = top_k_select(seen[None, None], top_k=3, local_window=2)
    mask = np.isin(np.arange(6), indices)  # their sixth key is masked out
    assert mask.astype(int).tolist() == [0, 1, 0, 1, 1, 0]


def test_sparse_softmax_is_flexgen_without_renormalization() -> None:
    x = np.array([[8, 0, 11, 13], [2, 5, 1, 6], [14, 12, 7, 10], [4, 15, 9, 3]])[:, None, :]
    kept = np.array([[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0]])
    expected = np.array([softmax(row[0]) for row in x]) * kept
    np.testing.assert_allclose(weights_of(flexgen_attention, x, top_k=2)[:, 0], expected, rtol=8 * EPS)


def test_sparse_softmax_gqa_is_flexgen_with_one_choice_per_group() -> None:
    # Only the second group is tested. The first group is an exact tie in floating point (0.5 + exp(-97) = 0.5).
    x = np.array([[[99, 1, 0, 0], [0, 10, 10, 0]]])
    expected = np.array([softmax(row) for row in x[0]]) * [1, 1, 0, 0]
    np.testing.assert_allclose(weights_of(flexgen_attention, x, top_k=2)[0], expected, rtol=8 * EPS)


def test_sparse_softmax_large_k_is_dense() -> None:
    x = np.array([[8, 0, 11, 13], [2, 5, 1, 6], [14, 12, 7, 10], [4, 15, 9, 3]])[:, None, :]
    expected = np.array([softmax(row[0]) for row in x])
    np.testing.assert_allclose(weights_of(flexgen_attention, x, top_k=8)[:, 0], expected, rtol=8 * EPS)


def test_sparse_softmax_before_softmax_is_oracle_top_k() -> None:
    x = [[[0.3, 0.1, 0.5, 0.2, 0.4]]]  # without the authors' sixth, masked key
    expected = np.zeros(5)
    expected[[2, 4]] = softmax([0.5, 0.4])
    actual = weights_of(oracle_top_k_attention, x, top_k=2, local_window=0)[0, 0]
    np.testing.assert_allclose(actual, expected, rtol=8 * EPS)


@pytest.mark.parametrize(
    ("logits", "sinks", "kept"),
    [
        ([2, 5], 0, [1, 2]),
        ([14, 12, 7], 0, [2, 3]),
        ([4, 15, 9, 3], 0, [3, 4]),
        ([2, 5], 1, [1, 2]),
        ([14, 12, 7], 1, [1, 3]),
        ([4, 15, 9, 3], 1, [1, 4]),
    ],
)
def test_local_softmax_is_streaming_behind_one_padded_key(logits: list[int], sinks: int, kept: list[int]) -> None:
    x = np.array([[[0, *logits]]])
    expected = np.zeros(x.shape[-1])
    expected[kept] = softmax(x[0, 0, kept])
    actual = weights_of(streaming_attention, x, sink_tokens=sinks, recent_tokens=2 - sinks, left_padding=[1])
    np.testing.assert_allclose(actual[0, 0], expected, rtol=8 * EPS)


@pytest.mark.parametrize("reallocate", [False, True])
def test_ann_module_with_padded_keys_1e9_and_padded_values_inf(reallocate: bool) -> None:
    # Shapes and poison are from the authors' test_ann_module, whose result is NaN in the padded rows.
    rng = np.random.default_rng(0)
    padding = np.array([2, 0, 5])
    queries = rng.standard_normal((3, 5, 1, 16))
    keys, values = rng.standard_normal((2, 3, 5, 7, 16))
    padded = np.arange(7) < padding[:, None]
    keys[np.broadcast_to(padded[:, None], (3, 5, 7))] = 1e9
    values[np.broadcast_to(padded[:, None], (3, 5, 7))] = np.inf
    # the authors' k=3 and local_k=1: 4 keys, 2 of them local
    choice = {"rank": 6, "top_k": 4, "local_window": 2, "left_padding": padding}
    out = sparq_attention(queries, keys, values, reallocate=reallocate, **choice)
    assert np.isfinite(out).all()
    selection = sparq_select(queries, keys, **choice)
    filled = selection.indices >= 0
    assert (filled.sum(axis=-1) == np.minimum(7 - padding, 4)[:, None]).all()
    assert (selection.indices.max(axis=-1) == 6).all(), "the current key is local"
    assert (selection.alpha <= 1 + 8 * EPS).all()


# --- The llama.cpp fork ----------------------------------------------------------------------------------------------


def test_llama_cpp_softmax() -> None:
    weights = weights_of(dense_attention, [[[1, 2, 3, 4]]])[0, 0]
    assert [f"{w:.4f}" for w in weights] == ["0.0321", "0.0871", "0.2369", "0.6439"]


LLAMA_CPP = {
    "queries": one_head([[1.0, -0.5]]),
    "keys": one_head([[1, 0], [4, -10], [2, 5], [-3, 10]]),
    "values": one_head([[1, 2], [3, 4], [5, 6], [7, 8]]),
}


def test_llama_cpp_sparq_chooses_by_the_signed_approximate_score() -> None:
    choice = sparq_select(LLAMA_CPP["queries"], LLAMA_CPP["keys"], rank=1, top_k=2, local_window=0)
    assert choice.indices.tolist() == [[[1, 2]]], "key 3 has the larger magnitude, -3"


def test_llama_cpp_sparq_output() -> None:
    w = softmax([(4 + 5) / np.sqrt(2), (2 - 2.5) / np.sqrt(2)])
    expected = [w[0] * 3 + w[1] * 5, w[0] * 4 + w[1] * 6]
    out = sparq_attention(**LLAMA_CPP, rank=1, top_k=2, local_window=0, reallocate=False)
    np.testing.assert_allclose(out[0, 0, 0], expected, rtol=8 * EPS)
    out, _ = attend_indices(**LLAMA_CPP, indices=np.array([[[1, 2]]]), scale=2**-0.5)
    np.testing.assert_allclose(out[0, 0, 0], expected, rtol=8 * EPS)


@pytest.mark.parametrize("method", ["dense", "sparq"])
def test_llama_cpp_small(method: str) -> None:
    queries = one_head([[0.361, -0.286]])
    keys = one_head([[-0.394, 0.243], [-1.383, -2.313], [-0.317, -0.866]])
    values = one_head([[1.748, -0.276], [-0.975, 0.479], [-2.365, -0.805]])
    if method == "dense":
        out = dense_attention(queries, keys, values)
    else:
        out = sparq_attention(queries, keys, values, rank=2, top_k=3)
    # The fork prints inputs and outputs with 3 digits, and allows an error of 2e-3.
    np.testing.assert_allclose(out[0, 0, 0], [-0.710, -0.190], rtol=0, atol=2e-3)
