"""Run the decode methods that the papers on SparQ and SAAP compare with: Streaming, H2O, FlexGen and OracleTopK.

Each of them shows one limit: fixed positions, past attention, exact scores of all keys, or the best possible selection.
They exist for comparisons, so they have no kernels.

Equations: docs/spec/sparq.md, (sparq.13) to (sparq.15) and "Baselines".
"""
