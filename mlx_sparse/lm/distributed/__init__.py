"""One model or one context on several ranks of MLX's distributed runtime.

`ranks` checks that all ranks run the same command. Tensor and pipeline parallelism, where mlx-lm shards the model, need
nothing else. The other modules shard the context: each rank runs the whole model on the same tokens and stores the keys
and values of its own positions (`mlx_sparse.cache.sharded_cache`). `context` dispatches the attention calls and saves
prompt caches, `rank_attention` attends, `sharded_sparq` is SparQ's auxiliary state, and `exchange` sends.
"""
