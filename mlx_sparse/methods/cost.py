"""Constants of the machine models that decide crossover lengths. No constant depends on the mathematics of a method."""

from __future__ import annotations

# Bytes that a layer's decode step has to save before SparQ's additional launches pay, by kind of GPU. Not measured.
# Apple (base and Pro, Max, Ultra): the cautious end of a roofline model (docs/methods.md, "The model").
# NVIDIA: 20 microseconds of additional launches at 2.0, 4.3 and 8 TB/s (docs/results/triton.md).
ENOUGH_SAVED = {
    **{"g": 20 << 20, "s": 36 << 20, "d": 52 << 20},
    **{"sm_80": 40 << 20, "sm_90": 80 << 20, "sm_100": 160 << 20},
}

# KV heads whose query networks a GPU reads at full memory bandwidth, by kind. One core reads the network of one KV head
# at 20 GB/s. These are the cautious ends of the model, and not measured.
ROUTING_HEADS = {"g": 8, "s": 27, "d": 40}

# Time of a listed row in array operations, relative to a row of MLX's dense attention (docs/results/speed.md).
GATHERED_ROW = 2.5

# Keys from which SampleAttention is on by default: about the length at which the paper reports no loss of speed.
SAMPLE_DENSE_BELOW = 8192
# Largest density at which attending the selected blocks is assumed to be faster than dense attention. ops: measured on
# a CPU (docs/results/prefill.md). metal: not measured; assumes a kernel four times slower per block than MLX's.
SAMPLE_DENSE_ABOVE = {"ops": 0.75, "metal": 0.22}
# At most one of this many queries of a chunk is sampled. A larger sample costs more than it saves
# (docs/results/prefill.md).
SAMPLE_SHARE = 8


def nvidia_kind(capability: int) -> str:
    """Return the key of `ENOUGH_SAVED` for a compute capability such as 90: the nearest lower one, or the lowest."""
    known = sorted(int(kind[3:]) for kind in ENOUGH_SAVED if kind.startswith("sm_"))
    return f"sm_{max((lower for lower in known if lower <= capability), default=known[0])}"
