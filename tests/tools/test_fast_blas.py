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
    "tune-sample": "tune-sample --text text.txt --lengths 4k",
    "train-saap": "train-saap --text text.txt -o a.safetensors --recent-tokens 63",
    "try": "try --fast-blas",
}
GENERATE = "--model model --prompt w1 --max-tokens 2 --attn sparq:rank=4"
OPENBLAS = "BLAS: OpenBLAS 0.3.27, threads: 1"
NAME = "import mlx_sparse.blas; print(mlx_sparse.blas.in_use())"
# Print the name of the BLAS, and check a product.
PRODUCT = f"""
import numpy as np, os
a, b = mx.random.normal((65, 257)), mx.random.normal((257, 33))
assert np.allclose(np.array(a @ b), np.array(a, np.float64) @ np.array(b, np.float64), atol=1e-4)
assert os.environ.get("OPENBLAS_NUM_THREADS", "") == os.environ.get("CHOSEN", "")
{NAME}
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
    return [line.removeprefix("[mlx-sparse] ") for line in err.splitlines() if "BLAS" in line]


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
@pytest.mark.parametrize(
    ("program", "environment", "name"),
    [
        ("import mlx_sparse\nimport mlx.core as mx", {}, OPENBLAS),
        ("import mlx.core as mx\nimport mlx_sparse", {}, None),
        ("import mlx.core as mx", {}, None),
        ("import mlx_lm, mlx.core as mx", {}, None),
        (
            "import mlx.core as mx, mlx_lm\nmlx_lm.load('model')",
            {"MLX_SPARSE_ATTN": "sparq:rank=4"},
            OPENBLAS,
        ),
    ],
)
def test_programs_use_openblas_if_they_import_the_package_first(
    program: str, environment: dict[str, str], name: str | None, fetched: Path
) -> None:
    out, err = run("python", "-c", program + PRODUCT, **environment)
    assert out == f"{name and name.removeprefix('BLAS: ')}\n"
    assert err.count(OPENBLAS) == ("load(" in program)


@linux
@pytest.mark.skipif(os.cpu_count() == 1, reason="OpenBLAS starts at most one thread per core")
def test_the_user_sets_the_number_of_threads(fetched: Path) -> None:
    program = "import mlx_sparse\nimport mlx.core as mx" + PRODUCT
    assert "threads: 2" in run("python", "-c", program, **{blas.THREADS: "2", "CHOSEN": "2"})[0]


@linux
@pytest.mark.parametrize("first", ["mlx_sparse", "mlx.core"])
def test_the_linker_binds_the_calls_of_mlx(first: str, fetched: Path, folder: Path) -> None:
    """Test the claim of `in_use` with the dynamic linker's own log."""
    run("python", "-c", f"import {first}\nimport mlx.core", LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(folder / "log"))
    (log,) = folder.glob("log.*")
    bound = re.findall(r"file \S*/libmlx\.so \S+ to (\S+) .*symbol `cblas_sgemm'", log.read_text())
    assert len(bound) == 1 and (Path(bound[0]).parent == fetched) == (first == "mlx_sparse")


@linux
def test_another_preloaded_blas_stays(fetched: Path) -> None:
    preload = ":".join(str(USERS / name) for name in blas.LIBRARIES)
    code = "import mlx_sparse, mlx.core; print(open('/proc/self/maps').read())"
    maps, err = run("python", "-c", code, LD_PRELOAD=preload)
    assert err == "" and str(USERS) in maps


@linux
@pytest.mark.parametrize("damage", ["changed", "empty", "missing", "a folder"])
def test_a_damaged_library_is_not_loaded(damage: str, fetched: Path) -> None:
    name = list(blas.LIBRARIES)[-2]
    (fetched / name).unlink()
    if damage == "a folder":
        (fetched / name).mkdir()
    elif damage != "missing":
        (fetched / name).write_bytes((USERS / name).read_bytes()[:-1] + b"\1" if damage == "changed" else b"")
    out, err = run("python", "-c", "import mlx_sparse\nimport mlx.core as mx" + PRODUCT)
    refusal = f"OpenBLAS is not used: {fetched / name}: expected a library of OpenBLAS, got"
    assert out == "None\n" and err.startswith(f"[mlx-sparse] {refusal}") and err.endswith(". Delete its folder.\n")
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
