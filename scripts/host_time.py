"""Host time to build the graph of a layer's decode step: SparQ's Metal kernels beside MLX's dense attention.

python scripts/host_time.py [--attn sparq:key=value,...] [-o FORM] [--out FILE]

Runs anywhere: MLX builds a step before it evaluates it, and in a trace, where nothing is evaluated, without a GPU too.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import by_method
import mlx.core as mx

from mlx_sparse.cache.kv_cache import SparseKVCache
from mlx_sparse.methods import SparQ
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.formats import table

SHAPE = Shape(32, 8, 128)
CONTEXTS = (4096, 16_384)  # a list of keys that is made in one tile, and of several
TOKENS = 60
LAYERS = 32  # of a token: what its length decides is worked out by the first
PARTS = {"whole": "whole", "mlx": "MLX's own calls", "ours": "ours"}
SCALE = SHAPE.D**-0.5

Step = Callable[[], Any]
_metal_kernel = mx.fast.metal_kernel


class Launches:
    """Stands in for `mx.fast.metal_kernel` and remembers the calls of the kernels that it made, to make them again."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], dict[str, Any]]] = []
        self.kept = False

    def __call__(self, **about: Any) -> Callable[..., Any]:
        kernel = _metal_kernel(**about)

        def launch(**how: Any) -> Any:
            if self.kept:
                self.calls.append((launch, how))
            return kernel(**how)

        return launch

    def of(self, step: Step) -> Step:
        """The launches of ``step``, and nothing around them."""
        self.calls, self.kept = [], True
        step()
        self.kept, calls = False, self.calls
        return lambda: [launch(**how) for launch, how in calls]


class Layer:
    """A cache over which a layer decodes, of ``context`` keys and with room for those of `TOKENS`.

    Attributes:
        launched: kernels of a step.
    """

    launched = 0

    def __init__(self, config: SparQ, context: int) -> None:
        rows = mx.zeros((1, SHAPE.Hkv, context + TOKENS, SHAPE.D), mx.float16)
        self.queries = mx.zeros((1, SHAPE.Hq, 1, SHAPE.D), mx.float16)
        self.config, self.cache = config, SparseKVCache()  # type: ignore[no-untyped-call]
        self.cache.update_and_fetch(rows, rows)
        self.cache.trim(TOKENS)  # type: ignore[no-untyped-call]
        mx.eval(self.sparse("ops"))  # begins what lies beside the cache

    def sparse(self, backend: str = "metal") -> Any:
        return self.cache.attend(self.queries, self.config, scale=SCALE, backend=backend)

    def dense(self) -> mx.array:
        """As mlx-lm calls it."""
        keys, values, _ = self.cache.rows("ops")
        return mx.fast.scaled_dot_product_attention(self.queries, keys, values, scale=SCALE)

    def again(self) -> None:
        """Forget what the step did to the cache: the next is that of another layer."""
        self.cache.beside["sparq"].rewind(self.cache.offset - 1)


def measure(configs: Sequence[SparQ], context: int, launches: Launches) -> list[dict[str, Any]]:
    """A row for dense attention and for each of ``configs``: microseconds per layer.

    Its ``whole`` is what a step takes, ``mlx`` what its launches take when made again by themselves, and released, and
    ``ours`` the rest, array operations of the cache included; of each the median and the least of all tokens. Dense
    attention is all of it MLX's.
    """
    layers = {str(config): Layer(config, context) for config in configs}
    found: dict[tuple[str, str], list[float]] = {}

    def decode(traced: mx.array) -> mx.array:
        for _ in range(TOKENS):
            for part, costs in _token(layers, launches).items():
                found.setdefault(part, []).append(mean(costs))
        return traced

    mx.export_function(lambda node: None, decode, mx.zeros(1))  # type: ignore[no-untyped-call]
    launched = {"dense": 0} | {name: layer.launched for name, layer in layers.items()}
    return [{"keys": context, "step": name, "launched": n, **_figures(name, found)} for name, n in launched.items()]


def _token(layers: Mapping[str, Layer], launches: Launches) -> dict[tuple[str, str], list[float]]:
    """Microseconds of each kind of step in each layer of one token, and of its launches alone; in turns."""
    costs: dict[tuple[str, str], list[float]] = {}
    alone: dict[str, Step] = {}
    for layer in layers.values():
        layer.cache.offset += 1
    for _ in range(LAYERS):
        for name, layer in layers.items():
            costs.setdefault(("dense", "whole"), []).append(_time(layer.dense))
            layer.again()
            costs.setdefault((name, "whole"), []).append(_time(layer.sparse))
            if name not in alone:  # not before a layer has worked out what the length decides
                alone[name] = launches.of(layer.sparse)
                layer.launched = len(launches.calls)
            costs.setdefault((name, "mlx"), []).append(_time(alone[name]))
    return costs


def _time(step: Step) -> float:
    """Microseconds of a step, with the release of what it built."""
    start = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - start) / 1e3


def _figures(name: str, found: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, dict[str, float]]:
    figures = {}
    for of, pick in (("median", median), ("least", min)):
        whole = pick(found[name, "whole"])
        own = pick(found[name, "mlx"]) if (name, "mlx") in found else whole
        figures[of] = {"whole": whole, "mlx": own, "ours": whole - own}
    return figures


def sparq(config: SparQ) -> by_method.Found:
    """Of the method, and with keys of 16 bits."""
    both = dict.fromkeys(dataclasses.replace(config, key_bits=bits) for bits in (16, config.key_bits))
    configs = [one.for_model(qk_norm=False) for one in both]
    with patch.object(mx.fast, "metal_kernel", Launches()) as launches:
        rows = [row for S in CONTEXTS for row in measure(configs, S, launches)]
    lines = [
        [f"{row['keys']:,}", row["step"], *(f"{row['median'][part]:.1f} ({row['least'][part]:.1f})" for part in PARTS)]
        for row in rows
    ]
    return rows, f"Microseconds for {SHAPE}, median (least):\n\n{table(['keys', 'step', *PARTS.values()], lines)}"


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").partition("\n")[0]
    return by_method.main(argv, __file__, about, {"apple": {"sparq": sparq}})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
