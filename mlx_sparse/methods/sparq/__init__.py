"""SparQ."""
