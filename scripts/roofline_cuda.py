"""What each contender on an NVIDIA GPU has to move or multiply, from sizes alone, and what ratio that allows.

Foreign contenders are counted by the paper's formulae (common/stats.py), our kernels by what they read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import by_method
from mlx_sparse.cuda_ref.bench import prompts, saap_cases
from mlx_sparse.cuda_ref.bench.saap_cases import LLAMA
from mlx_sparse.cuda_ref.bench.sparq_cases import BARS, PAPER_SETTING, Setting, SparQCase, sparq_parts

from mlx_sparse.tools.bench.thresholds import length
from mlx_sparse.tools.formats import table

BANDWIDTH = 4.3e12  # bytes a second that a large copy read and wrote on an H200
OPERATIONS = 790e12  # operations a second of a large bfloat16 product on one
DENSITIES = (0.05, 0.1, 0.2, 0.5)  # at 128k keys
SPARQ = [
    *("batch", "heads", "S", "dense, bytes per key", "scores", "select", "attend", "bytes allow", "bar", "dense, µs"),
    *("bar, µs", "SparQ's bytes, µs", "left for launches, µs"),
]
SAAP = [
    *("S", "SAAP", "keys attended", "network, MB", "list", "attend", "dense", "bytes allow", "bar", "dense, µs"),
    *("bar, µs", "SAAP's bytes, µs", "left for launches, µs"),
]
SAMPLE = [
    *("S", "density", "dense, PFLOP", "stage 1", "stage 2", "operations allow", "bar", "dense at 790 TFLOP/s, ms"),
    *("keys and parts of stage 1, MB", "share of dense speed for the bar"),
]


def found(method: str) -> by_method.Found:
    """The table of a method, and its rows."""
    made: dict[str, tuple[list[str], Callable[[], Iterable[list[str]]]]] = {
        "sparq": (SPARQ, _sparq),
        "saap": (SAAP, _saap),
        "sample": (SAMPLE, _sample),
    }
    header, rows = made[method][0], list(made[method][1]())
    return [dict(zip(header, cells, strict=True)) for cells in rows], table(header, rows)


def bar_cases() -> list[SparQCase]:
    """The cases that have a bar, with the paper's setting."""
    setting = Setting(*PAPER_SETTING)
    return [
        SparQCase("float16", shape, B, S, (setting,))
        for shape, batches in BARS.items()
        for B, S in chain.from_iterable(((B, S) for S in wanted) for B, wanted in batches.items())
    ]


def _sparq() -> Iterable[list[str]]:
    """Bytes per key and KV head, the ratio they allow, and the time that each bar leaves for all the rest."""
    for case in bar_cases():
        (setting,), bar = case.settings, case.bar or 0.0
        moved = [part.bytes for part in sparq_parts(case, setting)]
        dense, ours = 1e6 * case.dense_bytes / BANDWIDTH, 1e6 * sum(moved) / BANDWIDTH
        per_key = [f"{part / case.rows / case.S:.1f}" for part in (case.dense_bytes, *moved)]
        cells = [f"{case.B}", f"{case.Hq}/{case.Hkv}", length(case.S), *per_key, f"{dense / ours:.2f}", f"{bar:g}"]
        yield [*cells, f"{dense:.0f}", f"{dense / bar:.0f}", f"{ours:.1f}", f"{dense / bar - ours:.0f}"]


def _saap() -> Iterable[list[str]]:
    """Bytes of a step against dense, the ratio they allow, and the time that a bar leaves for the rest."""
    cases = saap_cases.plan([64 * 1024, *saap_cases.BARS], [1], [LLAMA], "float16")
    for case in sorted(cases, key=lambda case: case.S):
        for setting in case.settings:
            moved = [part.bytes for part in saap_cases.parts(case, setting)]
            dense, ours = 1e6 * case.dense_bytes / BANDWIDTH, 1e6 * sum(moved) / BANDWIDTH
            bar = case.bar if setting == case.settings[0] else None
            cells = [length(case.S), str(setting), f"{case.attended(setting):,.0f}"]
            cells += [*(f"{part / 1e6:.1f}" for part in moved), f"{case.dense_bytes / 1e6:.0f}", f"{dense / ours:.1f}"]
            at_bar = ["", ""] if bar is None else [f"{dense / bar:.0f}", f"{dense / bar - ours:.0f}"]
            cells += ["" if bar is None else f"{bar:g}", f"{dense:.0f}"]
            yield [*cells, at_bar[0], f"{ours:.1f}", at_bar[1]]


def _sample() -> Iterable[list[str]]:
    """Operations and bytes of both stages, and the speed that a bar asks of stage 2."""
    for S in (8192, 32768, 65536, 131072, 262144, 1048576):
        for density in DENSITIES if S == 131072 else (prompts.HELD,):
            case = prompts.Prompt("float16", LLAMA, 1, S)
            dense, sampled, listed = case.flops(), case.sampled_flops, case.flops(density)
            # Keys once from memory, and 8 bytes for a sampled query and key block, written once and read twice.
            moved = 2 * case.Hkv * S * case.D + 24 * case.Hq * case.block_size * case.layout.key_blocks
            bar = prompts.BARS.get(S) if density == prompts.HELD else None
            cells = [length(S), f"{density:.0%}", f"{dense / 1e15:.3f}", f"{sampled / 1e15:.4f}"]
            cells += [f"{listed / 1e15:.4f}", f"{dense / (sampled + listed):.1f}", "" if bar is None else f"{bar:g}"]
            cells += [f"{1e3 * dense / OPERATIONS:.1f}", f"{moved / 1e6:.0f}"]
            yield [*cells, "" if bar is None else f"{bar * (sampled + listed) / dense:.0%}"]
