"""Test install hints: they depend on how this package was installed, as recorded by the installer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from json_tables import read_tables

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


# Each row: the installer's record, the arguments of install_hint, its text, and the text of build_hint or None.
@pytest.mark.parametrize(("record", "arguments", "install", "build"), read_tables(__file__)["hints"])
def test_hints_follow_the_record_of_the_installer(
    site: Path, record: dict[str, Any] | None, arguments: list[str], install: str, build: str | None
) -> None:
    def filled(text: str) -> str:
        places = {"{folder}": str(site.parent), "{folder_url}": site.parent.as_uri(), "{site_url}": site.as_uri()}
        for name, value in (places | {"{site}": str(site), "{pip}": PIP}).items():
            text = text.replace(name, value)
        return text

    for name in ("m-0.1.0-py3-none-any.whl", "m-0.1.0.tar.gz"):
        (site / name).touch()
    if record:
        (site / "direct_url.json").write_text(filled(json.dumps(record)))
    assert "%20" in site.as_uri()
    assert extras.install_hint(*arguments) == filled(install)
    assert build is None or extras.build_hint() == filled(build)


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
