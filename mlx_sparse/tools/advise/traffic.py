"""What a decode step of a model reads, what its caches take, and what follows for the speed of sparse attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ...cache.kv_cache import SparseKVCache
from ...calibrate import Calibration, Layer
from ...lm import seam
from ...methods import Method, registry
from ...methods.stats import dense_elements
from ...model_info import config_of, leaves

FULL, WINDOW, LINEAR, LATENT = "full", "window", "linear", "latent"
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
SIDE_ROWS = 2048  # of a cache, and twice as many, from which the memory of what a method keeps follows


@dataclass(frozen=True)
class Kept:
    """What the layers of one kind keep for a sequence, all together.

    Attributes:
        kind: `FULL`, `WINDOW`, `LINEAR` (a state of fixed size) or `LATENT` (what keys and values are computed from).
        layers: how many there are.
        per_token: bytes of a token in their caches.
        read: bytes of a token that a decode step reads; more than are kept where several layers share a cache.
        fixed: bytes that do not grow.
        window: tokens that are kept at most; None for all.
    """

    kind: str
    layers: int
    per_token: int = 0
    read: int = 0
    fixed: int = 0
    window: int | None = None

    def with_more(self, other: Kept) -> Kept:
        """These layers and others of the same kind and window."""
        names = ("layers", "per_token", "read", "fixed")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def bytes_read(self, S: int) -> int:
        """In a decode step over ``S`` tokens."""
        return self.fixed + self.read * self._rows(S)

    def nbytes(self, S: int) -> int:
        """Memory at ``S`` tokens."""
        return self.fixed + self.per_token * self._rows(S)

    def _rows(self, S: int) -> int:
        return S if self.window is None else min(S, self.window)


@dataclass(frozen=True)
class Served:
    """Layers of one shape that a method serves.

    Attributes:
        config: the method, as the model runs it.
        layer: the sizes of one.
        layers: how many there are.
    """

    config: Method
    layer: Layer
    layers: int

    def dense_bytes(self, S: int) -> int:
        """That dense attention reads of these layers at ``S`` keys."""
        step = self.layer.step
        return self.layers * step.heads * step.itemsize * dense_elements(S, step.D)

    def saved(self, S: int) -> int:
        """Bytes that the method reads less, by its formula; 0 where it would attend every key."""
        if S <= self.config.attended:
            return 0
        step = self.layer.step
        moved = self.config.elements(S, step.D, step.buckets)
        return max(0, self.dense_bytes(S) - self.layers * step.heads * step.itemsize * moved)


@dataclass(frozen=True)
class Traffic:
    """What a decode step of a single sequence reads.

    Attributes:
        weights: bytes of weights; of experts those that are active for a token.
        kept: by kind of layer.
    """

    weights: int
    kept: tuple[Kept, ...]

    def kv(self, S: int) -> int:
        """Bytes of all that layers keep, read at ``S`` tokens."""
        return sum(kept.bytes_read(S) for kept in self.kept)

    def total(self, S: int) -> int:
        """All bytes of a step."""
        return self.weights + self.kv(S)

    def share(self, S: int) -> float:
        """Of what layers keep in the bytes of a step."""
        return self.kv(S) / self.total(S)

    def nbytes(self, S: int) -> int:
        """Memory of the caches at ``S`` tokens."""
        return sum(kept.nbytes(S) for kept in self.kept)

    def best(self, S: int, served: Iterable[Served]) -> float:
        """The speed-up if a step read nothing of the ``served`` layers: no method can have more, by bytes."""
        return self.total(S) / max(1, self.total(S) - sum(one.dense_bytes(S) for one in served))

    def bound(self, S: int, served: Iterable[Served]) -> float:
        """The speed-up if time is bytes and a method reads no more than its formula says."""
        return self.total(S) / (self.total(S) - sum(one.saved(S) for one in served))


def traffic_of(model: Any) -> Traffic:
    """Look at a model that is loaded and not enabled; nothing of it is evaluated."""
    return Traffic(weights_read(model), tuple(kept_by(model)))


def weights_read(model: Any) -> int:
    """Bytes of the weights that a decode step reads.

    Of experts those that are active for a token, where the config says how many; of an embedding a row, unless it is
    the output matrix as well.
    """
    modules = [module for _, module in model.named_modules()]
    config = config_of(model)
    head = {len(module.weight) for module in modules if isinstance(module, (nn.Linear, nn.QuantizedLinear))}
    active = next((config[name] for name in ACTIVE if isinstance(config.get(name), int) and config[name] > 0), None)
    found = 0
    for module in modules:
        own = sum(array.nbytes for array in module.values() if isinstance(array, mx.array))
        if isinstance(module, (SwitchLinear, QuantizedSwitchLinear)):
            experts = len(module.weight)
            own = own * min(active or experts, experts) // experts
        elif isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)) and not _is_output(module, config, head):
            own = 0
        found += own
    return found


def _is_output(module: Any, config: dict[str, Any], head: set[int]) -> bool:
    """Whether an embedding is the output matrix: of the size of both, and no other matrix is."""
    rows, columns = module.weight.shape
    columns = columns * 32 // module.bits if hasattr(module, "bits") else columns
    sizes = rows == config.get("vocab_size", rows) and columns == config.get("hidden_size", columns)
    return sizes and rows not in head


class _Readers:
    """Counts at the seam which caches attention reads, by their places; every call passes.

    A layer that reads what another one wrote hands over that layer's keys, with its cache or without.
    """

    def __init__(self, caches: list[Any]) -> None:
        self.places = {id(cache): place for place, cache in enumerate(caches)}
        self.keys: dict[int, tuple[Any, int]] = {}  # with the keys, whose id no other array may get
        self.calls: Counter[int] = Counter()

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
    ) -> None:
        place = self.places.get(id(cache), self.keys.get(id(keys), (None, -1))[1])
        self.keys.setdefault(id(keys), (keys, place))
        self.calls[place] += 1


def kept_by(model: Any) -> Iterator[Kept]:
    """What a model's layers keep, those of a kind and window together."""
    caches = make_prompt_cache(model)
    readers = _Readers(leaves(caches))
    names, token = seam.bind(model), seam.active.set(readers)
    try:
        model(mx.zeros((1, 1), mx.int32), cache=caches)
    finally:
        seam.active.reset(token)
        seam.unbind(names)
    found: dict[tuple[str, int | None], Kept] = {}
    for place, leaf in enumerate(leaves(caches)):
        kept = _kept(leaf, max(1, readers.calls[place]))
        known = found.get((kept.kind, kept.window))
        found[kept.kind, kept.window] = kept if known is None else known.with_more(kept)
    yield from found.values()


