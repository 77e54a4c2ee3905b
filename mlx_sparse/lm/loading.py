"""Load the model of a command, with one-line errors and warnings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checks import ConfigError, SparseAttentionError


@contextlib.contextmanager
def loading(model: object) -> Iterator[None]:
    """Replace the errors of mlx-lm and the hub while they load ``model``.

    Raises:
        ConfigError: with the first line of their error.
    """
    try:
        yield
    except SparseAttentionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model: expected a model that mlx-lm can load, got {model} ({reason}).") from None


def has_all_weights(folder: Path) -> bool:
    """Return True if ``folder`` has all weights of the model; a pipeline stage may have only its own weights."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).is_file() for name in set(json.loads(index.read_text())["weight_map"].values()))


def refuse_rotating_cache(model_path: Path) -> None:
    """Raise `ConfigError` if ``--max-kv-size`` makes the model in ``model_path`` use rotating caches."""
    from mlx_lm import utils

    config = utils.load_config(model_path)
    model_class, _ = utils._get_classes(config)
    if not hasattr(model_class, "make_cache"):
        raise ConfigError(
            f"--max-kv-size: expected none with --attn for {config.get('model_type')}, got one: it makes the caches "
            "rotating, and no method supports these. Drop one of the options."
        )


def refuse_unquantizable(model: Any, form: Mapping[str, int]) -> None:
    """Raise `ConfigError` if mlx-lm cannot quantize the caches of ``model``, before mlx-lm fails during prefill.

    Args:
        form: arguments of ``to_quantized``; the default group size is 64.
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
            raise ConfigError(f"--kv-bits: expected caches that mlx-lm can quantize, got: {reason} Drop it.") from None


# By mlx-lm's name of the family: the reason. Each entry was measured or published; docs/advise.md has the sources.
UNFIT: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma4", "gemma4_text"),
        "its answers are reported to change too much even with the best 2,048 keys of its global layers",
    ),
    "minimax_m3_vl": "it was trained to select its own blocks of keys, and most of its layers stay dense",
}


def unfit_warning(model_type: str) -> str | None:
    """Return a one-line warning about sparse attention with a model of this family, or None."""
    reason = UNFIT.get(model_type)
    if reason is None:
        return None
    about = f"{model_type} is known to be unfit for sparse attention: {reason} (docs/advise.md)"
    return f"{about}. mlx-sparse advise measures your model"
