"""Self-speculative decoding (``--lossless``): sparse decode steps draft tokens, one dense call checks several.

`generation` takes the place of mlx-lm's ``generate_step``, `draft_length` decides how many tokens are drafted, `rewind`
takes back what was written for drafts, `attention` attends the checks and `setup` refuses what cannot draft.
"""
