"""The contenders on onnxruntime and torch on a CPU: our operators, as bodies and native, and dense attention."""

from __future__ import annotations

from typing import Any

from mlx_sparse.checks import ConfigError, check_int
from mlx_sparse.tools.bench.run import Plan, Request

METHODS: dict[str, dict[str, tuple[str, ...]]] = {  # and which parameters they may have
    "step": {
        "sparq": ("rank", "top_k", "local_window"),
        "saap": ("probes", "sink_tokens", "recent_tokens"),
    },
    "prompt": {"sample": ("block_size", "chunks")},
}


def plan(request: Request) -> Plan:
    """What to time.

    Raises:
        ConfigError: an option is wrong.
    """
    config: Any = request.one_method(METHODS[request.stage])
    check_int("--repeat", request.repeat, 2)
    if request.stage == "prompt":
        from . import prompts

        return prompts.plan(request, config)
    if len(request.shapes) > 1:
        found = ",".join(map(str, request.shapes))
        raise ConfigError(f"--shapes: expected one for steps with --engine onnx, got {found}.")
    from . import saap, steps

    return saap.plan(request, config) if config.before_rope else steps.plan(request, config)
