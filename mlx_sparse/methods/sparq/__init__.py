"""Find the keys that matter from the few largest components of the query, then attend exactly to those keys.

A few components carry most of a query, so their partial dot products rank the keys almost like complete ones. A decode
step therefore reads ``rank`` of D components of all keys, and complete rows of only ``top_k`` keys.

Equations: docs/spec/sparq.md, (sparq.1) to (sparq.12) and (sparq.16) to (sparq.26).
"""
