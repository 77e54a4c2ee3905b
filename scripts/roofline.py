"""A model of the time of sparq, saap or sample on Apple's chips, or of what bytes allow on NVIDIA's: no measurement.

python scripts/roofline.py [--of apple|cuda] [--attn METHOD] [-o FORM] [--out FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import by_method

from mlx_sparse.methods import SAAP, Method, Sample, SparQ


def sparq(config: SparQ) -> by_method.Found:
    """A decode step on Apple's chips."""
    import roofline_sparq as model

    rows = model.rows(config)
    return rows, model.text(rows, config)


def saap(config: SAAP) -> by_method.Found:
    """A decode step on Apple's chips."""
    import roofline_saap as model

    rows = model.rows(config)
    return rows, model.text(rows, config)


def sample(config: Sample) -> by_method.Found:
    """A prompt on Apple's chips."""
    import roofline_sample as model

    rows = model.rows(config)
    return rows, model.text(rows, config)


def cuda(config: Method) -> by_method.Found:
    """What the bars of docs/results/triton.md ask for on an H200; runs without mlx, with torch and triton."""
    import roofline_cuda as model

    by_method.bare(config)
    return model.found(config.name)


METHODS: dict[str, Any] = {"sparq": sparq, "saap": saap, "sample": sample}


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").partition("\n")[0]
    return by_method.main(argv, __file__, about, {"apple": METHODS, "cuda": dict.fromkeys(METHODS, cuda)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
