"""Safetensors files: what one says it holds is checked against the file before it is read; written whole or not."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checks import ArtefactError
from ..common.files import replace_file

HEADER_LIMIT = 8 << 20  # bytes; ours has a few hundred per layer
ITEM_SIZES = {"F16": 2, "F32": 4}


@dataclass(frozen=True)
class Header:
    """Shapes by tensor name, and the metadata."""

    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of a file of float16 and float32 tensors.

    Raises:
        ArtefactError: the file cannot be read, is truncated, damaged, or of another kind.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise _refuse(path, "none that can be read (no file)")  # a pipe would never end
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise _refuse(path, "another file or a truncated one")
            text = file.read(length)
    except OSError as error:
        raise _refuse(path, f"none that can be read ({error.strerror})") from None
    try:
        entries = json.loads(text.decode("utf-8"))
        metadata = entries.pop("__metadata__", None) or {}
        tensors = {name: _tensor(entry) for name, entry in entries.items()}
        metadata = {str(name): str(value) for name, value in metadata.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _refuse(path, "one with a damaged header") from None
    end = 0
    for start, stop, _ in sorted(tensors.values()):
        if start != end:
            raise _refuse(path, "one whose tensors overlap or have gaps")
        end = stop
    if end != size - 8 - length:
        raise _refuse(path, f"{size - 8 - length:,} bytes of data where its header says {end:,}")
    return Header({name: shape for name, (_, _, shape) in tensors.items()}, metadata)


def read_tensors(path: Path, header: Header) -> dict[str, mx.array]:
    """The tensors of a file whose ``header`` has been read.

    Raises:
        ArtefactError: MLX reads something else from it.
    """
    try:
        tensors: Any = mx.load(str(path), format="safetensors")
        mx.eval(tensors)
    except (RuntimeError, ValueError):
        raise _refuse(path, "one that MLX cannot read") from None
    if {name: tuple(array.shape) for name, array in tensors.items()} != header.shapes:
        raise _refuse(path, "one whose header says a thing twice")
    return dict(tensors)


def write_tensors(path: Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file of float16 and float32 tensors.

    Raises:
        ArtefactError: ``path`` does not end in .safetensors, which MLX would add.
        OSError: it cannot be written; what was there before is still there.
    """
    if path.suffix != ".safetensors":
        raise ArtefactError(f"path: expected a name in .safetensors, got {path}.")
    whole = {name: mx.contiguous(array) for name, array in tensors.items()}

    def write(new: Path) -> None:
        try:
            mx.save_safetensors(str(new), whole, dict(metadata or {}))
            read_header(new)
        except (ArtefactError, RuntimeError):
            # MLX does not say why, or notice.
            raise OSError(errno.ENOSPC, "no room for the whole file (disk full?)", str(path)) from None

    replace_file(path, write)


def _tensor(entry: Any) -> tuple[int, int, tuple[int, ...]]:
    """First byte, end and shape; raises `ValueError` where they do not fit together."""
    start, stop = entry["data_offsets"]
    shape = entry["shape"]
    numbers = [start, stop, *shape]
    if any(type(number) is not int or number < 0 for number in numbers) or len(shape) > 4 or max(numbers) >> 48:
        raise ValueError(entry)
    if stop - start != math.prod(shape) * ITEM_SIZES[entry["dtype"]]:
        raise ValueError(entry)
    return start, stop, tuple(shape)


def _refuse(path: Path, found: str) -> ArtefactError:
    return ArtefactError(f"{path}: expected a file written by mlx-sparse train-saap, got {found}. Train it again.")
