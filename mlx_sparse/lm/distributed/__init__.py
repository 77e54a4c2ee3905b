"""One model or one context on several ranks of MLX's distributed runtime.

`ranks` checks that all ranks run the same command. Nothing else is needed if mlx-lm cuts the model (tensor, pipeline).
The other modules shard the context: every rank runs the whole model on the same tokens and has the keys and values of
its own positions (`mlx_sparse.cache.sharded_cache`). `context` dispatches the attention calls, `decode` and `prefill`
attend, `exchange` sends, `files` saves prompt caches.
"""
