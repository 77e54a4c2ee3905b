"""Test that commands check all options before a download, and fetch OpenBLAS only for `try --fast-blas`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from absent import OFFLINE

from mlx_sparse import cli
from mlx_sparse.tools.assets import blas

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # commands
linux = pytest.mark.skipif(not blas.wanted(), reason="MLX does not compute on a Linux CPU here, or a BLAS is preloaded")

TRY = "try no-tokenizer"  # fails right after the point where OpenBLAS would be fetched
# Commands without a model would download the default model.
COMMANDS = {
    "eval": "eval --methods sparq --text text.txt",
    "tune-sample": "tune-sample --text text.txt --lengths 4k",
    "train-saap": "train-saap --text text.txt -o a.safetensors --recent-tokens 63",
    "try": "try --fast-blas",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working folder with a model and a text, without access to packages."""
    tiny_models.write(tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny_models.words(tiny_models.prompt_of(3000)))
    tiny_models.write(tmp_path / "no-tokenizer")
    (tmp_path / "no-tokenizer" / "tokenizer.json").unlink()
    for variable, value in OFFLINE.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(capfd: Any, words: str) -> str:
    """Return the standard error of a command that fails, with `cache` as its cache folder."""
    assert cli.main([*words.split(), "--cache-dir", "cache"]) == 2
    return str(capfd.readouterr().err)


@linux
def test_blas_is_offered_but_not_fetched_by_default(folder: Path, capfd: Any) -> None:
    output = error_of(capfd, TRY)
    assert not (folder / "cache").exists()
    assert output.count(blas.OFFER) == 1 and "scipy" not in output


@linux
def test_fast_blas_is_fetched_and_optional(capfd: Any) -> None:
    output = error_of(capfd, f"{TRY} --fast-blas")
    assert "OpenBLAS is not available, so the run is slower: scipy==1.13.1: expected one file from pip" in output
    assert blas.OFFER not in output


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, "--model /nowhere") for name in COMMANDS),
        *((name, "--model gemma-3-270m") for name in COMMANDS),
        *((name, "--text nowhere.txt") for name in COMMANDS),
        ("eval", "--limit 0"),
        ("tune-sample", "--examples 0"),
        ("train-saap", "--context 100"),
        ("train-saap", "--held-out nowhere.txt"),
        ("try", "--attn sparkle"),
    ],
)
def test_options_are_checked_before_any_download(name: str, wrong: str, folder: Path, capfd: Any) -> None:
    output = error_of(capfd, f"{COMMANDS[name]} {wrong}")
    assert output.count("\n") == 1 and ": error: " in output
    assert not (folder / "cache").exists()
