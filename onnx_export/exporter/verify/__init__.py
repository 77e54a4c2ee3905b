"""Verify that an exported file computes the same logits as MLX with the same weights.

MLX runs the model twice in float32. The second run adds noise as large as rounding errors to the embeddings. The
tolerance is twice the difference between the logits of the two runs.

Half-precision caches cause larger errors and may change the keys that a sparse step selects, so two files are verified.
The first file is a copy with float32 caches, whose attention is sparse even for short prompts. Its logits must be
within the tolerance. The second file is the exported file. For this file, the tolerance also includes the error of
rounding to the cache type.

SampleAttention and int4 scoring keys are verified on the first layers only, because all layers would take minutes. The
prompt for SampleAttention has several small blocks. The prompt for int4 scoring keys fills a group of keys, and the
following step fills another group.
"""
