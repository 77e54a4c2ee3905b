"""What each contender on an NVIDIA GPU has to move or multiply, from sizes alone, and what ratio that allows.

Foreign contenders are counted by the paper's formulae (common/stats.py), our kernels by what they read and write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import by_method
from mlx_sparse.cuda_ref.bench import cases
from mlx_sparse.cuda_ref.bench.cases import LLAMA, SPARQ_BARS, SaapCase, SparQCase, SparQSetting, StepCase

from mlx_sparse.tools.bench.thresholds import length
from mlx_sparse.tools.formats import table

BANDWIDTH = 4.3e12  # bytes a second that a large copy read and wrote on an H200
OPERATIONS = 790e12  # operations a second of a large bfloat16 product on one
DENSITIES = (0.05, 0.1, 0.2, 0.5)  # at 128k keys

Cells = dict[str, str]  # by the titles of their columns


def found(method: str) -> by_method.Found:
    """The table of a method, and its rows."""
    rows = list({"sparq": _sparq, "saap": _saap, "sample": _sample}[method]())
    return rows, table([*rows[0]], [row.values() for row in rows])


def bar_cases() -> list[SparQCase]:
    """The cases that have a bar, with the paper's setting."""
    settings = tuple(SparQSetting(*cases.PAPER_SETTING, key_bits=bits) for bits in (16, 4))
    return [
        SparQCase("float16", shape, B, S, settings)
        for shape, batches in SPARQ_BARS.items()
        for B, wanted in batches.items()
        for S in wanted
    ]


def _left(case: StepCase, moved: Sequence[int], bar: float | None, name: str) -> Cells:
    """The ratio that bytes allow, and the time that a bar leaves for all the rest."""
    dense, ours = 1e6 * case.dense_bytes / BANDWIDTH, 1e6 * sum(moved) / BANDWIDTH
    return {
        "bar": "" if bar is None else f"{bar:g}",
        "dense, µs": f"{dense:.0f}",
        "bar, µs": "" if bar is None else f"{dense / bar:.0f}",
        f"{name}'s bytes, µs": f"{ours:.1f}",
        "left for launches, µs": "" if bar is None else f"{dense / bar - ours:.0f}",
    }


def _sparq() -> Iterable[Cells]:
    """Bytes per key and KV head."""
    for case in bar_cases():
        for setting in case.settings:
            moved = case.parts(setting)
            per_key = [f"{part / case.rows / case.S:.1f}" for part in (case.dense_bytes, *moved)]
            yield {
                "batch": f"{case.B}",
                "heads": f"{case.Hq}/{case.Hkv}",
                "S": length(case.S),
                "bits": f"{setting.key_bits}",
                **dict(zip(("dense, bytes per key", "scores", "select", "attend"), per_key, strict=True)),
                "bytes allow": f"{case.dense_bytes / sum(moved):.2f}",
                **_left(case, moved, case.bar if setting == case.settings[0] else None, "SparQ"),
            }


def _saap() -> Iterable[Cells]:
    """Bytes of a step against dense."""
    made = cases.saap_cases([64 * 1024, *cases.SAAP_BARS], [1], [LLAMA], "float16")
    for case in sorted(made, key=lambda case: case.S):
        assert isinstance(case, SaapCase)
        for setting in case.settings:
            moved = case.parts(setting)
            megabytes = [f"{part / 1e6:.1f}" for part in moved] + [f"{case.dense_bytes / 1e6:.0f}"]
            yield {
                "S": length(case.S),
                "SAAP": str(setting),
                "keys attended": f"{case.attended(setting):,.0f}",
                **dict(zip(("network, MB", "list", "attend", "dense"), megabytes, strict=True)),
                "bytes allow": f"{case.dense_bytes / sum(moved):.1f}",
                **_left(case, moved, case.bar if setting == case.settings[0] else None, "SAAP"),
            }


def _sample() -> Iterable[Cells]:
    """Operations and bytes of both stages, and the speed that a bar asks of stage 2."""
    for S in (8192, 32768, 65536, 131072, 262144, 1048576):
        for density in DENSITIES if S == 131072 else (cases.HELD,):
            case = cases.Prompt("float16", LLAMA, 1, S)
            dense, sampled, listed = case.flops(), case.sampled_flops, case.flops(density)
            # Keys once from memory, and 8 bytes for a sampled query and key block, written once and read twice.
            moved = 2 * case.Hkv * S * case.D + 24 * case.Hq * case.block_size * case.layout.key_blocks
            bar = cases.PROMPT_BARS.get(S) if density == cases.HELD else None
            yield {
                "S": length(S),
                "density": f"{density:.0%}",
                "dense, PFLOP": f"{dense / 1e15:.3f}",
                "stage 1": f"{sampled / 1e15:.4f}",
                "stage 2": f"{listed / 1e15:.4f}",
                "operations allow": f"{dense / (sampled + listed):.1f}",
                "bar": "" if bar is None else f"{bar:g}",
                "dense at 790 TFLOP/s, ms": f"{1e3 * dense / OPERATIONS:.1f}",
                "keys and parts of stage 1, MB": f"{moved / 1e6:.0f}",
                "share of dense speed for the bar": "" if bar is None else f"{bar * (sampled + listed) / dense:.0%}",
            }
