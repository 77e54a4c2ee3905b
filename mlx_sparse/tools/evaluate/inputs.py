"""The model and the texts of a command that runs examples."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from ...checks import ConfigError
from ...files import cache_directory
from ...lm.loading import loading
from ...model_info import kv_shapes, weights_hash
from .. import environment
from ..assets.models import add_model_options, check_model, find_model
from . import texts
from .tasks.base import encode


def add_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add what every command that runs examples takes: ``--model``, ``--text``, ``--seed`` and how it runs.

    ``positional``: the model is an argument and no option.
    """
    add_model_options(parser, positional=positional)
    parser.add_argument(
        "--text",
        metavar="TEXT",
        nargs="+",
        help=f"files, or {', '.join(texts.NAMES)} (default: {texts.DEFAULT}, its language reference)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="for whatever is drawn (default: 0)")
    parser.add_argument("--cache-dir", metavar="DIR", help="where the default model goes (default: user's cache)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def check_options(args: argparse.Namespace) -> None:
    """Refuse a model and texts of `add_options` that cannot be had, before anything is fetched or loaded.

    Raises:
        ConfigError, PackageMissing: as `check_model` and `texts.check`.
    """
    check_model(args.model, cache_directory(args.cache_dir), args.accept_licence)
    texts.check(args.text)


def load_model(name: str | None, cache: str | None, licence: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its tokenizer and its ``config.json``; SmolLM2 by default. ``licence`` is one that the user accepts."""
    from mlx_lm import load

    path = find_model(name, cache_directory(cache), licence)
    with loading(path):
        model, tokenizer, config = load(path, return_config=True)  # type: ignore[misc]
    return model, tokenizer, config


def encode_texts(tokenizer: Any, read: Sequence[texts.Text]) -> list[list[int]]:
    """The tokens of each text, without those that open one; texts are parted by an empty line."""
    # transformers warns of texts longer than the context, of which only pieces are used here.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return [encode(tokenizer, ("\n\n" if i else "") + text.text) for i, text in enumerate(read)]


def read_tokens(tokenizer: Any, names: list[str] | None, cache: str | None, option: str = "--text") -> list[int]:
    """The tokens of the texts called ``names``, one after the other; ``option`` is who named them."""
    found = texts.read(names, option, cache_directory(cache))
    return [token for tokens in encode_texts(tokenizer, found) for token in tokens]


def fingerprint(model: Any, tokens: Sequence[int], *options: Any) -> str:
    """A hash that stands for what results depend on: the model, the text, the options, the versions and the device."""
    import numpy as np

    chip = environment.hardware()["chip"]
    digest = hashlib.sha256(json.dumps([weights_hash(model), environment.versions(), chip, options]).encode())
    digest.update(np.array(tokens, dtype=np.int64).tobytes())
    return digest.hexdigest()


def head_dim(model: Any) -> int:
    """Components of a key of the first layer that keeps keys.

    Raises:
        ConfigError: no layer does.
    """
    shape = next(filter(None, kv_shapes(model)), None)
    if shape is None:
        raise ConfigError("--model: expected a model with a KV cache, got one without.")
    return shape[1]
