"""Bytes that the Metal kernels of sparq, saap or sample and MLX's own move, counted in the harness of tests/msl.

python scripts/traffic.py [--attn METHOD] [-o FORM] [--out FILE]

Runs on Linux; needs a clang or the test extra, which brings one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import by_method
import traffic_packed
import traffic_saap
import traffic_sample
import traffic_sparq

from mlx_sparse.checks import ConfigError
from mlx_sparse.methods import Method

TESTS = Path(__file__).resolve().parents[1] / "tests"
MODULES: dict[str, Any] = {"sparq": traffic_sparq, "saap": traffic_saap, "sample": traffic_sample}
MORE: dict[str, tuple[Any, ...]] = {"sparq": (traffic_packed,)}


def count(config: Method) -> by_method.Found:
    """What a decode step of the method, or a step of a prompt, moves.

    Raises:
        ConfigError: the package `msl` of this checkout cannot run here, or has no compiler; or the method has
            parameters where only the paper's are counted.
    """
    module = MODULES[config.name]
    if not module.ANY_PARAMETERS:
        by_method.bare(config)
    if sys.platform != "linux":
        raise ConfigError(f"traffic.py: expected Linux, where the harness of tests/msl runs, got {sys.platform}.")
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    import msl

    try:
        found = [(counted, counted.measure(msl, config)) for counted in (module, *MORE.get(config.name, ()))]
    except msl.CompileError as error:
        raise ConfigError(f"traffic.py: {error}") from None
    texts = [counted.text(rows, config) for counted, rows in found]
    return [row.as_dict() for _, rows in found for row in rows], "\n\n".join(texts)


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").partition("\n")[0]
    return by_method.main(argv, __file__, about, {"apple": dict.fromkeys(MODULES, count)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
