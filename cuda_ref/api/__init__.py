"""Provide the attention functions of `mlx_sparse` for torch tensors. `mlx_sparse.api.functions` documents them.

Arguments that are slices of larger buffers are not copied. ``keys_t`` is read fastest if it is a slice of a buffer
whose capacity is a multiple of 16 keys. Each function validates its arguments and calls a launcher, which is a torch
operator. Functions that exist only in this backend are in
`mlx_sparse.cuda_ref.api.parts`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import triton as triton  # raises here, when a function is imported, if triton is missing

from mlx_sparse.api.functions import Functions
from mlx_sparse.checks import BackendUnavailable, ShapeError, Sizes

from .. import checks

BLOCKS = frozenset({"attend_blocks", "sample", "sample_select"})  # prefill functions that have kernels


class Torch:
    """Implementation of `mlx_sparse.api.checked_call.Library` for torch. `triton` is the only backend."""

    xp: ModuleType = torch

    def check_array(
        self, name: str, array: torch.Tensor, like: Any = None, *, integers: bool = False, same_type: bool = False
    ) -> None:
        checks.check_tensor(name, array)
        checks.check_code_type(name, array)
        if name.endswith(("_weight", "_bias")):  # arrays of a query network
            checks.check_real(name, array)
        if integers:
            checks.check_integers(name, array)
        if like is not None:
            checks.check_device(name, array, like.device)
            if same_type:
                checks.check_type(name, array, like.dtype)

    def resolve(
        self, backend: str, function: str, sizes: Sizes, *arrays: torch.Tensor, bias: torch.Tensor | None = None
    ) -> str:
        if bias is not None:
            raise BackendUnavailable("backend: expected ops or cpu of mlx_sparse with a bias, got triton.")
        if sizes.Dv not in (0, sizes.D):
            raise BackendUnavailable(
                f"backend: expected ops or cpu of mlx_sparse for values of head dim {sizes.Dv}, got triton."
            )
        checks.check_backend(backend, arrays[0].device)
        if max(sizes.B, sizes.Hkv) > checks.GRID_LIMIT:
            raise ShapeError(
                f"queries: expected at most {checks.GRID_LIMIT} sequences and KV heads, got {(sizes.B, sizes.Hkv)}."
            )
        if function != "saap_assign":
            checks.check_real("queries", arrays[0])
        for name, array in zip(("keys", "values"), arrays[1:], strict=False):
            checks.check_type(name, array, arrays[0].dtype)
            checks.check_device(name, array, arrays[0].device)
        if sizes.L == 1:
            checks.check_group(sizes.G)
        if function in BLOCKS or (sizes.L == 1 and len(arrays) > 1):
            checks.check_head_dim(sizes.D)
        return "triton"

    def padding(self, left_padding: checks.Padding, sizes: Sizes, like: torch.Tensor) -> torch.Tensor | None:
        return checks.as_padding(left_padding, sizes, like.device)

    def ones(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.ones(shape, device=like.device)

    def visit(self, bucket_ids: torch.Tensor, visited: torch.Tensor) -> dict[str, object]:
        return {"bucket_ids": bucket_ids, "visited": visited}


_functions = Functions(Torch())


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_functions, name)
