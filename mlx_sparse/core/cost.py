"""Define constants for estimating when sparse attention is faster than dense attention."""

from __future__ import annotations

import os

PROCESSORS = os.cpu_count() or 1

# Bytes that a decode step of one layer must save to outweigh SparQ's additional work, by device. GPUs are not measured.
# Apple (base and Pro, Max, Ultra): conservative end of a roofline model (docs/methods.md, "The model").
# NVIDIA: 20 microseconds of additional launches at 2.0, 4.3 and 8 TB/s. cpu: from
# timings of one AMD EPYC. More processors may speed up dense attention, but not the additional work.
ENOUGH_SAVED = {
    **{"g": 20 << 20, "s": 36 << 20, "d": 52 << 20},
    **{"sm_80": 40 << 20, "sm_90": 80 << 20, "sm_100": 160 << 20},
    "cpu": PROCESSORS * (3 << 20),
}

# Number of KV heads whose query networks a GPU reads at full memory bandwidth, by kind of GPU. One core reads the
# network of one KV head at 20 GB/s. The numbers are conservative ends of a model, and not measured.
ROUTING_HEADS = {"g": 8, "s": 27, "d": 40}

# Time of a row in a sparse step, relative to a row of dense attention, from timings. cpu: for one processor,
# with SAAP's routing, which array operations run.
GATHERED_ROW = {"ops": 2.5, "cpu": 8.0}

# Number of keys from which SampleAttention is used with ranges, which are tuned for the model. The default alphas lose
# copies at 4,096 and 8,192 tokens (docs/results/prefill.md), so without ranges, prefill stays dense.
SAMPLE_TUNED_BELOW = 8192
# Largest density at which attending to the selected blocks is assumed to be faster than dense attention. ops, cpu:
# from timings of single chunks. metal: not measured; assumes a kernel four times slower per block than MLX's.
SAMPLE_DENSE_ABOVE = {"ops": 0.75, "cpu": 0.8, "metal": 0.22}
# At most 1 / SAMPLE_SHARE of the queries of a chunk are sampled. A larger sample costs more than it saves.
SAMPLE_SHARE = 8


def nvidia_kind(capability: int) -> str:
    """Return a key of `ENOUGH_SAVED`, such as "sm_90", for an NVIDIA GPU with the given compute ``capability``.

    The result is the highest key that is not above ``capability``. If all keys are above it, return the lowest key.
    """
    known = sorted(int(kind[3:]) for kind in ENOUGH_SAVED if kind.startswith("sm_"))
    return f"sm_{max((lower for lower in known if lower <= capability), default=known[0])}"
