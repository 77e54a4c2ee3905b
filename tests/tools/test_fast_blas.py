"""Test OpenBLAS: commands fetch it only with `--fast-blas`, and MLX calls it in processes that use this package."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from absent import OFFLINE
from forked import BIN

from mlx_sparse import blas, cli
from mlx_sparse.files import cache_directory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # commands
linux = pytest.mark.skipif(blas.note() is None, reason="MLX does not compute on a Linux CPU here")

# Commands without a model would download the default model.
COMMANDS = {
    "eval": "eval --methods sparq --text text.txt",
    "tune": "tune --text text.txt --lengths 4k",
    "train-saap": "train-saap --text text.txt -o a.safetensors --recent-tokens 63",
    "try": "try --fast-blas",
}
GENERATE = "--model model --prompt w1 --max-tokens 2 --attn sparq:rank=4"
OPENBLAS = "BLAS: OpenBLAS 0.3.27, threads: 1"
# Enable a model. Print the name of the BLAS, and whether it rounds as MLX's own does. Check the results of libraries.
PROGRAM = """
import os
import mlx.core as mx, mlx_lm, numpy as np
import mlx_sparse
from mlx_sparse import blas
a, b = mx.random.normal((65, 257)), mx.random.normal((257, 33))
before = np.array(a @ b)
mlx_sparse.enable(mlx_lm.load("model")[0], "sparq:rank=4")
after = np.array(a @ b)
assert np.allclose(after, np.array(a, np.float64) @ np.array(b, np.float64), atol=1e-4)
assert os.environ.get("OPENBLAS_NUM_THREADS", "") == os.environ.get("CHOSEN", "")
print(blas.in_use(), (before == after).all())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working folder with a model, a text and the user's cache folder `cache`, without access to packages."""
    tiny_models.write(tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny_models.words(tiny_models.prompt_of(3000)))
    tiny_models.write(tmp_path / "no-tokenizer")
    (tmp_path / "no-tokenizer" / "tokenizer.json").unlink()
    for variable, value in OFFLINE.items():
        monkeypatch.setenv(variable, value)
    for variable in ("LD_PRELOAD", blas.THREADS):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fetched(folder: Path) -> Path:
    """Put OpenBLAS into the cache folder, as links. Return its directory."""
    target = cache_directory() / blas.DIRECTORY
    target.mkdir(parents=True)
    for name in blas.LIBRARIES:
        (target / name).symlink_to(USERS / name)
    return target


USERS = cache_directory() / blas.DIRECTORY  # conftest.py has fetched it


def error_of(capfd: Any, words: str) -> str:
    """Return the standard error of a command that fails, with `cache` as its cache folder."""
    assert cli.main([*words.split(), "--cache-dir", "cache"]) == 2
    return str(capfd.readouterr().err)


def run(*command: object, code: int = 0, **environment: str) -> tuple[str, str]:
    """Return standard output and standard error of a program of this environment."""
    first, *rest = map(str, command)
    argv = [sys.executable if first == "python" else str(BIN / first), *rest]
    done = subprocess.run(argv, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def notes(err: str) -> list[str]:
    """Return what a command prints about the BLAS."""
    return [part.removeprefix("[mlx-sparse] ") for part in re.split("\n|; ", err) if "BLAS" in part]


SPELLINGS = ["mlx_lm.generate", "mlx_lm generate", "python -m mlx_lm generate", "mlx-sparse generate"]
if find_spec("mlx_vlm"):
    SPELLINGS.append("mlx_vlm.generate")


@linux
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_commands_with_attn_use_openblas(spelling: str, fetched: Path) -> None:
    assert notes(run(*spelling.split(), *GENERATE.split())[1]) == [OPENBLAS]


@linux
def test_commands_of_the_package_need_no_hook(fetched: Path) -> None:
    code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'CommandFinder'];"
    code += "from mlx_sparse.cli import main; main(sys.argv[1:])"
    assert notes(run("python", "-c", code, "generate", *GENERATE.split())[1]) == [OPENBLAS]


@linux
def test_enabled_models_use_openblas(fetched: Path) -> None:
    assert run("python", "-c", PROGRAM) == (f"{OPENBLAS.removeprefix('BLAS: ')} False\n", "")
    code = "import mlx_lm; mlx_lm.load('model')"
    assert OPENBLAS in run("python", "-c", code, MLX_SPARSE_ATTN="sparq:rank=4")[1]


@linux
@pytest.mark.skipif(os.cpu_count() == 1, reason="OpenBLAS starts at most one thread per core")
def test_the_user_sets_the_number_of_threads(fetched: Path) -> None:
    assert "threads: 2" in run("python", "-c", PROGRAM, **{blas.THREADS: "2", "CHOSEN": "2"})[0]


