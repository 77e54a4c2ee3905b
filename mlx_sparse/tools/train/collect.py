"""Queries and keys of a model in real text, before and after RoPE, streamed to disk as the model runs."""

from __future__ import annotations

import fcntl
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...checks import ArtefactError, ConfigError
from ...lm.rope import Recorder, Seen, Source, find_sources, observe
from ...model_info import leaves
from ..evaluate.journal import Journal
from .rows import Texts

Array = npt.NDArray[Any]
STEP = 512  # tokens that the model sees at a time


class _AllSeen(Exception):
    """Every layer that is collected has attended to this chunk."""


@dataclass(frozen=True)
class Done:
    """Entry of the journal: a text whose ``tokens`` were all collected."""

    tokens: int


@dataclass(frozen=True)
class Place:
    """Index of a layer among the model's caches, and its attention heads."""

    layer: int
    Hq: int
    Hkv: int
    D: int
    scale: float


@dataclass(frozen=True)
class Collection:
    """A folder of arrays: for each layer float16 keys of all tokens and queries of some, before and after RoPE."""

    folder: Path
    places: dict[int, Place]
    windows: int
    length: int
    queries: int
    first: int
    seed: int

    @cached_property
    def positions(self) -> Array:
        """Positions ``(windows, queries)`` of the collected queries, ascending, none before ``first``."""
        chosen = [
            np.random.default_rng([self.seed, window]).choice(self.length - self.first, self.queries, replace=False)
            for window in range(self.windows)
        ]
        return np.sort(np.array(chosen, np.int32), axis=1) + self.first

    @property
    def bytes(self) -> int:
        """Bytes of the complete folder."""
        return sum(2 * math.prod(shape) for place in self.places.values() for shape in self._shapes(place).values())

    def texts(self, layer: int) -> Texts:
        """Map the collected tensors of one layer from disk.

        Raises:
            ArtefactError: the files are missing or damaged.
        """
        place = self.places[layer]
        try:
            arrays = {
                name: np.memmap(self._path(layer, name), np.float16, "r", shape=shape)
                for name, shape in self._shapes(place).items()
            }
        except (OSError, ValueError) as error:
            raise ArtefactError(
                f"{self.folder}: expected what was collected there, got {error}. Delete the folder and run again."
            ) from None
        return Texts(**arrays, positions=self.positions, scale=place.scale)

    def _shapes(self, place: Place) -> dict[str, tuple[int, ...]]:
        keys = (self.windows, place.Hkv, self.length, place.D)
        queries = (self.windows, place.Hq, self.queries, place.D)
        return {"keys_before": keys, "keys_after": keys, "queries_before": queries, "queries_after": queries}

    def _path(self, layer: int, name: str) -> Path:
        return self.folder / f"layer-{layer:03}.{name}.f16"

    def _write(self, seen: Seen, window: int, before: tuple[mx.array, mx.array]) -> None:
        """Write one chunk of a layer."""
        start, stop = seen.position, seen.position + seen.queries.shape[2]
        inside = np.flatnonzero((self.positions[window] >= start) & (self.positions[window] < stop))
        places = mx.array(self.positions[window][inside] - start)
        assert seen.keys is not None
        rows = {"keys_before": before[1], "keys_after": seen.keys}
        rows |= {"queries_before": before[0][:, :, places], "queries_after": seen.queries[:, :, places]}
        half = {name: array[0].astype(mx.float16) for name, array in rows.items()}
        mx.eval(half)
        shapes = self._shapes(self.places[seen.layer])
        for name, array in half.items():
            first = start if name.startswith("keys") else int(inside[0]) if len(inside) else 0
            self._put(self._path(seen.layer, name), np.array(array), shapes[name], window, first)

    def _put(self, path: Path, rows: Array, shape: tuple[int, ...], window: int, first: int) -> None:
        """Write ``rows (heads, n, D)`` at ``[window, :, first : first + n]`` of an array on disk.

        A full disk is an error when a file is written, and a signal when it is mapped.
        """
        _, heads, length, D = shape
        if not np.isfinite(rows).all():
            raise ConfigError(f"--model: expected queries and keys within float16, got larger or NaN in {path.stem}.")
        try:
            with path.open("r+b" if path.exists() else "w+b") as file:
                for head in range(heads):
                    file.seek(2 * D * ((window * heads + head) * length + first))
                    file.write(np.ascontiguousarray(rows[head]).data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def collect(
    model: Any,
    places: dict[int, Place],
    windows: Sequence[Sequence[int]],
    folder: Path,
    *,
    queries: int,
    first: int,
    seed: int,
    key: str,
    progress: Any,
) -> Collection:
    """Run ``model`` on texts of equal length, and store the queries and keys of its attention layers.

    Disk: `Collection.bytes`. Memory: the model, its cache of one text, and one chunk of one layer.
    Texts that an interrupted run with the same ``key`` completed are not run again.

    Args:
        places: the layers to collect, as `find_places` gives them.
        queries: number of queries of each text to keep, at random positions from ``first`` on.
        progress: a bar that counts tokens.

    Raises:
        ConfigError: the disk has too little room.
        OSError: the disk is full.
    """
    found = Collection(folder, places, len(windows), len(windows[0]), queries, first, seed)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "windows.jsonl", "train-saap", key, Done)
    done = len(journal.results)
    needed, free = found.bytes - found.bytes * done // found.windows, shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--work: expected {needed / 1e9:.2f} GB free in {folder}, got {free / 1e9:.2f} GB. Choose another folder, "
            "or fewer --windows or --queries."
        )
    progress.update(done * found.length)
    sources = find_sources(model) if done < found.windows else {}
    for window in range(done, found.windows):
        _run(model, found, sources, window, windows[window], progress)
        journal.add(str(window), Done(found.length))
    return found


