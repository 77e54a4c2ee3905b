"""Bytes that the Metal kernels of sparq, saap or sample and MLX's own move, counted in the harness of tests/msl.

python scripts/traffic.py [--attn METHOD] [-o FORM] [--out FILE]

Runs on Linux; needs a clang or the test extra, which brings one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import by_method
import traffic_saap
import traffic_sample
import traffic_sparq

from mlx_sparse.checks import ConfigError
from mlx_sparse.methods import SAAP, Sample, SparQ

T = TypeVar("T")

TESTS = Path(__file__).resolve().parents[1] / "tests"


def counted(measure: Callable[[Any], Sequence[T]]) -> Sequence[T]:
    """What ``measure`` counts with the package `msl` of this checkout.

    Raises:
        ConfigError: it cannot run here, or has no compiler.
    """
    if sys.platform != "linux":
        raise ConfigError(f"traffic.py: expected Linux, where the harness of tests/msl runs, got {sys.platform}.")
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    import msl

    try:
        return measure(msl)
    except msl.CompileError as error:
        raise ConfigError(f"traffic.py: {error}") from None


def sparq(config: SparQ) -> by_method.Found:
    """A decode step, with the settings of the paper."""
    by_method.bare(config)
    tables = counted(traffic_sparq.measure)
    return [row for table in tables for row in table.as_dicts()], traffic_sparq.text(tables)


def saap(config: SAAP) -> by_method.Found:
    """A decode step."""
    steps = counted(lambda msl: traffic_saap.measure(msl, config))
    return [step.as_dict() for step in steps], traffic_saap.text(steps, config)


def sample(config: Sample) -> by_method.Found:
    """A step of a prompt."""
    by_method.bare(config)
    rows = counted(traffic_sample.measure)
    return [row.as_dict() for row in rows], traffic_sample.text(rows)


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").partition("\n")[0]
    return by_method.main(argv, __file__, about, {"apple": {"sparq": sparq, "saap": saap, "sample": sample}})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
