#!/usr/bin/env python3
"""Run the demo, the tests or the checks of this project. This script needs only Python 3.10 or newer.

  python3 scripts/dev.py demo     mlx-sparse try: compare dense and sparse decoding of a small real model
  python3 scripts/dev.py test     lint, then the fast tests of every backend; with --all, all tests
  python3 scripts/dev.py lint     ruff, mypy and codespell
  python3 scripts/dev.py doctor   versions, devices and problems of this machine
  python3 scripts/dev.py setup    install the requirements of the tests, and run nothing
  python3 scripts/dev.py size     line counts with budgets, file counts, and the import closures of three entry points

The first run creates .venv in the project and installs the project into it. For test and lint it also installs the
requirements of the tests (3 GB). If uv is installed, the script uses it. Further arguments of demo, test and doctor
are passed on: python3 scripts/dev.py test -k sparq runs all tests with that name.
"""

import argparse
import ast
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
STAMP = ROOT / ".venv" / "dev-stamp"  # installed extra; hash of pyproject.toml, native kernels and list of modules
KERNELS = [ROOT / "mlx_sparse" / "native", ROOT / "onnx_export" / "ort_ops"]
PACKAGES = ("mlx_sparse", "metal", "cuda_ref", "onnx_export")
BASE, TEST = ".", ".[test]"

# Budgets: lines of tracked text files, without pictures and JSON; files that an entry point imports; words of Markdown.
LINES = {
    "mlx_sparse": 27_500,
    "mlx_sparse/core": 2_900,
    "mlx_sparse/methods": 5_800,
    "mlx_sparse/cache": 700,
    "mlx_sparse/api": 1_200,
    "mlx_sparse/lm": 4_400,
    "mlx_sparse/native": 3_600,
    "mlx_sparse/tools": 7_800,
    "metal": 3_000,
    "onnx_export": 6_700,
    "cuda_ref": 5_000,
    "scripts": 1_800,
}
PRODUCT = ("mlx_sparse", "metal", "onnx_export", "cuda_ref", "scripts")
TOTALS = {"product lines": 43_500, "product files": 330, "test lines": 35_500, "words of Markdown": 35_000}
CLOSURES = {"mlx_sparse/lm/model.py": 50, "onnx_export/exporter/export.py": 55, "cuda_ref/api/__init__.py": 21}
NOT_CODE = {".gz", ".svg", ".png", ".json", ".jsonl"}


def run(*command):
    """Print a command and run it in the project root. If the command fails, exit with the status of the command."""
    command = [str(part) for part in command]
    print("$", " ".join(shlex.quote(part) for part in command), flush=True)
    status = subprocess.call(command, cwd=str(ROOT))
    if status:
        sys.exit(status if status > 0 else 128 - status)


def make_venv(uv):
    if uv:
        run(uv, "venv", "--python", sys.executable, ".venv")
    elif importlib.util.find_spec("ensurepip"):
        run(sys.executable, "-m", "venv", "--upgrade-deps", ".venv")  # a new pip is twice as fast as Python 3.11's
    elif importlib.util.find_spec("pip"):  # Debian without python3-venv
        run(sys.executable, "-m", "venv", "--without-pip", ".venv")
        run(sys.executable, "-m", "pip", "--python", BIN / "python", "install", "pip")
    else:
        sys.exit(f"{sys.executable} has neither ensurepip nor pip: install python3-venv or uv")


