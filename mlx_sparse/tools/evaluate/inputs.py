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
from .tasks import encode


def add_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add the options that every command with examples has. With ``positional`` the model is an argument."""
    add_model_options(parser, positional=positional)
    parser.add_argument(
        "--text",
        metavar="TEXT",
        nargs="+",
        help=f"files, or {', '.join(texts.NAMES)} (default: {texts.DEFAULT}, its language reference)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of random places and names (default: 0)")
    parser.add_argument("--cache-dir", metavar="DIR", help="where the default model goes (default: user's cache)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def check_options(args: argparse.Namespace) -> None:
    """Refuse a model and texts that are not available, before anything is fetched or loaded.

    Raises:
        ConfigError, PackageMissing: as `check_model` and `texts.check`.
    """
    check_model(args.model, cache_directory(args.cache_dir), args.accept_licence)
    texts.check(args.text)


def load_model(name: str | None, cache: str | None, licence: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """Load a model, its tokenizer and its ``config.json``; SmolLM2 by default. The user accepts ``licence``."""
    from mlx_lm import load

    path = find_model(name, cache_directory(cache), licence)
    with loading(path):
        model, tokenizer, config = load(path, return_config=True)  # type: ignore[misc]
    return model, tokenizer, config


def encode_texts(tokenizer: Any, read: Sequence[texts.Text]) -> list[list[int]]:
    """Return the tokens of each text, without opening tokens. An empty line separates texts."""
    # transformers warns about texts longer than the context, but only parts of them are used here.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return [encode(tokenizer, ("\n\n" if i else "") + text.text) for i, text in enumerate(read)]


def read_tokens(tokenizer: Any, names: list[str] | None, cache: str | None, option: str = "--text") -> list[int]:
    """Return the tokens of the texts ``names``, given to ``option``, one after the other."""
    found = texts.read(names, option, cache_directory(cache))
    return [token for tokens in encode_texts(tokenizer, found) for token in tokens]


def fingerprint(model: Any, tokens: Sequence[int], *options: Any) -> str:
    """Return a hash of what results depend on: the model, the text, the options, the versions and the device."""
    import numpy as np

    chip = environment.hardware()["chip"]
    digest = hashlib.sha256(json.dumps([weights_hash(model), environment.versions(), chip, options]).encode())
    digest.update(np.array(tokens, dtype=np.int64).tobytes())
    return digest.hexdigest()


def head_dim(model: Any) -> int:
    """Return the head dim of the first layer with a KV cache.

    Raises:
        ConfigError: no layer does.
    """
    shape = next(filter(None, kv_shapes(model)), None)
    if shape is None:
        raise ConfigError("--model: expected a model with a KV cache, got one without.")
    return shape[1]
