"""The cases that are timed: every method on every backend that has it, shapes, types, batches and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tqdm import tqdm

from .. import registry
from ..checks import BackendUnavailable, ConfigError, check_choice, check_rank
from ..config import SAAP, MethodConfig, Prefill, SparQ, parse
from ..forms import Result
from . import decode, prefill
from .decode import Case
from .dense import Shape
from .rows import Row
from .saap_steps import check_probes
from .steps import steps_of

QUIET = 2  # seconds before progress is shown


@dataclass(frozen=True)
class Sizes:
    """What to time; every combination is a case."""

    dtypes: Sequence[str]
    shapes: Sequence[Shape]
    batches: Sequence[int]
    lengths: Sequence[int]

    def cases(self) -> list[Case]:
        return [Case(*sizes) for sizes in product(self.dtypes, self.shapes, self.batches, self.lengths)]


def read_method(text: str) -> MethodConfig:
    """One method that can be timed.

    Raises:
        ConfigError: none, or several at once.
    """
    configs = parse(text)
    if len(configs) != 1 or configs[0].name == "dense":
        raise ConfigError(f"--attn: expected methods such as sparq:rank=16,streaming or sample, got {text}.")
    return configs[0]


def decode_steps(configs: Sequence[MethodConfig], backends: Sequence[str], sizes: Sizes, repeat: int) -> Result:
    """Time decode steps.

    Raises:
        BackendUnavailable: no backend can run any of the methods.
    """
    for config in configs:
        if isinstance(config, SAAP):
            check_probes(config)
        if isinstance(config, SparQ):
            for shape in sizes.shapes:
                check_rank(config.rank, shape.D)
    served = {shape: list(serving(configs, backends, shape)) for shape in sizes.shapes}
    _check_any(served)
    rows: list[Row] = []
    for case in tqdm(sizes.cases(), unit="case", disable=None, delay=QUIET):
        steps = [
            step
            for config, backend, reason in served[case.shape]
            if reason is None
            for step in steps_of(config, backend, case.shape)
        ]
        rows += [*decode.measure(case, steps, repeat), *_refused(case, served[case.shape])]
    return _result(rows, decode.text(rows))


def prompts(
    configs: Sequence[MethodConfig],
    backends: Sequence[str],
    sizes: Sizes,
    steps: Sequence[int | None],
    repeat: int,
) -> Result:
    """Time prompts.

    Args:
        steps: queries per call; None for all at once.

    Raises:
        BackendUnavailable: no backend can run any of the methods.
    """
    served = {shape: list(serving(configs, backends, shape)) for shape in sizes.shapes}
    _check_any(served)
    cases = dict.fromkeys((case, min(step or case.S, case.S)) for case in sizes.cases() for step in steps)
    rows: list[Row] = []
    for case, step in tqdm(cases, unit="case", disable=None, delay=QUIET):
        methods = [
            (config, backend)
            for config, backend, reason in served[case.shape]
            if reason is None and isinstance(config, Prefill)
        ]
        rows += prefill.measure(case, step, methods, repeat)
        rows += _refused(case, served[case.shape], step=step)
    return _result(rows, prefill.text(rows))


Served = tuple[MethodConfig, str, str | None]  # a backend, and why it cannot run the method


def serving(configs: Sequence[MethodConfig], backends: Sequence[str], shape: Shape) -> Iterator[Served]:
    """Each method with each backend, and the reason if it cannot run it."""
    for name in backends:
        check_choice("--backend", name, ("auto", *registry.BACKENDS))
    for config in configs:
        function = "saap_route" if isinstance(config, SAAP) else config.name
        found: dict[str, str | None] = {}
        for asked in backends:
            name = registry.resolve("auto", function, D=shape.D, G=shape.G) if asked == "auto" else asked
            found[name] = registry.refusal(name, function, registry.unfit(name, function, shape.D, shape.G))
        yield from ((config, name, reason) for name, reason in found.items())


def _check_any(served: dict[Shape, list[Served]]) -> None:
    """Raise `BackendUnavailable` if there is nothing to time."""
    (first, *_), *_ = served.values()
    if all(reason for some in served.values() for _, _, reason in some):
        raise BackendUnavailable(f"--backend: expected one that has {first[0].name} here, got {first[1]} ({first[2]}).")


def _refused(case: Case, served: Sequence[Served], **details: int) -> list[Row]:
    """A row for each method that a backend cannot run, among others that it can."""
    sizes = (case.dtype, case.shape, case.B, case.S, details)
    return [Row(str(config), name, *sizes, note=f"{name}: {reason}") for config, name, reason in served if reason]


def _result(rows: Sequence[Row], text: str) -> Result:
    return Result([row.as_dict() for row in rows], text, not any(row.failed for row in rows))
