"""Implement ``mlx-sparse calibrate``: measure each method's crossover length for a model on this machine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..calibrate import MODELED, Calibration, describe
from ..calibrate.timing import Layer
from ..checks import ConfigError, Parser, check_int
from ..core.base import Method
from ..lm.loading import load_text_model
from ..lm.model import plan_of, sparse
from .bench.core import log

Served = dict[tuple[Method, Layer], int]  # number of layers for each method and layer shape

if TYPE_CHECKING:
    from ..lm.plan import Plan


def main(argv: Sequence[str]) -> int:
    """Run ``mlx-sparse calibrate``. Return 1 if any crossover length is only estimated, otherwise 0."""
    parser = Parser(
        prog="mlx-sparse calibrate",
        description="Time dense and sparse attention with the shapes of a model's layers, and store the crossover "
        "length of each method on this machine: the context length at which sparse attention becomes faster. Without "
        "this command, --attn measures at the first context that is long enough.",
    )
    parser.add_model("a model that mlx-lm can load")
    about = "as for mlx_lm.generate (default: %(default)s)"
    parser.add_argument("--attn", metavar="METHOD", default="sparq", help=about)
    parser.add_argument("--attn-backend", metavar="NAME", default="auto", help=about)
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="time per method and shape (default: 3 on a GPU, 10 on a CPU)"
    )
    parser.add_argument(
        "--prefill-step-size", type=int, default=2048, metavar="N", help="tokens of a prefill chunk (default: 2048)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.seconds is not None and not 0 < args.seconds <= 3600:
        raise ConfigError(f"--seconds: expected a number above 0 and at most 3600, got {args.seconds:g}.")
    if args.model is None:
        raise ConfigError("--model: expected a model that mlx-lm can load, got none.")
    check_int("--prefill-step-size", args.prefill_step_size, 1)
    calibration = Calibration(seconds=args.seconds, chunk=args.prefill_step_size, progress=log)
    with planned(args.model, args.attn, args.attn_backend, calibration) as plan:
        rows = rows_of(plan.layers, calibration, measures=True)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['layers']} layers, {row['shape']}: {row['attn']} {row['crossovers']}")
    return 0 if all(row["how"] != MODELED for row in rows) else 1


@contextlib.contextmanager
def planned(name: str, attn: str, backend: str, calibration: Calibration) -> Iterator[Plan]:
    """Load a model, enable sparse attention, and yield the plan. The model does not run. At the end, call `disable`."""
    model = load_text_model(name, lazy=True)[0]
    with sparse(model, attn, backend=backend, calibration=calibration) as report:
        report.model = Path(name).name
        plan = plan_of(model)
        assert plan is not None
        yield plan


def rows_of(served: Served, calibration: Calibration, *, measures: bool = False) -> list[dict[str, object]]:
    """Return one row for each method and layer shape, with the crossover length in keys.

    If ``measures`` is True, first measure every crossover length that can be measured.
    """
    rows = []
    for (config, layer), count in served.items():
        found = calibration.measure(config, layer) if measures and config.measurable else None
        found = found or calibration.threshold(config, layer)
        row = {"attn": str(config), "backend": layer.backend, "shape": str(layer), "layers": count}
        row["measurable"] = config.measurable
        rows.append(row | {"value": found.value, "how": found.how, "crossovers": describe(config, found)})
    return rows
