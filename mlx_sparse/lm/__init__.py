"""Run models of mlx-lm and mlx-vlm with sparse attention: `enable` a model in Python, or add ``--attn`` to a command.

Every attention layer of mlx-lm calls `mlx_lm.models.base.scaled_dot_product_attention` with the layer's cache. mlx-vlm
has its own `scaled_dot_product_attention`. `seam` replaces both functions in the modules of an enabled model. `plan`
selects sparse or dense attention for each layer, and `call` runs the attention of one forward pass. `statistics`
counts the calls. `command` adds the options to the commands, and `variable` enables the models that other programs
load. Some methods need `hooks`: `h2o` accumulates attention scores during dense prefill, and `saap` assigns pre-RoPE
keys from `rope` to buckets. `speculative` implements lossless decoding. `ranks` checks that all ranks of a sharded
model run the same command.
"""

from .model import disable, enable, lossless, report, sparse

__all__ = ["disable", "enable", "lossless", "report", "sparse"]
