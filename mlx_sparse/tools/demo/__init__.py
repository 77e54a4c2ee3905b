"""`mlx-sparse demo`: a real model answers a question about a long text, densely and sparsely."""
