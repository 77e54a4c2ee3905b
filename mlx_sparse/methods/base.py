"""What every method's configuration has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import ConfigError

# Names of submodules that normalise queries or keys, over mlx-lm's and transformers' model files.
QK_NORMS = frozenset({"q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm"})
QK_NORMS |= {"query_layernorm", "key_layernorm", "qk_norm"}
NEVER = 1 << 40  # keys; as `shortest_context`: not at any context


@dataclass(frozen=True)
class Step:
    """The sizes of a layer's decode step, which tell from what context on a method pays.

    Attributes:
        heads: KV heads of all sequences, ``B * Hkv``.
        G: query heads per KV head.
        D: head dim.
        itemsize: bytes of an element of keys and values.
        buckets: that the index of SAAP has.
        network: bytes of SAAP's query network of a KV head.
        gpu: for the `metal` and `triton` backends the kind of GPU, a key of `ENOUGH_SAVED`; empty where there is none.
    """

    heads: int
    G: int
    D: int
    itemsize: int
    gpu: str = ""
    buckets: int = 0
    network: int = 0


@dataclass(frozen=True)
class MethodConfig:
    """What every method has."""

    name: ClassVar[str]
    stage: ClassVar[str] = "decode"  # or "prefill": what it replaces dense attention in
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @property
    def attended(self) -> int:
        """Keys attended per step and KV head; contexts of up to this many keys are attended densely."""
        raise ConfigError(f"attn: expected a sparse method, got {self.name}.")

    def shortest_context(self, step: Step | None = None) -> int:
        """Contexts of fewer keys are attended densely; `NEVER` where all are."""
        return self.attended + 1

    def elements(self, S: int, D: int) -> int:
        """Elements moved per KV head and step for ``S`` keys of head dim ``D``."""
        raise ConfigError(f"attn: expected a sparse method, got {self.name}.")

    def __str__(self) -> str:
        """The text form with every key that differs from its default."""
        pairs = [
            f"{field.name}={_print_value(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (":" + ",".join(pairs) if pairs else "")


@dataclass(frozen=True)
class Dense(MethodConfig):
    """Attention as mlx-lm runs it: the baseline."""

    name: ClassVar[str] = "dense"


def _print_value(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
