"""Define `Stats`, and count moved elements by the formulas of the papers. Formulas of one method are in its `config`.

The functions return numbers of elements for S keys of head dim D. A number is per KV head for a decode step, and per
query head for a prefill chunk. To get bytes, multiply the number by the item size. Equation numbers refer to
docs/spec/sparq.md, sample.md and saap.md. Values have the head dim ``Dv``, if a function has this parameter and it is
not 0. Otherwise they have the head dim D, and the caller subtracts ``D - Dv`` for each value row (sparq.27).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .blocks.layout import Layout


@dataclass(frozen=True)
class Stats:
    """Statistics of an attention call, returned if ``return_stats`` is set.

    Attributes:
        elements: number of elements moved per KV head and decode step, or per query head in prefill.
        dense_elements: number of elements that dense attention would move in the call.
        density: share of the keys that the call attended to. In prefill, share of the causal block pairs that the call
            attended to (sample.9).
        recall: float32 ``(B, Hq, L)`` attention recall ``exp(lse_sparse - lse_dense)``, the share of the softmax mass
            on the attended keys. None unless ``return_stats`` is "recall".
        head_density: ``density`` of each head in prefill, ``(B, Hq)``; None for a decode step.
        sampled: share of the queries that were sampled to select key blocks; 0 for decode methods.
        selectivity: share of the keys that are in visited buckets (saap.12). Keys that SAAP always attends to are not
            counted. 0 for other methods.
        estimated_recall: float32 ``(B, Hkv)`` attention recall that SparQ estimates (sparq.24); None for other
            methods, dense calls and `cuda_ref`.
    """

    elements: int
    dense_elements: int
    density: float
    recall: Any = None
    head_density: Any = None
    sampled: float = 0.0
    selectivity: float = 0.0
    estimated_recall: Any = None

    @property
    def compression(self) -> float:
        """Elements that the call moves, as a share of the elements that dense attention moves; smaller is better."""
        return self.elements / self.dense_elements


def dense_elements(S: int, D: int, Dv: int = 0) -> int:
    """Return the number of elements that a dense decode step moves, ``2 S D + 2 D`` (sparq.11).

    The step reads S keys and values, and writes one key and one value.
    """
    return (S + 1) * (D + (Dv or D))


def sparq_elements(S: int, D: int, *, rank: int, top_k: int, key_bits: int = 16) -> int:
    """Return the number of elements that a SparQ decode step moves, ``S r + 2 k D + 4 D`` (sparq.12).

    The step reads r = ``rank`` components of S keys, and k = ``top_k`` keys and values. The step writes one key and one
    value, and reads and writes the mean value. If ``key_bits`` is below 16, the first term is
    ``S r (key_bits + 1/2) / 16`` (sparq.23). This term counts the codes, ``lo`` and ``step`` in elements of 16 bits.
    """
    scored = S * rank if key_bits == 16 else -(-S * rank * (2 * key_bits + 1) // 32)
    return scored + 2 * min(top_k, S) * D + 4 * D


def h2o_elements(S: int, D: int, *, top_k: int) -> int:
    """Return the number of elements that an H2O decode step moves, ``2 k D + 2 D + 2 S`` (sparq.14).

    The step reads k = ``top_k`` keys and values, writes one key and one value, and reads and writes S scores.
    """
    return 2 * min(top_k, S) * D + 2 * D + 2 * S


def saap_elements(D: int, attended: int, *, network: int = 0) -> int:
    """Return the number of elements that a SAAP decode step moves, ``2 n D + n + 2 D + w`` (saap.14).

    The step reads n = ``attended`` keys, their values, n key indices, and w = ``network`` weights of the query network.
    The step writes one key and one value.
    """
    return 2 * attended * D + attended + 2 * D + network


def attended_pairs(found: Any) -> Any:
    """Return the number of pairs ``(B, Hq)`` of a row block and a key block that each query head attends to.

    Args:
        found: third result of a prefill function: the key blocks ``(B, Hq, R, N)`` of each row block, the number of
            key blocks ``(B, Hq, R)``, or the number of pairs.
    """
    if found.ndim == 4:
        found = (found >= 0).sum(axis=3)
    return found.sum(axis=2) if found.ndim == 3 else found


def prefill_elements(layout: Layout, D: int, density: float | None = None, Dv: int = 0) -> int:
    """Return the number of elements that a prefill chunk moves per query head (sample.10).

    The number includes the queries, the output, the keys and values of each attended block pair, and the keys that the
    sampled queries read. If ``density`` is None, attention is dense.
    """
    share, pair = 1.0 if density is None else density, D + (Dv or D)
    sampling = 0 if density is None or not layout.sampled_share else len(layout.regions) * layout.S * D
    return round(layout.L * pair + layout.block_size * pair * layout.causal_pairs * share) + sampling


def as_prefill(stats: Stats, layout: Layout, D: int, Dv: int = 0) -> Stats:
    """Return a copy of ``stats``, the statistics of a dense call, that counts the elements per query head."""
    moved = prefill_elements(layout, D, Dv=Dv)
    return replace(stats, elements=moved, dense_elements=moved)
