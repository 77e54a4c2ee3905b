"""Define `Method` and `Prefill`, the base classes of all decode and prefill methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from ..checks import ConfigError, check_block_size, check_int, check_local_window
from .blocks.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

# Names of submodules that normalize queries or keys in the model files of mlx-lm and transformers.
QK_NORMS = frozenset({"q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm"})
QK_NORMS |= {"query_layernorm", "key_layernorm", "qk_norm"}
# Settings that decide whether a backend is called. They are not arguments of the backend functions.
SWITCHES = frozenset({"dense_below", "dense_above", "ranges"})


@dataclass(frozen=True)
class Step:
    """Sizes of a layer's decode step, which determine the modeled crossover length.

    Attributes:
        heads: number of KV heads in all sequences, ``B * Hkv``.
        G: number of query heads per KV head.
        D: head dim.
        itemsize: bytes per element of keys and values.
        device: a key of `cost.ENOUGH_SAVED`: "cpu" for native kernels, or the kind of GPU. Any other text means array
            operations.
        buckets: number of buckets in SAAP's index.
        network: size in bytes of SAAP's query network for one KV head.
        measured: crossover length in keys that was measured on this machine; None before a measurement.
        packed: (bits per component, group size) of a quantized KV cache (quantized.1); None if not quantized.
        latent: True if the keys are also the values, as in multi-head latent attention.
        Dv: head dim of the values; 0 means D.
    """

    heads: int
    G: int
    D: int
    itemsize: int
    device: str = ""
    buckets: int = 0
    network: int = 0
    measured: int | None = None
    packed: tuple[int, int] | None = None
    latent: bool = False
    Dv: int = 0

    @property
    def value_dim(self) -> int:
        """Head dim of the rows that are values only."""
        return 0 if self.latent else self.Dv or self.D

    @property
    def pair_bytes(self) -> int:
        """Bytes of the key and the value of one token and head."""
        return self.row_bytes + self._bytes(self.value_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one key row of one head."""
        return self._bytes(self.D)

    def _bytes(self, D: int) -> int:
        if self.packed is None:
            return D * self.itemsize
        bits, group_size = self.packed
        return D * bits // 8 + 2 * self.itemsize * D // group_size


