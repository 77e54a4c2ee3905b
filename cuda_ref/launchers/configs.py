"""Tile sizes, warps and stages by architecture: an explicit table, so that runs are the same everywhere.

The table is compiled for every architecture it names by tests/kernels/test_triton_aot.py, which rejects spills,
tiles that do not fit and scalar loads. It was chosen so, and not by timing: there was no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

HEAD_DIMS = (16, 256)  # what the tiles are made for
LARGEST_GROUP = 16  # query heads of a KV head, likewise


@dataclass(frozen=True)
class Tiles:
    """What one program works on.

    Attributes:
        elements: of the tile of keys that is loaded at a time, for two bytes each.
        warps: 32 threads each, for two bytes an element.
        stages: of the software pipeline.
    """

    elements: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """Tiles of one architecture: `sparq_scores` and its kind, `attend` with a list, and without."""

    scores: Tiles
    listed: Tiles
    dense: Tiles


# By compute capability; a device takes the nearest one below it.
METHODS: Mapping[int, Config] = {
    80: Config(Tiles(8192, 4, 3), Tiles(4096, 4, 2), Tiles(8192, 4, 3)),
    90: Config(Tiles(8192, 4, 3), Tiles(4096, 4, 2), Tiles(8192, 4, 3)),
    100: Config(Tiles(8192, 4, 3), Tiles(4096, 4, 2), Tiles(8192, 4, 3)),
}


@dataclass(frozen=True)
class BlockTile:
    """What one program of a prompt's attention works on.

    Attributes:
        queries: of the tile.
        keys: that are loaded at a time.
        warps: 32 threads each.
        stages: of the software pipeline.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# For two bytes an element, by compute capability, largest head dim and block size.
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
WITHOUT_MATRIX_UNITS = BlockTile(32, 32, 8, 2)  # float32, everywhere


@dataclass(frozen=True)
class ColumnTile:
    """What one program of a query network's layer works on.

    Attributes:
        columns: of the weights, that it multiplies with.
        rows: of the weights, that are loaded at a time.
        warps: 32 threads each.
        stages: of the software pipeline.
    """

    columns: int
    rows: int
    warps: int
    stages: int


COLUMNS = (64, 32, 16)  # that a program may take of a query network's layer
MOST_ROWS = 256  # of a tile: with more, registers run out where a row is short
SELECT_WARPS = {1024: 8, 2048: 8, 4096: 8}  # of `top_k_select` by the keys of a tile
WITHOUT_A_GPU = 4  # processors: a few splits, so that the interpreter merges some


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
    """Return the tile of `sample_scores`, which keeps no weighted values: two programs fit on every processor."""
    if itemsize > 2:
        return BlockTile(32, 32, 4, 2)
    return BlockTile(block_size, min(block_size, 64), 8 if block_size == 128 else 4, 2)


def columns(N: int, itemsize: int, queries: int, programs: int, device: torch.device) -> ColumnTile:
    """Return the tile of a layer with ``N`` outputs, for so many ``programs`` each, with so many ``queries``.

    The widest that keeps all processors busy; with more queries fewer rows fit into registers.
    """
    wide = (width for width in COLUMNS if -(-N // width) * programs >= processors(device))
    return ColumnTile(next(wide, min(COLUMNS)), max(32, 2048 // (queries * itemsize)), 4, 6)


def nearest(device: torch.device) -> int:
    """Return the architecture of the tables that ``device`` takes."""
    known = [architecture for architecture in METHODS if architecture <= capability(device)]
    return max(known, default=min(METHODS))


@cache
def capability(device: torch.device) -> int:
    """Compute capability: 90 is sm_90."""
    if device.type != "cuda":
        return min(METHODS)
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors."""
    if device.type != "cuda":
        return WITHOUT_A_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def rows(tiles: Tiles, width: int, itemsize: int) -> int:
    """Return the rows of ``width`` elements in a tile, a power of 2; at least 16, which the matrix units take."""
    return min(MOST_ROWS, max(16, tiles.elements * 2 // (width * itemsize)))


def warps(tiles: Tiles, width: int, itemsize: int) -> int:
    """Return the warps of `attend`: one thread for each of ``width`` accumulators, twice as many for float32.

    float32 is multiplied without matrix units.
    """
    return max(tiles.warps * max(1, itemsize // 2), width // 32)


def score_warps(tiles: Tiles, width: int) -> int:
    """Return the warps that score keys: one thread for each component.

    A thread that ranks two components runs out of registers; two threads that rank one component load it twice.
    """
    return max(tiles.warps, width // 32)


def splits(items: int, rows: int, per_processor: int, device: torch.device) -> int:
    """Return the parts of ``items`` that keep every processor busy; each part is of ``rows`` programs."""
    return max(1, min(items, per_processor * processors(device) // rows))


def share(items: int, block: int, rows: int, per_processor: int, device: torch.device) -> int:
    """Return the items of a program, in whole blocks, such that the programs keep every processor busy."""
    programs = max(1, per_processor * processors(device) // rows)
    return -(-max(1, -(-items // programs)) // block) * block
