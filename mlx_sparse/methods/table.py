"""The literal table method x backend: which function runs what where.

Code is named by import strings relative to mlx_sparse, so that reading the table imports no backend. `registry` reads
it; everything that lists methods or backends (help, README, matrix, pictures) is derived from it and from `METHODS`.
"""

from __future__ import annotations

from collections.abc import Mapping

BACKENDS: Mapping[str, str] = {
    "oracle": "NumPy float64, everywhere: the specification that the tests compare with",
    "ops": "MLX array operations, everywhere MLX runs (CPU, Metal, CUDA)",
    "metal": "custom Metal kernels, on Apple GPUs; under test on any Linux machine (tests/msl)",
    "triton": "Triton kernels for torch tensors, on NVIDIA GPUs; slowly on any Linux machine with TRITON_INTERPRET=1",
    "onnx": "exported files on any ONNX runtime: the operators as functions of standard ones",
    "ort": "exported files on ONNX Runtime with native kernels for the CPU (AVX2, AVX-512, NEON)",
}

# Backends that take no MLX arrays, and what they take.
FOREIGN: Mapping[str, str] = {
    "oracle": "it takes NumPy arrays: call the same function in mlx_sparse.oracle",
    "triton": "it takes torch tensors: call the same function in mlx_sparse.cuda_ref",
    **dict.fromkeys(("onnx", "ort"), "it runs exported files: export-onnx, then mlx-sparse run-onnx"),
}

# Backends that read whole cache buffers and a `length`, where a slice would be copied on every call.
WHOLE_BUFFERS = frozenset({"metal"})

# Methods of exported files are nodes: the operator of any of them as a model, and options of a session that runs it.
EXPORTED = {"onnx": "onnx_export:operator_model", "ort": "onnx_export:session_options"}

