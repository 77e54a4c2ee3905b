"""List the function that runs each method on each backend.

The table contains import strings relative to mlx_sparse, because this module must not import a backend. `registry`
reads the table. The help, the README, the matrix and the plots list the methods and backends of this table.
"""

from __future__ import annotations

from collections.abc import Mapping

BACKENDS: Mapping[str, str] = {
    "oracle": "NumPy float64, everywhere: the reference that the tests compare with",
    "ops": "MLX array operations, everywhere MLX runs (CPU, Metal, CUDA)",
    "metal": "custom Metal kernels, on Apple GPUs; under test on any Linux machine (tests/msl)",
    "triton": "Triton kernels for torch tensors, on NVIDIA GPUs; slowly on any Linux machine with TRITON_INTERPRET=1",
    "onnx": "exported files on any ONNX runtime: the operators as functions of standard ones",
    "ort": "exported files on ONNX Runtime with native kernels for the CPU (AVX2, AVX-512, NEON)",
}

# Backends that do not accept MLX arrays, with the reason.
FOREIGN: Mapping[str, str] = {
    "oracle": "it takes NumPy arrays: call the same function in mlx_sparse.oracle",
    "triton": "it takes torch tensors: call the same function in mlx_sparse.cuda_ref",
    **dict.fromkeys(("onnx", "ort"), "it runs exported files: export-onnx, then mlx-sparse run-onnx"),
}

# Backends that take whole cache buffers and a `length`, because MLX would copy a slice on every call.
WHOLE_BUFFERS = frozenset({"metal"})

# In an exported file each method is a node. These functions build a model with one node, and run a model.
EXPORTED = {"onnx": "onnx_export:operator_model", "ort": "onnx_export:session_options"}


def _row(name: str, ops: str, metal: str = "", triton: str = "", *, oracle: str | None = None) -> dict[str, str]:
    """Return a dict from each backend that supports the function ``name`` to the import string of the function.

    ``ops``, ``metal``, ``triton`` and ``oracle`` are module names, or ``module:function`` if the function has a
    different name in this module. An empty string means that the backend does not support the function. By default,
    the oracle's module is the neighbor of the module in ``ops``.
    """
    oracle = ops.replace(".ops", ".oracle") if oracle is None else oracle
    modules = {"oracle": oracle, "ops": ops, "metal": metal, "triton": triton}
    return {key: module if ":" in module else f"{module}:{name}" for key, module in modules.items() if module}


SCORING_KEYS = "methods.sparq.oracle_codes"

# The methods come first, then shared functions. A comment "metal: ..." gives the reason why Metal uses `ops`.
FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "dense": _row("dense_attention", "core.attend.ops", "core.attend.ops", "cuda_ref.torch_functions") | EXPORTED,
    "sparq": _row("sparq_attention", "methods.sparq.ops", "methods.sparq.metal", "cuda_ref.launchers.sparq") | EXPORTED,
    "saap": _row("saap_attention", "methods.saap.ops", "methods.saap.metal", "cuda_ref.launchers.saap") | EXPORTED,
    "quest": _row("quest_attention", "methods.quest.ops", "methods.quest.metal"),
    "streaming": _row("streaming_attention", "methods.baselines.ops"),
    "flexgen": _row("flexgen_attention", "methods.baselines.ops"),
    "oracle_top_k": _row("oracle_top_k_attention", "methods.baselines.ops"),
    "h2o": _row("h2o_attention", "methods.baselines.ops"),
    "h2o_scores": _row("h2o_scores", "methods.baselines.ops"),
    "sample": _row(
        "sample_attention", "methods.sample.ops", "methods.sample.metal", "cuda_ref.launchers.sample:sample_prefill"
    )
    | EXPORTED,
    "minference": _row("minference_attention", "methods.patterns.ops"),
    "bigbird": _row("bigbird_attention", "methods.patterns.ops"),
    "streaming_prefill": _row("streaming_prefill_attention", "methods.patterns.ops"),
    "hyperattention": _row("hyperattention_attention", "methods.patterns.ops_lsh"),
    "hash_sparse": _row("hash_sparse_attention", "methods.patterns.ops_lsh"),
    "sample_scores": _row("sample_scores", "methods.sample.ops", "methods.sample.metal", "cuda_ref.api.parts"),
    "sample_select": _row("sample_select", "methods.sample.ops", "methods.sample.metal", "cuda_ref.launchers.sample"),
    # metal: a matrix product and a maximum, once per key
    "saap_assign": _row(
        "saap_assign",
        "methods.saap.kmeans:assign",
        "methods.saap.kmeans:assign",
        "cuda_ref.torch_functions",
        oracle="methods.saap.oracle",
    ),
    "saap_route": _row("saap_route", "methods.saap.ops", "methods.saap.metal", "cuda_ref.launchers.saap"),
    # metal: once every few hundred tokens
    "saap_index": _row(
        "saap_index", "methods.saap.csr", "methods.saap.csr", "cuda_ref.api.parts", oracle="methods.saap.oracle"
    ),
    "saap_indices": _row("saap_indices", "methods.saap.ops", "methods.saap.metal", "cuda_ref.api.parts"),
    "attend_blocks": _row("attend_blocks", "core.blocks.ops", "core.blocks.metal", "cuda_ref.launchers.blocks"),
    "attend_indices": _row("attend_indices", "core.attend.ops", "core.attend.metal", "cuda_ref.launchers.attend"),
    "top_k_select": _row(
        "top_k_select", "core.attend.ops", "core.select.metal", "cuda_ref.api.parts", oracle="core.select.oracle"
    ),
    # metal: once every 64 tokens
    "code_keys": _row(
        "code_keys", "methods.sparq.ops", "methods.sparq.ops", "cuda_ref.torch_functions", oracle=SCORING_KEYS
    ),
    "key_spread": _row(
        "key_spread", "methods.sparq.ops", "methods.sparq.ops", "cuda_ref.torch_functions", oracle=SCORING_KEYS
    ),
    # metal: once every `page_size` tokens
    "page_bounds": _row("page_bounds", "methods.quest.ops", "methods.quest.ops"),
    # metal: only a few numbers per page
    "page_keys": _row("page_keys", "methods.quest.ops", "methods.quest.ops", oracle=""),
    "quest_select": _row("quest_select", "methods.quest.ops", "methods.quest.metal"),
    "sparq_select": _row("sparq_select", "methods.sparq.ops"),
    # Not part of a decode step, so array operations suffice on every backend.
    "dense_lse": _row("dense_lse", "core.attend.ops", "core.attend.ops", "cuda_ref.torch_functions"),
    "deviation": _row(
        "deviation",
        "methods.sparq.ops",
        "methods.sparq.ops",
        "cuda_ref.torch_functions",
        oracle="methods.sparq.oracle_codes",
    ),
    "masked_mean": _row(
        "masked_mean",
        "methods.sparq.ops",
        "methods.sparq.ops",
        "cuda_ref.torch_functions",
        oracle="methods.sparq.oracle_codes",
    ),
}

# Class of a method's auxiliary cache state (`mlx_sparse.cache.state.State`), created at the first decode step.
STATES: Mapping[str, str] = {
    "sparq": "methods.sparq.state:SparQState",
    "h2o": "methods.baselines.state:H2OState",
    "quest": "methods.quest.state:QuestState",
}

# Class of a method's hooks around a model and its calls (`mlx_sparse.lm.hooks.ModelHooks`).
HOOKS: Mapping[str, str] = {
    "saap": "lm.hooks.saap:Buckets",
    "h2o": "lm.hooks.h2o:ObservedPrompts",
}
