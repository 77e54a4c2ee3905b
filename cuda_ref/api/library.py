"""What the public functions need to know of torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlx_sparse.checks import ConfigError, ShapeError, Sizes
from mlx_sparse.methods import registry

from .. import checks
from ..packed_rows import PackedRows, Rows

ROWS = ("queries", "keys", "values")
READ_PACKED = frozenset({"attend_indices", "code_keys", "dense", "saap", "sparq"})


class Torch:
    """`mlx_sparse.api.checked_call.Library` of torch, whose one backend is `triton`."""

    xp: Any = torch

    def check_array(
        self, name: str, array: Any, like: Any = None, *, integers: bool = False, same_type: bool = False
    ) -> None:
        if name in ROWS:
            checks.check_rows(name, array)
        else:
            checks.check_tensor(name, array)
        checks.check_code_type(name, array)
        if integers:
            checks.check_integers(name, array)
        if like is not None:
            checks.check_device(name, array, like.device)
            if same_type:
                checks.check_type(name, array, like.dtype)

    def resolve(self, backend: str, function: str, sizes: Sizes, *arrays: Rows) -> str:
        checks.check_backend(backend, arrays[0].device)
        if max(sizes.B, sizes.Hkv) > checks.GRID_LIMIT:
            raise ShapeError(
                f"queries: expected at most {checks.GRID_LIMIT} sequences and KV heads, got {(sizes.B, sizes.Hkv)}."
            )
        if function != "saap_assign":
            checks.check_real("queries", arrays[0])
        for name, array in zip(("keys", "values"), arrays[1:], strict=False):
            given, part = (f"{name}.scales", array.scales) if isinstance(array, PackedRows) else (name, array)
            checks.check_type(given, part, arrays[0].dtype)
            checks.check_device(given, part, arrays[0].device)
        self._check_packed(function, arrays)
        if sizes.L == 1 or sizes.Hq > arrays[0].shape[1]:  # a step: (several.2)
            checks.check_group(sizes.G)
            if len(arrays) > 1:
                checks.check_head_dim(sizes.D)
        return "triton"

    def _check_packed(self, function: str, arrays: tuple[Rows, ...]) -> None:
        """Raise `ConfigError` unless ``function`` reads rows that are packed as these are."""
        names = ("keys",) if function == "saap_assign" else ROWS
        for name, array in zip(names, arrays, strict=False):
            reads = function in READ_PACKED and (name != "queries" or function == "code_keys")
            if isinstance(array, PackedRows) and not reads:
                raise ConfigError(f"{name}: expected a tensor of torch, got PackedRows. Pass {name}[:], its numbers.")
        if len(arrays) > 1:
            checks.check_alike(*arrays[1:])

    def load(self, function: str, backend: str) -> Callable[..., Any]:
        return registry.load(function, backend)

    def padding(self, left_padding: Any, sizes: Sizes, like: torch.Tensor) -> torch.Tensor | None:
        return checks.as_padding(left_padding, sizes, like.device)

    def ones(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.ones(shape, device=like.device)

    def visit(self, bucket_ids: torch.Tensor, visited: torch.Tensor) -> dict[str, Any]:
        return {"bucket_ids": bucket_ids, "visited": visited}

    def kept(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.sum(dim=2)
