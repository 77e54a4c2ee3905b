"""Load a model and check it before and after loading. Failed checks raise a one-line error or return a warning."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import blas
from ..checks import ConfigError, SparseAttentionError, reason_of
from ..files import cache_directory
from ..model_info import leaves, new_caches, text_model

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper


@contextlib.contextmanager
def loading(model: object) -> Iterator[None]:
    """Convert errors that are raised while the ``with`` block loads ``model`` to one-line errors.

    Raises:
        ConfigError: mlx-lm or the Hugging Face Hub raised an error. The message contains this error.
    """
    try:
        yield
    except SparseAttentionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--model: expected a model that mlx-lm can load, got {model} ({reason_of(error)})."
        ) from None


def load_text_model(
    name: str | Path, *, lazy: bool = False, only_mlx_lm: bool = False
) -> tuple[nn.Module, TokenizerWrapper, dict[str, object]]:
    """Load a model with mlx-lm. If mlx-lm does not support the model family, use mlx-vlm if it is installed.

    Args:
        name: folder or Hugging Face name of the model.
        lazy: True to read the weights only when they are used.
        only_mlx_lm: True to never use mlx-vlm.

    Returns:
        The model, its tokenizer in mlx-lm's wrapper, and its config. If mlx-vlm loads the model, only the language
        model is returned.

    Raises:
        ConfigError: neither library can load the model.
    """
    from mlx_lm import load, tokenizer_utils

    blas.load(cache_directory())
    with loading(name):
        try:
            return load(str(name), lazy=lazy, return_config=True)  # type: ignore[return-value]
        except ValueError:
            if only_mlx_lm or find_spec("mlx_vlm") is None:
                raise
        utils = import_module("mlx_vlm.utils")
        folder = utils.get_model_path(str(name))
        model = text_model(utils.load_model(folder, lazy=lazy))
        return model, tokenizer_utils.load(folder), utils.load_config(folder)


def has_all_weights(folder: Path) -> bool:
    """Return True if ``folder`` has all weight files of the model. A pipeline stage may have only some weight files."""
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
            f"--max-kv-size: expected no limit with --attn for {config.get('model_type')}, got one. It selects "
            "rotating caches, which no method supports. Drop one option."
        )


GROUP_SIZES = (32, 64, 128)  # group sizes of MLX


@contextlib.contextmanager
def quantizing(caches: list[object], *, group_size_option: bool = True) -> Iterator[None]:
    """Convert errors that are raised while the ``with`` block quantizes ``caches`` to one-line errors.

    Args:
        group_size_option: True if the command has the option ``--kv-group-size``.

    Raises:
        ConfigError: mlx-lm cannot quantize a cache.
    """
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        reason = reason_of(error).rstrip(".")
        keys = [rows for cache in caches if isinstance(rows := getattr(cache, "keys", None), mx.array)]
        fits = [size for size in GROUP_SIZES if all(rows.shape[-1] % size == 0 for rows in keys)]
        divides = isinstance(error, ValueError) and group_size_option and fits
        advice = f"Set --kv-group-size {fits[0]}, or drop --kv-bits." if divides else "Drop --kv-bits."
        raise ConfigError(f"--kv-bits: expected caches that mlx-lm can quantize, got: {reason}. {advice}") from None


def refuse_unquantizable(model: nn.Module, bits: int) -> None:
    """Raise `ConfigError` if mlx-lm cannot quantize the caches of ``model`` with its default group size."""
    caches = new_caches(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)  # not evaluated
    for cache in leaves(caches):
        if hasattr(cache, "to_quantized"):
            with quantizing([cache], group_size_option=False):
                cache.to_quantized(bits=bits)


# Reason why a model family is unfit for sparse attention, by mlx-lm's family name. docs/advise.md has the sources.
UNFIT: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma4", "gemma4_text"),
        "its answers reportedly change too much, even if the global layers attend the best 2,048 keys",
    ),
    "minimax_m3_vl": "it was trained with another selection of key blocks, and most of its layers stay dense",
}


def blas_note(model: nn.Module) -> str | None:
    """Return a line about the BLAS of MLX on a Linux CPU; None if ``model`` has no float32 matrices to multiply."""
    arrays = dict[str, mx.array](tree_flatten(model.parameters())).values()
    return blas.note() if any(array.dtype == mx.float32 and array.ndim == 2 for array in arrays) else None


def unfit_warning(model_type: str) -> str | None:
    """Return a one-line warning if models of ``model_type`` are unfit for sparse attention; otherwise None."""
    reason = UNFIT.get(model_type)
    if reason is None:
        return None
    about = f"{model_type} is known to be unfit for sparse attention: {reason} (docs/advise.md)"
    return f"{about}. Run 'mlx-sparse advise' to measure your model"
