"""One frozen dataclass per method: validate, parse, print, presets, TOML.

``"sparq:rank=16,top_k=64"`` is the text form: METHOD[:key=value,...][+METHOD...]. `parse` reads it, ``str(config)``
prints it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from . import stats
from .checks import ConfigError, check_choice, check_int, check_local_window

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

MAX_TOML_BYTES = 1 << 20  # a configuration is a few lines; refuse to parse a model file by mistake


# Bytes that a layer's decode step has to save before SparQ's extra launches pay, by kind of GPU.
# Apple (base and Pro, Max, Ultra): from the roofline model (docs/results/roofline.md), its pessimistic end.
# NVIDIA: 20 microseconds of extra launches at 2.0, 4.3 and 8 TB/s, until docs/results/triton.md has measured it.
# Nothing here was measured.
ENOUGH_SAVED = {
    **{"g": 20 << 20, "s": 36 << 20, "d": 52 << 20},
    **{"sm_80": 40 << 20, "sm_90": 80 << 20, "sm_100": 160 << 20},
}
# Names of submodules that normalise queries or keys, over mlx-lm's and transformers' model files.
QK_NORMS = frozenset({"q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm"})
QK_NORMS |= {"query_layernorm", "key_layernorm", "qk_norm"}
NEVER = 1 << 40  # keys; as `shortest_context`: not at any context


def nvidia_kind(capability: int) -> str:
    """The key of `ENOUGH_SAVED` for a compute capability such as 90: the nearest one below it, or else the lowest."""
    known = sorted(int(kind[3:]) for kind in ENOUGH_SAVED if kind.startswith("sm_"))
    return f"sm_{max((lower for lower in known if lower <= capability), default=known[0])}"


@dataclass(frozen=True)
class Step:
    """The sizes of a layer's decode step, which tell from what context on a method pays.

    Attributes:
        heads: KV heads of all sequences, ``B * Hkv``.
        G: query heads per KV head.
        D: head dim.
        itemsize: bytes of an element of keys and values.
        gpu: for the `metal` and `triton` backends the kind of GPU, a key of `ENOUGH_SAVED`; empty where there is none.
    """

    heads: int
    G: int
    D: int
    itemsize: int
    gpu: str = ""


@dataclass(frozen=True)
class MethodConfig:
    """What every method has."""

    name: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    served: ClassVar[bool] = True  # can be named in --attn and mlx_sparse.enable

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


@dataclass(frozen=True)
class SparQ(MethodConfig):
    """SparQ decoding (docs/spec/sparq.md).

    What "auto" means: ``dense_below``, the number of keys below which attention stays dense, is ``16 * top_k`` with the
    `ops` backend, from where on no shape was slower (docs/results/ops.md), `pays_from` with kernels on a GPU, and none
    for a ``top_k`` below the default, which is for experiments on short texts; ``component_score`` is
    ``"query_key"`` for models with q/k-norm, whose channels learn scales of their own, and ``"query"``, the paper's,
    otherwise; ``reallocate`` is on for one query head per KV head and off otherwise.
    """

    name: ClassVar[str] = "sparq"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # Algorithm 1 with its GQA paragraph: what the functions do by default.
        "paper": {"component_score": "query"},
        # The paper's code listing: no local window, mean reallocation for every group size.
        "appendix_b": {"component_score": "query", "local_window": 0, "reallocate": True},
        # The authors' evaluation code: sum of logits; the current token comes free: 128 + 1 keys, 32 + 1 local.
        "eval": {"component_score": "query", "group_reduce": "logits", "top_k": 129, "local_window": 33},
        # Ours: components ranked by |q| times the spread of the keys.
        "robust": {"component_score": "query_key"},
    }

    rank: int = 32
    top_k: int = 128
    local_window: int | None = None
    reallocate: str | bool = "auto"
    group_reduce: str = "softmax"
    component_score: str = "auto"
    dense_below: str | int = "auto"

    def __post_init__(self) -> None:
        if self.dense_below != "auto":
            check_int("dense_below", self.dense_below, 0)
        check_int("rank", self.rank, 1)
        check_int("top_k", self.top_k, 1)
        check_local_window(self.local_window, self.top_k)
        check_choice("reallocate", self.reallocate, ("auto", True, False))
        check_choice("group_reduce", self.group_reduce, ("softmax", "logits"))
        check_choice("component_score", self.component_score, ("auto", "query", "query_key"))

    @property
    def attended(self) -> int:
        return self.top_k

    def shortest_context(self, step: Step | None = None) -> int:
        if not isinstance(self.dense_below, str):
            return max(self.dense_below, self.top_k + 1)
        if self.top_k < SparQ.top_k:
            return self.top_k + 1
        return self.pays_from(step) if step and step.gpu else 16 * self.top_k

    def pays_from(self, step: Step) -> int:
        """Keys from which a step with the kernels of a GPU saves `ENOUGH_SAVED` bytes.

        Saved are the elements of keys and values that are not read, (sparq.11) less (sparq.12); spent is the score
        buffer, one float32 number per key and query head, written and read.
        """
        per_key = step.itemsize * (2 * step.D - self.rank) - 2 * 4 * step.G
        if per_key <= 0:
            return NEVER
        fixed = step.itemsize * 2 * (self.top_k + 1) * step.D
        return math.ceil((ENOUGH_SAVED[step.gpu] / step.heads + fixed) / per_key)

    def elements(self, S: int, D: int) -> int:
        return stats.sparq_elements(S, D, rank=self.rank, top_k=self.top_k)


@dataclass(frozen=True)
class Streaming(MethodConfig):
    """First ``sink_tokens`` and last ``recent_tokens`` keys (StreamingLLM, LM-Infinite)."""

    name: ClassVar[str] = "streaming"
    sink_tokens: int = 16
    recent_tokens: int = 112

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, 0)
        check_int("recent_tokens", self.recent_tokens, 1)

    @property
    def attended(self) -> int:
        return self.sink_tokens + self.recent_tokens

    def elements(self, S: int, D: int) -> int:
        return stats.streaming_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class H2O(MethodConfig):
    """Heavy hitters: the ``top_k`` keys with the largest attention so far; the rest is evicted for good."""

    name: ClassVar[str] = "h2o"
    served: ClassVar[bool] = False  # needs the attention of the prompt, which models do not hand out
    top_k: int = 128
    local_window: int | None = None

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)
        check_local_window(self.local_window, self.top_k)

    @property
    def attended(self) -> int:
        return self.top_k

    def elements(self, S: int, D: int) -> int:
        return stats.h2o_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class FlexGen(MethodConfig):
    """Exact softmax over all keys, values of the ``top_k`` largest weights, no renormalisation."""

    name: ClassVar[str] = "flexgen"
    top_k: int = 128

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)

    @property
    def attended(self) -> int:
        return self.top_k

    def elements(self, S: int, D: int) -> int:
        return stats.flexgen_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class OracleTopK(MethodConfig):
    """The ``top_k`` keys of the exact scores: a bound on SparQ, not a saving."""

    name: ClassVar[str] = "oracle_top_k"
    top_k: int = 128
    local_window: int | None = None
    group_reduce: str = "softmax"

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)
        check_local_window(self.local_window, self.top_k)
        check_choice("group_reduce", self.group_reduce, ("softmax", "logits"))

    @property
    def attended(self) -> int:
        return self.top_k

    def elements(self, S: int, D: int) -> int:
        return stats.oracle_top_k_elements(S, D, top_k=self.attended)


CONFIGS: Mapping[str, type[MethodConfig]] = {
    config.name: config for config in (Dense, SparQ, Streaming, H2O, FlexGen, OracleTopK)
}


def parse(text: str, base: Mapping[str, MethodConfig] | None = None) -> tuple[MethodConfig, ...]:
    """Read METHOD[:key=value,...][+METHOD...].

    Args:
        text: for example ``"sparq:rank=16,top_k=64"`` or ``"sparq:preset=eval"``; keys after a preset win over it.
        base: configurations by method name (from a TOML file) that the keys in ``text`` are applied on.

    Raises:
        ConfigError: unknown method, key or preset; a value of the wrong type or out of range; a method named twice.
    """
    configs: dict[str, MethodConfig] = {}
    for part in text.split("+"):
        name, colon, options = part.partition(":")
        name = name.strip()
        _class(name)
        if colon and not options.strip():
            raise ConfigError(f"{name}: expected key=value after ':', got nothing.")
        pairs = [_split_pair(name, pair) for pair in options.split(",")] if colon else []
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{name}: expected each key once, got {key!r} {keys.count(key)} times.")
        if name in configs:
            raise ConfigError(f"attn: expected each method once, got {name} twice.")
        configs[name] = _build(name, dict(pairs), (base or {}).get(name))
    return tuple(configs.values())


def load_toml(path: str | Path) -> dict[str, MethodConfig]:
    """Read a TOML file with one table per method, for example ``[sparq]`` with ``rank = 16``.

    Raises:
        ConfigError: the file is missing, too large, not TOML, or holds an unknown method, key or value.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_TOML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"attn-config: expected a readable TOML file, got {file} ({error.strerror}).") from None
    if len(text) > MAX_TOML_BYTES:
        raise ConfigError(f"attn-config: expected a TOML file of at most 1 MiB, got {file}.")
    try:
        tables = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, an integer too long, brackets too deep
        raise ConfigError(f"attn-config: expected valid TOML, got {file} ({error}).") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"attn-config: expected one table per method such as [sparq], got the key {name!r}.")
    if not tables:
        raise ConfigError(f"attn-config: expected a table such as [sparq], got an empty file {file}.")
    return {name: _build(name, table, None) for name, table in tables.items()}


