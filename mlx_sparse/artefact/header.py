"""What a safetensors file says it holds, checked against the file before anything is read by it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import ArtefactError

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
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise _refuse(path, "another file or a truncated one")
            text = file.read(length)
    except OSError as error:
        raise _refuse(path, f"none that can be read ({error.strerror})") from None
    try:
        entries = json.loads(text.decode("utf-8"))
        metadata = entries.pop("__metadata__", {})
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
