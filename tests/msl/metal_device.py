"""Print MLX's Metal device and run one of our kernels. Fail without a device or with a wrong result.

python tests/msl/metal_device.py
"""

from __future__ import annotations

import json
import sys

import mlx.core as mx
import numpy as np

from mlx_sparse.core.select.metal import merge
from mlx_sparse.tools.environment import machine


def main() -> int:
    """Run the command and return the exit code."""
    if not mx.metal.is_available():
        print("metal_device.py: error: expected a Metal device, got none.", file=sys.stderr)
        return 1
    print(json.dumps(machine() | {"device_info": mx.device_info()}, indent=1, default=str))
    order = np.random.default_rng(0).permutation(9000)
    bits, indices = (mx.array(row, dtype)[None, None] for row, dtype in ((order, mx.uint32), (range(9000), mx.int32)))
    chosen = np.array(merge(bits, indices, 100)[1])
    if not np.array_equal(chosen[0, 0], np.sort(np.argsort(-order)[:100])):
        print(f"metal_device.py: error: expected the 100 best of 9,000 keys, got {chosen}.", file=sys.stderr)
        return 1
    print("A kernel ran with the correct result.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
