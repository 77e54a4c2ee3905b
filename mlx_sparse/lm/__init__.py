"""Integration in mlx-lm and mlx-vlm: `enable` a model, or the command-line option ``--attn``.

Every attention layer of mlx-lm calls `mlx_lm.models.base.scaled_dot_product_attention` with the cache of the layer, and
mlx-vlm has a function of the same name. `seam` replaces this function in the modules of an enabled model. `plan`
selects sparse or dense attention for each layer, `call` executes the plans, and `statistics` has the statistics of
sparse calls. `command` adds the options to the commands, and `variable` enables the models that other programs load.
Some methods have `hooks`: `h2o` sums the attention of dense prefill, and `saap` assigns pre-RoPE keys, which `rope`
finds, to buckets. `speculative` is lossless decoding. `distributed` supports several ranks.
"""

from .model import disable, enable, lossless, report, sparse

__all__ = ["disable", "enable", "lossless", "report", "sparse"]
