"""Define the parameters of SAAP, and estimate its transfers and crossover length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...checks import MAX_BUCKETS, ConfigError, check_choice, check_int
from ...core import stats
from ...core.base import Method, Step
from ...core.decide import ENOUGH_SAVED, GATHERED_ROW, NEVER, PROCESSORS, ROUTING_HEADS

ONLINE_BUCKETS = 256


@dataclass(frozen=True)
class SAAP(Method):
    """Attend to the keys in the visited buckets, the first keys and the last keys (docs/spec/saap.md).

    Attributes:
        artefact: path of a file from `mlx-sparse train-saap`; None if the mode is "online".
        mode: "trained" to select buckets with the query networks of the artefact, or "online" to select buckets with
            centroids that are fitted to the prompt.
        probes: number of visited buckets per KV head and decode step.
        buckets: number of buckets in mode "online", 256 by default. In mode "trained" the artefact sets the number.
        sink_tokens: number of first keys that are always attended to.
        recent_tokens: number of last keys that are always attended to.
        dense_layers: number of first attention layers that stay dense.
        merge_every: number of keys that are merged into the index at a time, after they leave the window of recent
            keys. Until then these keys are always attended to.
        dense_below: context length in keys below which attention stays dense. "auto" is a modeled length. On a GPU
            backend, a step must save `ENOUGH_SAVED` bytes. On `ops` and `cpu`, dense attention must read `GATHERED_ROW`
            times as many rows as a sparse step, and on `cpu` this for each processor. If ``recent_tokens`` is below
            the default, as in experiments on short texts, every step that can be sparse is sparse. The length is not
            measured, because the time of SAAP depends on the sizes of the visited buckets.
    """

    name: ClassVar[str] = "saap"
    source: ClassVar[str] = "SAAP, arXiv 2502.08246"
    reads: ClassVar[str] = (
        "the weights of a small network, then the keys and values of the buckets that it selects, and the first and "
        "last keys ([SAAP](docs/spec/saap.md)); for very long contexts; needs training once per model"
    )
    budget_setting: ClassVar[str] = "probes"
    limits: ClassVar[Mapping[str, int]] = {"sink_tokens": 0, "recent_tokens": 1, "dense_layers": 0, "merge_every": 1}
    pre_rope: ClassVar[bool] = True

    artefact: str | None = None
    mode: str = "trained"
    probes: int = 32
    buckets: int | None = None
    sink_tokens: int = 1
    recent_tokens: int = 2047
    dense_layers: int = 1
    merge_every: int = 256
    dense_below: str | int = "auto"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("trained", "online"))
        if self.mode == "online" and self.artefact is not None:
            raise ConfigError("artefact: expected none with mode=online, got a file. Leave one of them out.")
        if self.artefact is not None and (not isinstance(self.artefact, str) or not self.artefact):
            raise ConfigError(f"artefact: expected the name of a file, got {self.artefact!r}.")
        if self.buckets is not None:
            check_int("buckets", self.buckets, 1, MAX_BUCKETS)
            if self.mode != "online":
                raise ConfigError("buckets: expected none with mode=trained, got one. The artefact sets it.")
        super().__post_init__()
        check_int("probes", self.probes, 1, MAX_BUCKETS)
        if self.mode == "online" and self.probes > self.fitted_buckets:
            raise ConfigError(f"probes: expected at most buckets={self.fitted_buckets}, got {self.probes}.")

    @property
    def file(self) -> str | None:
        if self.mode != "online" and self.artefact is None:
            raise ConfigError(
                "artefact: expected a file that mlx-sparse train-saap wrote, got none. "
                "Set saap:artefact=FILE, or use saap:mode=online, which needs no artefact."
            )
        return self.artefact

    @property
    def fitted_buckets(self) -> int:
        return ONLINE_BUCKETS if self.buckets is None else self.buckets

    @property
    def attended(self) -> int:
        return self.sink_tokens + self.recent_tokens

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        """Return the number of elements that a decode step moves per KV head, if the buckets have equal sizes.

        The weights of the query network are not counted.
        """
        outside = max(0, S - self.attended)
        attended = min(self.attended, S) + outside * self.probes / buckets
        return stats.saap_elements(D, round(attended))

    @property
    def measurable(self) -> bool:
        return False

    @property
    def experiment(self) -> bool:
        return self.recent_tokens < SAAP.recent_tokens

    def modeled_context(self, step: Step | None) -> int:
        native = step is not None and step.device == "cpu"
        if step and step.device in ENOUGH_SAVED and not native:
            # The step must save `ENOUGH_SAVED` bytes. It reads the query network, and moves three int32 numbers per
            # listed key: one read from the bucket, one written to the list, and one read from the list.
            share = self._visited_share(step.buckets)
            row, listed = 2 * step.itemsize * step.D, 3 * 4
            per_key = row * (1 - share) - listed * share
            if per_key <= 0:
                return NEVER
            routing = step.network * max(ROUTING_HEADS.get(step.device, 0) / step.heads, 1.0)
            fixed = (row + listed) * (self.attended + self.merge_every // 2) + routing
            return math.ceil((ENOUGH_SAVED[step.device] / step.heads + fixed) / per_key)
        network = step.network // (2 * step.itemsize * step.D) if step else 0
        gathered, processors = (GATHERED_ROW["cpu"], PROCESSORS) if native else (GATHERED_ROW["ops"], 1)
        per_key = 1 - gathered * (self._visited_share(step.buckets) if step and step.buckets else 0.0)
        if per_key <= 0:
            return NEVER
        return math.ceil(processors * gathered * (self.attended + self.merge_every // 2 + network) / per_key)

    def _visited_share(self, buckets: int) -> float:
        """Estimate the share of keys in visited buckets. Bucket sizes differ, so double the share for equal sizes."""
        return min(2 * self.probes / buckets, 1.0)
