"""Build the CSR index that lists the keys of each SAAP bucket (docs/spec/saap.md, saap.9).

The `ops` and `metal` backends share this module. Caches rebuild the index every few hundred tokens.
"""

from __future__ import annotations

import mlx.core as mx


def saap_index(
    bucket_ids: mx.array, *, buckets: int, sink_tokens: int, left_padding: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """List the keys of each bucket in ascending order (saap.9). Sinks and padding are omitted.

    Args:
        bucket_ids: ``(B, Hkv, n)`` int bucket of each key. Keys with a bucket outside ``0 .. buckets - 1`` are omitted.

    Returns:
        int32 ``offsets (B, Hkv, buckets + 1)`` and ``key_ids (B, Hkv, n)``. Bucket c has the keys
        ``key_ids[offsets[c] : offsets[c + 1]]``. Slots at ``offsets[buckets]`` and above are undefined.
    """
    B, Hkv, n = bucket_ids.shape
    if n == 0:
        return mx.zeros((B, Hkv, buckets + 1), mx.int32), mx.zeros((B, Hkv, 0), mx.int32)
    sink_tokens = min(sink_tokens, n)  # a larger number could overflow 32 bits
    first = mx.array(sink_tokens) if left_padding is None else (left_padding + sink_tokens)[:, None, None]
    listed = (bucket_ids >= 0) & (bucket_ids < buckets) & (mx.arange(n) >= first)
    ids = mx.where(listed, bucket_ids, buckets).astype(mx.int32)
    counts = mx.zeros((B, Hkv, buckets + 1), mx.int32)
    counts = counts.at[mx.arange(B)[:, None, None], mx.arange(Hkv)[:, None], ids].add(1)[..., :buckets]
    offsets = mx.pad(mx.cumsum(counts, axis=-1), [(0, 0), (0, 0), (1, 0)])
    # Sort by bucket * n + key. These numbers are unique, so the sort need not be stable.
    wide = mx.uint32 if (buckets + 1) * n <= 2**32 else mx.int64
    order = mx.sort(ids.astype(wide) * n + mx.arange(n).astype(wide), axis=-1)
    return offsets, (order % n).astype(mx.int32)
