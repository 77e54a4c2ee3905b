"""What an enabled model is to do: which method in which stage, from what context on, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ..calibrate import Calibration, Layer, describe
from ..common.call_report import Counts, Report
from ..methods import NEVER, Dense, Method, Prefill
from .call import Call
from .figures import PrefillFigures
from .hooks import ModelHooks


class Plan:
    """What all calls of an enabled model have in common.

    Attributes:
        prefill, decode: the method of each stage; None where it stays dense.
        mass: whether the retained mass of prompts is measured.
        hooks: what the decode method does besides.
        calibration: from where on both pay here.
        decodes: whether steps of a single query may be sparse; False where a command only processes a prompt.
        watch: is told once, after the first step of a single query, the keys of its context and what it did.
        layers: those that are served, counted by method and sizes.
        report: what the calls did.
        lossless: None, or how many tokens are drafted before dense attention checks them: 0 for as many as pay.
        sharers: processes that hold the keys and values of one context together.
        new_call: begins a call of the model on its caches.
        new_caches: makes of the model's own caches those that it is to be called with; None where these are.
    """

    def __init__(
        self,
        prefill: Prefill | None,
        decode: Method | None,
        backend: str,
        family: str,
        hooks: ModelHooks,
        *,
        mass: bool,
        calibration: Calibration,
    ) -> None:
        self.calibration = calibration
        self.prefill = prefill
        self.decode = decode
        self.backend = backend
        self.mass = mass
        self.hooks = hooks
        self.decodes = True
        self.report = Report(
            "+".join(map(str, self.configs)) or Dense.name, backend, family, decodes=decode is not None
        )
        self.report.add(Counts(prefill=prefill and PrefillFigures(), decode=hooks.figures))
        self.report.outlook = self.outlook
        self.watch: Callable[[int, Counts], object] | None = None
        self.layers: Counter[tuple[Method, Layer]] = Counter()
        self.lossless: int | None = None
        self.sharers = 1
        self.new_call: Callable[..., Call] = Call
        self.new_caches: Callable[[list[Any]], list[Any]] | None = None

    @property
    def configs(self) -> list[Method]:
        """The methods there are."""
        return [config for config in (self.prefill, self.decode) if config is not None]

    @property
    def name(self) -> str:
        """The names of the methods, joined by a plus sign."""
        return "+".join(config.name for config in self.configs) or Dense.name

    def outlook(self) -> list[str]:
        """When the layers that are served are sparse, a line for those that are alike."""
        lines: dict[Method, Counter[str]] = {}
        for (config, layer), count in self.layers.items():
            if config is self.decode and not self.decodes:
                continue
            line = describe(config, self.calibration.of(config, layer))
            if self.calibration.waits(config, layer):
                asks = self.calibration.worth_asking(config)
                line = f"{line[:-1]}; the first context of {asks:,} keys is measured)"
            if self.sharers > 1 and config.measurable:
                line += ", of each rank"
            lines.setdefault(config, Counter())[line] += count
        return [
            f"{count} layers: {line}" if len(alike) > 1 else line
            for alike in lines.values()
            for line, count in alike.items()
        ]

    def sparse_from(self) -> int:
        """Keys below which no step is sparse, whatever is measured until then; `NEVER` where none ever is."""
        found = [NEVER]
        for config, layer in self.layers:
            if config is self.decode:
                known = int(self.calibration.of(config, layer).value)
                waits = self.calibration.waits(config, layer)
                found.append(min(known, self.calibration.worth_asking(config)) if waits else known)
        return min(found)

    def count_in(self, report: Report) -> None:
        """Go on counting in the report of another plan, of the same methods on the same model."""
        if report is not self.report:
            for name in ("backend", "layers", "served_layers", "dense_layers", "outlook", "part", "kv_heads"):
                setattr(report, name, getattr(self.report, name))
            self.report = report
