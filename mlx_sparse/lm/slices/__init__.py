"""Context sharding: every rank of MLX's distributed runtime holds a share of the keys and values of each layer.

All ranks run the whole model on the same tokens; what they share is attention and its caches. `Shares` says which
positions are whose, `SlicedKVCache` keeps them, `SliceCall` stands where `lm.call.Call` stands otherwise.
"""
