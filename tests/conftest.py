"""Fixtures that several test files share, where Triton's kernels run, and what cannot run on the oldest Python."""

import os
import sys
from pathlib import Path

# Triton reads this when its kernels are defined. Without an NVIDIA GPU they run on the CPU, in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["fixtures_msl", "fixtures_smollm2"]

# onnxruntime 1.31 needs Python 3.11.
collect_ignore_glob = ["test_onnx_*.py"] if sys.version_info < (3, 11) else []


def pytest_report_header() -> list[str]:
    return [f"not collected on this Python: {name}" for name in collect_ignore_glob]
