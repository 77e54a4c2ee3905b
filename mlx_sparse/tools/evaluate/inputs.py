"""Define the common options of the commands that run a model on texts, and load the model and the texts."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...checks import ConfigError, Parser
from ...files import cache_directory
from ...lm.loading import load_text_model
from ...model_info import kv_shapes, weights_hash
from .. import environment
from ..assets.models import add_model_options, check_model, find_model
from . import texts
from .tasks import encode

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer


def add_options(parser: Parser) -> None:
    """Add the options of all commands that run a model on texts."""
    add_model_options(parser)
    parser.add_argument(
        "--text",
        metavar="TEXT",
        nargs="+",
        help=f"files, or {', '.join(texts.NAMES)} (default: {texts.DEFAULT}, its language reference)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder for fetched files (default: user's cache)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def check_options(args: argparse.Namespace) -> None:
    """Check the options for the model and the texts before anything is fetched or loaded."""
    check_model(args.model, cache_directory(args.cache_dir), args.accept_license)
    texts.check(args.text)


def load_model(
    name: str | None, cache: str | None, license: str | None = None, *, only_mlx_lm: bool = False
) -> tuple[nn.Module, Tokenizer, dict[str, Any]]:
    """Load the model ``name`` (default: SmolLM2). Return the model, its tokenizer and its config.

    ``cache`` is the folder for fetched files. ``license`` is the name of the license that the user accepts.

    If mlx-lm does not have the model's family, mlx-vlm loads the model, unless ``only_mlx_lm`` is True.
    """
    return load_text_model(find_model(name, cache_directory(cache), license), only_mlx_lm=only_mlx_lm)


def encode_texts(tokenizer: Tokenizer, read: Sequence[texts.Text]) -> list[list[int]]:
    """Return the tokens of each text. BOS is omitted. Every text except the first begins with an empty line."""
    # Suppress the warning of transformers about long texts, because only parts of the texts are used.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return [encode(tokenizer, ("\n\n" if i else "") + text.text) for i, text in enumerate(read)]


def read_tokens(tokenizer: Tokenizer, names: list[str] | None, cache: str | None, option: str = "--text") -> list[int]:
    """Read the texts ``names``, and return the tokens of all texts as one list. Messages begin with ``option``."""
    found = texts.read(names, option, cache_directory(cache))
    return [token for tokens in encode_texts(tokenizer, found) for token in tokens]


def fingerprint(model: nn.Module, tokens: Sequence[int], *options: object) -> str:
    """Return a hash of everything that affects the results: model, text, options, versions, chip, dense attention."""
    import numpy as np

    machine = [environment.hardware()[name] for name in ("chip", "dense")]
    digest = hashlib.sha256(json.dumps([weights_hash(model), environment.versions(), machine, options]).encode())
    digest.update(np.array(tokens, dtype=np.int64).tobytes())
    return digest.hexdigest()


def head_dim(model: nn.Module) -> int:
    """Return the head dim of the first layer with a KV cache."""
    shape = next(filter(None, kv_shapes(model)), None)
    if shape is None:
        raise ConfigError("--model: expected a model with a KV cache, got one without.")
    return shape[1]
