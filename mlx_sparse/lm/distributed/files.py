"""Save prompt caches of a sharded context in mlx-lm's own files: one file has the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ...cache.sharded_cache import Shard, ShardedKVCache
from ...checks import ConfigError
from ...files import replace_file
from .exchange import Exchange


def save(write: Callable[..., Any], file_name: str, cache: list[Any], *args: Any, **kwargs: Any) -> None:
    """Save sharded caches by ``write``, mlx-lm's ``save_prompt_cache``. All ranks call this, and rank 0 writes.

    Rank 0 has the whole cache in memory meanwhile.

    Raises:
        ConfigError: on all ranks, if rank 0 cannot write. An existing file is unchanged then.
    """
    exchange = Exchange()
    whole = [_whole(one, exchange) if isinstance(one, ShardedKVCache) else one for one in cache]
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


def _whole(cache: ShardedKVCache, exchange: Exchange) -> Any:
    """Return a cache with the rows of all ranks in the order of their positions; an empty one except on rank 0."""
    found: Any = KVCache()
    if not cache.position:
        return found
    counts = cache.counts()
    # Row n of rank r is at place r * longest + n of what is gathered.
    order = np.concatenate([Shard(rank, exchange.size).positions(0, n) for rank, n in enumerate(counts)])
    longest = max(counts)
    places = np.concatenate([rank * longest + np.arange(n) for rank, n in enumerate(counts)])
    rows = mx.array(places[np.argsort(order)].astype(np.int32))
    arrays = []
    for own in cache.own_rows():
        gathered = exchange.gather(mx.pad(own, [(0, 0), (0, 0), (0, longest - cache.length), (0, 0)]))
        B, H, _, D = own.shape
        gathered = gathered.transpose(1, 2, 0, 3, 4).reshape(B, H, -1, D)
        arrays.append(mx.take(gathered, rows, axis=2))
        mx.eval(arrays)  # one after the other, because only rank 0 keeps them
    if exchange.rank == 0:
        found.keys, found.values = arrays
        found.offset = cache.position
    return found
