"""Count the elements that each method moves, with the formulas from the papers, and define `Stats`.

The functions count elements for S keys of head dim D, per KV head in a decode step and per query head in prefill.
Multiply a count by the item size to get bytes. Equation numbers refer to docs/spec/sparq.md, sample.md, saap.md and
quest.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .block_layout import Layout


@dataclass(frozen=True)
class Stats:
    """Statistics of an attention call, returned with ``return_stats``.

    Attributes:
        elements: number of elements moved per KV head and decode step, or per query head in prefill.
        dense_elements: number of elements that dense attention moves for the same shapes.
        density: share of the keys that were attended to; in prefill, share of the causal block pairs (sample.9).
        recall: float32 ``(B, Hq, L)`` attention recall, the share of the softmax mass on the attended keys:
            ``exp(lse_sparse - lse_dense)``. None without ``return_stats="recall"``.
        head_density: ``density`` of each head in prefill, ``(B, Hq)``; None for a decode step.
        sampled: share of the queries that were sampled to select key blocks; 0 for decode methods.
        selectivity: share of the keys in visited buckets, without the keys that SAAP always attends to (saap.12).
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
        """Number of elements moved, divided by the number for dense attention; smaller is better."""
        return self.elements / self.dense_elements


def dense_elements(S: int, D: int) -> int:
    """Return ``2 S D + 2 D`` (sparq.11). All S keys and values are read, and one key and one value are written."""
    return 2 * S * D + 2 * D


def sparq_elements(S: int, D: int, *, rank: int, top_k: int, key_bits: int = 16) -> int:
    """Return ``S r + 2 k D + 4 D`` (sparq.12) for r = ``rank`` and k = ``top_k``.

    A decode step moves r components of S keys, k keys and values, the new key and value, and the mean value.
    If ``key_bits`` is below 16, the first term is ``S r (key_bits + 1/2) / 16`` (sparq.23). This term counts the codes
    with their ``lo`` and ``step``, in elements of 16 bits.
    """
    scored = S * rank if key_bits == 16 else -(-S * rank * (2 * key_bits + 1) // 32)
    return scored + 2 * min(top_k, S) * D + 4 * D


def streaming_elements(S: int, D: int, *, top_k: int) -> int:
    """Return ``2 k D + 2 D`` (sparq.13) for k = ``top_k`` keys and values. The selection is not counted."""
    return 2 * min(top_k, S) * D + 2 * D


def h2o_elements(S: int, D: int, *, top_k: int) -> int:
    """Return ``2 k D + 2 D + 2 S`` (sparq.14) for k = ``top_k`` keys and values. S scores are read and written."""
    return 2 * min(top_k, S) * D + 2 * D + 2 * S


def flexgen_elements(S: int, D: int, *, top_k: int) -> int:
    """Return ``S D + k D + 2 D`` (sparq.15) for all S keys and k = ``top_k`` values."""
    return S * D + min(top_k, S) * D + 2 * D


def quest_elements(S: int, D: int, *, top_k: int, page_size: int) -> int:
    """Return ``2 P D + 2 k D + 2 D`` (quest.6) for P page bounds, k = ``top_k`` keys and values, and the new row."""
    return 2 * -(-S // page_size) * D + 2 * min(top_k, S) * D + 2 * D


def saap_elements(D: int, attended: int, *, network: int = 0) -> int:
    """Return ``2 n D + n + 2 D + w`` (saap.14) for n = ``attended`` keys, and w = ``network`` weights."""
    return 2 * attended * D + attended + 2 * D + network


def prefill_elements(layout: Layout, D: int, density: float | None = None) -> int:
    """Count the elements moved per query head in prefill (sample.10). ``density=None`` means dense attention.

    The count includes keys and values of each attended block pair, queries, output, and the keys for the sample.
    """
    share = 1.0 if density is None else density
    sampling = 0 if density is None or not layout.sampled_share else len(layout.regions) * layout.S * D
    return round(2 * layout.L * D + 2 * layout.block_size * D * layout.causal_pairs * share) + sampling


def as_prefill(stats: Stats, layout: Layout, D: int) -> Stats:
    """Return the ``stats`` of a dense call with the elements counted per query head, as in prefill."""
    moved = prefill_elements(layout, D)
    return replace(stats, elements=moved, dense_elements=moved)
