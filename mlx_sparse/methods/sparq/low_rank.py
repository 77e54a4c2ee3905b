"""Fit and apply the low-rank projection of latents, docs/spec/low_rank.md, (low_rank.1) to (low_rank.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ...core.packed_rows import Rows
from .scoring_keys import CAPTURED, FITTED_ROWS, RIDGE, Projection

if TYPE_CHECKING:
    from mlx import nn

Array = np.ndarray


class ProjectedRows:
    """Latents that are projected when they are indexed, so that only the indexed rows take memory.

    Attributes:
        shape: ``(B, Hkv, S, r)``.
    """

    def __init__(self, rows: Rows, projection: mx.array) -> None:
        """Create a view of ``rows (B, Hkv, S, D)``. ``projection`` has shape ``(B, Hkv, D, r)``."""
        self._rows, self._projection = rows, projection
        self.shape = (*rows.shape[:3], projection.shape[3])

    def __getitem__(self, at: Any) -> mx.array:
        """Return float32 rows. The first index, of the sequences, must be a slice or an ellipsis."""
        sequences = at[0] if isinstance(at, tuple) else at
        return self._rows[at].astype(mx.float32) @ self._projection[sequences]


def project(projection: Projection, queries: mx.array, rows: Rows) -> tuple[mx.array, Any]:
    """Return the scoring queries ``(B, Hq, 1, r)``, and the scoring keys as `ProjectedRows` (low_rank.3)."""
    B, Hq, _, D = queries.shape
    scoring = queries.astype(mx.float32).reshape(B, rows.shape[1], -1, D) @ projection.queries
    return scoring.reshape(B, Hq, 1, -1), ProjectedRows(rows, projection.keys)


def stack(parts: list[Projection]) -> Projection:
    """Return the projection of a batch of the sequences in ``parts``. Components that a part does not have are zero."""
    rank = max(part.keys.shape[3] for part in parts)
    queries, keys = (
        mx.concatenate([mx.pad(array, [(0, 0)] * 3 + [(0, rank - array.shape[3])]) for array in arrays])
        for arrays in ([part.queries for part in parts], [part.keys for part in parts])
    )
    return Projection(queries, keys, np.concatenate([part.share for part in parts]))


def query_covariance(attention: nn.Module) -> Array:
    """Return ``C_q (D, D)`` of a layer with absorbed queries (low_rank.1). Quantized weights are dequantized.

    Args:
        attention: attention module of mlx-lm, with ``embed_q`` and with ``q_proj`` or ``q_b_proj``.
    """
    embed = _weight(attention.embed_q)  # (H, D, nope)
    H, _, nope = embed.shape
    if hasattr(attention, "q_b_proj"):
        weight = _weight(attention.q_b_proj) * attention.q_a_layernorm.weight
    else:
        weight = _weight(attention.q_proj)
    inputs = weight.reshape(H, -1, weight.shape[1])[:, :nope]
    # W_h = embed_h inputs_h. This order multiplies the smallest matrices.
    found = embed @ (inputs @ inputs.swapaxes(-1, -2)) @ embed.swapaxes(-1, -2)
    return np.array(found.sum(axis=0), np.float64)


def _weight(layer: Any) -> mx.array:
    """Return the float32 weight of a linear layer."""
    if "scales" not in layer:
        weight: mx.array = layer.weight
        return weight.astype(mx.float32)
    biases, how = layer.get("biases"), {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(layer.weight, layer.scales, biases, **how).astype(mx.float32)


def fit(query_covariance: Array, latents: Rows, rank: int) -> Projection:
    """Fit the projection of one sequence. See `components` for the first two arguments.

    Args:
        rank: smallest number of components (low_rank.5).
    """
    queries, keys, shares = components(query_covariance, latents)
    r = smallest_rank(shares, rank)
    return Projection(mx.array(queries[..., :r], mx.float32), mx.array(keys[..., :r], mx.float32), shares[..., r - 1])


def components(query_covariance: Array, latents: Rows) -> tuple[Array, Array, Array]:
    """Factorize the covariances of one sequence on the host, (low_rank.1) to (low_rank.3).

    Args:
        query_covariance: ``C_q (D, D)``.
        latents: ``(1, Hkv, n, D)`` valid latents.

    Returns:
        projections ``(1, Hkv, D, D)`` of the queries and of the keys onto all components, and the captured share
        ``(1, Hkv, D)`` of each number of components.
    """
    values, vectors = np.linalg.eigh(regular(query_covariance))
    values = np.maximum(values, RIDGE)  # a float32 covariance may have negative eigenvalues
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    # C_q^(1/2) C_k^(1/2) = U S V^T, so U S^2 U^T = C_q^(1/2) C_k C_q^(1/2), and S^(1/2) V^T C_k^(-1/2) =
    # S^(-1/2) U^T C_q^(1/2). This form needs no root of C_k.
    squares, U = np.linalg.eigh(root @ regular(covariance(latents)) @ root)
    squares, U = squares[..., ::-1], U[..., ::-1]
    scale = np.maximum(squares, np.finfo(float).eps * squares[..., :1])[..., None, :] ** 0.25
    return inverse @ U * scale, root @ U / scale, np.cumsum(squares, axis=-1) / squares.sum(axis=-1, keepdims=True)


def smallest_rank(shares: Array, rank: int) -> int:
    """Return the smallest of 1, 2 and 4 times ``rank`` that captures enough in all heads, or D (low_rank.5).

    Args:
        shares: ``(..., D)`` captured share of each number of components.
    """
    D = shares.shape[-1]
    return next((r for r in (rank, 2 * rank, 4 * rank) if r < D and (shares[..., r - 1] >= CAPTURED).all()), D)


def regular(covariance: Array) -> Array:
    """Divide a covariance by its mean eigenvalue, and add `RIDGE`. If that is impossible, return the identity."""
    mean = np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / covariance.shape[-1]
    usable = np.isfinite(mean) & (mean > 0)
    identity = np.eye(covariance.shape[-1])
    scaled = np.where(usable, covariance, 0) / np.where(usable, mean, 1) + RIDGE * identity
    return np.where(usable, scaled, identity)


def covariance(latents: Rows) -> Array:
    """Return the covariance ``(1, Hkv, D, D)`` of the finite latents, with float32 products (low_rank.1)."""
    step = max(1, -(-latents.shape[2] // FITTED_ROWS))
    rows = latents[:, :, ::step].astype(mx.float32)
    used = mx.isfinite(rows).all(axis=-1, keepdims=True)
    count = mx.maximum(used.sum(axis=2, keepdims=True), 1)
    rows = mx.where(used, rows, 0)
    rows = mx.where(used, rows - rows.sum(axis=2, keepdims=True) / count, 0)
    return np.array(rows.swapaxes(-1, -2) @ rows / count, np.float64)
