"""What attention moves: the papers' transfer formulae, and the record returned with ``return_stats``.

Counts are elements (multiply by the item size for bytes), with S keys of head dim D: for a decode step per KV head, for
a prompt per query head. Equation numbers refer to docs/spec/sparq.md, sample.md and saap.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .block_layout import Layout


@dataclass(frozen=True)
class Stats:
    """What an attention call moved.

    Attributes:
        elements: elements moved per KV head and step, or per query head of a prompt.
        dense_elements: what dense attention moves for the same shapes.
        density: share of the keys, or of a prompt's causal block pairs (sample.9), that were attended.
        recall: attention recall, the share of the softmax mass on the attended keys, ``exp(lse_sparse - lse_dense)``,
            float32 ``(B, Hq, L)``; None without ``return_stats="recall"``.
        head_density: ``density`` of each head of a prompt, ``(B, Hq)``; None for a decode step.
        sampled: share of a prompt's queries that were scored to choose the blocks.
        selectivity: share of the keys outside SAAP's exact part that are in visited buckets (saap.12).
    """

    elements: int
    dense_elements: int
    density: float
    recall: Any = None
    head_density: Any = None
    sampled: float = 0.0
    selectivity: float = 0.0

    @property
    def compression(self) -> float:
        """Elements moved over the dense count; smaller is better."""
        return self.elements / self.dense_elements


def dense_elements(S: int, D: int) -> int:
    """(sparq.11) read K and V, write the new key and value: ``2 S D + 2 D``."""
    return 2 * S * D + 2 * D


def sparq_elements(S: int, D: int, *, rank: int, top_k: int, key_bits: int = 16) -> int:
    """(sparq.12) r components of every key, k keys and values, new row and mean value: ``S r + 2 k D + 4 D``.

    With fewer ``key_bits`` (sparq.23) an element counts 16 bits, and a component of a key its code and its share of lo
    and step: ``S r (bits + 1/2) / 16``.
    """
    scored = S * rank if key_bits == 16 else -(-S * rank * (2 * key_bits + 1) // 32)
    return scored + 2 * min(top_k, S) * D + 4 * D


def streaming_elements(S: int, D: int, *, top_k: int) -> int:
    """(sparq.13) ``top_k`` keys that cost nothing to select: ``2 k D + 2 D``. A bound for `oracle_top_k`."""
    return 2 * min(top_k, S) * D + 2 * D


def h2o_elements(S: int, D: int, *, top_k: int) -> int:
    """(sparq.14) ``top_k`` keys, and the running scores read and written: ``2 k D + 2 D + 2 S``."""
    return 2 * min(top_k, S) * D + 2 * D + 2 * S


def flexgen_elements(S: int, D: int, *, top_k: int) -> int:
    """(sparq.15) every key, ``top_k`` values: ``S D + k D + 2 D``."""
    return S * D + min(top_k, S) * D + 2 * D


def quest_elements(S: int, D: int, *, top_k: int, page_size: int) -> int:
    """(quest.6) the bounds of all pages, k keys and values, new row: ``2 P D + 2 k D + 2 D``."""
    return 2 * -(-S // page_size) * D + 2 * min(top_k, S) * D + 2 * D


def saap_elements(D: int, attended: int, *, network: int = 0) -> int:
    """(saap.14) attended keys and values, their list, the new row, the query network: ``2 n D + n + 2 D + w``."""
    return 2 * attended * D + attended + 2 * D + network


def prefill_elements(layout: Layout, D: int, density: float | None = None) -> int:
    """(sample.10) keys and values of every block pair, queries and output, keys for the sample; dense if None."""
    share = 1.0 if density is None else density
    sampling = 0 if density is None or not layout.sampled_share else len(layout.regions) * layout.S * D
    return round(2 * layout.L * D + 2 * layout.block_size * D * layout.causal_pairs * share) + sampling


def as_prefill(stats: Stats, layout: Layout, D: int) -> Stats:
    """``stats`` of a dense call, in a prompt's unit: elements per query head."""
    moved = prefill_elements(layout, D)
    return replace(stats, elements=moved, dense_elements=moved)
