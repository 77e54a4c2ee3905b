"""A model of the time of sparq, saap or sample on Apple's chips, or of what bytes allow on NVIDIA's: no measurement.

python scripts/roofline.py [--of apple|cuda] [--attn METHOD] [-o FORM] [--out FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import by_method

from mlx_sparse.methods import Method

METHODS = ("sparq", "saap", "sample")


def apple(config: Method) -> by_method.Found:
    """A decode step or a prompt on Apple's chips."""
    import roofline_sample
    import roofline_steps

    model = {
        "sparq": (roofline_steps.sparq_rows, roofline_steps.sparq_text),
        "saap": (roofline_steps.saap_rows, roofline_steps.saap_text),
        "sample": (roofline_sample.rows, roofline_sample.text),
    }
    rows, text = model[config.name]
    found = rows(config)  # type: ignore[operator]
    return found, text(found, config)  # type: ignore[operator]


def cuda(config: Method) -> by_method.Found:
    """What the bars of docs/results/triton.md ask for on an H200; runs without mlx, with torch and triton."""
    import roofline_cuda as model

    by_method.bare(config)
    return model.found(config.name)


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").partition("\n")[0]
    kinds = {"apple": dict.fromkeys(METHODS, apple), "cuda": dict.fromkeys(METHODS, cuda)}
    return by_method.main(argv, __file__, about, kinds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