@dataclass(frozen=True)
class Method:
    """Base class of all methods. The fields are the settings. The class attributes below describe the method.

    Attributes:
        name: name of the method in the text form and in all tables.
        stage: "decode" (one query per decode step), "prefill" (chunks of any size) or "prefill and decode".
        source: paper that introduced the method.
        reads: description of the data that a decode method reads for each new token, or a prefill method attends to.
        presets: dict from the name of a preset to the settings of the preset, which are a dict by setting name.
        function_defaults: defaults of the public function that differ from the defaults of the settings.
        limits: dict from the name of each integer setting to the smallest value of the setting.
        budget_setting: name of the setting that is adjusted to reach a transfer budget; empty if none can be.
        sparse: True if the method skips keys; False for dense attention.
        observes_prefill: True if the selection uses the attention weights of a dense prefill.
        pre_rope: True if the selection uses pre-RoPE queries and keys.
    """

    name: ClassVar[str]
    stage: ClassVar[str] = "decode"
    source: ClassVar[str]
    reads: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    function_defaults: ClassVar[Mapping[str, Any]] = {}
    limits: ClassVar[Mapping[str, int]] = {}
    budget_setting: ClassVar[str] = ""
    sparse: ClassVar[bool] = True
    observes_prefill: ClassVar[bool] = False
    pre_rope: ClassVar[bool] = False

    def __post_init__(self) -> None:
        settings = vars(self)
        for name, low in self.limits.items():
            check_int(name, settings[name], low)
        if settings.get("dense_below", "auto") != "auto":
            check_int("dense_below", settings["dense_below"], 0)
        if "local_window" in settings:
            check_local_window(settings["local_window"], self.attended)

    @property
    def attended(self) -> int:
        """Number of attended keys per decode step and KV head. Contexts of at most this many keys stay dense."""
        if not hasattr(self, "top_k"):
            raise ConfigError(f"attn: expected a sparse method, got {self.name}.")
        return int(self.top_k)

    @property
    def serves_latents(self) -> bool:
        """True if the settings turn on sparse decode steps in layers with multi-head latent attention (MLA)."""
        return False

    @property
    def scores_latents(self) -> bool:
        """True if the settings serve layers with MLA only."""
        return False

    def layer_arguments(self, attention: object) -> dict[str, Any]:
        """Return arguments for `State.bind`, for a layer with MLA whose module is ``attention``."""
        return {}

    def for_bias(self) -> Self | None:
        """Return the method for decode steps that add a bias to the logits, or None if there is none."""
        return None

    @property
    def unit(self) -> int:
        """Number of consecutive keys in a selected group. If it exceeds 1, the last group is always selected."""
        return 1

    @property
    def file(self) -> str | None:
        """Path of the artefact to load; None if the method or its settings need no artefact.

        Raises:
            ConfigError: the settings need an artefact, but do not name a file.
        """
        return None

    @property
    def fitted_buckets(self) -> int:
        """Number of buckets that SAAP fits to the prompt in online mode; 0 for methods that have no buckets."""
        return 0

    def for_model(self, *, qk_norm: bool, grouped: bool = True) -> Self:
        """Return the method with a value in place of each "auto" that depends on the model.

        Args:
            qk_norm: True if the model normalizes queries or keys.
            grouped: True if several query heads share a KV head.
        """
        return self

    def check_head_dim(self, D: int) -> None:
        """Raise `ConfigError` if a setting is too large for the head dim ``D``."""

    def supports_sinks(self, G: int) -> bool:
        """Return True if the method supports attention sinks with ``G`` query heads per KV head.

        Sinks rescale the output, which requires the log-sum-exp of the attended keys.
        """
        return True

    def at(self, S: int) -> Self:
        """Return the method with its settings for a context of ``S`` keys.

        The settings of a decode method change only where ``S`` is a power of two.
        """
        return self

    def parameters(self, G: int = 1) -> dict[str, Any]:
        """Return a dict of keyword arguments for the backend functions, for ``G`` query heads per KV head.

        The dict contains a value in place of each "auto" that depends on the layer.
        """
        found = {name: getattr(self, name) for name in self.setting_names()}
        if "local_window" in found:
            found["local_window"] = check_local_window(found["local_window"], self.attended)
        return found

    @classmethod
    def setting_names(cls) -> list[str]:
        """Return the names of the settings that are arguments of the backend functions."""
        return [field.name for field in dataclasses.fields(cls) if field.name not in SWITCHES]

    @property
    def always_attended(self) -> tuple[int, int]:
        """Pair of the number of first keys and the number of last keys that every decode step attends to."""
        found = self.parameters()
        return found.get("sink_tokens", 0), found.get("recent_tokens", found.get("local_window", 0))

    @property
    def measurable(self) -> bool:
        """True if a measurement on this machine may replace `modeled_context`, because ``dense_below`` is "auto"."""
        return getattr(self, "dense_below", 0) == "auto" and not self.experiment

    @property
    def experiment(self) -> bool:
        """True if the settings are for experiments on short texts. Every step that can be sparse is then sparse."""
        return False

    def crossover(self, estimate: int) -> int:
        """Return the crossover length in keys, which is ``estimate`` if ``dense_below`` is "auto".

        Shorter contexts stay dense. If the result is `decide.NEVER`, all contexts stay dense.
        """
        below = getattr(self, "dense_below", 0)
        if isinstance(below, str):
            below = 0 if self.experiment else estimate
        return max(below, self.attended + 1)

    def shortest_context(self, step: Step | None = None) -> int:
        """Return the crossover length in keys for the sizes ``step``, as measured or else as modeled."""
        measured = None if step is None else step.measured
        return self.crossover(self.modeled_context(step) if measured is None else measured)

    def modeled_context(self, step: Step | None) -> int:
        """Return a conservative estimate of the crossover length in keys, for use until the length is measured."""
        return self.attended + 1

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        """Return the number of elements that a decode step over ``S`` keys of head dim ``D`` moves per KV head.

        ``buckets`` is the number of buckets in SAAP's index. Only SAAP uses this argument.
        """
        raise ConfigError(f"attn: expected a sparse method, got {self.name}.")

    def rows(self, S: int) -> int:
        """Return the number of complete key and value rows that a decode step over ``S`` keys reads per KV head."""
        return 2 * min(self.attended, S)

    def value_rows(self, S: int) -> int:
        """Return the number of values that `elements` and `step_bytes` count: those that are read, and a new one.

        If values have another head dim than keys, the caller subtracts the difference for each of them.
        """
        return self.rows(S) // 2 + 1

    def step_bytes(self, S: int, D: int, *, itemsize: int, row_bytes: int, G: int, backend: str) -> int:
        """Return the number of bytes that a decode step over ``S`` keys of head dim ``D`` moves per KV head.

        The papers' formula counts `elements`. Methods add the buffers that ``backend`` writes and reads back.

        Args:
            itemsize: size of an element in bytes.
            row_bytes: size of one key (or value) row in bytes.
            G: number of query heads per KV head.
        """
        rows = self.rows(S)
        return itemsize * (self.elements(S, D) - rows * D) + rows * row_bytes

    def with_budget(self, share: Fraction, D: int, named: Collection[str]) -> tuple[Self, str]:
        """Return a changed copy of the method, and the name of a setting. The caller then adjusts this setting.

        The adjusted method must move at most the share ``share`` of the elements that dense attention moves. The
        returned copy may move more. The copy has ``dense_below=0``, but settings in ``named`` stay unchanged. The name
        is empty if no setting can be adjusted.
        """
        own = {field.name for field in dataclasses.fields(self)}
        running: dict[str, Any] = {"dense_below": 0} if "dense_below" in own - set(named) else {}
        return dataclasses.replace(self, **running), "" if self.budget_setting in named else self.budget_setting

    def __str__(self) -> str:
        """Return the text form with all settings that differ from their defaults."""
        pairs = [
            f"{field.name}={_print_value(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (":" + ",".join(pairs) if pairs else "")


@dataclass(frozen=True)
class Dense(Method):
    """Dense attention of mlx-lm, the baseline for all methods."""

    name: ClassVar[str] = "dense"
    stage: ClassVar[str] = "prefill and decode"
    sparse: ClassVar[bool] = False
    source: ClassVar[str] = "the baseline"
    reads: ClassVar[str] = "every key and value"

    @property
    def serves_latents(self) -> bool:
        return True

    def for_bias(self) -> Dense:
        return self


@dataclass(frozen=True)
class Prefill(Method):
    """Base class of the prefill methods.

    Attributes:
        selects_keys: True if the method's functions take attention sinks and quantized keys and values.
    """

    stage: ClassVar[str] = "prefill"
    selects_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if "block_size" in vars(self):
            check_block_size(self.block_size)

    @property
    def block_size(self) -> int:
        """Number of queries per row block and of keys per key block; 1 if each query selects single keys."""
        return 1

    def layout(self, L: int, S: int) -> Layout:
        """Return the row blocks, key blocks and sampled rows for ``L`` queries over ``S`` keys."""
        return Layout(L, S, 1, self.block_size, rows=0)

    def shortest_context(self, step: Step | None = None) -> int:
        return 0

    def max_density(self, backend: str, measured: float | None = None) -> float:
        """Return the density of the selected blocks above which attention on ``backend`` stays dense.

        ``measured`` is the largest density at which sparse attention was faster than dense attention on this machine.
        It is None before a measurement.
        """
        return 1.0

    def dense_reason(self, L: int, S: int) -> str | None:
        """Return the reason why a prefill chunk of ``L`` queries over ``S`` keys must stay dense, or None."""
        return None


def read_value(text: str) -> str | int | float | bool | None:
    """Convert the text of a setting to a bool, None or a number. Any other text is returned unchanged."""
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
