"""The contenders on an NVIDIA GPU: torch's attention, our own dense kernel, and the sparse ones. Runs without mlx."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx_sparse.checks import BackendUnavailable, ConfigError, check_choice
from mlx_sparse.tools.bench.core import Row, Turns, measure, too_large
from mlx_sparse.tools.bench.run import Plan, Request

from ..availability import unavailable

DTYPES = ("float16", "bfloat16")
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "step": {"sparq": ("rank", "top_k", "key_bits"), "saap": ()},
    "prompt": {"sample": ()},
}
LEAST = 5  # turns of decode steps that are taken when time is short
LARGEST_SHARE = 0.9  # of the free memory
SAAP_LEAST = 4096  # keys


def plan(request: Request) -> Plan:
    """What to time.

    Raises:
        ConfigError: an option is wrong.
        BackendUnavailable: Triton's kernels cannot run here.
    """
    config: Any = request.one_method(METHODS[request.stage])
    (dtype, *others) = request.dtypes
    check_choice("--dtype", dtype if not others else ",".join(request.dtypes), DTYPES)
    if request.stage == "prompt" and list(request.batches) != [1]:
        raise ConfigError(f"--batches: expected 1 of prompts with --engine cuda, got {request.batches[0]}.")
    shortest = min(request.lengths)
    if config.name == "sparq" and config.top_k >= shortest:
        raise ConfigError(
            f"--lengths: expected more than the {config.top_k} keys that SparQ attends to, got {shortest}."
        )
    if config.name == "saap" and shortest < SAAP_LEAST:
        raise ConfigError(
            f"--lengths: expected at least {SAAP_LEAST} keys, twice what SAAP always attends, got {shortest}."
        )
    for shape in request.shapes:
        config.check_head_dim(shape.D)
    if reason := unavailable():
        raise BackendUnavailable(f"--engine cuda: expected an NVIDIA GPU with torch and triton, got none ({reason}).")
    return _plan(request, dtype, config)


def _plan(request: Request, dtype: str, config: Any) -> Plan:
    from . import cases, prompts, report, saap, sparq
    from .device import Device

    device, sizes = Device(), (request.lengths, request.batches, request.shapes, dtype)
    made: Sequence[Any]
    if request.stage == "prompt":
        made = [cases.Prompt(dtype, shape, 1, S) for S in sorted(request.lengths) for shape in request.shapes]
        timed = partial(_prompt, contenders=prompts.contenders, device=device, request=request)
    elif config.name == "sparq":
        made = cases.sparq_cases(*sizes, cases.SparQSetting(config.rank, config.top_k, config.key_bits))
        timed = partial(steps, contenders=sparq.contenders, device=device, repeat=request.repeat)
    else:
        made = cases.saap_cases(*sizes)
        timed = partial(steps, contenders=saap.contenders, device=device, repeat=request.repeat)
    told = report.REPORTS[config.name]
    return Plan(
        device.facts,
        made,
        timed,
        lambda rows: told.text(device.facts, rows, request.repeat),
        lambda rows: told.lines(device.facts, rows),
        needed=True,
        # Times of prompts grow with the square of the length: the last case takes most.
        **({"ahead": 2} if request.stage == "prompt" else {}),
    )


def steps(case: Any, end: float, contenders: Any, device: Any, repeat: int) -> Sequence[Row]:
    """Rows of a decode step, whose turns end early when the clock is past ``end``."""
    if not case.settings:
        return [Row(case, "", note="left out: SparQ would attend to all keys")]
    free, copies = device.free_memory(), case.copies(device.facts["l2"])
    large = partial(too_large, there=free, share=LARGEST_SHARE)
    while copies > 1 and large(case.memory(copies)):
        copies -= 1
    if reason := large(case.memory(copies)):
        return [Row(case, "", note=f"left out: {reason}")]
    return measure(case, contenders(case, copies, device), Turns(repeat, until=end, least=LEAST))


def _prompt(case: Any, end: float, contenders: Any, device: Any, request: Request) -> Sequence[Row]:
    """Rows of a prompt, whose turns end when the clock is past ``end``, after the first at the earliest."""
    if reason := too_large(case.memory, device.free_memory(), LARGEST_SHARE):
        return [Row(case, "", note=f"left out: {reason}")]
    return measure(case, contenders(case, request.densities, device), Turns(request.repeat, until=end))
