"""Find and read a model for a command, and refuse or warn about it in one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checks import ConfigError, SparseAttentionError


@contextlib.contextmanager
def loading(model: object) -> Iterator[None]:
    """Say in one line what went wrong with finding or reading ``model``.

    Raises:
        ConfigError: in place of what mlx-lm and the hub raise.
    """
    try:
        yield
    except SparseAttentionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model: expected a model that mlx-lm can load, got {model} ({reason}).") from None


def has_all_weights(folder: Path) -> bool:
    """Whether all weights of the model in ``folder`` are there; a stage of a pipeline may have been given its own."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).is_file() for name in set(json.loads(index.read_text())["weight_map"].values()))


def refuse_rotating_cache(model_path: Path) -> None:
    """Raise `ConfigError` if ``--max-kv-size`` gives the model in ``model_path`` rotating caches; do not load it."""
    from mlx_lm import utils

    config = utils.load_config(model_path)
    model_class, _ = utils._get_classes(config)
    if not hasattr(model_class, "make_cache"):
        raise ConfigError(
            f"--max-kv-size: expected none with --attn for {config.get('model_type')}, whose caches it makes rotating, "
            "which no method here reads. Drop one."
        )


def refuse_unquantisable(model: Any, form: Mapping[str, int]) -> None:
    """Raise `ConfigError` if mlx-lm cannot quantise the caches of ``model``: it would say so in mid-prompt.

    Args:
        form: arguments of ``to_quantized``; 64 components to a group if they do not say.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from ..model_info import leaves

    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)  # not evaluated
    for cache in leaves(caches):
        try:
            if hasattr(cache, "to_quantized"):
                cache.to_quantized(**form)
        except (NotImplementedError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"--kv-bits: expected caches that mlx-lm can quantise, got: {reason} Drop it.") from None


# By mlx-lm's name of the family: why. Only what somebody has measured or read; docs/advise.md has the sources.
UNFIT: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma4", "gemma4_text"),
        "even the best 2,048 keys of its global layers are reported to change what it says far too much",
    ),
    "minimax_m3_vl": "it was trained to choose its own blocks of keys, which most of its layers do by masks: they stay "
    "dense",
}


def unfit_warning(model_type: str) -> str | None:
    """One line for who runs a model of this family sparsely; None where nothing is known against it."""
    reason = UNFIT.get(model_type)
    if reason is None:
        return None
    return f"{model_type} is known to be unfit for this: {reason} (docs/advise.md). mlx-sparse advise measures yours"
