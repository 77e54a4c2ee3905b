"""Run SparQ with native kernels (docs/spec/sparq.md). The functions that prepare scoring keys are those of `ops`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ...core import native_call
from ...core.attend.cpu import attend_indices
from ...core.native_call import attend, fill
from .config import Selection
from .ops import code_keys as code_keys
from .ops import deviation as deviation
from .ops import first_groups, sparq_select
from .ops import key_spread as key_spread
from .ops import masked_mean as masked_mean
from .scoring_keys import KeyCodes


def sparq_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    reallocate: bool,
    value_mean: mx.array | None,
    length: int | None = None,
    **parameters: Any,
) -> tuple[mx.array, ...]:
    """Run a SparQ decode step over whole buffers. See `methods.sparq.ops.sparq_attention`."""
    selection = Selection(**parameters)
    if selection.projection is not None:
        S = keys.shape[2] if length is None else length
        selection = selection._replace(keys_t=first_groups(selection.keys_t, S))
        indices, _, estimate = sparq_select(queries, keys[:, :, :S], selection)
        given: dict[str, Any] = {"scale": selection.scale, "length": length, "bias": selection.bias}
        return *attend_indices(queries, keys, values, indices, **given), estimate
    step = native_call.SparQ(selection.rank, selection.top_k, selection.local_window)
    if isinstance(selection.keys_t, KeyCodes):
        scored, step.groups = selection.keys_t._asdict(), selection.keys_t.lo.shape[3]
    else:
        keys_t = mx.contiguous(keys.swapaxes(-1, -2)) if selection.keys_t is None else selection.keys_t
        dtype = mx.result_type(keys, values, keys_t)
        keys, values, keys_t = keys.astype(dtype), values.astype(dtype), keys_t.astype(dtype)
        scored, step.columns = {"keys_t": keys_t}, keys_t.shape[3]
    recall = np.empty(keys.shape[:2], np.float32)
    weight = selection.component_weight
    mean = value_mean.astype(mx.float32) if reallocate and value_mean is not None else None
    fill(step, **scored, component_weight=weight, value_mean=mean, recall=recall)
    how = {"scale": selection.scale, "length": length, "left_padding": selection.left_padding}
    how["bias"] = selection.bias
    out, lse = attend("sparq", queries, keys, values, step, **how)
    return out, lse, mx.array(recall)
