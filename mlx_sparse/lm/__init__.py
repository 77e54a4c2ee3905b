"""mlx-lm integration: `enable` a model, or the command-line option ``--attn``.

How it works: every attention layer of mlx-lm calls one function, `mlx_lm.models.base.scaled_dot_product_attention`, and
hands it the layer's cache. `seam` replaces that function in the modules of an enabled model; `plan` decides per call
whether the cache attends sparsely and counts what it decided, `figures` what was kept; `command` adds the option to
mlx-lm's commands. What a method does besides attending is in its `hooks`: `h2o` counts what dense prompts attend to,
`saap` keeps indices of queries and keys before RoPE. `rope` has those, and `tracing.observe` shows them of a model
that is not enabled. `drafts` generates the tokens of dense attention with sparse drafts; `slices` shares one context
out.
"""

from .model import disable, enable, lossless, report, sparse

__all__ = ["disable", "enable", "lossless", "report", "sparse"]
