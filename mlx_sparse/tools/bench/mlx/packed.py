"""Decode steps over quantised caches, in the same turns as those over plain ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from ....cache.kv_cache import SparseKVCache, SparseQuantizedKVCache
from ....checks import ConfigError
from ....methods import Method, Step
from ....methods.packed_parts import BITS
from ..core import Case, Shape
from .steps import DecodeStep, Layers

GROUP = 64  # components that share a scale, as with mlx_lm's --kv-bits


class PackedStep(DecodeStep):
    """A method's step through layers whose rows are packed in ``bits``, from the rows of the plain ones."""

    def __init__(self, case: Case, config: Any, backend: str, layers: Layers | None, bits: int) -> None:
        self._bits = bits
        super().__init__(case, config, backend, layers)
        self.row.details["kv_bits"] = bits

    @classmethod
    def check_bits(cls, bits: int, config: Method, shape: Shape) -> None:
        """Raise `ConfigError` if there are no such caches, or the benchmark has no step of the method over them."""
        if bits not in BITS:
            raise ConfigError(f"--kv-bits: expected some of {', '.join(map(str, BITS))}, got {bits}.")
        if shape.D % GROUP:
            raise ConfigError(f"--kv-bits: expected head dims that are multiples of {GROUP}, got {shape}.")
        if config.before_rope or config.observes_prompts:
            raise ConfigError(f"--kv-bits: expected methods that choose by keys alone, got {config.name}.")

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        cache: Any = SparseQuantizedKVCache(group_size=GROUP, bits=self._bits)
        cache.keys, cache.values = (mx.quantize(rows, group_size=GROUP, bits=self._bits) for rows in (keys, values))
        cache.offset = keys.shape[2]
        mx.eval(cache.keys, cache.values)
        packed: SparseKVCache = cache
        return packed

    def bytes(self) -> int:
        case, row_bytes = self.case, self.sizes().row_bytes
        return int(case.rows * self.config.step_bytes(case.S, case.D, itemsize=case.item, row_bytes=row_bytes))

    def sizes(self) -> Step:
        return replace(super().sizes(), packed=(self._bits, GROUP))
