"""Run mlx-lm models with sparse attention: `enable` a model in Python, or pass ``--attn`` to an mlx-lm command.

Every attention layer of mlx-lm calls `mlx_lm.models.base.scaled_dot_product_attention` with the layer's cache.
`seam` replaces this function in the modules of an enabled model. `plan` selects sparse or dense attention for each
layer, `call` runs the attention of one forward pass, and `statistics` and `recall` count sparse calls. `command` adds
the options to mlx-lm's commands. Some methods need `hooks`: `h2o` accumulates attention scores during dense prefill,
and `saap` assigns pre-RoPE keys from `rope` to buckets. `speculative` implements lossless decoding. `distributed` runs
models on several ranks.
"""

from .model import disable, enable, lossless, report, sparse

__all__ = ["disable", "enable", "lossless", "report", "sparse"]
