"""Compare logits with the tokens that they had to predict and with dense attention's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...checks import ConfigError
from .results import Outcome
from .tasks import Example

Array = npt.NDArray[np.float64]
SLICE = 128  # positions compared at a time


def log_softmax(logits: mx.array) -> mx.array:
    """Return the log-softmax over the last axis, in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def figures_of(logp: mx.array, dense: mx.array, targets: mx.array) -> Array:
    """Return per position: nats of the target, whether it was the most likely token, whether that is dense's, the KL.

    Args:
        logp, dense: log-probabilities ``(..., vocabulary)`` of the method and of dense attention.
        targets: tokens ``(...)``.

    Returns:
        float64 ``(..., 4)``.
    """
    best = logp.argmax(axis=-1)
    nats = -mx.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    # Tokens of probability 0 under dense attention add nothing, even where the logit is -inf.
    kl = mx.where(mx.exp(dense) > 0, mx.exp(dense) * (dense - logp), 0.0).sum(axis=-1)
    columns = [nats, best == targets, best == dense.argmax(axis=-1), kl]
    return np.array(mx.stack([column.astype(mx.float32) for column in columns], axis=-1), np.float64)


def outcome(figures: Array, n_bytes: float, matched: float = 0.0) -> Outcome:
    """Return the outcome of the scored positions' ``figures (scored, 4)``, whose text has ``n_bytes``.

    Raises:
        ConfigError: the model's logits are not finite.
    """
    if not np.isfinite(figures).all():
        raise ConfigError("--model: expected logits that are finite, got others. Use a copy in bfloat16 or float32.")
    nats, right, agreed, kl = figures.sum(axis=0).tolist()
    n = len(figures)
    return Outcome(nats / (math.log(2) * n_bytes), right / n, agreed / n, kl / n, matched, float(right == n))


def step_outcome(figures: Array, example: Example, tokenizer: Any) -> Outcome:
    """Return the outcome of an example, whose target's tokens have ``figures (len(target), 4)``."""
    scored = range(len(example.target)) if example.scored is None else example.scored
    wrong = next((position for position in scored if not figures[position, 1]), len(example.target))
    text: str = tokenizer.decode([example.target[position] for position in scored])
    matched = len(tokenizer.decode([example.target[position] for position in scored if position < wrong]))
    return outcome(figures[list(scored)], len(text.encode()), matched)


def prompt_outcome(logits: mx.array, dense: mx.array, targets: Sequence[int], n_bytes: float) -> Outcome:
    """Return the outcome of ``logits (scored, vocabulary)`` in a prompt; ``dense`` are dense attention's."""
    rows = [slice(start, start + SLICE) for start in range(0, len(targets), SLICE)]
    parts = [figures_of(log_softmax(logits[r]), log_softmax(dense[r]), mx.array(list(targets[r]))) for r in rows]
    return outcome(np.concatenate(parts), n_bytes)
