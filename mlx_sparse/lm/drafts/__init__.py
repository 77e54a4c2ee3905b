"""Decoding with the tokens of dense attention: sparse attention drafts them, one dense call checks several.

`steps` is what mlx-lm generates with, `pace` decides how many tokens are drafted, `undo` takes back what was written
for drafts, `figures` says what came of them, `setup` refuses what cannot draft.
"""
