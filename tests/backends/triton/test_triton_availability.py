"""Test on which machines Triton kernels can run, and the reasons on other machines."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from require import needs_triton

from mlx_sparse import cuda_ref
from mlx_sparse.core import registry
from mlx_sparse.extras import install_hint


def run(code: str, **env: str) -> str:
    """Return the output of a new Python process."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("missing", [("torch",), ("triton",), ("torch", "triton")], ids=" and ".join)
def test_missing_packages_are_named(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("torch", "triton"):
        found = None if name in missing else importlib.util.find_spec("json")
        monkeypatch.setitem(sys.modules, name, found and importlib.util.module_from_spec(found))
    expected = f"{' and '.join(missing)} not installed: run {install_hint('cuda')}"
    assert cuda_ref.unavailable() == registry.unavailable("triton") == expected


def test_no_hint_where_triton_has_no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cuda_ref.unavailable() == "triton has packages for Linux only"


def test_gpu_is_needed_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_triton()
    import torch

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cuda_ref.interpreted()
    assert cuda_ref.unavailable() is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not cuda_ref.interpreted()
    reason = None if torch.cuda.is_available() else "torch finds no NVIDIA GPU; TRITON_INTERPRET=1 runs"
    assert (reason or "None") in str(cuda_ref.unavailable())


def test_unsupported_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_triton()
    import torch

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in {(7, 5): "the GPU is an sm_75; the kernels need an sm_80 (A100)", (8, 6): "None"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert str(cuda_ref.unavailable()).startswith(reason)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert str(cuda_ref.unavailable()).startswith("torch is built for AMD GPUs")


@pytest.mark.parametrize("setting", ["1", "true", "ON", "yes", "y", "0", "no", ""])
def test_interpreter_setting_matches_triton(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_triton()
    from triton import knobs

    monkeypatch.setenv("TRITON_INTERPRET", setting)
    assert cuda_ref.interpreted() == knobs.runtime.interpret


def test_broken_torch_is_a_reason(tmp_path: Path) -> None:
    needs_triton()
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    code = "from mlx_sparse.core import registry; print(registry.unavailable('triton'))"
    output = run(code, PYTHONPATH=str(tmp_path), TRITON_INTERPRET="0")
    assert output == "torch does not work here: libcudart.so.13: cannot open shared object file\n"


def test_package_imports_no_optional_package() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("torch", "triton", "mlx", "mlx.core"), None))
import mlx_sparse.cuda_ref
from mlx_sparse.core import registry
print(registry.FOREIGN["triton"] if registry.unavailable("triton") else "runs")
"""
    assert run(code) == registry.FOREIGN["triton"] + "\n"
