"""Implement ``mlx-sparse doctor``: report the installation, the available backends and any problems.

If a check raises an error, the command reports the error as a problem and still prints the rest of the report.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

from .. import __version__, _boot, blas, native
from ..checks import SparseAttentionError, echoed
from ..core.registry import BACKENDS, unavailable
from ..extras import NAME, REBUILD, install_hint
from ..files import cache_directory
from . import environment

PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "numpy", "tqdm", "transformers", "torch", "triton")
ATTN = "gather+sparq"


def examine(model: str | None = None, attn: str = ATTN, backend: str = "auto", *, variable: str = "") -> dict[str, Any]:
    """Return a dict from the name of each finding to its value. The entry ``problems`` is a list of sentences.

    Args:
        model: a model that mlx-lm or mlx-vlm can load. If set, add a report of how ``--attn`` affects the model.
        variable: value of ``MLX_SPARSE_ATTN``.
    """
    problems: list[str] = []
    findings: dict[str, Any] = {
        "version": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: environment.version_of(name) for name in PACKAGES},
        "device": _guarded(_device, problems, "mlx"),
        "backends": {name: unavailable(name) or "yes" for name in BACKENDS},
        "hook": _hook(problems),
        "variable": _guarded(lambda: _variable(variable, problems), problems, _boot.VARIABLE),
        "seams": _guarded(lambda: _seams("mlx_lm"), problems, "mlx-lm"),
    }
    problems += [blas.SLOW] if blas.SLOW in str(findings["device"]) else []
    if __version__ == "unknown":
        problems.append(f"the metadata of {NAME} is missing: run {install_hint(options=REBUILD)}")
    problems += [f"{name} is not installed" for name in ("mlx", "mlx-lm") if not findings["packages"][name]]
    problems += [f"mlx-lm: {problem}" for problem in findings["seams"] or []]
    if findings["packages"].get("mlx-vlm"):
        findings["seams of mlx-vlm"] = _guarded(lambda: _seams("mlx_vlm"), problems, "mlx-vlm")
        problems += [f"mlx-vlm: {problem}" for problem in findings["seams of mlx-vlm"] or []]
    if "cpu" in str(findings["device"]) and (reason := native.unavailable()) is not None:
        problems.append(f"attention on the CPU uses array operations: {reason}")
    problems += _other_owners()
    if model is not None:
        findings["model"] = _guarded(lambda: _crossovers(model, attn, backend), problems, model)
    findings["problems"] = problems
    return findings


def text(findings: dict[str, Any]) -> str:
    """Format the findings of `examine` as text."""
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in findings["packages"].items())
    lines = [
        f"mlx-sparse-attention {findings['version']}, Python {findings['python']}, {findings['platform']}",
        f"packages: {packages}",
        f"default device: {findings['device']}",
        "backends: " + ", ".join(f"{name}: {state}" for name, state in findings["backends"].items()),
        f"mlx_lm.* --attn: {findings['hook']}",
        f"{_boot.VARIABLE}: {findings['variable']}",
    ]
    for library, key in (("mlx-lm", "seams"), ("mlx-vlm", "seams of mlx-vlm")):
        if key in findings:
            lines.append(f"interfaces of {library}: {'not ' if findings[key] != [] else ''}as expected")
    if found := findings.get("model"):
        first, *more = found["lines"]
        lines += [first, *(f"  {line}" for line in more)]
        if any(row["how"] == "modeled" and row["measurable"] for row in found["thresholds"]):
            lines.append("  `mlx-sparse calibrate` and `--attn` replace modeled values by measurements")
    lines += [f"problem: {problem}" for problem in findings["problems"]] or ["no problems found"]
    return "\n".join(lines)


def _guarded(probe: Any, problems: list[str], what: str) -> Any:
    try:
        return probe()
    except SparseAttentionError as error:
        problems.append(str(error))
    except Exception as error:  # report every error and continue
        problems.append(f"{what} does not work here: {type(error).__name__}: {error}")
    return None


def _crossovers(model: str, attn: str, backend: str) -> dict[str, Any]:
    """Load a model, and return the settings, layers and crossover lengths that result from ``--attn``.

    The model does not run.
    """
    from ..calibrate import Calibration
    from .measure import planned, rows_of

    with planned(model, attn, backend, Calibration()) as plan:
        report = plan.report
        found = {name: getattr(report, name) for name in ("attn", "backend", "model_type", "layers")}
        found |= {"served_layers": report.served_layers, "dense_layers": dict(report.dense_layers)}
        found |= {"thresholds": rows_of(plan.layers, plan.calibration), "lines": report.opening()}
        found["lines"].insert(1, f"settings: {report.attn}")
        return found


def _device() -> str:
    import mlx.core as mx

    blas.load(cache_directory())
    return "; ".join(filter(None, (str(mx.default_device()), blas.note())))


def _seams(package: str) -> list[str]:
    from ..lm.seam import changed_interfaces

    return changed_interfaces(package)


def _variable(attn: str, problems: list[str]) -> str:
    """Describe how the environment variable MLX_SPARSE_ATTN affects the models that a program loads.

    ``attn`` is the value of the variable. If the value is invalid, append a message to ``problems``.
    """
    from ..lm.model import select_methods
    from ..methods import parse

    if not attn:
        return "not set"
    try:
        select_methods(parse(attn))
    except SparseAttentionError as error:
        problems.append(f"{_boot.VARIABLE}: {error}")
        return f"{echoed(attn)}, which is refused: models stay dense"
    return f"{echoed(attn)}, for every model that mlx-lm or mlx-vlm loads after it is imported"


def _hook(problems: list[str]) -> str:
    if _boot.installed():
        return "the start-up hook is active"
    problems.append(
        "the start-up hook is not active, so mlx_lm.generate has no --attn: use 'mlx-sparse generate', or reinstall: "
        f"run {install_hint(options=REBUILD)}"
    )
    return "the start-up hook is not active"


def _other_owners() -> list[str]:
    """Return a problem for each foreign distribution that installs `mlx_sparse`, such as `mlx-sparse` on PyPI."""
    owners = {
        distribution.metadata["Name"]
        for distribution in metadata.distributions()
        if any(file.parts[0] == "mlx_sparse" for file in distribution.files or [])
    } - {NAME}
    found = util.find_spec("mlx_sparse")
    where = Path(found.origin).parent if found and found.origin else "nowhere"
    return [
        f"{owner} also installs mlx_sparse (found at {where}): run 'pip uninstall {owner}', then reinstall {NAME}"
        for owner in sorted(owners)
    ]
