"""SampleAttention."""
