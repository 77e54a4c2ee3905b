"""Files of packages, fetched by pip from the user's indexes and read as data: nothing is installed or imported.

Each file is pinned by its hash, so what is read is always what was looked at when it was pinned. pip runs the setup.py
of a source archive, after it has checked the hash, to learn its metadata; of a wheel nothing runs.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ...checks import ArtefactError
from ...files import naming
from .store import check_file


def fetch(requirement: str, sha256: str, cache: Path, options: Sequence[str] = (), *, source: bool = False) -> Path:
    """Return the file of ``name==version`` with this SHA-256, downloading it into ``cache`` once.

    Args:
        options: more of ``pip download``.
        source: the source archive, which pip asks for its metadata once it has checked the hash; otherwise a wheel.

    Raises:
        ArtefactError: it cannot be had, or is another file.
    """
    what, suffix = ("source archive", ".tar.gz") if source else ("wheel", ".whl")
    # What builds a source archive may come as wheels.
    form = f"--no-binary={requirement.partition('==')[0]}" if source else "--only-binary=:all:"
    target = cache / f"{requirement.replace('==', '-')}-{sha256[:12]}{suffix}"
    if not target.exists():
        _download(requirement, sha256, target, [form, *options])
    check_file(target, sha256, f"the {what} of {requirement}")
    return target


def _download(requirement: str, sha256: str, target: Path, options: Sequence[str]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ArtefactError(
            f"pip: expected it beside {sys.executable}, got none. Run `{sys.executable} -m ensurepip`, "
            f"or put the file of {requirement} there as {target}."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with naming(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        pins, found = Path(scratch) / "pins.txt", Path(scratch) / "found"
        pins.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        command += ["--dest", str(found), *options, "--requirement", str(pins)]
        # pip draws its own progress bar, here on stderr: stdout is for the caller's results.
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
    """Return the files of a wheel or a source archive whose names match ``pattern``, by their last name, sorted.

    Raises:
        ArtefactError: there is none.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            found = {name: wheel.read(name) for name in wheel.namelist() if fnmatchcase(name, pattern)}
    else:
        with tarfile.open(archive) as source:
            # A link in an archive can lead anywhere, or nowhere.
            wanted = [entry for entry in source if entry.isfile() and fnmatchcase(entry.name, pattern)]
            found = {entry.name: source.extractfile(entry).read() for entry in wanted}  # type: ignore[union-attr]
    if not found:
        raise ArtefactError(f"{archive}: expected files {pattern}, got none. Move it away and run again.")
    return {Path(name).name: found[name] for name in sorted(found)}
