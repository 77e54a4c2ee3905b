"""Which kernel MLX attends densely with: its rule for one query per head, as of MLX 0.32.

MLX chooses by the last letter of the GPU's architecture: g (base and Pro chips), s (Max), d (Ultra).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Heads and head dim of one attention layer."""

    Hq: int
    Hkv: int
    D: int

    @property
    def G(self) -> int:
        return self.Hq // self.Hkv

    def __str__(self) -> str:
        return f"{self.Hq}x{self.Hkv}x{self.D}"


@dataclass(frozen=True)
class DenseKernel:
    """A kernel of MLX and into how many parts it cuts the keys; several parts take a second launch to merge."""

    name: str
    blocks: int

    @property
    def launches(self) -> int:
        return 1 if self.blocks == 1 else 2


def dense_kernel(letter: str, shape: Shape, S: int) -> DenseKernel:
    """What `mx.fast.scaled_dot_product_attention` runs for one query per head and ``S`` keys."""
    G = shape.G
    if not (letter in "sd" and S >= 1024) and not (G > 1 and S >= 4096):
        return DenseKernel("sdpa_vector", 1)
    shared = G == 8 and shape.D in (64, 128) and S >= 8192
    name = "sdpa_vector_2pass_1_gqa" if shared else "sdpa_vector_2pass_1"
    return DenseKernel(name, {"g": _base, "s": _max, "d": _ultra}[letter](G, S))


def _base(G: int, S: int) -> int:
    return 64 if G >= 4 else 32


def _max(G: int, S: int) -> int:
    if S <= 1024 or G <= 4:
        return 64
    return next((blocks for limit, blocks in ((8192, 128), (32768, 256), (65536, 512)) if limit >= S), 1024)


def _ultra(G: int, S: int) -> int:
    if G <= 2:
        return 256 if S > 8192 else 128
    if G < 6 or S < 16384:
        return 128
    return 512 if S < 65536 else 1024
