"""Score all keys for a few sampled queries of a prefill chunk, and let the other queries attend to the best key blocks.

Neighboring queries attend to the same columns (key blocks) and slashes (distances), so a sample reveals both. Each head
keeps the fewest columns and slashes that cover a given share of its sample's attention.

Equations: docs/spec/sample.md, (sample.1) to (sample.11).
"""
