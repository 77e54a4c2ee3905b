"""Read safetensors files of float16 and float32 tensors, and write them atomically."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from ...checks import ArtefactError
from ...files import replace_file

TYPES = ("F16", "F32")
QUOTED = 120  # maximum length of a problem description in an error message, in characters


def read_tensors(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a safetensors file. Return a dict from tensor name to tensor, and the metadata.

    Raises:
        ArtefactError: the file cannot be read, is truncated or damaged, or has tensors of unsupported types.
    """
    if not os.path.isfile(path):  # noqa: PTH113 - reading a pipe could block; False for a name that is too long
        raise refuse(path, f"none that can be read ({'a folder' if path.is_dir() else 'no file'})")
    try:
        with safe_open(path, framework="mlx") as file:
            names = list(file.keys())
            if any(file.get_slice(name).get_dtype() not in TYPES for name in names):
                raise refuse(path, f"tensors of other types than {' and '.join(TYPES)}")
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise refuse(path, f"none that can be read ({error})") from None


def write_tensors(path: Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None) -> None:
    """Write float16 and float32 tensors to a safetensors file.

    Raises:
        ArtefactError: ``path`` does not end in .safetensors. MLX would append this suffix.
        OSError: the file cannot be written. An existing file is unchanged.
    """
    if path.suffix != ".safetensors":
        raise ArtefactError(f"path: expected a file name that ends in .safetensors, got {path}.")
    whole = {name: mx.contiguous(array) for name, array in tensors.items()}

    def write(new: Path) -> None:
        try:
            mx.save_safetensors(str(new), whole, dict(metadata or {}))
            with safe_open(new, framework="mlx"):
                pass
        except (SafetensorError, RuntimeError):
            # MLX does not report why a write failed, and sometimes reports no error. safe_open above detects that.
            raise OSError(errno.ENOSPC, "the file was not written completely (disk full?)", str(path)) from None

    replace_file(path, write)


def refuse(path: Path, found: str) -> ArtefactError:
    """Return an `ArtefactError` about ``path``. ``found`` describes the problem and is cut to `QUOTED` characters."""
    found = " ".join(found.split())
    found = found if len(found) <= QUOTED else f"{found[:QUOTED]}..."
    return ArtefactError(f"{path}: expected a file written by mlx-sparse train-saap, got {found}. Train it again.")
