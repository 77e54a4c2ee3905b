"""Measure every case: all contenders in turns in one run, each only after its result was found right."""

from __future__ import annotations

import gc
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from mlx_sparse.checks import SparseAttentionError

from ..availability import interpreted
from . import contenders
from .contenders import Contender
from .timing import Run, copy_bandwidth, record

REPEAT, LEAST = 9, 5  # turns, and how many are taken when time is short
ENOUGH = 300e-6  # seconds that the steps of one run take together, at least
LAUNCH = 5e-6  # seconds of a step beside the bytes: a guess that only sets how many steps a run has
LARGEST_SHARE = 0.9  # of the free memory
LONGEST_NOTE = 240


@dataclass
class Row:
    """One contender in one case.

    Attributes:
        contender, setting: as in `contenders.names`; no contender stands for all of the case.
        bytes: what it has to move.
        floor: microseconds that a copy of these bytes takes.
        times: microseconds of a step, one for each turn.
        note: why there are no times.
        failed: the result was wrong, or our code raised.
    """

    case: Any
    contender: str
    setting: Any = None
    bytes: int = 0
    floor: float = 0.0
    times: list[float] = field(default_factory=list)
    note: str | None = None
    failed: bool = False

    @property
    def median(self) -> float | None:
        return median(self.times) if self.times else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        case = {name: getattr(self.case, name) for name in ("B", "Hq", "Hkv", "D", "S", "dtype")}
        setting = self.setting.as_dict() if self.setting else {}
        return {
            "kind": "row",
            **case,
            "contender": self.contender,
            **setting,
            "bytes": self.bytes,
            "floor_us": self.floor,
            "median_us": self.median,
            "min_us": min(self.times, default=None),
            "turns": len(self.times),
            "note": self.note,
            "failed": self.failed,
        }


@dataclass
class Found:
    """What a run found: the machine, and a row for every contender and case."""

    machine: dict[str, Any]
    rows: list[Row]

    @property
    def right(self) -> bool:
        """Whether nothing failed and something was measured."""
        return not any(row.failed for row in self.rows) and any(row.times for row in self.rows)


def run(cases: Sequence[Any], budget: float, emit: Callable[[dict[str, Any]], None], method: Any = contenders) -> Found:
    """Measure ``cases`` in order within ``budget`` seconds; hand every fact and row to ``emit`` when it is known.

    Args:
        method: the module that says who takes part: `contenders` for SparQ, or `saap`.
    """
    end = time.monotonic() + budget
    device = torch.device("cpu" if interpreted() else "cuda")
    # Sums in float16, which the float32 ones of everybody else would be compared with.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    found = Found(machine(device), [])
    emit({"kind": "machine"} | found.machine)
    for number, case in enumerate(cases):
        left = end - time.monotonic()
        if left <= 0:
            rows = [Row(case, "", note=f"left out: the {budget:g} s were over")]
        else:
            rows = measure_case(case, device, found.machine, left / (len(cases) - number), method)
        found.rows += rows
        for row in rows:
            emit(row.as_dict())
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """What this is measured on; no serial numbers, no names."""
    facts: dict[str, Any] = {"platform": platform.platform(), "python": platform.python_version()}
    for name in ("torch", "triton"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    facts |= {"device": "CPU, Triton's interpreter", "l2": 0, "memory": free_memory(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = properties.name
        facts["architecture"] = 10 * properties.major + properties.minor
        facts["processors"] = properties.multi_processor_count
        facts["l2"] = properties.L2_cache_size
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return facts | {"copy_bytes_per_second": copy_bandwidth(device)}


def free_memory(device: torch.device) -> int:
    """Bytes that a case may take."""
    if device.type != "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def measure_case(case: Any, device: torch.device, facts: dict[str, Any], seconds: float, method: Any) -> list[Row]:
    """Rows of one case, whose turns end early when it has taken ``seconds``."""
    end = time.monotonic() + seconds
    if not case.settings:
        return [Row(case, "", note="left out: SparQ would attend to all keys")]
    most = LARGEST_SHARE * free_memory(device)
    copies = case.copies(facts["l2"])
    while copies > 1 and case.memory(copies) > most:
        copies -= 1
    if case.memory(copies) > most:
        needed = f"needs {case.memory(copies) / 1e9:.0f} GB of {most / 1e9:.0f} GB that are free"
        return [Row(case, "", note=f"left out: {needed}")]
    try:
        contestants = method.field(case, copies, device)
    except torch.OutOfMemoryError:
        return [Row(case, "", note="left out: out of memory")]
    rows, entered = [], []
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for name, setting in method.names(case):
        row = Row(case, name, setting, note=method.left_out(name, case, device))
        rows.append(row)
        if row.note is None and (steps := enter(row, contestants, copies, device, facts, pool, method.OURS)):
            entered.append((row, steps))
    measure(entered, end)
    return rows


def enter(
    row: Row,
    contestants: Any,
    copies: int,
    device: torch.device,
    facts: dict[str, Any],
    pool: Any,
    ours: tuple[str, ...],
) -> Run | None:
    """Prepare a contender's steps and check what they give; None, with the reason in ``row``, if that fails."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            contender = contestants.contender(row.contender, row.setting)
            row.bytes = contender.bytes
            seconds = row.bytes / facts["copy_bytes_per_second"]
            row.floor = 1e6 * seconds
            rounds = math.ceil(ENOUGH / (copies * (seconds + LAUNCH))) if device.type == "cuda" else 1
            steps = record(contender.step, copies, copies * rounds, device, pool)
            steps.run()
            row.note = check(contender, steps)
            row.failed = row.note is not None
        except (torch.OutOfMemoryError, SparseAttentionError) as error:
            row.note = reason(error, [])
        # Whatever a library raises, the others can still be measured.
        except Exception as error:
            row.note = reason(error, [str(warning.message) for warning in said])
            row.failed = row.contender in ours
    return None if row.note else steps


def check(contender: Contender, steps: Run) -> str | None:
    """What is wrong with the outputs of any set of caches; what equals the first is as right as that."""
    first, *others = steps.outputs
    differing = [out for out in others if not all(map(torch.equal, out, first))]
    return next(filter(None, map(contender.wrong, [first, *differing])), None)


def measure(entered: Sequence[tuple[Row, Run]], end: float) -> None:
    """Fill in the times of every row, in turns: `REPEAT`, or from `LEAST` on until ``end``."""
    for turn in range(REPEAT):
        for row, steps in entered:
            row.times.append(steps.sample())
        if turn + 1 >= LEAST and time.monotonic() > end:
            return


def reason(error: Exception, said: Sequence[str]) -> str:
    """An error in one line, with what torch warned of before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    more = [text.split("(Triggered internally")[0].strip() for text in said]
    text = " ".join(dict.fromkeys([lines[0], *more]))
    return text if len(text) <= LONGEST_NOTE else text[: LONGEST_NOTE - 3] + "..."
