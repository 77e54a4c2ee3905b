"""Base classes of the methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from ..checks import ConfigError, check_local_window
from .block_layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

# Names of submodules that normalize queries or keys in the model files of mlx-lm and transformers.
QK_NORMS = frozenset({"q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm"})
QK_NORMS |= {"query_layernorm", "key_layernorm", "qk_norm"}
NEVER = 1 << 40  # keys; as `shortest_context`: dense at every length
SLACK = 2  # the best keys are not evenly distributed over the context-parallel shards
# Settings that select when a backend is called, and are not arguments of its functions.
SWITCHES = frozenset({"dense_below", "dense_above", "ranges"})


@dataclass(frozen=True)
class Step:
    """Sizes of a layer's decode step, from which the crossover length is modelled.

    Attributes:
        heads: KV heads of all sequences, ``B * Hkv``.
        G: query heads per KV head.
        D: head dim.
        itemsize: bytes of an element of keys and values.
        buckets: number of buckets of SAAP's index.
        network: bytes of SAAP's query network per KV head.
        gpu: kind of GPU for the `metal` and `triton` backends, a key of `cost.ENOUGH_SAVED`; empty without a GPU.
        measured: crossover length in keys that was measured on this machine; None before a measurement.
        packed: bits per component and group size of a quantized KV cache (quantized.1); None for other caches.
    """

    heads: int
    G: int
    D: int
    itemsize: int
    gpu: str = ""
    buckets: int = 0
    network: int = 0
    measured: int | None = None
    packed: tuple[int, int] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one key (or value) row of one head."""
        if self.packed is None:
            return self.D * self.itemsize
        bits, group_size = self.packed
        return self.D * bits // 8 + 2 * self.itemsize * self.D // group_size