# Function by method and backend, then the functions that methods share.
FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "dense": {
        "oracle": "oracle:dense_attention",
        "ops": "ops.attend:dense_attention",
        "metal": "ops.attend:dense_attention",  # MLX's own kernel
        "triton": "cuda_ref.torch_functions:dense_attention",
        **EXPORTED,
    },
    "sparq": {
        "oracle": "oracle:sparq_attention",
        "ops": "ops.sparq:sparq_attention",
        "metal": "kernels.sparq:sparq_attention",
        "triton": "cuda_ref.launchers.sparq:sparq_attention",
        **EXPORTED,
    },
    "saap": {
        "oracle": "oracle:saap_attention",
        "ops": "ops.saap:saap_attention",
        "metal": "kernels.saap:saap_attention",
        "triton": "cuda_ref.launchers.saap:saap_attention",
        **EXPORTED,
    },
    "quest": {
        "oracle": "oracle:quest_attention",
        "ops": "ops.quest:quest_attention",
        "metal": "kernels.quest:quest_attention",
    },
    "streaming": {"oracle": "oracle:streaming_attention", "ops": "ops.baselines:streaming_attention"},
    "flexgen": {"oracle": "oracle:flexgen_attention", "ops": "ops.baselines:flexgen_attention"},
    "oracle_top_k": {"oracle": "oracle:oracle_top_k_attention", "ops": "ops.baselines:oracle_top_k_attention"},
    "h2o": {"oracle": "oracle:h2o_attention", "ops": "ops.baselines:h2o_attention"},
    "h2o_scores": {"oracle": "oracle:h2o_scores", "ops": "ops.baselines:h2o_scores"},
    "sample": {
        "oracle": "oracle:sample_attention",
        "ops": "ops.sample:sample_attention",
        "metal": "kernels.sample:sample_attention",
        "triton": "cuda_ref.launchers.sample:sample_prefill",
        **EXPORTED,
    },
    "minference": {"oracle": "oracle:minference_attention", "ops": "ops.prefill:minference_attention"},
    "bigbird": {"oracle": "oracle:bigbird_attention", "ops": "ops.prefill:bigbird_attention"},
    "streaming_prefill": {
        "oracle": "oracle:streaming_prefill_attention",
        "ops": "ops.prefill:streaming_prefill_attention",
    },
    "hyperattention": {"oracle": "oracle:hyperattention_attention", "ops": "ops.lsh:hyperattention_attention"},
    "hash_sparse": {"oracle": "oracle:hash_sparse_attention", "ops": "ops.lsh:hash_sparse_attention"},
    "sample_scores": {
        "oracle": "oracle:sample_scores",
        "ops": "ops.sample:sample_scores",
        "metal": "kernels.sample:sample_scores",
        "triton": "cuda_ref.api.parts:sample_scores",
    },
    "sample_select": {
        "oracle": "oracle:sample_select",
        "ops": "ops.sample:sample_select",
        "metal": "kernels.sample:sample_select",
        "triton": "cuda_ref.launchers.sample:sample_select",
    },
    "saap_assign": {
        "oracle": "oracle:saap_assign",
        "ops": "ops.kmeans:assign",
        "metal": "ops.kmeans:assign",  # a matrix product and a maximum, once per key
        "triton": "cuda_ref.torch_functions:saap_assign",
    },
    "saap_route": {
        "oracle": "oracle:saap_route",
        "ops": "ops.saap:saap_route",
        "metal": "kernels.saap:saap_route",
        "triton": "cuda_ref.launchers.saap:saap_route",
    },
    "saap_index": {
        "oracle": "oracle:saap_index",
        "ops": "ops.csr:saap_index",
        "metal": "ops.csr:saap_index",  # once every few hundred tokens
        "triton": "cuda_ref.api.parts:saap_index",
    },
    "saap_indices": {
        "oracle": "oracle:saap_indices",
        "ops": "ops.saap:saap_indices",
        "metal": "kernels.saap:saap_indices",
        "triton": "cuda_ref.api.parts:saap_indices",
    },
    "attend_blocks": {
        "oracle": "oracle:attend_blocks",
        "ops": "ops.blocks:attend_blocks",
        "metal": "kernels.blocks:attend_blocks",
        "triton": "cuda_ref.launchers.blocks:attend_blocks",
    },
    "attend_indices": {
        "oracle": "oracle:attend_indices",
        "ops": "ops.attend:attend_indices",
        "metal": "kernels.attend:attend_indices",
        "triton": "cuda_ref.launchers.attend:attend_indices",
    },
    "top_k_select": {
        "oracle": "oracle:top_k_select",
        "ops": "ops.select:top_k_select",
        "metal": "kernels.select:top_k_select",
        "triton": "cuda_ref.api.parts:top_k_select",
    },
    "code_keys": {
        "oracle": "oracle:code_keys",
        "ops": "ops.key_codes:code_keys",
        "metal": "ops.key_codes:code_keys",  # once every 64 tokens
        "triton": "cuda_ref.torch_functions:code_keys",
    },
    "key_spread": {
        "oracle": "oracle:key_spread",
        "ops": "ops.key_codes:key_spread",
        "metal": "ops.key_codes:key_spread",
        "triton": "cuda_ref.torch_functions:key_spread",
    },
    "page_bounds": {
        "oracle": "oracle:page_bounds",
        "ops": "ops.quest:page_bounds",
        "metal": "ops.quest:page_bounds",  # once in as many steps as a page has keys
    },
    "page_keys": {"ops": "ops.quest:page_keys", "metal": "ops.quest:page_keys"},  # a few numbers per page
    "quest_select": {
        "oracle": "oracle:quest_select",
        "ops": "ops.quest:quest_select",
        "metal": "kernels.quest:quest_select",
    },
    "sparq_select": {"oracle": "oracle:sparq_select", "ops": "ops.sparq:sparq_select"},
    # Not on the way of a decode step: array operations do for every backend.
    "dense_lse": {
        "ops": "ops.attend:dense_lse",
        "metal": "ops.attend:dense_lse",
        "triton": "cuda_ref.torch_functions:dense_lse",
    },
    "deviation": {
        "ops": "ops.sparq:deviation",
        "metal": "ops.sparq:deviation",
        "triton": "cuda_ref.torch_functions:deviation",
    },
    "masked_mean": {
        "ops": "ops.sparq:masked_mean",
        "metal": "ops.sparq:masked_mean",
        "triton": "cuda_ref.torch_functions:masked_mean",
    },
}

# What a cache begins for a method at its first step, if the method keeps anything beside keys and values: a
# `mlx_sparse.cache.state.State`.
STATES: Mapping[str, str] = {
    "sparq": "cache.sparq_state:SparQState",
    "h2o": "cache.h2o_state:Received",
    "quest": "cache.quest_state:QuestState",
}

# What a method does around a model and its calls, if attending is not all: `mlx_sparse.lm.hooks.ModelHooks`.
HOOKS: Mapping[str, str] = {
    "saap": "lm.saap:Buckets",
    "h2o": "lm.h2o:ObservedPrompts",
}
