"""Run the prefill methods that the paper on SampleAttention compares with: fixed patterns and hashes.

MInference, BigBird and StreamingPrefill attend to patterns of key blocks with a fixed budget. HyperAttention and
HashSparse expect queries and keys with large scores to have equal hashes.

Equations: docs/spec/sample.md, (sample.12) to (sample.18).
"""
