"""Directories in the cache folder that are either complete or not used at all."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from ...checks import ArtefactError
from ...files import naming

MANIFEST = "mlx-sparse-manifest.json"


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_file(path: Path, sha256: str, what: str) -> None:
    """Refuse a file that is not, to the bit, the one that was pinned."""
    if not path.is_file():
        raise ArtefactError(f"{path}: expected {what}, got no file. Fetch it again.")
    if (found := file_hash(path)) != sha256:
        raise ArtefactError(
            f"{path}: expected {what} with SHA-256 {sha256[:12]}..., got {found[:12]}.... "
            "It is damaged or another file; move it away and run again."
        )


def check_directory(path: Path) -> None:
    """Refuse a directory that `build_directory` did not write or that changed since."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ArtefactError(
            f"{path}: expected a directory written by mlx-sparse, got one without {MANIFEST}. "
            "Move it away, or choose another --cache-dir."
        )
    try:
        hashes = json.loads(manifest.read_text(encoding="utf-8"))
        names = {entry.name for entry in path.iterdir()} - {MANIFEST}
        changed = sorted(names ^ set(hashes)) or [name for name in hashes if file_hash(path / name) != hashes[name]]
    except (ValueError, TypeError, OSError, RecursionError):
        changed = [MANIFEST]
    if changed:
        raise ArtefactError(
            f"{path}: expected the directory as it was written, got a damaged {changed[0]}. "
            "Delete the directory and run again."
        )


def build_directory(path: Path, fill: Callable[[Path], None]) -> Path:
    """Return the complete directory ``path``; if there is none, let ``fill`` write it.

    ``fill`` gets a temporary directory beside ``path``, which takes the name only when it is complete.
    """
    if path.exists():
        check_directory(path)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        work = Path(scratch) / "work"
        work.mkdir()
        fill(work)
        hashes = {file.name: file_hash(file) for file in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
        try:
            work.rename(path)
        except OSError:
            check_directory(path)  # another process was faster; its result is as good if it is complete
    return path


def write_json(path: Path, value: object) -> None:
    """Write a JSON file that a person can read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
