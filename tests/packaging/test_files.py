"""Test files in folders that others can write: unpredictable names, no followed links, no blocking reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_sparse.files import read_regular, replace_file


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out.json"
    victim.write_text("mine")
    (tmp_path / f".out-{os.getpid()}.json").symlink_to(victim)
    replace_file(out, lambda new: new.write_text("new"))
    assert victim.read_text() == "mine"
    assert out.read_text() == "new"
    out.unlink()
    out.symlink_to(victim)
    replace_file(out, lambda new: new.write_text("new"))
    assert victim.read_text() == "mine"
    assert not out.is_symlink()


def test_temporary_names_differ_and_umask_applies(tmp_path: Path) -> None:
    names: list[str] = []
    before = os.umask(0o027)
    try:
        for _ in range(2):
            replace_file(tmp_path / "out.json", lambda new: (names.append(new.name), new.write_text("new")))
    finally:
        os.umask(before)
    assert len(set(names)) == 2
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        replace_file(out, lambda new: (new.write_text("new"), (_ for _ in ()).throw(KeyboardInterrupt)))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    assert read_regular(tmp_path / "file", 4) == b"1234"
    with pytest.raises(ValueError, match="more than 3 bytes"):
        read_regular(tmp_path / "file", 3)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")  # no writer, so opening it would block
    for name in ("link", "pipe", "absent"):
        with pytest.raises(OSError, match=name):
            read_regular(tmp_path / name, 4)
    with pytest.raises(OSError, match=r"no regular file|Is a directory"):
        read_regular(tmp_path, 4)
