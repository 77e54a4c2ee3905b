"""MLX's contenders: every decode and prefill method on every backend that has it, dense attention and a plain read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product

from ....checks import BackendUnavailable, check_choice, check_rank
from ....methods import SAAP, Method, Prefill, SparQ, registry, table
from ...environment import machine
from ..core import Case, Row, Shape, cases
from ..run import Plan, Request
from . import prompts, steps
from .rows import method_row
from .saap import check_probes
from .steps import steps_of

Served = tuple[Method, str, str | None]  # a backend, and why it cannot run the method


def plan(request: Request) -> Plan:
    """What to time.

    Raises:
        ConfigError: a method does not fit a shape.
        BackendUnavailable: no backend can run any of the methods.
    """
    for config in request.methods:
        if isinstance(config, SAAP):
            check_probes(config)
        if isinstance(config, SparQ):
            for shape in request.shapes:
                check_rank(config.rank, shape.D)
    served = {shape: list(serving(request.methods, request.backends, shape)) for shape in request.shapes}
    (first, *_), *_ = served.values()
    if all(reason for some in served.values() for _, _, reason in some):
        raise BackendUnavailable(f"--backend: expected one that has {first[0].name} here, got {first[1]} ({first[2]}).")
    where, sizes = machine(), cases(request.dtypes, request.shapes, request.batches, request.lengths)
    head = f"MLX {where['mlx']}, {where['chip']}, {where['device']}"
    if request.stage == "step":
        return Plan(
            where,
            sizes,
            lambda case, _: _steps(case, served[case.shape], request.repeat),
            lambda rows: f"{head}\n\n{steps.text(rows)}",
        )
    pieces = [
        prompts.Prompt(case.dtype, case.shape, case.B, case.S, min(step or case.S, case.S))
        for case, step in product(sizes, request.steps)
    ]
    return Plan(
        where,
        list(dict.fromkeys(pieces)),
        lambda case, _: _prompts(case, served[case.shape], request.repeat),
        lambda rows: f"{head}\n\n{prompts.text(rows)}",
    )


def _steps(case: Case, served: Sequence[Served], repeat: int) -> Iterator[Row]:
    runnable = [(config, backend) for config, backend, reason in served if reason is None]
    chosen = [step for config, backend in runnable for step in steps_of(config, backend, case.shape)]
    yield from steps.measure(case, chosen, repeat)
    yield from _refused(case, served)


def _prompts(case: prompts.Prompt, served: Sequence[Served], repeat: int) -> Iterator[Row]:
    methods = [(one, backend) for one, backend, reason in served if reason is None and isinstance(one, Prefill)]
    yield from prompts.measure(case, methods, repeat)
    yield from _refused(case, served)


def _refused(case: Case, served: Sequence[Served]) -> Iterable[Row]:
    """A row for each method that a backend cannot run, among others that it can."""
    for config, backend, reason in served:
        if reason:
            yield method_row(case, str(config), backend, {}, f"{backend}: {reason}")


def serving(configs: Sequence[Method], backends: Sequence[str], shape: Shape) -> Iterator[Served]:
    """Each method with each backend, and the reason if it cannot run it."""
    for name in backends:
        check_choice("--backend", name, ("auto", *table.BACKENDS))
    for config in configs:
        function = "saap_route" if isinstance(config, SAAP) else config.name
        unfit = partial(registry.unfit, function=function, D=shape.D, G=shape.G)
        found: dict[str, str | None] = {}
        for asked in backends:
            name = registry.resolve("auto", function, D=shape.D, G=shape.G) if asked == "auto" else asked
            found[name] = registry.refusal(name, function, unfit(name))
        yield from ((config, name, reason) for name, reason in found.items())