@linux
@pytest.mark.parametrize("first", ["mlx.core", "numpy, torch"])
def test_other_libraries_keep_their_blas(first: str, fetched: Path) -> None:
    """Test a function that libraries call with different conventions. A symbol in the global scope would replace it."""
    pytest.importorskip("torch")
    code = f"""
import {first}
from mlx_sparse import blas
from mlx_sparse.files import cache_directory
blas.load(cache_directory())
import numpy as np, torch
a, b = torch.randn(2, 100, dtype=torch.complex64)
print(blas.in_use(), np.allclose(torch.dot(a, b), (a * b).sum()), hasattr(blas.ctypes.CDLL(None), "cblas_sgemm"))
"""
    out, _ = run("python", "-c", code, WITHOUT="")
    assert out == f"{OPENBLAS.removeprefix('BLAS: ')} True False\n"


@linux
def test_another_preloaded_blas_stays(fetched: Path) -> None:
    preload = ":".join(str(USERS / name) for name in blas.LIBRARIES)
    assert run("python", "-c", PROGRAM, LD_PRELOAD=preload) == ("preloaded True\n", "")


@linux
@pytest.mark.parametrize("damage", ["changed", "empty", "missing", "a folder"])
def test_a_damaged_library_is_not_loaded(damage: str, fetched: Path) -> None:
    name = list(blas.LIBRARIES)[-2]
    (fetched / name).unlink()
    if damage == "a folder":
        (fetched / name).mkdir()
    elif damage != "missing":
        (fetched / name).write_bytes((USERS / name).read_bytes()[:-1] + b"\1" if damage == "changed" else b"")
    out, err = run("python", "-c", PROGRAM)
    refusal = f"OpenBLAS is not used: {fetched / name}: expected a library of OpenBLAS, got"
    assert out == "None True\n" and err.startswith(f"[mlx-sparse] {refusal}") and err.endswith(". Delete its folder.\n")
    if damage == "changed":
        assert notes(run("mlx_lm.generate", *GENERATE.split())[1]) == [*notes(err), blas.SLOW]
        out, again = run("mlx-sparse", "doctor", "--fast-blas", code=1)
        assert f"problem: {blas.SLOW}\n" in out and again == err


@linux
def test_missing_openblas_is_offered_once_and_not_fetched(folder: Path, capfd: Any) -> None:
    assert notes(run("mlx_lm.generate", *GENERATE.split())[1]) == [blas.SLOW]
    out, err = run("mlx-sparse", "doctor", code=1)
    assert f"problem: {blas.SLOW}\n" in out and "scipy" not in err
    assert not blas.fetched(cache_directory())


@linux
@pytest.mark.parametrize("command", ["doctor", "try no-tokenizer"])
def test_openblas_is_optional_if_it_cannot_be_fetched(command: str) -> None:
    out, err = run("mlx-sparse", *command.split(), "--fast-blas", code=1 if command == "doctor" else 2)
    assert "OpenBLAS is not available, so the run is slower: scipy==1.13.1: expected one file from pip" in err
    assert blas.SLOW in " ".join(out.split())  # wrapped to the width of the terminal


@linux
def test_doctor_fetches_openblas(folder: Path) -> None:
    online = {"PIP_CONFIG_FILE": "", "PIP_NO_INDEX": "0"}
    assert OPENBLAS in run("mlx-sparse", "doctor", "--fast-blas", **online)[0]
    assert [file.name for file in cache_directory().iterdir()] == [USERS.name]
    assert OPENBLAS in run("mlx-sparse", "doctor")[0]


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas.platform, "libc_ver", lambda: ("", ""))
    found = runpy.run_path(blas.__file__)
    assert (found["in_use"](), found["note"]()) == (None, None)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, "--model /nowhere") for name in COMMANDS),
        *((name, "--model gemma-3-270m") for name in COMMANDS),
        *((name, "--text nowhere.txt") for name in COMMANDS),
        ("eval", "--limit 0"),
        ("tune", "--examples 0"),
        ("train-saap", "--context 100"),
        ("train-saap", "--held-out nowhere.txt"),
        ("try", "--attn sparkle"),
    ],
)
def test_options_are_checked_before_any_download(name: str, wrong: str, folder: Path, capfd: Any) -> None:
    output = error_of(capfd, f"{COMMANDS[name]} {wrong}")
    assert output.count("\n") == 1 and ": error: " in output
    assert not (folder / "cache").exists()
