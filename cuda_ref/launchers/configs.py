"""Define tile sizes, warps and stages by architecture, in an explicit table so that all runs are equal.

tests/kernels/test_triton_aot.py compiles the table for every architecture in it and rejects register spills, tiles that
do not fit and scalar loads. The values satisfy these checks. They were not timed, because no GPU was available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

HEAD_DIMS = (16, 256)  # smallest and largest head dim of the tiles
LARGEST_GROUP = 16  # largest number of query heads per KV head of the tiles


@dataclass(frozen=True)
class Tiles:
    """Tile of one program.

    Attributes:
        elements: number of elements of the key tile that is loaded at a time, for two bytes per element.
        warps: number of warps of 32 threads, for two bytes per element.
        stages: number of stages of the software pipeline.
    """

    elements: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """Tiles of one architecture: for the score kernels, for `attend` with a list, and for `attend` without a list."""

    scores: Tiles
    listed: Tiles
    dense: Tiles


# By compute capability. A device uses the nearest entry that is not above its own capability.
METHODS: Mapping[int, Config] = {
    80: Config(Tiles(8192, 4, 3), Tiles(4096, 4, 2), Tiles(8192, 4, 3)),
    90: Config(Tiles(8192, 4, 3), Tiles(4096, 4, 2), Tiles(8192, 4, 3)),
    100: Config(Tiles(8192, 4, 3), Tiles(4096, 4, 2), Tiles(8192, 4, 3)),
}


@dataclass(frozen=True)
class BlockTile:
    """Tile of one program of the prefill kernels.

    Attributes:
        queries: number of queries of the tile.
        keys: number of keys that are loaded at a time.
        warps: number of warps of 32 threads.
        stages: number of stages of the software pipeline.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# For two bytes per element, by compute capability, largest head dim and block size.
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
    """Tile of one program of a query network's layer.

    Attributes:
        columns: number of weight columns of the program.
        rows: number of weight rows that are loaded at a time.
        warps: number of warps of 32 threads.
        stages: number of stages of the software pipeline.
    """

    columns: int
    rows: int
    warps: int
    stages: int


COLUMNS = (64, 32, 16)  # possible weight columns of a program of a query network's layer
MOST_ROWS = 256  # maximum rows of a tile: with more, short rows need too many registers
SELECT_WARPS = {1024: 8, 2048: 8, 4096: 8}  # warps of `top_k_select` by the keys of a tile
WITHOUT_A_GPU = 4  # assumed number of processors, so that the interpreter merges a few splits


def config(device: torch.device) -> Config:
    """Return the row of the table for ``device``."""
    return METHODS[nearest(device)]


def block_tile(device: torch.device, D: int, block_size: int, itemsize: int) -> BlockTile:
    """Return the tile of `attend_blocks` on this device."""
    if itemsize > 2:
        return WITHOUT_MATRIX_UNITS
    tiles = BLOCK_TILES[nearest(device)]
    return tiles[next(most for most in tiles if D <= most)][block_size]


def sample_tile(block_size: int, itemsize: int) -> BlockTile:
    """Return the tile of `sample_scores`. It accumulates no values, so two programs fit on every processor."""
    if itemsize > 2:
        return BlockTile(32, 32, 4, 2)
    return BlockTile(block_size, min(block_size, 64), 8 if block_size == 128 else 4, 2)


def columns(N: int, itemsize: int, queries: int, programs: int, device: torch.device) -> ColumnTile:
    """Return the tile of a layer with ``N`` outputs, with ``programs`` per column tile and ``queries`` per program.

    It is the widest tile that keeps all processors busy. With more queries fewer rows fit into registers.
    """
    wide = (width for width in COLUMNS if -(-N // width) * programs >= processors(device))
    return ColumnTile(next(wide, min(COLUMNS)), max(32, 2048 // (queries * itemsize)), 4, 6)


def nearest(device: torch.device) -> int:
    """Return the architecture in the tables that ``device`` uses."""
    known = [architecture for architecture in METHODS if architecture <= capability(device)]
    return max(known, default=min(METHODS))


@cache
def capability(device: torch.device) -> int:
    """Return the compute capability: 90 is sm_90."""
    if device.type != "cuda":
        return min(METHODS)
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    if device.type != "cuda":
        return WITHOUT_A_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def rows(tiles: Tiles, width: int, itemsize: int) -> int:
    """Return the rows of ``width`` elements in a tile: a power of 2, at least the 16 rows of the matrix units."""
    return min(MOST_ROWS, max(16, tiles.elements * 2 // (width * itemsize)))


def warps(tiles: Tiles, width: int, itemsize: int) -> int:
    """Return the warps of `attend`: one thread for each of ``width`` accumulators.

    The number is doubled for float32, which is multiplied without matrix units.
    """
    return max(tiles.warps * max(1, itemsize // 2), width // 32)


def score_warps(tiles: Tiles, width: int) -> int:
    """Return the warps of the score kernels: one thread for each component.

    With two components per thread the registers do not suffice. Two threads per component would load it twice.
    """
    return max(tiles.warps, width // 32)


def splits(items: int, rows: int, per_processor: int, device: torch.device) -> int:
    """Return the number of splits of ``items`` that keeps every processor busy, with ``rows`` programs per split."""
    return max(1, min(items, per_processor * processors(device) // rows))


def share(items: int, block: int, rows: int, per_processor: int, device: torch.device) -> int:
    """Return the items per program, in whole blocks, that keep every processor busy."""
    programs = max(1, per_processor * processors(device) // rows)
    return -(-max(1, -(-items // programs)) // block) * block
