"""Verify that an exported file computes the same logits as MLX with the same weights.

MLX runs the model in float32, and a second time with noise on the embeddings that is as large as rounding errors. The
difference of the two logits is the tolerance. Half-precision caches round more and may change the keys that a sparse
step selects, so two files are compared. A copy with float32 caches and an early sparse step must stay within the
tolerance. The tolerance of the file itself is the error of MLX if it rounds keys and values to the type of the caches.

SampleAttention and int4 scoring keys are compared in a copy of the first layers, because MLX would take minutes for all
layers. The prompt for SampleAttention has several small blocks. The prompt for int4 scoring keys fills a group of keys,
and the following step fills another group.
"""
