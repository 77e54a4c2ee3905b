"""Define the parameters of SampleAttention, and decide which prefill chunks stay dense."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from ...checks import ConfigError, check_int, check_sample, check_share
from ...core import reasons
from ...core.base import Prefill, Step, read_value
from ...core.blocks.layout import Layout
from ...core.decide import NEVER, SAMPLE_DENSE_ABOVE, SAMPLE_SHARE, SAMPLE_TUNED_BELOW


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


@dataclass(frozen=True)
class Sample(Prefill):
    """Select key blocks in prefill from the attention of a few sampled queries (docs/spec/sample.md).

    Attributes:
        block_size: number of queries per row block and of keys per key block: 32, 64 or 128.
        alpha_column: share of the sample's attention that the selected key blocks must cover; above 0, at most 1.
        alpha_slash: share of the sample's attention that the selected diagonals must cover; above 0, at most 1.
        chunks: number of regions per prefill chunk, each with its own sample of queries.
        dense_below: context length in keys below which attention stays dense, and no queries are sampled. "auto" is
            `SAMPLE_TUNED_BELOW` with ``ranges``; without ``ranges``, prefill is always dense.
        dense_above: density of the selected blocks above which attention stays dense. "auto" is the density that was
            measured on this machine (`mlx-sparse calibrate`), and `SAMPLE_DENSE_ABOVE` before a measurement. If
            ``dense_below`` is a number, "auto" is 1, and the limit of `SAMPLE_SHARE` does not apply.
        ranges: settings for ranges of context lengths, in ascending order, which replace ``alpha_column``,
            ``alpha_slash`` and ``chunks``. Contexts beyond the last range use the settings of the last range.
            `mlx-sparse tune` finds the ranges for a model.
    """

    name: ClassVar[str] = "sample"
    source: ClassVar[str] = "SampleAttention, MLSys 2025, arXiv 2406.15486"
    reads: ClassVar[str] = (
        "the key blocks and distances with most of a sample's attention, per head "
        "([SampleAttention](docs/spec/sample.md))"
    )

    block_size: int = 128
    alpha_column: float = 0.95
    alpha_slash: float = 0.95
    chunks: int = 1
    dense_below: str | int = "auto"
    dense_above: str | float = "auto"
    ranges: tuple[SampleRange, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sample(self.alpha_column, self.alpha_slash, self.chunks, self.block_size)
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
            ranges=(chosen,),
        )

    def shortest_context(self, step: Step | None = None) -> int:
        if isinstance(self.dense_below, str):
            return SAMPLE_TUNED_BELOW if self.ranges else NEVER
        return self.dense_below

    def layout(self, L: int, S: int) -> Layout:
        return Layout(L, S, self.chunks, self.block_size)

    def dense_reason(self, L: int, S: int) -> str | None:
        if max(self.alpha_column, self.alpha_slash) >= 1:
            return reasons.ALPHA_OF_ONE
        if self.layout(L, S).all_sampled:
            return reasons.ALL_SAMPLED
        # One block may be missing, because mlx-lm processes the last token of a prompt separately.
        if self.dense_below == "auto" and L < (SAMPLE_SHARE * self.chunks - 1) * self.block_size:
            return reasons.LARGE_SAMPLE
        return None

    @property
    def measurable(self) -> bool:
        return self.dense_above == self.dense_below == "auto" and bool(self.ranges)

    def max_density(self, backend: str, measured: float | None = None) -> float:
        if not isinstance(self.dense_above, str):
            return self.dense_above
        if self.dense_below != "auto":
            return 1.0
        return SAMPLE_DENSE_ABOVE[backend] if measured is None else measured


def _read_ranges(ranges: object) -> tuple[SampleRange, ...]:
    """Convert ``UP_TO:ALPHA_COLUMN:ALPHA_SLASH:CHUNKS/...``, or a list of TOML tables, to `SampleRange` objects."""
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
