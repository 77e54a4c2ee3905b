"""The models that commands know by name, and what has to be accepted before one is fetched."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...checks import ConfigError
from . import gemma3, smollm2


@dataclass(frozen=True)
class Named:
    """A model that packages bring; ``licence`` and ``terms`` if its licence is not an open-source one.

    ``check`` says before anything is fetched that ``prepare`` would lack a package.
    """

    prepare: Callable[[Path], Path]
    licence: str | None = None
    terms: str = ""
    check: Callable[[Path], None] = lambda _: None


DEFAULT = "smollm2-135m-instruct"
MODELS = {
    DEFAULT: Named(smollm2.prepare_model),
    "gemma-3-270m": Named(gemma3.prepare_model, "gemma", gemma3.TERMS, gemma3.check_reader),
}
LICENCES = [named.licence for named in MODELS.values() if named.licence]


def add_model_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add ``--model``, or MODEL if it is to be an argument, and what goes with it."""
    about = {"metavar": "MODEL", "help": f"path, Hugging Face repo, or {', '.join(MODELS)} (default: {DEFAULT})"}
    if positional:
        parser.add_argument("model", nargs="?", **about)  # type: ignore[arg-type]
    else:
        parser.add_argument("--model", **about)  # type: ignore[arg-type]
    parser.add_argument(
        "--accept-licence",
        metavar="NAME",
        choices=LICENCES,
        help=f"you accept the terms of use of a model that is not open source: {', '.join(LICENCES)}",
    )


def check_model(name: str | None, cache: Path, licence: str | None = None) -> None:
    """Refuse what `find_model` or mlx-lm would, as far as that shows before anything is fetched.

    Raises:
        ConfigError: the model has terms of use that were not accepted, or is a folder that is not there.
        PackageMissing: what reads its file is not installed.
    """
    name = name or DEFAULT
    there, named = Path(name).exists(), MODELS.get(name)
    if named is None and not there and name.startswith(("/", "./", "../")):
        raise ConfigError(f"--model: expected a model that mlx-lm can load, got {name} (no such folder).")
    if named is None or there:
        return
    if named.licence not in (None, licence):
        raise ConfigError(
            f"--model: expected --accept-licence {named.licence} with {name}, got none. Its weights are not open "
            f"source: read {named.terms}, and give that option if you accept."
        )
    named.check(cache)


def find_model(name: str | None, cache: Path, licence: str | None = None) -> str:
    """Return what mlx-lm loads for ``--model name``; a named model is fetched and converted the first time.

    Args:
        licence: the licence that the user accepts.

    Raises:
        ConfigError, PackageMissing: `check_model` refuses it.
        ArtefactError: it cannot be fetched, or its files are damaged.
    """
    check_model(name, cache, licence)
    name = name or DEFAULT
    named = MODELS.get(name)
    return name if named is None or Path(name).exists() else str(named.prepare(cache))
