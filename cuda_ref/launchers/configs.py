"""Define tile sizes, warps and pipeline stages in fixed tables, for reproducible launches.

tests/backends/triton/test_triton_aot.py compiles every entry. The test rejects register spills, tiles
that do not fit and scalar loads. The values pass this test, but were not tuned by timing on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Tiles:
    """Key tile and launch options of one program of the decode kernels.

    Attributes:
        elements: number of key elements that are loaded at a time if an element has two bytes.
        warps: number of warps of 32 threads if an element has two bytes.
    """

    elements: int
    warps: int
    stages: int


# For the score kernels, attention to listed keys, and attention to all keys, on all architectures.
SCORES, LISTED, DENSE = Tiles(8192, 4, 3), Tiles(4096, 4, 2), Tiles(8192, 4, 3)


@dataclass(frozen=True)
class BlockTile:
    """Tile and launch options of one program of the prefill kernels.

    Attributes:
        keys: number of keys that are loaded at a time.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# For two bytes per element. The keys are compute capability, largest head dim, and block size. A device uses the
# largest compute capability that is not above its own.
BLOCK_TILES: Mapping[int, Mapping[int, Mapping[int, BlockTile]]] = {
    80: {
        64: {128: BlockTile(128, 64, 8, 3), 64: BlockTile(64, 64, 4, 3), 32: BlockTile(32, 32, 4, 3)},
        128: {128: BlockTile(128, 64, 8, 2), 64: BlockTile(64, 64, 8, 2), 32: BlockTile(32, 32, 4, 2)},
        256: {128: BlockTile(64, 64, 8, 2), 64: BlockTile(64, 64, 8, 2), 32: BlockTile(32, 32, 4, 2)},
    },
    90: {
        64: {128: BlockTile(128, 128, 8, 3), 64: BlockTile(64, 64, 4, 3), 32: BlockTile(32, 32, 4, 3)},
        128: {128: BlockTile(128, 128, 8, 2), 64: BlockTile(64, 64, 4, 3), 32: BlockTile(32, 32, 4, 3)},
        256: {128: BlockTile(128, 32, 8, 3), 64: BlockTile(64, 64, 8, 2), 32: BlockTile(32, 32, 4, 2)},
    },
    100: {
        64: {128: BlockTile(128, 128, 8, 3), 64: BlockTile(64, 64, 4, 3), 32: BlockTile(32, 32, 4, 3)},
        128: {128: BlockTile(128, 64, 8, 3), 64: BlockTile(64, 64, 4, 3), 32: BlockTile(32, 32, 4, 3)},
        256: {128: BlockTile(128, 32, 8, 2), 64: BlockTile(64, 64, 8, 2), 32: BlockTile(32, 32, 4, 2)},
    },
}
WITHOUT_MATRIX_UNITS = BlockTile(32, 32, 8, 2)  # for float32 on all architectures


@dataclass(frozen=True)
class ColumnTile:
    """Tile and launch options of one program that computes a layer of SAAP's query network.

    Attributes:
        rows: number of weight rows that are loaded at a time.
    """

    columns: int
    rows: int
    warps: int
    stages: int


COLUMNS = (64, 32, 16)  # possible values of ColumnTile.columns
MOST_ROWS = 256  # maximum rows of a tile; with more, tiles of small head dims need too many registers
SELECT_WARPS = {1024: 8, 2048: 8, 4096: 8}  # warps of `top_k_select` by number of keys per tile
WITHOUT_A_GPU = 4  # assumed number of processors, so that tests in the interpreter merge a few splits


def block_tile(device: torch.device, D: int, block_size: int, itemsize: int) -> BlockTile:
    """Return the tile of `attend_blocks` for head dim ``D`` and blocks of ``block_size`` queries on ``device``."""
    if itemsize > 2:
        return WITHOUT_MATRIX_UNITS
    tiles = BLOCK_TILES[nearest(device)]
    return tiles[next(most for most in tiles if D <= most)][block_size]


def sample_tile(block_size: int, itemsize: int) -> BlockTile:
    """Return the tile of `sample_scores`, which is small enough that a multiprocessor can run two programs."""
    if itemsize > 2:
        return BlockTile(32, 32, 4, 2)
    return BlockTile(block_size, min(block_size, 64), 8 if block_size == 128 else 4, 2)


def columns(N: int, itemsize: int, queries: int, programs: int, device: torch.device) -> ColumnTile:
    """Return the widest tile that keeps all processors busy, for a query network layer with ``N`` outputs.

    If no tile keeps all processors busy, return the narrowest tile.

    Args:
        queries: number of queries per program. The more queries, the fewer weight rows fit into registers.
        programs: number of programs per column tile.
    """
    wide = (width for width in COLUMNS if -(-N // width) * programs >= processors(device))
    return ColumnTile(next(wide, min(COLUMNS)), max(32, 2048 // (queries * itemsize)), 4, 6)


def nearest(device: torch.device) -> int:
    """Return the compute capability (such as 90) whose table entry ``device`` uses."""
    known = [architecture for architecture in BLOCK_TILES if architecture <= capability(device)]
    return max(known, default=min(BLOCK_TILES))


@cache
def capability(device: torch.device) -> int:
    """Return the compute capability of ``device`` as an integer, such as 90 for sm_90."""
    if device.type != "cuda":
        return min(BLOCK_TILES)
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of ``device``."""
    if device.type != "cuda":
        return WITHOUT_A_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def rows(tiles: Tiles, width: int, itemsize: int) -> int:
    """Return how many rows of ``width`` elements a tile has. Tensor cores need a power of 2, at least 16."""
    return min(MOST_ROWS, max(16, tiles.elements * 2 // (width * itemsize)))


def warps(tiles: Tiles, width: int, itemsize: int) -> int:
    """Return the number of warps of `attend`. Each of ``width`` accumulators gets at least one thread.

    The number is doubled for float32, because tensor cores do not multiply float32.
    """
    return max(tiles.warps * max(1, itemsize // 2), width // 32)


def score_warps(tiles: Tiles, width: int) -> int:
    """Return the number of warps of the score kernels. Each of ``width`` components gets at least one thread.

    If a thread had two components, the kernels would need too many registers.
    """
    return max(tiles.warps, width // 32)


def splits(items: int, rows: int, per_processor: int, device: torch.device) -> int:
    """Return the number of splits of ``items`` that keeps all processors busy. A split has ``rows`` programs."""
    return max(1, min(items, per_processor * processors(device) // rows))


def share(items: int, block: int, rows: int, per_processor: int, device: torch.device) -> int:
    """Return the number of items per program, which is a multiple of ``block``.

    The programs of all ``rows`` together keep all processors busy. ``items`` is the number of items per row.
    """
    programs = max(1, per_processor * processors(device) // rows)
    return -(-max(1, -(-items // programs)) // block) * block
