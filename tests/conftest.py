"""Set up the test run: shared fixtures, the device of Triton kernels, test tiers and files that are not collected."""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tier as tiers
from absent import without
from require import required

if importlib.util.find_spec("mlx"):
    from mlx_sparse import blas, calibrate
    from mlx_sparse.files import cache_directory
    from mlx_sparse.tools.assets import openblas

    openblas.fetch_libraries(cache_directory())  # commands that tests start find it there
    blas.load(cache_directory())

# Triton reads this variable when a kernel is defined. Without an NVIDIA GPU, kernels run in the interpreter on the CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Each worker has one core, so BLAS threads would only compete with other workers.
if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OPENBLAS", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Background jobs of a shell ignore interrupts, and so would the commands that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# These plugins need mlx, which scripts/gpu_check.sh does not install on machines with an NVIDIA GPU.
MODELS = ["fixtures_lm", "fixtures_msl", "fixtures_smollm2"] if importlib.util.find_spec("mlx") else []
pytest_plugins = ["fixtures_backends", "fixtures_onnx", "fixtures_triton", *MODELS]

# onnxruntime 1.31 and the tools of the site need Python 3.11. The kernel modules import triton, which has wheels for
# Linux only.
OLD = "on this Python" if sys.version_info < (3, 11) else ""
NO_TRITON = "" if importlib.util.find_spec("triton") or required("triton") else "without triton"
NO_VLM = "" if importlib.util.find_spec("mlx_vlm") or required("mlx_vlm") else "without mlx-vlm"
NOT_HERE = {"*test_onnx_*.py": OLD, "docs/test_site.py": OLD, "*test_triton_*.py": NO_TRITON, "*test_vlm*.py": NO_VLM}
collect_ignore_glob = [names for names, why in NOT_HERE.items() if why]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the fast tier: no test that is marked slow")
    parser.addoption("--every", action="store_true", help="all cases of tests that run some of theirs, whole examples")


def pytest_configure(config: pytest.Config) -> None:
    tiers.every = config.getoption("every")
    config.addinivalue_line("markers", "slow: takes half a minute or more, or starts dozens of processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    if config.getoption("fast") and slow:
        config.hook.pytest_deselected(items=slow)
        slow = []
    items[:] = slow + quick  # slow files first: no worker ends alone with one


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [*tier(config), *(f"not collected {NOT_HERE[name]}: {name}" for name in collect_ignore_glob)]


def tier(config: pytest.Config) -> list[str]:
    if config.getoption("fast"):
        return ["tier: fast, without the tests that are marked slow"]
    return ["tier: everything" + ("" if config.getoption("every") else ", some cases of the costly tests (--every)")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("fast"):
        terminalreporter.write_line("This was the fast tier. Everything: python3 scripts/dev.py test --all")


@pytest.fixture(scope="session", autouse=True)
def _no_calibration(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the user's calibration from all tests."""
    folder = tmp_path_factory.mktemp("measured") / "calibration"
    if MODELS:
        calibrate.folder = lambda: folder


@pytest.fixture
def calibration_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty calibration folder for this test."""
    folder = tmp_path / "measured" / "calibration"
    folder.parent.mkdir()
    monkeypatch.setattr(calibrate, "folder", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def without_torch() -> Iterator[dict[str, str]]:
    """Hide torch from the processes that this module starts: transformers would spend two seconds to import it."""
    environment = without("torch")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment
