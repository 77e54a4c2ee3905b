"""Attend exactly to listed keys, or to all keys (`attend_indices`, `dense_attention`)."""
