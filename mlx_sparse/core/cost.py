"""Define constants for estimating when sparse attention is faster than dense attention."""

from __future__ import annotations

# Bytes that a decode step of one layer must save to outweigh SparQ's additional kernel launches, by kind of GPU. Not
# measured. Apple (base and Pro, Max, Ultra): conservative end of a roofline model (docs/methods.md, "The model").
# NVIDIA: 20 microseconds of additional launches at 2.0, 4.3 and 8 TB/s (docs/results/triton.md).
ENOUGH_SAVED = {
    **{"g": 20 << 20, "s": 36 << 20, "d": 52 << 20},
    **{"sm_80": 40 << 20, "sm_90": 80 << 20, "sm_100": 160 << 20},
}

# Number of KV heads whose query networks a GPU reads at full memory bandwidth, by kind of GPU. One core reads the
# network of one KV head at 20 GB/s. The numbers are conservative ends of a model, and not measured.
ROUTING_HEADS = {"g": 8, "s": 27, "d": 40}

# Time to attend to a gathered row in array operations, relative to a row of dense attention (docs/results/speed.md).
GATHERED_ROW = 2.5

# Number of keys from which SampleAttention is used by default. At about this length the paper reports no slowdown.
SAMPLE_DENSE_BELOW = 8192
# Largest density at which attending to the selected blocks is assumed to be faster than dense attention. ops: measured
# on a CPU (docs/results/prefill.md). metal: not measured; assumes a kernel four times slower per block than MLX's.
SAMPLE_DENSE_ABOVE = {"ops": 0.75, "cpu": 0.75, "metal": 0.22}
# At most 1 / SAMPLE_SHARE of the queries of a chunk are sampled. A larger sample costs more than it saves
# (docs/results/prefill.md).
SAMPLE_SHARE = 8


def nvidia_kind(capability: int) -> str:
    """Return a key of `ENOUGH_SAVED`, such as "sm_90", for an NVIDIA GPU with the given compute ``capability``.

    The result is the highest key that is not above ``capability``. If all keys are above it, return the lowest key.
    """
    known = sorted(int(kind[3:]) for kind in ENOUGH_SAVED if kind.startswith("sm_"))
    return f"sm_{max((lower for lower in known if lower <= capability), default=known[0])}"
