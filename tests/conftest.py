"""Fixtures that several test files share, and what cannot run on the oldest Python."""

import sys

pytest_plugins = ["fixtures_msl", "fixtures_smollm2"]

# onnxruntime 1.31 needs Python 3.11.
collect_ignore_glob = ["test_onnx_*.py"] if sys.version_info < (3, 11) else []


def pytest_report_header() -> list[str]:
    return [f"not collected on this Python: {name}" for name in collect_ignore_glob]
