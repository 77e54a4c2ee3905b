"""Group the keys into buckets, and attend only to the buckets that a small network predicts for the query.

Queries and keys have different distributions, so the network learns which buckets receive a query's attention. It uses
pre-RoPE queries and keys, so a bucket fits at any distance; the first and last keys are always attended.

Equations: docs/spec/saap.md, (saap.1) to (saap.15).
"""
