"""Families of models that are known to be unfit for sparse attention that they were not trained for."""

from __future__ import annotations

from collections.abc import Mapping

# By mlx-lm's name of the family: why. Only what somebody has measured or read; docs/advise.md has the sources.
UNFIT: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma4", "gemma4_text"),
        "even the best 2,048 keys of its global layers are reported to change what it says far too much",
    ),
    "minimax_m3_vl": "it was trained to choose its own blocks of keys, which most of its layers do by masks: they stay "
    "dense",
}


def warning(model_type: str) -> str | None:
    """One line for who runs a model of this family sparsely; None where nothing is known against it."""
    reason = UNFIT.get(model_type)
    if reason is None:
        return None
    return f"{model_type} is known to be unfit for this: {reason} (docs/advise.md). mlx-sparse advise measures yours"
