"""Enable the models that a program loads, if the environment variable ``MLX_SPARSE_ATTN`` is set."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

VARIABLE = "MLX_SPARSE_ATTN"  # also in `_boot`, which imports this module
_lock = threading.Lock()


def enable_loaded(model: Any) -> None:
    """Enable the methods in ``MLX_SPARSE_ATTN`` on a model that was just loaded, and print a line to standard error.

    If an error occurs, the line contains the error, and the model runs with dense attention.
    """
    attn = os.environ.get(VARIABLE, "").strip()
    if not attn or "drafters" in type(model).__module__:
        return
    try:
        with _lock:
            from .loading import unfit_warning
            from .model import enable, plan_of

            if plan_of(model) is not None:  # a load inside the load
                return
            report = enable(model, attn)
        warning = unfit_warning(report.model_type)
        line = "; ".join([*report.opening(), *([] if warning is None else [warning])])
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        line = f"attention is dense: {reason}"
    sys.stderr.write(f"[mlx-sparse] {VARIABLE}={attn}: {line}\n")  # one call, so that threads do not mix their lines
    sys.stderr.flush()
