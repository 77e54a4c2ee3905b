"""Check that a finished file computes the logits that MLX computes with the same weights.

MLX runs the model in float32, and again with noise on the embeddings as large as rounding errors. The difference of
the two logits is the tolerance. Half-precision caches round more and may change the keys that a sparse step selects.
Therefore two files are compared. A copy with float32 caches and an early sparse step must stay within the tolerance.
The file itself must stay within the error of MLX when MLX rounds keys and values to the type of the caches.

SampleAttention and int4 scoring keys are compared in a copy of the first layers, because MLX would take minutes for all
layers. The prompts have several small blocks, or fill a group of keys before a step that fills another group.
"""
