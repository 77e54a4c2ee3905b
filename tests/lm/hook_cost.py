"""Measure the cost of the start-up hook for an empty Python program: python tests/lm/hook_cost.py.

Each turn starts Python in a separate environment, once without the hook and once with each of its two files, and
compares the processor times.
"""

from __future__ import annotations

import compileall
import resource
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from statistics import quantiles

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PTH, START = (
    entry["template"]
    for entry in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"][
        "generate"
    ]
)
# Python 3.15 imports the module of a .start file and calls the function; the line here does the same on every Python.
FILES = {"no hook": "", ".pth": PTH, ".start": "import {0}; {0}.{1}()\n".format(*START.strip().split(":"))}


def environment(folder: Path) -> tuple[Path, Path]:
    """Create an environment with the modules that the hook imports; return its Python and its packages."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "mlx_sparse").mkdir()
    for name in ("__init__.py", "_boot.py"):
        shutil.copy(ROOT / "mlx_sparse" / name, site / "mlx_sparse")
    compileall.compile_dir(site, quiet=1)
    return folder / "bin" / "python", site


def start(python: Path) -> float:
    """Return the processor time of one Python program in milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-c", "pass"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def starts(turns: int) -> dict[str, list[float]]:
    """Return the milliseconds of every turn, without the hook and with each of the hook's two files."""
    found: dict[str, list[float]] = {name: [] for name in FILES}
    with tempfile.TemporaryDirectory() as folder:
        python, site = environment(Path(folder))
        for _ in range(turns):
            for name, line in FILES.items():
                (site / "mlx_sparse_attention.pth").write_text(line, encoding="utf-8")
                found[name].append(start(python))
    return found


def report(turns: int) -> None:
    """Print the cost of each file. The fastest starts are printed too, because other work delays single starts."""
    found = starts(turns)
    base = found.pop("no hook")
    print(f"milliseconds of processor time, {turns} pairs of starts:")
    for name, rows in found.items():
        low, middle, high = quantiles([with_it - without for with_it, without in zip(rows, base, strict=True)], n=4)
        print(f"{name}: median {middle:.2f} (quartiles {low:.2f} to {high:.2f}), fastest {min(rows) - min(base):.2f}")


if __name__ == "__main__":
    report(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
