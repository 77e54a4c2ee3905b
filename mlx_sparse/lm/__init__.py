"""mlx-lm integration: `enable` a model, or the command-line option ``--attn``.

How it works: every attention layer of mlx-lm calls one function, `mlx_lm.models.base.scaled_dot_product_attention`, and
passes it the layer's cache. `seam` replaces that function in the modules of an enabled model, `plan` decides how each
layer attends, `call` executes the plans, `figures` counts. `command` adds the options to mlx-lm's commands, and
`session` is one run of a command. The `hooks` of a method do what it needs besides attending: `h2o` counts attention
in dense prompts, `saap` keeps indices of pre-RoPE keys, which `rope` records. `tracing.observe` watches a model that is
not enabled. `speculative` is lossless decoding, `distributed` runs on several ranks.
"""

from .model import disable, enable, lossless, report, sparse

__all__ = ["disable", "enable", "lossless", "report", "sparse"]