def setup(wanted):
    """Install the requirement ``wanted`` (BASE or TEST) into .venv, unless the installation is up to date.

    An installation is outdated if pyproject.toml, the native kernels or the list of modules changed.
    """
    read = [ROOT / "pyproject.toml", *sorted(path for folder in KERNELS for path in folder.iterdir() if path.is_file())]
    modules = sorted(str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    state = hashlib.sha256(b"".join([*(path.read_bytes() for path in read), *map(str.encode, modules)])).hexdigest()
    installed, _, known = STAMP.read_text().partition(" ") if STAMP.is_file() else ("", "", "")
    if known == state and installed in (wanted, TEST):
        return
    wanted = TEST if TEST in (wanted, installed) else wanted  # keep an installation with the test extra
    uv = shutil.which("uv")
    if not (BIN / "python").exists():
        make_venv(uv)
    # Python compiles modules on first import. Compiling all 3 GB now would take minutes.
    pip = [BIN / "python", "-m", "pip", "install", "--no-compile"]
    install = [uv, "pip", "install", "--python", BIN / "python"] if uv else pip
    run(*install, "-e", wanted)
    STAMP.write_text(f"{wanted} {state}")


def lint():
    run(BIN / "ruff", "check", ".")
    run(BIN / "ruff", "format", "--check", ".")
    # The dependencies of onnx_export do not support Python 3.10.
    run(BIN / "mypy", *([] if sys.version_info >= (3, 11) else ["mlx_sparse", "cuda_ref"]))
    run(BIN / "codespell")


def tests(args):
    """Return ``args`` for pytest. Replace [] by options for the fast tests, and ["--all"] by options for all tests."""
    if args not in ([], ["--all"]):
        return args
    # Distribute whole files, so that the fixtures of a file are made once. Slow files come first.
    return ["-n", "logical", "--dist", "loadfile", "--no-loadscope-reorder", *([] if args else ["--fast"])]


def imported_by(path, root=ROOT, *, everything=False, types=False):
    """Return the dotted names that a file imports. `from a import b` becomes a.b.

    If ``everything`` is True, also return the names in functions and in calls to import_module. If ``types`` is True,
    also return the names in TYPE_CHECKING blocks.
    """
    package = list(path.relative_to(root).parent.parts)
    names, todo = [], [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if not types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not everything:
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            names += [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names += [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return names


def lazy_modules(package):
    """Read _HOMES in a package's __init__.py, and return a dict from each name to the module that defines the name."""
    init = package / "__init__.py"
    for node in ast.parse(init.read_text(encoding="utf-8")).body if init.is_file() else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return {name: module for module, names in ast.literal_eval(node.value).items() for name in names.split()}
    return {}


def closure(entry):
    """Return the files of this project that an import of ``entry`` loads, including each __init__.py."""
    todo, seen = [ROOT / entry], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imported_by(path):
            parts = name.split(".")
            if parts[:2] in (["mlx_sparse", "cuda_ref"], ["mlx_sparse", "onnx_export"]):
                parts.pop(0)  # both are installed inside mlx_sparse
            for end in range(1, len(parts) + 1 if parts[0] in PRODUCT else 1):
                at = ROOT.joinpath(*parts[:end])
                todo += [found for found in (at / "__init__.py", at.with_suffix(".py")) if found.is_file()]
                if at != path.parent and (module := lazy_modules(at).get(".".join(parts[end : end + 1]))):
                    up = len(module) - len(module.lstrip("."))  # "..core.base" is relative to the package
                    home = at.parents[up - 2] if up > 1 else at
                    todo.append(home.joinpath(*module.lstrip(".").split(".")).with_suffix(".py"))
    return seen


def size():
    """Print the lines and files of each package, the totals, the sizes of import closures, and the largest files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=str(ROOT), check=True, stdout=subprocess.PIPE).stdout
    tracked = [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    texts = {path: path.read_text(encoding="utf-8") for path in tracked if path.suffix not in NOT_CODE}
    lines = {path: text.count("\n") for path, text in texts.items()}

    def under(*folders):
        return [path for path in lines if any((ROOT / folder) in path.parents for folder in folders)]

    row = "{:<24}{:>8}{:>9}{:>7}".format
    print(row("package", "lines", "budget", "files"))
    for folder, budget in LINES.items():
        found = under(folder)
        print(row(folder, sum(map(lines.get, found)), budget, len(found)))
    product, tests = under(*PRODUCT), under("tests")
    words = sum(len(text.split()) for path, text in texts.items() if path.suffix == ".md")
    print("\n" + row("total", "now", "budget", ""))
    now = (sum(map(lines.get, product)), len(product), sum(map(lines.get, tests)), words)
    for (name, budget), count in zip(TOTALS.items(), now):  # noqa: B905 (Python 3.9 runs this as far as its version check)
        print(row(name, count, budget, ""))
    print("\n" + row("imported files", "now", "budget", ""))
    for entry, budget in CLOSURES.items():
        print(row(entry, len(closure(entry)), budget, ""))
    print("\nlargest files")
    for path in sorted(product, key=lines.get)[:-9:-1]:
        print(f"{lines[path]:>6}  {path.relative_to(ROOT)}")


def main():
    if sys.version_info < (3, 10):  # noqa: UP036 (this runs before anything checks requires-python)
        sys.exit(f"mlx-sparse-attention needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["demo", "test", "lint", "doctor", "setup", "size"])
    parser.add_argument("args", nargs=argparse.REMAINDER, help="further arguments of the command")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise hundreds of processes compile the same modules
    if options.verb in ("lint", "setup", "size") and options.args:
        parser.error(f"{options.verb} takes no arguments")
    if options.verb == "size":
        return size()
    setup(BASE if options.verb in ("demo", "doctor") else TEST)
    if options.verb in ("test", "lint"):
        lint()
    if options.verb == "test":
        run(BIN / "python", "-m", "pytest", *tests(options.args))
    elif options.verb in ("demo", "doctor"):
        # With MLX's own BLAS, the prefill of the demo is slow on a Linux CPU.
        fast = ["--fast-blas"] if options.verb == "demo" and sys.platform == "linux" else []
        run(BIN / "mlx-sparse", "try" if options.verb == "demo" else options.verb, *fast, *options.args)


if __name__ == "__main__":
    main()
