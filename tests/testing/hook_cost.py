"""Measure the cost of the start-up hook for an empty Python program: python tests/testing/hook_cost.py.

Each turn starts Python in a separate environment, once without the hook and once with it, and compares the processor
times.
"""

from __future__ import annotations

import resource
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
with (ROOT / "pyproject.toml").open("rb") as project:
    (PTH,) = (entry["template"] for entry in tomllib.load(project)["tool"]["scikit-build"]["generate"])
FILES = {"no hook": "", ".pth": PTH}


def environment(folder: Path) -> tuple[Path, Path]:
    """Create an environment; return its Python and its packages."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", site


def start(python: Path) -> float:
    """Return the processor time of one Python program in milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-c", "pass"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def starts(turns: int) -> dict[str, list[float]]:
    """Return the milliseconds of every turn, without the hook and with it."""
    found: dict[str, list[float]] = {name: [] for name in FILES}
    with tempfile.TemporaryDirectory() as folder:
        python, site = environment(Path(folder))
        for _ in range(turns):
            for name, line in FILES.items():
                (site / "mlx_sparse_attention.pth").write_text(line, encoding="utf-8")
                found[name].append(start(python))
    return found


def report(turns: int) -> None:
    """Print the cost of the hook. The fastest start is printed too, because other work delays single starts."""
    base, rows = starts(turns).values()
    low, middle, high = quantiles([with_it - without for with_it, without in zip(rows, base, strict=True)], n=4)
    print(f"milliseconds of processor time, {turns} pairs of starts:")
    print(f"median {middle:.2f} (quartiles {low:.2f} to {high:.2f}), fastest {min(rows) - min(base):.2f}")


if __name__ == "__main__":
    report(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
