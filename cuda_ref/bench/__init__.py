"""The contenders on an NVIDIA GPU: torch's attention, our own dense kernel, and the sparse ones. Runs without mlx."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_sparse.checks import BackendUnavailable, ConfigError, check_choice, check_rank
from mlx_sparse.tools.bench.core import Contender, Row, Turns, measure, too_large
from mlx_sparse.tools.bench.run import Plan, Request

from ..availability import unavailable

if TYPE_CHECKING:
    from .device import Device

DTYPES = ("float16", "bfloat16")
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "step": {"sparq": ("rank", "top_k"), "saap": ()},
    "prompt": {"sample": ()},
}
LEAST = 5  # turns of decode steps that are taken when time is short
SAAP_LEAST = 4096  # keys


def plan(request: Request) -> Plan:
    """What to time.

    Raises:
        ConfigError: an option is wrong.
        BackendUnavailable: Triton's kernels cannot run here.
    """
    config = request.one_method(METHODS[request.stage])
    (dtype, *others) = request.dtypes
    check_choice("--dtype", dtype if not others else ",".join(request.dtypes), DTYPES)
    if request.stage == "prompt" and list(request.batches) != [1]:
        raise ConfigError(f"--batches: expected 1 of prompts with --engine cuda, got {request.batches[0]}.")
    _check_lengths(request, config)
    if reason := unavailable():
        raise BackendUnavailable(f"--engine cuda: expected an NVIDIA GPU with torch and triton, got none ({reason}).")
    planned: dict[str, Callable[[Request, str, Any], Plan]] = {"sparq": _sparq, "saap": _saap, "sample": _prompts}
    return planned[config.name](request, dtype, config)


def _check_lengths(request: Request, config: Any) -> None:
    for S in request.lengths:
        if config.name == "sparq" and config.top_k >= S:
            raise ConfigError(f"--lengths: expected more than the {config.top_k} keys that SparQ attends to, got {S}.")
        if config.name == "saap" and S < SAAP_LEAST:
            raise ConfigError(
                f"--lengths: expected at least {SAAP_LEAST} keys, twice what SAAP always attends, got {S}."
            )
    if config.name == "sparq":
        for shape in request.shapes:
            check_rank(config.rank, shape.D)


def _sparq(request: Request, dtype: str, config: Any) -> Plan:
    from . import report, sparq
    from .device import Device
    from .sparq_cases import Setting, plan

    device, setting = Device(), Setting(config.rank, config.top_k)
    return Plan(
        device.facts,
        plan(request.lengths, request.batches, request.shapes, dtype, setting),
        lambda case, end: steps(case, end, device, sparq.contenders, request.repeat),
        lambda rows: report.sparq_text(device.facts, rows, request.repeat),
        lambda rows: report.sparq_lines(device.facts, rows),
        needed=True,
    )


def _saap(request: Request, dtype: str, config: Any) -> Plan:
    from . import report, saap
    from .device import Device
    from .saap_cases import plan

    device = Device()
    return Plan(
        device.facts,
        plan(request.lengths, request.batches, request.shapes, dtype),
        lambda case, end: steps(case, end, device, saap.contenders, request.repeat),
        lambda rows: report.saap_text(device.facts, rows, request.repeat),
        lambda rows: [bar.as_dict() for bar in report.saap_bars(rows)],
        needed=True,
    )


def _prompts(request: Request, dtype: str, config: Any) -> Plan:
    from . import prompts, report
    from .device import Device

    device = Device()
    return Plan(
        device.facts,
        prompts.plan(request.lengths, request.shapes, dtype),
        lambda case, end: _prompt(case, end, device, request),
        lambda rows: report.prompt_text(device.facts, rows, request.repeat),
        lambda rows: [bar.as_dict() for bar in report.prompt_bars(rows)],
        needed=True,
        ahead=2,  # times grow with the square of the length: the last case takes most
    )


def steps(
    case: Any, end: float, device: Device, contenders: Callable[[Any, int, Device], Iterator[Contender]], repeat: int
) -> Sequence[Row]:
    """Rows of a decode step, whose turns end early when the clock is past ``end``."""
    from .device import LARGEST_SHARE

    if not case.settings:
        return [Row(case, "", note="left out: SparQ would attend to all keys")]
    free, copies = device.free_memory(), case.copies(device.facts["l2"])
    large = partial(too_large, there=free, share=LARGEST_SHARE)
    while copies > 1 and large(case.memory(copies)):
        copies -= 1
    if reason := large(case.memory(copies)):
        return [Row(case, "", note=f"left out: {reason}")]
    return measure(case, contenders(case, copies, device), Turns(repeat, until=end, least=LEAST))


def _prompt(case: Any, end: float, device: Device, request: Request) -> Sequence[Row]:
    """Rows of a prompt, whose turns end when the clock is past ``end``, after the first at the earliest."""
    from . import prompts
    from .device import LARGEST_SHARE

    if reason := too_large(case.memory, device.free_memory(), LARGEST_SHARE):
        return [Row(case, "", note=f"left out: {reason}")]
    return measure(case, prompts.contenders(case, request.densities, device), Turns(request.repeat, until=end))