def _class(name: str) -> type[MethodConfig]:
    if name not in CONFIGS:
        served = ", ".join(known for known, cls in CONFIGS.items() if cls.served)
        raise ConfigError(f"attn: expected one of {served}, got {name!r}.")
    return CONFIGS[name]


def _build(name: str, options: Mapping[str, Any], base: MethodConfig | None) -> MethodConfig:
    """Options over preset over base over defaults."""
    cls = _class(name)
    known = [field.name for field in dataclasses.fields(cls)]
    settings = dict(options)
    preset = settings.pop("preset", None)
    if preset is not None and preset not in list(cls.presets):
        listed = ", ".join(cls.presets) or "none"
        raise ConfigError(f"{name}: expected one of the presets {listed}, got {preset!r}.")
    for key in settings:
        if key not in known:
            raise ConfigError(f"{name}: expected one of the keys {', '.join([*known, 'preset'])}, got {key!r}.")
    inherited = {key: getattr(base, key) for key in known} if base is not None else {}
    return cls(**{**inherited, **cls.presets.get(preset or "", {}), **settings})


def _split_pair(method: str, pair: str) -> tuple[str, Any]:
    key, equals, value = (piece.strip() for piece in pair.partition("="))
    if not equals or not key or not value:
        raise ConfigError(f"{method}: expected key=value, got {pair.strip()!r}.")
    return key, _parse_value(value)


def _parse_value(text: str) -> str | int | bool | None:
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text


def _print_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
