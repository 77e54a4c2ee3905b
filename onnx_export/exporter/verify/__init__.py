"""Check that a finished file computes the logits that MLX computes with the same weights.

MLX runs the model in float32, and once more with embeddings disturbed as much as rounding errors would disturb them:
what that does to the logits says how close the file must come. Caches of half precision round more than that, and may
swap the keys that a sparse step chooses. So a copy of the file with float32 caches, whose sparse step comes early, is
held to that, and the file itself must come as close as MLX does when it rounds what the caches hold. SampleAttention
is compared in a copy of the first layers, on a prompt of several small blocks, and so are coded keys, after a prompt
that fills a group of them and a step that fills another: MLX would take minutes for all layers.
"""
