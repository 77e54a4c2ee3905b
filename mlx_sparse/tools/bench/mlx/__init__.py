"""MLX's contenders: every decode and prefill method on every backend that has it, dense attention and a plain read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from ....checks import BackendUnavailable, check_choice
from ....methods import Method, registry, table
from ...environment import machine
from ..core import Case, Row, Shape, Turns, cases
from ..run import Plan, Request
from . import prompts, steps
from .packed import PackedStep
from .rows import measure, method_row
from .saap import SaapStep, saap_steps
from .steps import DecodeStep, Layers, ReceivedStep, layers_of

Served = tuple[Method, str, str | None]  # a backend, and why it cannot run the method

WARM_UP = 2  # turns of decode steps


def plan(request: Request) -> Plan:
    """What to time.

    Raises:
        ConfigError: a method does not fit a shape.
        BackendUnavailable: no backend can run any of the methods.
    """
    for config, shape in product(request.methods, request.shapes):
        if request.stage == "step":
            step_of(config).check_config(config, shape)
        for bits in request.kv_bits:
            PackedStep.check_bits(bits, config, shape)
    served = {shape: list(serving(request.methods, request.backends, shape)) for shape in request.shapes}
    (first, *_), *_ = served.values()
    if all(reason for some in served.values() for _, _, reason in some):
        raise BackendUnavailable(f"--backend: expected one that has {first[0].name} here, got {first[1]} ({first[2]}).")
    where, sizes = machine(), cases(request.dtypes, request.shapes, request.batches, request.lengths)
    measure_these = partial(measure_steps, kv_bits=request.kv_bits)
    timed, text = (measure_these, steps.text) if request.stage == "step" else (prompts.measure_prompts, prompts.text)
    if request.stage == "prompt":
        pieces = product(sizes, request.steps)
        sizes = [prompts.Prompt(case.dtype, case.shape, case.B, case.S, min(n or case.S, case.S)) for case, n in pieces]

    def rows(case: Case, _: float) -> Iterator[Row]:
        yield from timed(case, [(config, name) for config, name, no in served[case.shape] if not no], request.repeat)
        for config, backend, reason in served[case.shape]:
            if reason:  # among others that can run
                yield method_row(case, str(config), backend, {}, f"{backend}: {reason}")

    head = f"MLX {where['mlx']}, {where['chip']}, {where['device']}"
    return Plan(where, list(dict.fromkeys(sizes)), rows, lambda found: f"{head}\n\n{text(found)}")


def serving(configs: Sequence[Method], backends: Sequence[str], shape: Shape) -> Iterator[Served]:
    """Each method with each backend, and the reason if it cannot run it."""
    for name in backends:
        check_choice("--backend", name, ("auto", *table.BACKENDS))
    for config in configs:
        unfit = partial(registry.unfit, function=config.name, D=shape.D, G=shape.G)
        found: dict[str, str | None] = {}
        for asked in backends:
            name = registry.resolve("auto", config.name, D=shape.D, G=shape.G) if asked == "auto" else asked
            found[name] = registry.refusal(name, config.name, unfit(name))
        yield from ((config, name, reason) for name, reason in found.items())


def step_of(config: Method) -> type[DecodeStep]:
    """The kind of step, by what a method chooses from."""
    return SaapStep if config.before_rope else ReceivedStep if config.observes_prompts else DecodeStep


def steps_of(case: Case, config: Method, backend: str, layers: Layers | None = None) -> list[DecodeStep]:
    """The steps to time: one, or with query networks one for each size of network."""
    if config.before_rope:
        return saap_steps(case, config, backend, layers)
    return [step_of(config)(case, config, backend, layers)]


def measure_steps(
    case: Case, methods: Sequence[tuple[Method, str]], repeat: int, kv_bits: Sequence[int] = ()
) -> list[Row]:
    """A row for each method on a backend, and for each over caches in so many bits, timed in turns."""
    layers, contenders = Layers(case), list[DecodeStep]()
    for config, backend in methods:
        contenders += steps_of(case, config, backend, layers)
        contenders += [PackedStep(case, config, backend, layers, bits) for bits in kv_bits]
    needed = 2 * case.keys * layers_of(case) * (1 + 0.5 * len(contenders))
    return measure(contenders, needed, layers.sides, Turns(repeat, WARM_UP), layers_of(case))
