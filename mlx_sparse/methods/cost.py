"""When a method pays: what is known of machines, all engines together. Nothing here is of one method's mathematics."""

from __future__ import annotations

# Bytes that a layer's decode step has to save before SparQ's extra launches pay, by kind of GPU.
# Apple (base and Pro, Max, Ultra): the cautious end of a roofline model (docs/methods.md, "The model").
# NVIDIA: 20 microseconds of extra launches at 2.0, 4.3 and 8 TB/s, until docs/results/triton.md has measured it.
# Nothing here was measured.
ENOUGH_SAVED = {
    **{"g": 20 << 20, "s": 36 << 20, "d": 52 << 20},
    **{"sm_80": 40 << 20, "sm_90": 80 << 20, "sm_100": 160 << 20},
}

# KV heads whose query networks a GPU reads as fast as its memory delivers, by kind: one core reads that of a KV head,
# at 20 GB/s. This too is the cautious end of the model, and not measured.
ROUTING_HEADS = {"g": 8, "s": 27, "d": 40}

# Time that a listed row takes array operations over that of a row in MLX's dense attention (docs/results/speed.md).
GATHERED_ROW = 2.5

# Keys from which SampleAttention is on by default: about where the paper is no longer slower than dense.
SAMPLE_PAYS_FROM = 8192
# The share of block pairs up to which attending them is taken to be faster than attending densely. ops: measured on a
# CPU (docs/results/prefill.md). metal: not measured; what a kernel four times slower per block than MLX's would allow.
SAMPLE_PAYS_UP_TO = {"ops": 0.75, "metal": 0.22}
# A sample may be one of so many of a piece's queries: more cost what is left out (docs/results/prefill.md).
SAMPLE_SHARE = 8


def nvidia_kind(capability: int) -> str:
    """The key of `ENOUGH_SAVED` for a compute capability such as 90: the nearest one below it, or else the lowest."""
    known = sorted(int(kind[3:]) for kind in ENOUGH_SAVED if kind.startswith("sm_"))
    return f"sm_{max((lower for lower in known if lower <= capability), default=known[0])}"
