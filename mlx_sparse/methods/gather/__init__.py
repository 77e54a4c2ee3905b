"""Score all earlier keys for a few sampled queries of a chunk, gather the best keys, and run the stock dense kernel.

Every KV head selects single keys, not blocks. The gathered keys and the chunk's own keys are contiguous, so that any
dense kernel can attend to them, at any head dim.

Equations: docs/spec/gather.md, (gather.1) to (gather.10).
"""
