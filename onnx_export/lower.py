"""Models for runtimes without local functions."""

from __future__ import annotations

import onnx
from onnx.inliner import inline_local_functions

from mlx_sparse.checks import ConfigError

from .compose import calls
from .domain import DOMAIN


def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the body of every operator in its place; inputs, outputs and weights keep their names.

    External data stays where it is.

    Raises:
        ConfigError: an operator of the domain has no body in the model.
    """
    made = inline_local_functions(model)
    left = {node.op_type for node in calls(made.graph)}
    if left:
        raise ConfigError(f"model: expected a body for {' and '.join(sorted(left))}, got none. Export it again.")
    kept = [opset for opset in made.opset_import if opset.domain != DOMAIN]  # runtimes refuse domains they do not know
    del made.opset_import[:]
    made.opset_import.extend(kept)
    return made