def _run(
    model: Any,
    collection: Collection,
    sources: dict[int, Source | str],
    window: int,
    tokens: Sequence[int],
    progress: Any,
) -> None:
    caches = make_prompt_cache(model)
    needed = leaves(caches)[: 1 + max(collection.places)]
    missing: set[int] = set()

    def visit(seen: Seen) -> None:
        if seen.layer not in collection.places:
            return
        source = sources[seen.layer]
        assert isinstance(source, Source)
        assert seen.keys is not None
        before = [source.pre_rope(recorder, rows, seen.position) for rows in (seen.queries, seen.keys)]
        if before[0] is None or before[1] is None:
            raise ConfigError(f"--model: expected tensors before RoPE in layer {seen.layer}, got none.")
        collection._write(seen, window, (before[0], before[1]))
        missing.discard(seen.layer)
        if not missing:
            raise _AllSeen

    with Recorder(model) as recorder:
        for start in range(0, len(tokens), STEP):
            chunk = tokens[start : start + STEP]
            missing.update(collection.places)
            # The output of the last of these layers and the layers above it are not needed.
            with suppress(_AllSeen):
                observe(model, mx.array([chunk]), caches, visit, recorder)
            mx.eval([leaf.state for leaf in needed])
            progress.update(len(chunk))


def find_places(model: Any, dense_layers: int) -> dict[int, Place]:
    """Return the layers that SAAP can serve, without the first ``dense_layers`` attention layers.

    Raises:
        ConfigError: there is none; the message has the reasons.
    """
    sources = find_sources(model)
    order = sorted(sources)
    caches = make_prompt_cache(model)
    places: dict[int, Place] = {}
    reasons: list[str] = []

    def visit(seen: Seen) -> None:
        if seen.keys is None or seen.layer < 0:
            return
        source, cache = sources.get(seen.layer), leaves(caches)[seen.layer]
        Hq, Hkv, D = seen.queries.shape[1], *seen.keys.shape[1::2]
        if type(cache) is not KVCache:
            reasons.append(f"with a {type(cache).__name__}")
        elif not isinstance(source, Source):
            reasons.append(source or "without tensors before RoPE")
        elif order.index(seen.layer) < dense_layers:
            reasons.append("that stay dense")
        elif seen.queries.shape[3] != D:
            reasons.append("with key and value head dims that differ (MLA)")
        else:
            places[seen.layer] = Place(seen.layer, Hq, Hkv, D, seen.scale)

    with Recorder(model) as recorder:
        observe(model, mx.array([[0]]), caches, visit, recorder)
    if not places:
        counted = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
        raise ConfigError(f"--model: expected an attention layer that SAAP can serve, got {counted or 'none'}.")
    return places


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Create ``folder`` and lock it for this run; the lock ends with the process.

    Raises:
        ConfigError: another run has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--work: expected a folder that no other run is working in, got {folder}. Wait for that run, or "
                "choose another folder."
            ) from None
        yield


def clear(work: Path) -> None:
    """Remove the files of runs in ``work``, and the folder itself if it is then empty."""
    for folder in [*work.glob("collected-*"), *work.glob("trained-*")]:
        shutil.rmtree(folder)
    with suppress(OSError):
        work.rmdir()
