"""Define the plan of an enabled model, which uses crossover lengths to select sparse or dense attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn

from ..api.call_report import Counts, Report
from ..cache.sparse_cache import SparseCache
from ..cache.sparse_cache import Step as BoundStep
from ..calibrate import Calibration, describe
from ..calibrate.timing import Layer
from ..checks import ConfigError
from ..core import reasons, registry
from ..core.base import Dense, Method, Prefill, Step
from ..core.decide import NEVER, Facts, decide, exclusion
from ..core.packed_rows import PackedRows, Rows
from .hooks import CallHooks, ModelHooks
from .statistics import PrefillStatistics

SPAN = 960  # keys between two evaluations of the linear byte formula: a multiple of common page and group sizes


class Plan:
    """Configuration and report that all forward passes of an enabled model share.

    Attributes:
        prefill, decode: the method for each stage; None if the stage is dense.
        backend: "auto" or the name of a backend.
        recall: True to measure the attention recall of prefill.
        hooks: `ModelHooks` of the decode method.
        hooked: True if the decode method needs hooks.
        calibration: crossover lengths of both methods on this machine.
        decodes: True if decode steps may be sparse; False in a command that only processes a prompt.
        watch: function that is called once, after the first decode step. Its arguments are the step's number of keys
            and the step's `Counts`.
        latents: True if the settings turn on sparse decode steps with MLA, or if all attention is dense.
        absorbed: attention modules with MLA, in the order of their layers.
        layers: for each pair of a method and a layer shape, the number of layers that can use sparse attention.
        report: report that counts the calls of all forward passes.
        lossless: number of draft tokens per check; 0 to select the number by speed; None if the model is not lossless.
        calls: number of attention calls in each forward pass of a model of mlx-vlm; 0 for models of mlx-lm.
    """

    def __init__(
        self,
        prefill: Prefill | None,
        decode: Method | None,
        backend: str,
        family: str,
        hooks: ModelHooks,
        *,
        recall: bool,
        calibration: Calibration,
    ) -> None:
        self.calibration = calibration
        self.prefill = prefill
        self.decode = decode
        self.backend = backend
        self.recall = recall
        self.hooks = hooks
        self.hooked = type(hooks) is not ModelHooks
        self.decodes = True
        self.latents = (decode or prefill or Dense()).serves_latents
        self.absorbed: list[nn.Module] = []
        self.report = Report(attn=self.attn, backend=backend, model_type=family, decodes=decode is not None)
        self.report.add(Counts(prefill=prefill and PrefillStatistics(), counted=hooks.statistics))
        self.report.crossovers = self.crossovers
        self.watch: Callable[[int, Counts], object] | None = None
        self.layers: Counter[tuple[Method, Layer]] = Counter()
        self.lossless: int | None = None
        self.calls = 0

    @property
    def configs(self) -> list[Method]:
        """List of the prefill method and the decode method; a dense stage has no entry."""
        return [config for config in (self.prefill, self.decode) if config is not None]

    @property
    def attn(self) -> str:
        """Text form of the methods."""
        return "+".join(map(str, self.configs)) or Dense.name

    @property
    def name(self) -> str:
        """Names of the methods, joined by a plus sign."""
        return "+".join(config.name for config in self.configs) or Dense.name

    def crossovers(self) -> list[str]:
        """Return the crossover lengths as lines of text. Layers with equal crossover lengths share a line."""
        lines: dict[Method, Counter[str]] = {}
        for (config, layer), count in self.layers.items():
            if config is self.decode and not self.decodes:
                continue
            line = describe(config, self.calibration.threshold(config, layer))
            if self.calibration.needs_measurement(config, layer):
                first = self.calibration.shortest_measured(config)
                line = f"{line[:-1]}; will be measured at {first:,} keys)"
            lines.setdefault(config, Counter())[line] += count
        return [
            f"{count} layers: {line}" if len(alike) > 1 else line
            for alike in lines.values()
            for line, count in alike.items()
        ]

    def sparse_from(self) -> int:
        """Return the smallest context length at which a decode step can be sparse; `NEVER` if no step can be."""
        found = [NEVER]
        for config, layer in self.layers:
            if config is self.decode:
                known = int(self.calibration.threshold(config, layer).value)
                waits = self.calibration.needs_measurement(config, layer)
                found.append(min(known, self.calibration.shortest_measured(config)) if waits else known)
        return min(found)

    def count_in(self, report: Report) -> None:
        """Count later calls in ``report``, which belongs to an earlier plan for the same model and methods."""
        if report is not self.report:
            facts = {field.name for field in fields(Report)} - {field.name for field in fields(Counts)}
            for name in facts - {"model", "_counting"}:  # the user names the model, and earlier calls may be in flight
                setattr(report, name, getattr(self.report, name))
            self.report = report

    def resolve(self, config: Method, queries: mx.array, keys: Rows, cache: SparseCache) -> str:
        """Return the name of the backend that runs ``config`` for ``queries`` and ``keys``, the rows of ``cache``."""
        # Prefill dequantizes the rows of a quantized KV cache.
        bits = keys.bits if isinstance(keys, PackedRows) and not isinstance(config, Prefill) else None
        sizes = {"D": queries.shape[3], "G": _group(queries, keys), "Dv": cache.value_rows.shape[3]}
        return registry.resolve(self.backend, config.name, **sizes, bits=bits)

    def attends_natively(self, queries: mx.array, keys: mx.array) -> bool:
        """Return True if dense calls use the native kernels.

        ``--attn dense`` without a backend stays mlx-lm's own. So does a lossless model, because mlx-lm's attention
        returns the same bits for one query and for several queries.
        """
        if self.lossless is not None or not (self.configs or self.backend == "cpu"):
            return False
        return registry.resolve(self.backend, Dense.name, D=queries.shape[3], G=_group(queries, keys)) == "cpu"

    def sizes(
        self, config: Method, queries: mx.array, keys: Rows, cache: SparseCache, backend: str, hooks: CallHooks | None
    ) -> Layer:
        """Return the layer's shape, backend and cache type, which determine its crossover length."""
        prompts = isinstance(config, Prefill)
        device = registry.gpu_kind() if backend == "metal" else backend
        more: dict[str, Any] = {} if prompts or hooks is None else hooks.sizes(cache)
        if isinstance(keys, PackedRows) and not prompts:
            more["packed"] = keys.bits, keys.group_size
        if not prompts:
            more["latent"] = cache.latent
        if (Dv := cache.value_rows.shape[3]) != keys.shape[3]:
            more["Dv"] = Dv
        step = Step(keys.shape[1], _group(queries, keys), keys.shape[3], keys.itemsize, device, **more)
        return Layer(backend, step, keys.dtype, self.calibration.chunk if prompts else 1)

    def plan_layer(
        self,
        queries: mx.array,
        keys: Rows,
        cache: SparseCache,
        caches: Sequence[object],
        hooks: CallHooks | None,
        facts: Facts,
        index: int = -1,
    ) -> LayerPlan:
        """Plan the decode steps of a layer over ``cache``. Call this only if `refusal` finds no reason in ``facts``.

        Args:
            queries: ``(B, Hq, 1, D)`` queries of the current decode step.
            keys: all keys of the layer, including the key of the current decode step.
            caches: the caches of all layers.
            hooks: `CallHooks` of the decode method; None if the method needs no hooks.
            index: index of the layer's cache, which identifies the layer in the report.
        """
        assert self.decode is not None
        config, S, first_rows = self.decode, cache.length, cache.first_rows(caches)
        backend = self.resolve(config, queries, keys, cache)
        layer = self.sizes(config, queries, keys, cache, backend, hooks)
        padding, lengths = min(first_rows), [S - first for first in first_rows]
        estimate = int(self.calibration.threshold(config, layer, S - padding).value)
        waits = self.calibration.needs_measurement(config, layer)
        measured_at = self.calibration.shortest_measured(config) if waits else None
        decision = decide(config, replace(facts, estimate=estimate, measured_at=measured_at), lengths)
        heads = keys.shape[0] * keys.shape[1]
        G = facts.G
        now = config.at(S)
        step_bytes = partial(cache.step_bytes, now) if hooks is None else partial(hooks.step_bytes, cache)
        moved, later = (step_bytes(position, G, backend) // heads for position in (S, S + SPAN))
        per_key = (later - moved) / SPAN
        bound = now.for_bias() if facts.bias else now
        assert bound is not None
        given: dict[str, Any] = {}
        if bound.scores_latents:  # layers run in the order of their caches
            before = sum(getattr(entry, "latent", False) for entry in caches[: max(index, 0)])
            given = bound.layer_arguments(self.absorbed[before])
        served = decision.served
        stop = 1 << S.bit_length()  # `Method.at` is the same from half of this length on
        step = cache.bind(bound, G, backend, **given) if hooks is None else hooks.bind(cache, G, backend, served)
        return LayerPlan(
            self,
            index,
            queries.shape,
            start=max(padding + decision.start, stop // 2),
            stop=min(padding + decision.stop, stop),
            reason=decision.reason,
            step=step,
            served=served,
            short=decision.short,
            heads=heads,
            dense_bytes=heads * layer.step.pair_bytes,
            bias=facts.bias,
            sparse_bytes=(moved - per_key * S, per_key),
        )


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Plan for one layer's decode steps over one cache, valid for a range of context lengths.

    Attributes:
        plan: `Plan` of the model.
        index: index of the layer's cache, which identifies the layer in the report; -1 if unknown.
        queries: shape of the queries, ``(B, Hq, 1, D)``.
        start, stop: the plan is valid for ``start <= cache.length < stop``.
        reason: the reason why decode steps are dense; None if decode steps are sparse.
        step: function that runs the decode method over the cache.
        served: indices of the sequences that are long enough for sparse attention.
        short: indices of the sequences that are too short for sparse attention and get dense attention. Sequences with
            at most ``config.attended`` keys are not listed, because the sparse method attends to all their keys.
        heads: number of KV heads in the batch, ``B * Hkv``.
        dense_bytes: number of bytes of one position's keys and values in all ``heads``.
        bias: True if the steps add a bias to the logits.
        sparse_bytes: ``(constant, per_key)``. A sparse step over S keys moves ``constant + per_key * S`` bytes per KV
            head.
    """

    plan: Plan
    index: int
    queries: tuple[int, ...]
    start: int
    stop: int
    reason: str | None
    step: BoundStep
    served: list[int]
    short: list[int]
    heads: int
    dense_bytes: int
    bias: bool
    sparse_bytes: tuple[float, float]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle the plan as None, so that a copied cache has no plan."""
        return type(None), ()


@dataclass
class Probe:
    """Result of the trial call that finds the layers that can use sparse attention.

    Attributes:
        plan: `Plan` of the model.
        seen: for each attention call, the cache and the reason why the layer stays dense. The reason is a function if
            it depends on the settings of the method, which depend on ``grouped``.
        grouped: True if several query heads share a KV head in any layer.
        backends: names of the backends that the layers use.
        layers: for each pair of a method and a layer shape, the number of layers that can use sparse attention.
    """

    plan: Plan
    seen: list[tuple[object, str | Callable[[], str | None]]] = field(default_factory=list)
    grouped: bool = False
    backends: set[str] = field(default_factory=set)
    layers: Counter[tuple[Method, Layer]] = field(default_factory=Counter)

    def reason(
        self, queries: mx.array, keys: Rows, cache: SparseCache, facts: Facts, hooks: CallHooks | None
    ) -> str | None:
        """Return the reason why a layer can never use sparse attention, or None. Record each method's backend.

        Raises:
            ConfigError: a parameter does not fit the head dim.
        """
        plan = self.plan
        without_hooks = replace(facts, unready=None)  # the hooks belong to the decode method
        found = [
            (config, exclusion(config, facts if config is plan.decode else without_hooks))
            for config in plan.configs or [Dense()]
        ]
        serving = [config for config, reason in found if reason is None]
        for config in serving:
            if not config.sparse:  # dense attention, also over a cache that is quantized later
                self.backends.add(registry.resolve(plan.backend, config.name, D=queries.shape[3], G=1))
                continue
            config.check_head_dim(queries.shape[-1])
            if config.scores_latents and not (cache.latent and plan.absorbed):
                raise ConfigError(f"attn: expected a layer with multi-head latent attention for {config}, got another.")
            backend = plan.resolve(config, queries, keys, cache)
            self.backends.add(backend)
            self.layers[config, plan.sizes(config, queries, keys, cache, backend, hooks)] += 1
        return None if serving else found[-1][1]


def layer_reason(queries: mx.array, keys: Any, values: Any, cache: object, backend: str) -> str | None:
    """Return the reason why a layer with ``cache`` can never use sparse attention on ``backend``, or None."""
    if cache is None:
        return reasons.NO_CACHE
    if not isinstance(cache, SparseCache):
        return reasons.other_cache(type(cache).__name__)
    first, second = (rows if isinstance(rows, mx.array) else rows[0] for rows in (cache.keys, cache.values))
    if first.shape[3] != second.shape[3]:
        # The cache of MLA has latents and positional keys. Models expand latents to heads, except in decode steps.
        expanded = keys.shape[1::2] != cache.key_rows.shape[1::2]
        if expanded or (keys is values and queries.shape[2] > 1):
            return reasons.LATENT
    D, Dv = keys.shape[3], values.shape[3]
    if D != Dv and registry.unsupported(backend, "attend_indices", D, G=1, Dv=Dv) is not None:
        return reasons.OTHER_HEAD_DIMS
    B = queries.shape[0]
    for rows, stored in ((keys, cache.key_rows), (values, cache.value_rows)):
        same = isinstance(rows, PackedRows) == isinstance(stored, PackedRows)
        expected = B, stored.shape[1], cache.length, stored.shape[3]
        if not same or stored.shape[0] != B or rows.shape != expected:
            return reasons.OTHER_ROWS
    # A program can repeat the rows of a batch but not its padding. A kernel would read beyond the padding.
    return None if cache.padding is None or cache.padding.size == B else reasons.OTHER_ROWS


def _group(queries: mx.array, keys: Rows) -> int:
    """Return the number of query heads per KV head (G)."""
    return queries.shape[1] // keys.shape[1]
