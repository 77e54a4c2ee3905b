"""Self-speculative decoding (``--lossless``): sparse decode steps draft tokens, one dense call checks several.

`generation` replaces mlx-lm's ``generate_step`` and refuses methods and models that cannot draft. `draft_length`
selects how many tokens are drafted. `rewind` removes rejected drafts from the caches.
"""
