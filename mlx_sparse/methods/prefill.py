"""Prefill methods."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import ConfigError, check_block_size, check_int, check_sample, check_share
from ..common.block_layout import MINFERENCE_ROWS, Layout
from .base import MethodConfig, Step
from .values import read_value

# Keys from which SampleAttention is on by default: about where the paper is no longer slower than dense.
SAMPLE_PAYS_FROM = 8192
# The share of block pairs up to which attending them is taken to be faster than attending densely. ops: measured on a
# CPU (docs/results/prefill.md). metal: not measured; what a kernel four times slower per block than MLX's would allow
# (docs/results/roofline.md).
SAMPLE_PAYS_UP_TO = {"ops": 0.75, "metal": 0.22}
# A sample may be one of so many of a piece's queries: more cost what is left out (docs/results/prefill.md).
SAMPLE_SHARE = 8


@dataclass(frozen=True)
class SampleRange:
    """Settings of SampleAttention for contexts of fewer than ``up_to`` keys."""

    up_to: int
    alpha_column: float
    alpha_slash: float
    chunks: int

    def __post_init__(self) -> None:
        check_int("up_to", self.up_to, 1)
        check_sample(self.alpha_column, self.alpha_slash, self.chunks, Sample.block_size)

    def __str__(self) -> str:
        return f"{self.up_to}:{self.alpha_column}:{self.alpha_slash}:{self.chunks}"


SWITCHES = ("dense_below", "dense_above", "ranges")  # fields that decide whether and how a backend is called


@dataclass(frozen=True)
class Prefill(MethodConfig):
    """What the methods for prompts have."""

    stage: ClassVar[str] = "prefill"
    block_size: int = 128

    def at(self, S: int) -> Prefill:
        """The settings for a context of ``S`` keys."""
        return self

    def parameters(self) -> dict[str, Any]:
        """Arguments of the backends' functions."""
        kept = (field.name for field in dataclasses.fields(self) if field.name not in SWITCHES)
        return {name: getattr(self, name) for name in kept}

    def layout(self, L: int, S: int) -> Layout:
        """The blocks of ``L`` queries over ``S`` keys, and their samples: none where sizes alone choose."""
        return Layout(L, S, 1, self.block_size, rows=0)

    def shortest_context(self, step: Step | None = None) -> int:
        return 0

    def fullest(self, backend: str) -> float:
        """Density above which attention stays dense."""
        return 1.0


@dataclass(frozen=True)
class Sample(Prefill):
    """SampleAttention for prompts (docs/spec/sample.md).

    ``dense_below`` is the number of keys below which attention stays dense, without looking: "auto" means
    `SAMPLE_PAYS_FROM`. ``dense_above`` is the density above which it does after having looked: "auto" means
    `SAMPLE_PAYS_UP_TO`. Where ``dense_below`` is given, "auto" means 1, and pieces too short for their sample
    (`SAMPLE_SHARE`) are not dense for that.
    ``ranges`` are settings by context, ascending, that win over the single ones; contexts beyond the last range use the
    last one. ``mlx-sparse tune-sample`` finds them for a model.
    """

    name: ClassVar[str] = "sample"

    alpha_column: float = 0.95
    alpha_slash: float = 0.95
    chunks: int = 1
    dense_below: str | int = "auto"
    dense_above: str | float = "auto"
    ranges: tuple[SampleRange, ...] = ()

    def __post_init__(self) -> None:
        check_sample(self.alpha_column, self.alpha_slash, self.chunks, self.block_size)
        if self.dense_below != "auto":
            check_int("dense_below", self.dense_below, 0)
        if self.dense_above != "auto":
            check_share("dense_above", self.dense_above)
        object.__setattr__(self, "ranges", _read_ranges(self.ranges))

    def at(self, S: int) -> Sample:
        if not self.ranges:
            return self
        chosen = next((entry for entry in self.ranges if S < entry.up_to), self.ranges[-1])
        return dataclasses.replace(
            self,
            alpha_column=chosen.alpha_column,
            alpha_slash=chosen.alpha_slash,
            chunks=chosen.chunks,
            ranges=(),
        )

    def shortest_context(self, step: Step | None = None) -> int:
        return SAMPLE_PAYS_FROM if isinstance(self.dense_below, str) else self.dense_below

    def layout(self, L: int, S: int) -> Layout:
        return Layout(L, S, self.chunks, self.block_size)

    def too_short(self, L: int) -> bool:
        """Whether ``L`` queries stay dense, without looking: too few for their sample.

        One block may be missing, as mlx-lm keeps the last token of a prompt back.
        """
        return self.dense_below == "auto" and L < (SAMPLE_SHARE * self.chunks - 1) * self.block_size

    def fullest(self, backend: str) -> float:
        if not isinstance(self.dense_above, str):
            return self.dense_above
        return SAMPLE_PAYS_UP_TO[backend] if self.dense_below == "auto" else 1.0


@dataclass(frozen=True)
class MInference(Prefill):
    """Vertical-slash attention with fixed budgets for prompts."""

    name: ClassVar[str] = "minference"
    vertical_tokens: int = 1000
    slash_tokens: int = 6096
    block_size: int = 64

    def __post_init__(self) -> None:
        check_int("vertical_tokens", self.vertical_tokens, 1)
        check_int("slash_tokens", self.slash_tokens, 1)
        check_block_size(self.block_size)

    def layout(self, L: int, S: int) -> Layout:
        return Layout(L, S, 1, self.block_size, rows=MINFERENCE_ROWS)


@dataclass(frozen=True)
class BigBird(Prefill):
    """A window, the first keys and random blocks for prompts; window and first keys are shares of the context."""

    name: ClassVar[str] = "bigbird"
    window: float = 0.08
    global_share: float = 0.08
    random_blocks: int = 1
    block_size: int = 64

    def __post_init__(self) -> None:
        check_share("window", self.window)
        check_share("global_share", self.global_share)
        check_int("random_blocks", self.random_blocks, 0)
        check_block_size(self.block_size)


@dataclass(frozen=True)
class StreamingPrefill(Prefill):
    """The first keys and a window that is a share of the context, for prompts (StreamingLLM)."""

    name: ClassVar[str] = "streaming_prefill"
    sink_tokens: int = 4
    window: float = 0.08
    block_size: int = 64

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, 0)
        check_share("window", self.window)
        check_block_size(self.block_size)


def _read_ranges(ranges: object) -> tuple[SampleRange, ...]:
    """Ranges from Python, from a list of TOML tables, or from ``UP_TO:ALPHA_COLUMN:ALPHA_SLASH:CHUNKS/...``."""
    fields = [field.name for field in dataclasses.fields(SampleRange)]
    entries: Any = ranges.split("/") if isinstance(ranges, str) else ranges
    found: list[SampleRange] = []
    for entry in entries if isinstance(entries, (list, tuple)) else [entries]:
        values: Any = entry
        if isinstance(entry, str):
            texts = entry.split(":")
            values = dict(zip(fields, map(read_value, texts), strict=True)) if len(texts) == len(fields) else None
        if not isinstance(values, SampleRange):
            if not isinstance(values, dict) or set(values) != set(fields):
                raise ConfigError(f"ranges: expected {':'.join(fields)} for each range, got {entry!r}.")
            values = SampleRange(**values)
        if found and found[-1].up_to >= values.up_to:
            raise ConfigError(f"ranges: expected ascending up_to, got {found[-1].up_to} before {values.up_to}.")
        found.append(values)
    return tuple(found)
