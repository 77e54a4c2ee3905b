"""The models that commands know by name, and what has to be accepted before one is fetched."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..checks import ConfigError
from . import gemma3, smollm2


@dataclass(frozen=True)
class Named:
    """A model that packages bring; ``licence`` and ``terms`` if its licence is not an open-source one."""

    prepare: Callable[[Path], Path]
    licence: str | None = None
    terms: str = ""


DEFAULT = "smollm2-135m-instruct"
MODELS = {
    DEFAULT: Named(smollm2.prepare_model),
    "gemma-3-270m": Named(gemma3.prepare_model, "gemma", gemma3.TERMS),
}
LICENCES = [named.licence for named in MODELS.values() if named.licence]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and what goes with it."""
    names = ", ".join(MODELS)
    parser.add_argument("--model", metavar="MODEL", help=f"path, Hugging Face repo, or {names} (default: {DEFAULT})")
    parser.add_argument(
        "--accept-licence",
        metavar="NAME",
        choices=LICENCES,
        help=f"you accept the terms of use of a model that is not open source: {', '.join(LICENCES)}",
    )


def find_model(name: str | None, cache: Path, licence: str | None = None) -> str:
    """Return what mlx-lm loads for ``--model name``; a named model is fetched and converted the first time.

    Args:
        licence: the licence that the user accepts.

    Raises:
        ConfigError: the model has terms of use that were not accepted.
        ArtefactError: it cannot be fetched, or its files are damaged.
    """
    name = name or DEFAULT
    named = MODELS.get(name)
    if named is None or Path(name).exists():
        return name
    if named.licence != licence and named.licence is not None:
        raise ConfigError(
            f"--model: expected --accept-licence {named.licence} with {name}, got none. Its weights are not open "
            f"source: read {named.terms}, and give that option if you accept."
        )
    return str(named.prepare(cache))
