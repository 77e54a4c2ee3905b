"""Settings of SampleAttention for a model, found by trying them: behind ``mlx-sparse tune-sample``."""
