"""Run a model on several ranks of MLX's distributed runtime. The ranks share the model or the context.

`ranks` checks that all ranks run the same command. Tensor and pipeline parallelism, in which mlx-lm shards the model,
need only `ranks`. The other modules shard the context. All ranks run the whole model on the same tokens, and each
rank stores a part of the keys and values (`mlx_sparse.cache.sharded_cache`). `context` dispatches attention calls and
saves prompt caches. `rank_attention` computes attention, `sharded_sparq` updates SparQ's auxiliary state, and
`exchange` runs collectives.
"""
