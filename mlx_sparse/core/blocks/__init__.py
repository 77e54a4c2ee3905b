"""Select key blocks in prefill, and attend exactly to listed key blocks (`attend_blocks`)."""
