"""Fixtures that several test files share, where Triton's kernels run, and what cannot run on the oldest Python."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from absent import without

# Triton reads this when its kernels are defined. Without an NVIDIA GPU they run on the CPU, in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Workers have a processor each: threads of a product would only wait for those of another worker.
if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OPENBLAS", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# They need mlx, which machines with an NVIDIA GPU do without (scripts/gpu_check.sh).
MODELS = ["fixtures_msl", "fixtures_smollm2"] if importlib.util.find_spec("mlx") else []
pytest_plugins = ["fixtures_onnx", "fixtures_triton", *MODELS]

# onnxruntime 1.31 needs Python 3.11.
collect_ignore_glob = ["*test_onnx_*.py"] if sys.version_info < (3, 11) else []


# It fetches 240 MB whose licence is not an open-source one.
REAL_GEMMA = "test_gemma3_real.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-licence", choices=["gemma"], help=f"accept the Gemma Terms of Use: run {REAL_GEMMA}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name == REAL_GEMMA and not config.getoption("accept_licence") else None


# Files of which one test takes a minute: first, so that no worker is left alone with them at the end.
SLOW = {
    "test_demo.py",
    "test_evaluate_smollm2.py",
    "test_install.py",
    "test_onnx_native.py",
    "test_onnx_native_fuzz.py",
    "test_saap_train_smollm2.py",
    "test_triton_aot.py",
    "test_triton_saap_aot.py",
    "test_triton_sample_aot.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in SLOW)


def pytest_report_header(config: pytest.Config) -> list[str]:
    absent = [f"not collected on this Python: {name}" for name in collect_ignore_glob]
    if not config.getoption("accept_licence"):
        absent.append(f"not collected without --accept-licence gemma: {REAL_GEMMA}")
    return absent


@pytest.fixture(scope="module")
def without_torch() -> Iterator[dict[str, str]]:
    """What this module starts sees no torch: where there is one, transformers imports it, for two seconds a start."""
    environment = without("torch")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment
