"""Print MLX's Metal device and run one of our kernels. Fail without a device or with a wrong result.

python tests/msl/metal_device.py
"""

from __future__ import annotations

import json
import sys

import mlx.core as mx
import numpy as np

from mlx_sparse.core.select.metal import top_k_select
from mlx_sparse.tools.environment import machine


def main() -> int:
    """Run the command and return the exit code."""
    if not mx.metal.is_available():
        print("metal_device.py: error: expected a Metal device, got none.", file=sys.stderr)
        return 1
    print(json.dumps(machine() | {"device_info": mx.device_info()}, indent=1, default=str))
    scores = np.random.default_rng(0).permutation(9000).astype(np.float32)[None, None]
    chosen = np.array(top_k_select(mx.array(scores), top_k=100, local_window=0, left_padding=None))
    if not np.array_equal(chosen[0, 0], np.sort(np.argsort(-scores[0, 0])[:100])):
        print(f"metal_device.py: error: expected the 100 best of 9,000 keys, got {chosen}.", file=sys.stderr)
        return 1
    print("A kernel ran with the correct result.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