def _kept(leaf: Any, calls: int) -> Kept:
    """Of one cache that holds a token, which ``calls`` of attention read."""
    keys, values = getattr(leaf, "keys", None), getattr(leaf, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array) or keys.ndim != 4:
        state: Any = tree_flatten(leaf.state)
        return Kept(LINEAR, 1, fixed=sum(array.nbytes for _, array in state if isinstance(array, mx.array)))
    per_token = sum(rows.shape[1] * rows.shape[3] * rows.itemsize for rows in (keys, values))
    window = getattr(leaf, "max_size", None) or getattr(leaf, "chunk_size", None)
    latent = keys.shape[1] == 1 and keys.shape[3] != values.shape[3]
    return Kept(LATENT if latent else WINDOW if window else FULL, 1, per_token, calls * per_token, window=window)


@dataclass(frozen=True)
class Here:
    """What this machine's own measurements say of a method.

    Attributes:
        keys: from so many on it is sparse by default.
        how: one of `calibrate.MEASURED`, `MODELLED` and `GIVEN`.
        ratio: time of dense over sparse attention at the nearest length that was timed; None if none was.
        timed: that length; 0 if there is none.
        step: the speed-up of a whole step that follows if all else takes the time of its bytes; None if none was timed.
    """

    keys: float
    how: str
    ratio: float | None = None
    timed: int = 0
    step: float | None = None


def here(traffic: Traffic, served: list[Served], calibration: Calibration, S: int) -> Here:
    """What was measured before, at the length nearest to ``S``; nothing is timed now."""
    found = [calibration.of(one.config, one.layer) for one in served]
    keys, how = max((threshold.value, threshold.how) for threshold in found)
    points = [min(calibration.timed(o.config, o.layer), key=lambda p: abs(p.S - S), default=None) for o in served]
    timed = [point for point in points if point is not None]
    if len(timed) < len(served):
        return Here(keys, how)
    left = float(traffic.total(S))
    for one, threshold, point in zip(served, found, timed, strict=True):
        left -= one.dense_bytes(S) * (1 - 1 / point.ratio) if threshold.value <= S else 0
    slowest = min(timed, key=lambda point: point.ratio)
    return Here(keys, how, slowest.ratio, slowest.S, traffic.total(S) / left)


def side_bytes(served: Iterable[Served], S: int) -> int | None:
    """Memory at ``S`` tokens of what methods keep beside the caches; None where only a whole model can say.

    It follows from what they keep beside `SIDE_ROWS` rows, and beside twice as many.
    """
    total = 0.0
    for one in served:
        if registry.load_hooks(one.config.name) is not None:
            return None
        few, many = (_beside(one, rows) for rows in (SIDE_ROWS, 2 * SIDE_ROWS))
        total += one.layers * (few + (many - few) * (S - SIDE_ROWS) / SIDE_ROWS)
    return round(total)


def _beside(one: Served, rows: int) -> int:
    step = one.layer.step
    cache = SparseKVCache()  # type: ignore[no-untyped-call]
    cache.keys = cache.values = mx.zeros((1, step.heads, rows, step.D), one.layer.dtype)
    cache.offset = rows
    query = mx.zeros((1, step.heads * step.G, 1, step.D), one.layer.dtype)
    out, _ = cache.attend(query, one.config, scale=1.0, backend=one.layer.backend)
    mx.eval(out)
    return sum(state.nbytes for state in cache.beside.values())
