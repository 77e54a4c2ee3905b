"""The papers' transfer formulae, and the record that functions return with ``return_stats``.

Counts are elements (multiply by the item size for bytes) for S keys of head dim D: per KV head for a decode step, per
query head for prefill. Equation numbers refer to docs/spec/sparq.md, sample.md and saap.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .block_layout import Layout


@dataclass(frozen=True)
class Stats:
    """Elements moved and keys attended by an attention call.

    Attributes:
        elements: elements moved per KV head and decode step, or per query head in prefill.
        dense_elements: elements that dense attention moves for the same shapes.
        density: share of the keys, or of the causal block pairs in prefill (sample.9), that were attended.
        recall: attention recall, the share of the softmax mass on the attended keys, ``exp(lse_sparse - lse_dense)``,
            float32 ``(B, Hq, L)``; None without ``return_stats="recall"``.
        head_density: ``density`` of each head in prefill, ``(B, Hq)``; None for a decode step.
        sampled: share of the queries that were scored to select the blocks, in prefill.
        selectivity: share of the keys outside SAAP's exact part that are in visited buckets (saap.12).
        estimated_recall: SparQ's own estimate of the attention recall (sparq.24), float32 ``(B, Hkv)``; None with other
            methods, in dense calls, and from `cuda_ref`.
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
        """Ratio of the elements moved to the dense count; smaller is better."""
        return self.elements / self.dense_elements


def dense_elements(S: int, D: int) -> int:
    """Return ``2 S D + 2 D`` (sparq.11): read K and V, write the new key and value."""
    return 2 * S * D + 2 * D


def sparq_elements(S: int, D: int, *, rank: int, top_k: int, key_bits: int = 16) -> int:
    """Return ``S r + 2 k D + 4 D`` (sparq.12): r components of every key, k keys and values, new row, mean value.

    With fewer ``key_bits`` than 16 the first term is ``S r (bits + 1/2) / 16`` (sparq.23). It counts the code of a
    component and its share of lo and step, in elements of 16 bits.
    """
    scored = S * rank if key_bits == 16 else -(-S * rank * (2 * key_bits + 1) // 32)
    return scored + 2 * min(top_k, S) * D + 4 * D


def streaming_elements(S: int, D: int, *, top_k: int) -> int:
    """Return ``2 k D + 2 D`` (sparq.13): ``top_k`` keys without the cost of a selection. A bound for `oracle_top_k`."""
    return 2 * min(top_k, S) * D + 2 * D


def h2o_elements(S: int, D: int, *, top_k: int) -> int:
    """Return ``2 k D + 2 D + 2 S`` (sparq.14): ``top_k`` keys, and the running scores read and written."""
    return 2 * min(top_k, S) * D + 2 * D + 2 * S


def flexgen_elements(S: int, D: int, *, top_k: int) -> int:
    """Return ``S D + k D + 2 D`` (sparq.15): every key, and ``top_k`` values."""
    return S * D + min(top_k, S) * D + 2 * D


def quest_elements(S: int, D: int, *, top_k: int, page_size: int) -> int:
    """Return ``2 P D + 2 k D + 2 D`` (quest.6): the bounds of all pages, k keys and values, the new row."""
    return 2 * -(-S // page_size) * D + 2 * min(top_k, S) * D + 2 * D


def saap_elements(D: int, attended: int, *, network: int = 0) -> int:
    """Return ``2 n D + n + 2 D + w`` (saap.14): n keys and values, their list, the new row, the query network."""
    return 2 * attended * D + attended + 2 * D + network


def prefill_elements(layout: Layout, D: int, density: float | None = None) -> int:
    """Return the elements per query head in prefill (sample.10); dense attention if ``density`` is None.

    They are the keys and values of every block pair, the queries, the output, and the keys for the sample.
    """
    share = 1.0 if density is None else density
    sampling = 0 if density is None or not layout.sampled_share else len(layout.regions) * layout.S * D
    return round(2 * layout.L * D + 2 * layout.block_size * D * layout.causal_pairs * share) + sampling


def as_prefill(stats: Stats, layout: Layout, D: int) -> Stats:
    """Return the ``stats`` of a dense call in the unit of prefill: elements per query head."""
    moved = prefill_elements(layout, D)
    return replace(stats, elements=moved, dense_elements=moved)
