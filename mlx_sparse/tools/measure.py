"""``mlx-sparse calibrate``: measure the crossover length of methods for a model on this machine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibrate import MODELLED, SECONDS, Calibration, Layer, describe, device_kind
from ..checks import ConfigError, Parser, check_int
from ..lm.loading import loading
from ..lm.model import disable, enable, plan_of
from ..methods import Method
from .bench.core import say

Served = dict[tuple[Method, Layer], int]  # layers that are alike are counted

if TYPE_CHECKING:
    from ..lm.plan import Plan


def main(argv: Sequence[str]) -> int:
    """Measure; return 0 if every threshold was measured or given, 1 if one of them is modelled."""
    parser = Parser(
        prog="mlx-sparse calibrate",
        description="Time dense and sparse attention in the shapes of a model's layers, and store the context length "
        "from which each method is faster on this machine. --attn does the same the first time that a context is long "
        "enough.",
    )
    parser.add_argument("--model", metavar="DIR_OR_REPO", required=True, help="a model that mlx-lm can load")
    parser.add_argument("--attn", metavar="METHOD", default="sample+sparq", help="as for --attn (default: %(default)s)")
    parser.add_argument("--attn-backend", default="auto", metavar="NAME", help="as for --attn-backend (default: auto)")
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="for each method and shape (default: 3 on a GPU, 10 on a CPU)"
    )
    parser.add_argument(
        "--prefill-step-size", type=int, default=2048, metavar="N", help="tokens of a prompt at a time (default: 2048)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(argv)
    seconds = SECONDS[device_kind()] if args.seconds is None else args.seconds
    if not 0 < seconds <= 3600:
        raise ConfigError(f"--seconds: expected a number from 0 to 3600, got {args.seconds:g}.")
    check_int("--prefill-step-size", args.prefill_step_size, 1)
    calibration = Calibration(seconds=seconds, chunk=args.prefill_step_size, say=say)
    with planned(args.model, args.attn, args.attn_backend, calibration) as plan:
        rows = rows_of(plan.layers, calibration, measures=True)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['layers']} layers, {row['shape']}: {row['attn']} {row['outlook']}")
    return 0 if all(row["how"] != MODELLED for row in rows) else 1


@contextlib.contextmanager
def planned(name: str, attn: str, backend: str, calibration: Calibration) -> Iterator[Plan]:
    """Yield the plan of a model that is loaded and not run."""
    from mlx_lm import load

    with loading(name):
        model: Any = load(name, lazy=True)[0]
    enable(model, attn, backend=backend, calibration=calibration)
    plan = plan_of(model)
    assert plan is not None
    plan.report.model = Path(name).name
    try:
        yield plan
    finally:
        disable(model)


def rows_of(served: Served, calibration: Calibration, *, measures: bool = False) -> list[dict[str, Any]]:
    """Return the crossover length of each kind of layers; with ``measures`` measure all that can be measured."""
    rows = []
    for (config, layer), count in served.items():
        found = calibration.measure(config, layer) if measures and config.measurable else None
        found = found or calibration.threshold(config, layer)
        row = {"attn": str(config), "backend": layer.backend, "shape": str(layer), "layers": count}
        rows.append(row | {"value": found.value, "how": found.how, "outlook": describe(config, found)})
    return rows
