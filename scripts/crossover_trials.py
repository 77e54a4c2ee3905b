#!/usr/bin/env python3
"""Calibrate many times, and check that sparse decoding at the calibrated length is not slower than dense decoding.

python scripts/crossover_trials.py [--trials 50] [--fast-blas] [--attn sparq] > trials.jsonl

Each trial measures the crossover length. Then the trial times dense and sparse decode steps at the measured length,
independently of the first measurement. The trials are printed to standard output, and a summary table to standard
error. 50 trials take about 6 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from statistics import median

import mlx.core as mx
from tqdm import trange

from mlx_sparse.calibrate import Calibration, Layer
from mlx_sparse.methods import NEVER, Step, parse
from mlx_sparse.tools.assets import blas
from mlx_sparse.tools.formats import table

SHAPES = {"9x3x64": (3, 3, 64), "4x1x256": (1, 4, 256), "16x8x128": (8, 2, 128)}  # KV heads, G, D
SECONDS = 4.0  # seconds of independent timing per trial
SLOWER = 0.97  # dense over sparse time: below this ratio a trial counts as slower


def main() -> int:
    """Run the trials. Return 1 if sparse attention was more than 3 % slower than dense attention in any trial."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--attn", default="sparq")
    blas.add_option(parser)
    args = parser.parse_args()
    blas.restart_script(args.fast_blas)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no earlier measurement is read, and none is replaced
        rows = [trial(args.attn, list(SHAPES)[number % len(SHAPES)]) for number in trange(args.trials, unit="trial")]
    for row in rows:
        print(json.dumps(row))
    print(summary(rows), file=sys.stderr)
    return int(any(is_slower(row) for row in rows))


def trial(attn: str, shape: str) -> dict[str, object]:
    """Measure the crossover length of a layer of ``shape``, and time dense and sparse decode steps at that length."""
    heads, G, D = SHAPES[shape]
    (config,) = parse(attn)
    config = config.for_model(qk_norm=False, grouped=G > 1)
    layer = Layer("ops", Step(heads, G, D, 4), mx.float32)
    calibration = Calibration(measures=True)
    found = calibration.measure(config, layer)
    assert found is not None and found.value < NEVER
    S, pairs = int(found.value), list[tuple[float, float]]()
    for _ in range(4):
        pairs += calibration.pairs(config, layer, S, SECONDS / 4)
    ratio = median(dense / sparse for dense, sparse in pairs)
    return {"shape": shape, "attn": attn, "keys": S, "best": found.best, "busy": found.busy, "ratio": round(ratio, 3)}


def is_slower(row: dict[str, object]) -> bool:
    """Return True if sparse steps at the calibrated length took more than 3 % longer than dense steps."""
    return float(str(row["ratio"])) < SLOWER


def summary(rows: list[dict[str, object]]) -> str:
    """Return a table with one row for each layer shape."""
    cells = []
    for shape in SHAPES:
        own = [row for row in rows if row["shape"] == shape]
        if own:
            keys, ratios = ([float(str(row[name])) for row in own] for name in ("keys", "ratio"))
            spread = f"{min(keys):,.0f} to {max(keys):,.0f}"
            slower = sum(map(is_slower, own))
            cells.append([shape, str(len(own)), spread, f"{min(ratios):.2f} to {max(ratios):.2f}", str(slower)])
    return table(["layer", "trials", "crossover, keys", "dense / sparse time there", "slower by over 3 %"], cells)


if __name__ == "__main__":
    sys.exit(main())
