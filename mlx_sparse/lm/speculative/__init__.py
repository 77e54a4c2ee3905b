"""Run self-speculative decoding (``--lossless``): sparse decode steps draft tokens, and one dense call checks them.

`generation` replaces mlx-lm's ``generate_step`` and rejects methods and models that cannot draft tokens. `draft_length`
selects the number of draft tokens per check. `rewind` removes rejected draft tokens from the caches.
"""
