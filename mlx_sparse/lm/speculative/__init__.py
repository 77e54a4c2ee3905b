"""Self-speculative decoding (``--lossless``): sparse decode steps draft tokens, and one dense call checks them.

`generation` replaces mlx-lm's ``generate_step`` and rejects methods and models that cannot draft. `draft_length`
selects the number of drafts for each check. `rewind` removes rejected drafts from the caches.
"""
