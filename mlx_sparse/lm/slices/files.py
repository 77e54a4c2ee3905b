"""Prompt caches of a shared context in mlx-lm's own files: one file has all rows, wherever they are held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ...cache.shares import Shares
from ...cache.slice_cache import SlicedKVCache
from ...checks import ConfigError
from ...files import replace_file
from .exchange import Exchange


def save(write: Callable[..., Any], file_name: str, cache: list[Any], *args: Any, **kwargs: Any) -> None:
    """mlx-lm's ``save_prompt_cache``, called ``write``, for caches of which every rank has its rows: rank 0 writes.

    All ranks call it. Rank 0 holds the whole cache while it writes.

    Raises:
        ConfigError: on all ranks, where rank 0 could not write; there is no file then, or the one that was there.
    """
    exchange = Exchange()
    whole = [_whole(one, exchange) if isinstance(one, SlicedKVCache) else one for one in cache]
    failure: Exception | None = None
    if exchange.rank == 0:
        path = Path(file_name)
        path = path if path.suffix == ".safetensors" else path.with_name(f"{path.name}.safetensors")
        try:
            replace_file(path, lambda new: write(str(new), whole, *args, **kwargs))
        except (OSError, RuntimeError) as error:
            failure = error
    failed = exchange.from_first(mx.array(int(failure is not None)))
    if failed.item():
        reason = "rank 0 could not write it" if failure is None else str(failure).splitlines()[0]
        raise ConfigError(f"--prompt-cache-file: expected a file that can be written, got {file_name} ({reason}).")


def _whole(cache: SlicedKVCache, exchange: Exchange) -> Any:
    """The rows of all ranks in the order of their positions; empty on ranks other than 0."""
    found: Any = KVCache()
    if not cache.position:
        return found
    counts = cache.counts()
    # Row n of rank r is at place r * longest + n of what is gathered.
    order = np.concatenate([Shares(rank, exchange.size).positions(0, n) for rank, n in enumerate(counts)])
    longest = max(counts)
    places = np.concatenate([rank * longest + np.arange(n) for rank, n in enumerate(counts)])
    rows = mx.array(places[np.argsort(order)].astype(np.int32))
    arrays = []
    for own in cache.own_rows():
        gathered = exchange.gather(mx.pad(own, [(0, 0), (0, 0), (0, longest - cache.length), (0, 0)]))
        B, H, _, D = own.shape
        gathered = gathered.transpose(1, 2, 0, 3, 4).reshape(B, H, -1, D)
        arrays.append(mx.take(gathered, rows, axis=2))
        mx.eval(arrays)  # one after the other: only the first rank keeps them
    if exchange.rank == 0:
        found.keys, found.values = arrays
        found.offset = cache.position
    return found
