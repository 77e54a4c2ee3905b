#!/usr/bin/env python3
"""One command for each thing a newcomer wants. Needs Python 3.10 or newer and nothing else.

  python3 scripts/dev.py demo     generate with a small real model, dense and sparse
  python3 scripts/dev.py test     lint, then the fast tests: a few of every backend. --all runs all
  python3 scripts/dev.py lint     ruff, mypy and codespell
  python3 scripts/dev.py doctor   versions, devices and problems of this machine
  python3 scripts/dev.py setup    install what the tests need, and run nothing

The first run makes .venv in the project and installs the project into it, for test and lint with everything that the
tests need (3 GB); later runs find it ready. uv is used where it is installed. What follows demo, test and doctor is
passed on: python3 scripts/dev.py test -k sparq runs all tests with that name.
"""

import argparse
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
STAMP = ROOT / ".venv" / "dev-stamp"  # what was installed: its extras, pyproject.toml, native kernels, modules
KERNELS = ROOT / "onnx_export" / "ort_ops"
PACKAGES = ("mlx_sparse", "metal", "cuda_ref", "onnx_export")
BASE, TEST = ".", ".[test]"


def run(*command):
    """Show a command, run it in the project root, and end with its exit status if it fails."""
    command = [str(part) for part in command]
    print("$", " ".join(shlex.quote(part) for part in command), flush=True)
    status = subprocess.call(command, cwd=str(ROOT))
    if status:
        sys.exit(status if status > 0 else 128 - status)


def make_venv(uv):
    if uv:
        run(uv, "venv", "--python", sys.executable, ".venv")
    elif importlib.util.find_spec("ensurepip"):
        run(sys.executable, "-m", "venv", "--upgrade-deps", ".venv")  # a new pip takes half the time of Python 3.11's
    elif importlib.util.find_spec("pip"):  # Debian without python3-venv
        run(sys.executable, "-m", "venv", "--without-pip", ".venv")
        run(sys.executable, "-m", "pip", "--python", BIN / "python", "install", "pip")
    else:
        sys.exit(f"{sys.executable} has neither ensurepip nor pip: install python3-venv or uv")


def setup(wanted):
    """Bring .venv up to date with pyproject.toml, the sources that an install compiles and the modules it lists."""
    read = [ROOT / "pyproject.toml", *sorted(path for path in KERNELS.iterdir() if path.is_file())]
    modules = sorted(str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    state = hashlib.sha256(b"".join([*(path.read_bytes() for path in read), *map(str.encode, modules)])).hexdigest()
    installed, _, known = STAMP.read_text().partition(" ") if STAMP.is_file() else ("", "", "")
    if known == state and installed in (wanted, TEST):
        return
    wanted = TEST if TEST in (wanted, installed) else wanted  # what is there stays
    uv = shutil.which("uv")
    if not (BIN / "python").exists():
        make_venv(uv)
    # Python compiles what it imports, once; all of 3 GB would take minutes, which uv does not take either.
    pip = [BIN / "python", "-m", "pip", "install", "--no-compile"]
    install = [uv, "pip", "install", "--python", BIN / "python"] if uv else pip
    run(*install, "-e", wanted)
    STAMP.write_text(f"{wanted} {state}")


def lint():
    run(BIN / "ruff", "check", ".")
    run(BIN / "ruff", "format", "--check", ".")
    # What onnx_export needs left Python 3.10 behind.
    run(BIN / "mypy", *([] if sys.version_info >= (3, 11) else ["mlx_sparse", "cuda_ref"]))
    run(BIN / "codespell")


def tests(args):
    """What pytest is given: no arguments mean the fast tier, --all means everything, and others are passed on."""
    if args not in ([], ["--all"]):
        return args
    # To all processors, file by file, so that fixtures of a file are made once; slow files first.
    return ["-n", "logical", "--dist", "loadfile", "--no-loadscope-reorder", *([] if args else ["--fast"])]


def main():
    if sys.version_info < (3, 10):  # noqa: UP036 (this runs before anything checks requires-python)
        sys.exit(f"mlx-sparse-attention needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["demo", "test", "lint", "doctor", "setup"])
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed on to the command that the verb runs")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or hundreds of programs would compile the same modules each
    if options.verb in ("lint", "setup") and options.args:
        parser.error(f"{options.verb} takes no arguments")
    setup(BASE if options.verb in ("demo", "doctor") else TEST)
    if options.verb in ("test", "lint"):
        lint()
    if options.verb == "test":
        run(BIN / "python", "-m", "pytest", *tests(options.args))
    elif options.verb in ("demo", "doctor"):
        # MLX's own BLAS would take minutes for the demo on a Linux CPU.
        fast = ["--fast-blas"] if options.verb == "demo" and sys.platform == "linux" else []
        run(BIN / "mlx-sparse", options.verb, *fast, *options.args)


if __name__ == "__main__":
    main()