@dataclass(frozen=True)
class Method:
    """The settings of a method. Class attributes describe the method.

    Attributes:
        name: name of the method in the text form and in every table.
        stage: "decode" (one query per decode step), "prefill" (chunks of any size) or "prefill and decode".
        source: the paper of the method.
        reads: the data that the method reads per new token, or computes in prefill, in one phrase.
        plot_style: color and marker in pictures. The colors are safe for color-blind readers.
        presets: settings by name of the preset.
        budget_setting: the setting that a transfer budget determines; empty if there is none.
        sparse: True if the method skips keys, so that a model can run with it.
        observes_prefill: True if the selection starts from the attention of a dense prefill.
        pre_rope: True if the selection uses queries and keys before RoPE.
    """

    name: ClassVar[str]
    stage: ClassVar[str] = "decode"
    source: ClassVar[str]
    reads: ClassVar[str]
    plot_style: ClassVar[tuple[str, str]] = ("#666666", "o")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    budget_setting: ClassVar[str] = ""
    sparse: ClassVar[bool] = True
    observes_prefill: ClassVar[bool] = False
    pre_rope: ClassVar[bool] = False

    @property
    def attended(self) -> int:
        """Keys attended per step and KV head. Contexts of up to this many keys are attended densely."""
        if not hasattr(self, "top_k"):
            raise ConfigError(f"attn: expected a sparse method, got {self.name}.")
        return int(self.top_k)

    @property
    def unit(self) -> int:
        """Number of consecutive keys that are selected together. If above 1, the last group is always selected."""
        return 1

    @property
    def file(self) -> str | None:
        """Path of the artefact to load; None if the method or its settings need no artefact.

        Raises:
            ConfigError: the settings need an artefact and name none.
        """
        return None

    @property
    def fitted_buckets(self) -> int:
        """Number of buckets that SAAP fits on the prompt if it has no artefact; 0 for other methods."""
        return 0

    def for_model(self, *, qk_norm: bool, grouped: bool = True) -> Self:
        """Return the method with every "auto" that depends on the model resolved. `parameters` resolves the rest.

        Args:
            qk_norm: True if the model normalizes queries or keys.
            grouped: True if several query heads share a KV head.
        """
        return self

    def check_head_dim(self, D: int) -> None:
        """Raise `ConfigError` if a setting is too large for the head dim ``D``."""

    def supports_sinks(self, G: int) -> bool:
        """Return True if attention sinks can be added with the log-sum-exp of the attended keys alone.

        ``G`` is the number of query heads per KV head.
        """
        return True

    def parameters(self, G: int = 1) -> dict[str, Any]:
        """Return the arguments of the backends' functions for layers of ``G`` query heads per KV head.

        No value is "auto": this resolves the settings that depend on the layer.
        """
        found = {name: getattr(self, name) for name in self.setting_names()}
        if "local_window" in found:
            found["local_window"] = check_local_window(found["local_window"], self.attended)
        return found

    @classmethod
    def setting_names(cls) -> list[str]:
        """Return the names of the settings that the backends' functions take."""
        return [field.name for field in dataclasses.fields(cls) if field.name not in SWITCHES]

    @property
    def always_attended(self) -> tuple[int, int]:
        """Number of first keys and number of last keys that every decode step attends."""
        found = self.parameters()
        return found.get("sink_tokens", 0), found.get("recent_tokens", found.get("local_window", 0))

    def for_shard(self, size: int, recent: int) -> Self | None:
        """Return the settings with which each of ``size`` context-parallel shards selects among its own keys.

        Args:
            recent: number of keys of this shard among the last keys, which every step attends (`always_attended`).

        Returns:
            None if the selection does not compare keys, so that each shard attends the same keys as one process would.
        """
        return None

    @property
    def measurable(self) -> bool:
        """True if a measurement on the machine may set `shortest_context`: ``dense_below`` is "auto"."""
        return getattr(self, "dense_below", 0) == "auto" and not self.experiment

    @property
    def experiment(self) -> bool:
        """True if the settings are for experiments on short texts, in which every possible step is sparse."""
        return False

    def shortest_context(self, step: Step | None = None) -> int:
        """Return the crossover length in keys. Shorter contexts are attended densely; `NEVER` means all contexts."""
        below, exact = getattr(self, "dense_below", 0), self.attended + 1
        if not isinstance(below, str):
            return max(below, exact)
        if self.experiment:
            return exact
        if step is not None and step.measured is not None:
            return max(step.measured, exact)
        return max(self.modelled_context(step), exact)

    def modelled_context(self, step: Step | None) -> int:
        """Return `shortest_context` by a model of the machine, used before a measurement. It errs on the dense side."""
        return self.attended + 1

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        """Return the elements moved per KV head and decode step for ``S`` keys of head dim ``D``.

        ``buckets`` is the number of buckets of the index, if the method has an index.
        """
        raise ConfigError(f"attn: expected a sparse method, got {self.name}.")

    def rows(self, S: int) -> int:
        """Return the number of whole key and value rows that a decode step over ``S`` keys reads per KV head."""
        return 2 * min(self.attended, S)

    def step_bytes(self, S: int, D: int, *, itemsize: int, row_bytes: int) -> int:
        """Return the bytes moved per KV head and decode step, if a key or value row takes ``row_bytes``."""
        rows = self.rows(S)
        return itemsize * (self.elements(S, D) - rows * D) + rows * row_bytes

    def with_budget(self, share: Fraction, D: int, named: Collection[str]) -> tuple[Self, str]:
        """Return the method for a budget of ``share`` of the transfers of dense attention, and the free setting.

        Settings in ``named`` stay unchanged. The free setting is the setting that a search varies, or an empty text.
        """
        own = {field.name for field in dataclasses.fields(self)}
        running: dict[str, Any] = {"dense_below": 0} if "dense_below" in own - set(named) else {}
        return dataclasses.replace(self, **running), "" if self.budget_setting in named else self.budget_setting

    def __str__(self) -> str:
        """Return the text form with every key that differs from its default."""
        pairs = [
            f"{field.name}={_print_value(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (":" + ",".join(pairs) if pairs else "")


@dataclass(frozen=True)
class Dense(Method):
    """Attention as mlx-lm runs it: the baseline."""

    name: ClassVar[str] = "dense"
    stage: ClassVar[str] = "prefill and decode"
    sparse: ClassVar[bool] = False
    source: ClassVar[str] = "the baseline"
    reads: ClassVar[str] = "every key and value"
    plot_style: ClassVar[tuple[str, str]] = ("#000000", "X")


@dataclass(frozen=True)
class Prefill(Method):
    """Base class of the prefill methods."""

    stage: ClassVar[str] = "prefill"

    @property
    def block_size(self) -> int:
        """Queries per row block and keys per key block; 1 for methods that select single keys for single queries."""
        return 1

    def at(self, S: int) -> Prefill:
        """Return the method with the settings for a context of ``S`` keys."""
        return self

    def layout(self, L: int, S: int) -> Layout:
        """Return the blocks of ``L`` queries over ``S`` keys, and the sampled rows if there is a sample."""
        return Layout(L, S, 1, self.block_size, rows=0)

    def shortest_context(self, step: Step | None = None) -> int:
        return 0

    def max_density(self, backend: str, measured: float | None = None) -> float:
        """Return the density above which attention stays dense.

        ``measured`` is the largest density at which sparse attention was faster on this machine, if measured.
        """
        return 1.0

    def dense_reason(self, L: int, S: int) -> str | None:
        """Return the reason why a prefill chunk of ``L`` queries over ``S`` keys must stay dense, or None."""
        return None


def shard_top_k(top_k: int, size: int) -> int:
    """Return the number of keys that one of ``size`` shards selects: `SLACK` times its share, at most ``top_k``."""
    return min(top_k, -(-SLACK * top_k // size))


def read_value(text: str) -> str | int | float | bool | None:
    """Parse the value of a setting: true, false, none, a number, or else a text."""
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _print_value(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
