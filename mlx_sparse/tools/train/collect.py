"""Collect the queries and keys of a model before and after RoPE, and stream them to disk while the model runs."""

from __future__ import annotations

import fcntl
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...api.call_report import Counts
from ...checks import ArtefactError, ConfigError
from ...lm.dense import DenseAttention
from ...lm.model import native_dense, plan_of
from ...lm.rope import Recorder, Seen, Source, find_sources, visit_calls
from ...model_info import leaves
from ..evaluate.journal import Journal
from .rows import Texts

if TYPE_CHECKING:
    from mlx import nn

    from ..progress import Bar

Array = np.ndarray
STEP = 512  # tokens of a prefill chunk


class _CollectionComplete(Exception):
    """Signal that the last layer to collect has processed the chunk."""


@dataclass(frozen=True)
class Done:
    """Journal entry for a completely collected text. ``tokens`` is the length of the text."""

    tokens: int


@dataclass(frozen=True)
class LayerShape:
    """Head counts, head dim and scale of an attention layer. ``layer`` is its index in the model's list of caches."""

    layer: int
    Hq: int
    Hkv: int
    D: int
    scale: float


@dataclass(frozen=True)
class Collection:
    """A folder with float16 arrays for each layer.

    The arrays contain all keys and the sampled queries of each text, before and after RoPE.

    Attributes:
        layer_shapes: dict from the index of each collected layer to its shape.
        windows: number of texts.
        length: number of tokens in each text.
        queries: number of sampled queries per text.
        first: lowest position of a sampled query.
    """

    folder: Path
    layer_shapes: dict[int, LayerShape]
    windows: int
    length: int
    queries: int
    first: int
    seed: int

    @cached_property
    def positions(self) -> Array:
        """Positions ``(windows, queries)`` of the sampled queries in each text, in ascending order from ``first``."""
        chosen = [
            np.random.default_rng([self.seed, window]).choice(self.length - self.first, self.queries, replace=False)
            for window in range(self.windows)
        ]
        return np.sort(np.array(chosen, np.int32), axis=1) + self.first

    @property
    def bytes(self) -> int:
        shapes = [shape for layer in self.layer_shapes.values() for shape in self._shapes(layer).values()]
        return sum(2 * math.prod(shape) for shape in shapes)

    def texts(self, layer: int) -> Texts:
        """Return the collected arrays of ``layer``. The arrays are mapped from the files, not loaded."""
        layer_shape = self.layer_shapes[layer]
        try:
            arrays = {
                name: np.memmap(self._path(layer, name), np.float16, "r", shape=shape)
                for name, shape in self._shapes(layer_shape).items()
            }
        except (OSError, ValueError) as error:
            raise ArtefactError(
                f"{self.folder}: expected the collected files, got {error}. Delete the folder and run again."
            ) from None
        return Texts(**arrays, positions=self.positions, scale=layer_shape.scale)

    def _shapes(self, layer: LayerShape) -> dict[str, tuple[int, ...]]:
        keys = (self.windows, layer.Hkv, self.length, layer.D)
        queries = (self.windows, layer.Hq, self.queries, layer.D)
        return {"pre_rope_keys": keys, "rope_keys": keys, "pre_rope_queries": queries, "rope_queries": queries}

    def _path(self, layer: int, name: str) -> Path:
        return self.folder / f"layer-{layer:03}.{name}.f16"

    def _write(self, seen: Seen, window: int, before: tuple[mx.array, mx.array]) -> None:
        """Write all keys and the sampled queries of ``seen``.

        ``seen`` is an attention call on one chunk in one layer. ``window`` is the index of the text. ``before``
        contains the queries and the keys before RoPE.
        """
        start, stop = seen.position, seen.position + seen.queries.shape[2]
        inside = np.flatnonzero((self.positions[window] >= start) & (self.positions[window] < stop))
        chunk_rows = mx.array(self.positions[window][inside] - start)
        assert seen.keys is not None
        rows = {"pre_rope_keys": before[1], "rope_keys": seen.keys}
        rows |= {"pre_rope_queries": before[0][:, :, chunk_rows], "rope_queries": seen.queries[:, :, chunk_rows]}
        half = {name: array[0].astype(mx.float16) for name, array in rows.items()}
        mx.eval(half)
        shapes = self._shapes(self.layer_shapes[seen.layer])
        for name, array in half.items():
            first = start if name.endswith("keys") else int(inside[0]) if len(inside) else 0
            self._put(self._path(seen.layer, name), np.array(array), shapes[name], window, first)

    def _put(self, path: Path, rows: Array, shape: tuple[int, ...], window: int, first: int) -> None:
        """Write ``rows (heads, n, D)`` to ``[window, :, first : first + n]`` of the array in the file ``path``.

        If the disk is full, an OSError is raised. Writing to a mapped file would instead end the process with a signal.
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
    model: nn.Module, collection: Collection, windows: Sequence[Sequence[int]], *, key: str, progress: Bar
) -> None:
    """Run ``model`` on texts of equal length, and store the queries and keys of its attention layers in ``collection``.

    The files take `Collection.bytes` on disk. The model, the KV caches of one text, and one chunk of one layer are in
    memory. If an interrupted run with the same ``key`` completed a text, the text is skipped.

    Args:
        model: an mlx-lm model on which `enable` was not called.
        windows: tokens of each text.
        key: hash of the inputs of the run.
    """
    folder = collection.folder
    journal = Journal(folder / "windows.jsonl", "train-saap", key, Done)
    done = _completed_texts(journal, collection)
    needed, free = collection.bytes - collection.bytes * done // collection.windows, shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--work: expected {needed / 1e9:.2f} GB free in {folder}, got {free / 1e9:.2f} GB. Choose another folder, "
            "or fewer --windows or --queries."
        )
    progress.update(done * collection.length)
    sources = find_sources(model) if done < collection.windows else {}
    for window in range(done, collection.windows):
        _run(model, collection, sources, window, windows[window], progress)
        journal.add(str(window), Done(collection.length))


def _completed_texts(journal: Journal[Done], collection: Collection) -> int:
    done = len(journal.results)
    entries = [(str(window), Done(collection.length)) for window in range(min(done, collection.windows))]
    if list(journal.results.items()) != entries:
        raise ArtefactError(
            f"{journal.path}: expected the first of {collection.windows} texts of {collection.length:,} tokens in "
            "order, got other entries. Delete the folder and run again."
        )
    return done


def _run(
    model: nn.Module,
    collection: Collection,
    sources: dict[int, Source | str],
    window: int,
    tokens: Sequence[int],
    progress: Bar,
) -> None:
    caches = make_prompt_cache(model)
    needed = leaves(caches)[: 1 + max(collection.layer_shapes)]
    missing: set[int] = set()
    with native_dense(model):
        plan = plan_of(model)  # None if native kernels cannot run
    dense = DenseAttention(plan, needed, Counts(), checks=False) if plan else None

    def visit(seen: Seen) -> None:
        if seen.layer not in collection.layer_shapes:
            return
        source = sources[seen.layer]
        assert isinstance(source, Source)
        assert seen.keys is not None
        before = [source.pre_rope(recorder, rows, seen.position) for rows in (seen.queries, seen.keys)]
        if before[0] is None or before[1] is None:
            raise ConfigError(f"--model: expected pre-RoPE tensors in layer {seen.layer}, got none.")
        collection._write(seen, window, (before[0], before[1]))
        missing.discard(seen.layer)
        if not missing:
            raise _CollectionComplete

    with Recorder(model) as recorder:
        for start in range(0, len(tokens), STEP):
            chunk = tokens[start : start + STEP]
            missing.update(collection.layer_shapes)
            # The layers above the last collected layer need not run.
            with suppress(_CollectionComplete):
                visit_calls(model, mx.array([chunk]), caches, visit, recorder, dense)
            mx.eval([leaf.state for leaf in needed])
            progress.update(len(chunk))


def find_layer_shapes(model: nn.Module, dense_layers: int) -> dict[int, LayerShape]:
    """Return a dict from the index of each layer that can use SAAP to the shape of the layer.

    The first ``dense_layers`` attention layers are omitted.
    """
    sources = find_sources(model)
    order = sorted(sources)
    caches = make_prompt_cache(model)
    layer_shapes: dict[int, LayerShape] = {}
    reasons: list[str] = []

    def visit(seen: Seen) -> None:
        if seen.keys is None or seen.layer < 0:
            return
        source, cache = sources.get(seen.layer), leaves(caches)[seen.layer]
        Hq, Hkv, D = seen.queries.shape[1], *seen.keys.shape[1::2]
        if type(cache) is not KVCache:
            reasons.append(f"with a {type(cache).__name__}")
        elif not isinstance(source, Source):
            reasons.append(source or "without pre-RoPE tensors")
        elif order.index(seen.layer) < dense_layers:
            reasons.append("that stay dense")
        elif seen.queries.shape[3] != D:
            reasons.append("with key and value head dims that differ")
        else:
            layer_shapes[seen.layer] = LayerShape(seen.layer, Hq, Hkv, D, seen.scale)

    with Recorder(model) as recorder:
        visit_calls(model, mx.array([[0]]), caches, visit, recorder)
    if not layer_shapes:
        counted = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
        raise ConfigError(f"--model: expected an attention layer that SAAP can serve, got {counted or 'none'}.")
    return layer_shapes


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder``, and lock it while the ``with`` block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--work: expected a folder that no other run uses, got {folder}. Wait for that run, or "
                "choose another folder."
            ) from None
        yield


def remove_files(work: Path) -> None:
    """Remove the files of earlier runs from the folder ``work``. If the folder is then empty, remove the folder."""
    for folder in [*work.glob("collected-*"), *work.glob("trained-*")]:
        shutil.rmtree(folder)
    with suppress(OSError):
        work.rmdir()
