"""Attend exactly to listed key blocks in prefill (`attend_blocks`)."""
