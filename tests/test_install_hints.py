"""Test install hints: they depend on how this package was installed, as recorded by the installer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_sparse import extras

PIP = f"{sys.executable} -m pip install"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder at the start of sys.path with the metadata that an installer writes."""
    info = tmp_path / "site packages" / "mlx_sparse_attention-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: mlx-sparse-attention\nVersion: 0.1.0\n")
    (info / "INSTALLER").write_text("pip\n")
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.setenv("PATH", str(tmp_path))
    return info


def record(site: Path, url: str, **how: Any) -> None:
    (site / "direct_url.json").write_text(json.dumps({"url": url, **how}))


def test_index_install(site: Path) -> None:
    assert extras.install_hint("onnx") == f"`{PIP} 'mlx-sparse-attention[onnx]'`"
    assert extras.install_hint() == f"`{PIP} mlx-sparse-attention`"
    rebuild = "--force-reinstall --no-deps --no-binary mlx-sparse-attention"
    assert extras.build_hint() == f"`{PIP} {rebuild} mlx-sparse-attention`"


@pytest.mark.parametrize(("how", "option"), [({}, ""), ({"editable": True}, "-e ")], ids=["folder", "editable"])
def test_clone_install(site: Path, how: dict[str, bool], option: str) -> None:
    record(site, site.parent.as_uri(), dir_info=how)
    assert "%20" in site.parent.as_uri()
    assert extras.install_hint("eval") == f"`{PIP} {option}'{site.parent}[eval]'`"
    assert extras.build_hint() == f"`{PIP} --force-reinstall --no-deps {option}'{site.parent}'`"


@pytest.mark.parametrize("name", ["m-0.1.0-py3-none-any.whl", "m-0.1.0.tar.gz"])
def test_file_install(site: Path, name: str) -> None:
    file = site / name
    file.touch()
    record(site, file.as_uri(), archive_info={})
    assert extras.install_hint("onnx", "--quiet") == f"`{PIP} --quiet '{file}[onnx]'`"
    wheel = "`pip install --force-reinstall --no-deps .` in the clone"
    assert extras.build_hint() == (wheel if name.endswith("whl") else f"`{PIP} --force-reinstall --no-deps '{file}'`")


def test_url_install(site: Path) -> None:
    record(site, "https://host.org/me/it", vcs_info={"vcs": "git", "commit_id": "a1"}, subdirectory="s")
    expected = f"`{PIP} 'mlx-sparse-attention[onnx] @ git+https://host.org/me/it@a1#subdirectory=s'`"
    assert extras.install_hint("onnx") == expected
    record(site, "https://host.org/m.whl", archive_info={})
    assert extras.install_hint() == f"`{PIP} 'mlx-sparse-attention @ https://host.org/m.whl'`"


def test_missing_source_names_both_forms(site: Path) -> None:
    record(site, (site / "gone").as_uri(), dir_info={})
    assert extras.install_hint("onnx") == (
        "`pip install '.[onnx]'` in the clone, or with a wheel `pip install 'FILE.whl[onnx]'`"
    )
    assert extras.build_hint() == "`pip install --force-reinstall --no-deps .` in the clone"


def test_hint_names_the_installer(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "INSTALLER").write_text("uv\n")
    assert extras.install_hint() == f"`uv pip install --python {sys.prefix} mlx-sparse-attention`"
    monkeypatch.setattr(sys, "prefix", str(site))
    (site / "pipx_metadata.json").touch()
    assert extras.install_hint() == f"`pipx runpip {site.name} install mlx-sparse-attention`"


def test_pip_on_path_is_called_by_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "pip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(site))
    assert extras.install_hint() == f"`{PIP} mlx-sparse-attention`"
    monkeypatch.setattr(sys, "executable", str(site / "python"))
    assert extras.install_hint() == "`pip install mlx-sparse-attention`"
