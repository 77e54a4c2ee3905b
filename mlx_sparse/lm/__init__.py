"""mlx-lm integration: `enable` a model, or the command-line option ``--attn``.

Every attention layer of mlx-lm calls one function, `mlx_lm.models.base.scaled_dot_product_attention`, with the layer's
cache. `seam` replaces that function in the modules of an enabled model. `plan` decides how each layer attends, `call`
executes the plans and `figures` counts. `command` adds the options to mlx-lm's commands. The `hooks` of a method do the
work besides attention: `h2o` counts attention in dense prompts, `saap` updates indices of pre-RoPE keys, which `rope`
records. `speculative` is lossless decoding. `distributed` runs one command on several ranks.
"""

from .model import disable, enable, lossless, report, sparse

__all__ = ["disable", "enable", "lossless", "report", "sparse"]
