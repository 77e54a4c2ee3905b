"""What every method answers for itself."""

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

# Names of submodules that normalise queries or keys, over mlx-lm's and transformers' model files.
QK_NORMS = frozenset({"q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm"})
QK_NORMS |= {"query_layernorm", "key_layernorm", "qk_norm"}
NEVER = 1 << 40  # keys; as `shortest_context`: not at any context
SLACK = 2  # the best keys are not evenly spread over machines that share them
# Fields that decide whether and how a backend is called.
SWITCHES = frozenset({"dense_below", "dense_above", "ranges"})


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
        gpu: for the `metal` and `triton` backends the kind of GPU, a key of `cost.ENOUGH_SAVED`; empty where there is
            none.
        measured: keys from which a step of these sizes was faster on this machine; None if that is not known.
        packed: bits of a component and components of a group, where keys and values are packed (quantized.1).
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
        """Of a key or value of one head."""
        if self.packed is None:
            return self.D * self.itemsize
        bits, group_size = self.packed
        return self.D * bits // 8 + 2 * self.itemsize * self.D // group_size


@dataclass(frozen=True)
class Method:
    """A method and its settings; the class says what it is.

    Attributes:
        name: in the text form and in every table.
        stage: what it replaces dense attention in: "decode" (one query per step), "prefill" (a prompt, in pieces of any
            size) or "prefill and decode".
        source: the paper it comes from.
        reads: what it reads per new token, or computes of a prompt, in one sentence.
        look: its colour and marker in pictures. The colours are told apart by the colour-blind.
        presets: settings by name.
        grows: the setting that a budget of transfers decides; empty where none does.
        sparse: whether it leaves anything out, so that a model can be run with it.
        observes_prompts: whether its choice begins with what dense prompts attend to.
        before_rope: whether it chooses by queries and keys before RoPE.
    """

    name: ClassVar[str]
    stage: ClassVar[str] = "decode"
    source: ClassVar[str]
    reads: ClassVar[str]
    look: ClassVar[tuple[str, str]] = ("#666666", "o")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    grows: ClassVar[str] = ""
    sparse: ClassVar[bool] = True
    observes_prompts: ClassVar[bool] = False
    before_rope: ClassVar[bool] = False

    @property
    def attended(self) -> int:
        """Keys attended per step and KV head. Shorter contexts are attended densely."""
        if not hasattr(self, "top_k"):
            raise ConfigError(f"attn: expected a sparse method, got {self.name}.")
        return int(self.top_k)

    @property
    def together(self) -> int:
        """Consecutive keys that are chosen as one; then the last of these groups always is."""
        return 1

    @property
    def file(self) -> str | None:
        """The artefact it is to load; None for methods, and settings, without one.

        Raises:
            ConfigError: none is given where one is needed.
        """
        return None

    @property
    def fitted_buckets(self) -> int:
        """Buckets of its index where no artefact says; 0 for methods without one."""
        return 0

    def for_model(self, *, qk_norm: bool, grouped: bool = True) -> Self:
        """The method with what "auto" means for a model, but for what its layers decide.

        Args:
            qk_norm: whether it normalises queries or keys.
            grouped: whether several query heads share a KV head.
        """
        return self

    def check_head_dim(self, D: int) -> None:
        """Raise `ConfigError` if a setting does not fit the head dim ``D``."""

    def serves_sinks(self, G: int) -> bool:
        """Whether a sink's share can be told from the log-sum-exp of the attended keys, and is all that is asked for.

        ``G`` is the number of query heads per KV head.
        """
        return True

    def parameters(self, G: int = 1) -> dict[str, Any]:
        """Arguments of the backends' functions for layers of ``G`` query heads per KV head: nothing is "auto".

        Here alone the settings that `for_model` left to the layers are resolved.
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
    def always(self) -> tuple[int, int]:
        """How many of the first and of the last keys are attended at every step, whatever the queries are."""
        found = self.parameters()
        return found.get("sink_tokens", 0), found.get("recent_tokens", found.get("local_window", 0))

    def of_share(self, size: int, recent: int) -> Self | None:
        """The settings with which each of ``size`` machines that share the keys chooses among its own.

        Args:
            recent: keys of this one among those that are attended at every step because they are the last (`always`).

        Returns:
            None where nothing is chosen by comparing keys: what each attends is the same with and without the others.
        """
        return None

    @property
    def measurable(self) -> bool:
        """Whether `shortest_context` is left to the machine: ``dense_below`` is "auto", and nothing else decides."""
        return getattr(self, "dense_below", 0) == "auto" and not self.experiment

    @property
    def experiment(self) -> bool:
        """Whether the settings are for experiments on short texts, where every step that can be is sparse."""
        return False

    def shortest_context(self, step: Step | None = None) -> int:
        """Contexts of fewer keys are attended densely; `NEVER` where all are."""
        below, exact = getattr(self, "dense_below", 0), self.attended + 1
        if not isinstance(below, str):
            return max(below, exact)
        if self.experiment:
            return exact
        if step is not None and step.measured is not None:
            return max(step.measured, exact)
        return max(self.modelled_context(step), exact)

    def modelled_context(self, step: Step | None) -> int:
        """`shortest_context` where nothing was measured, by a model of the machine that errs on the dense side."""
        return self.attended + 1

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        """Elements moved per KV head and step for ``S`` keys of head dim ``D``, in ``buckets`` if it has an index."""
        raise ConfigError(f"attn: expected a sparse method, got {self.name}.")

    def rows(self, S: int) -> int:
        """Keys and values, whole ones, among the elements that a step over ``S`` keys reads per KV head."""
        return 2 * min(self.attended, S)

    def step_bytes(self, S: int, D: int, *, itemsize: int, row_bytes: int) -> int:
        """Bytes moved per KV head and step by `elements`, where a key or value takes ``row_bytes``."""
        rows = self.rows(S)
        return itemsize * (self.elements(S, D) - rows * D) + rows * row_bytes

    def with_budget(self, share: Fraction, D: int, named: Collection[str]) -> tuple[Self, str]:
        """Itself with what a budget of ``share`` of dense attention's transfers fixes, and the setting left to find.

        Settings in ``named`` stay; others are such that the method runs. The setting is empty where none is free.
        """
        own = {field.name for field in dataclasses.fields(self)}
        running: dict[str, Any] = {"dense_below": 0} if "dense_below" in own - set(named) else {}
        return dataclasses.replace(self, **running), "" if self.grows in named else self.grows

    def __str__(self) -> str:
        """The text form with every key that differs from its default."""
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
    look: ClassVar[tuple[str, str]] = ("#000000", "X")


@dataclass(frozen=True)
class Prefill(Method):
    """What the methods for prompts have."""

    stage: ClassVar[str] = "prefill"

    @property
    def block_size(self) -> int:
        """Queries per row block and keys per key block; 1 for methods that choose single keys for single queries."""
        return 1

    def at(self, S: int) -> Prefill:
        """The settings for a context of ``S`` keys."""
        return self

    def layout(self, L: int, S: int) -> Layout:
        """The blocks of ``L`` queries over ``S`` keys, and their samples: none where sizes alone choose."""
        return Layout(L, S, 1, self.block_size, rows=0)

    def shortest_context(self, step: Step | None = None) -> int:
        return 0

    def fullest(self, backend: str, measured: float | None = None) -> float:
        """Density above which attention stays dense; ``measured`` is where it was no longer faster here, if known."""
        return 1.0

    def dense_piece(self, L: int, S: int) -> str | None:
        """Why a piece of ``L`` queries over ``S`` keys stays dense whatever its keys are; None if it need not."""
        return None


def share_of(top_k: int, size: int) -> int:
    """Keys that one of ``size`` machines chooses: `SLACK` times its share, but no more than there are to choose."""
    return min(top_k, -(-SLACK * top_k // size))


def read_value(text: str) -> str | int | float | bool | None:
    """A word, a number, or else the text itself."""
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
