"""Validate torch tensors and their devices. Checks that need no tensors are in `mlx_sparse.checks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlx_sparse.checks import BackendUnavailable, ConfigError, ShapeError, Sizes, check_shape

from . import interpreted, unavailable

HEAD_DIMS = (16, 256)  # smallest and largest head dim that the tiles of the kernels support
LARGEST_GROUP = 16  # largest number of query heads per KV head that the tiles support
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CODE_TYPES = {  # dtypes of the arrays of `mlx_sparse.methods.sparq.scoring_keys.KeyCodes`
    "keys_t.codes": torch.uint8,
    "keys_t.lo": torch.float16,
    "keys_t.step": torch.float16,
    "keys_t.center": torch.float32,
}
Padding = torch.Tensor | Sequence[int] | None  # number of padding keys of each sequence
GRID_LIMIT = 65535  # CUDA's maximum number of programs along the second and the third axis of a grid


def check_head_dim(D: int) -> None:
    """Raise `BackendUnavailable` unless the kernels support head dim ``D``."""
    low, high = HEAD_DIMS
    if D % 8 or not low <= D <= high:
        raise BackendUnavailable(f"backend: expected head dims that are multiples of 8 from {low} to {high}, got {D}.")


def check_group(G: int) -> None:
    """Raise `BackendUnavailable` unless the kernels support ``G`` query heads per KV head."""
    if G > LARGEST_GROUP:
        raise BackendUnavailable(
            f"backend: expected at most {LARGEST_GROUP} query heads per KV head, got {G}. Use dense attention."
        )


def check_backend(backend: str, device: torch.device) -> None:
    """Raise `BackendUnavailable` unless ``backend`` names this backend and Triton's kernels can run on ``device``."""
    if backend not in ("auto", "triton"):
        raise BackendUnavailable(f"backend: expected auto or triton for mlx_sparse.cuda_ref, got {backend}.")
    reason = unavailable()
    if reason is None and device.type != "cuda" and not (interpreted() and device.type == "cpu"):
        reason = f"the tensors are on {device.type}; move them to the GPU"
    if reason is not None:
        raise BackendUnavailable(f"backend: expected a machine for Triton's kernels, got none ({reason}).")


def check_type(name: str, array: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless ``array`` has ``dtype``, the dtype of the other tensors."""
    if array.dtype != dtype:
        raise ConfigError(
            f"{name}: expected the type of the other tensors, {type_name(dtype)}, got {type_name(array.dtype)}."
        )


def check_code_type(name: str, array: torch.Tensor) -> None:
    """Raise `ConfigError` if ``name`` is in `CODE_TYPES` and ``array`` does not have the dtype listed there."""
    wanted = CODE_TYPES.get(name, array.dtype)
    if array.dtype != wanted:
        raise ConfigError(
            f"{name}: expected {type_name(wanted)}, got {type_name(array.dtype)}. Pass the result of code_keys."
        )


def check_tensor(name: str, array: object) -> None:
    """Raise `ConfigError` unless ``array`` is a torch tensor."""
    if not isinstance(array, torch.Tensor):
        raise ConfigError(f"{name}: expected a torch tensor, got {type(array).__name__}.")


def check_device(name: str, array: torch.Tensor, device: torch.device) -> None:
    """Raise `ConfigError` unless ``array`` is on ``device``, the device of the other tensors."""
    if array.device != device:
        raise ConfigError(f"{name}: expected a tensor on {device}, got {array.device}.")


def check_integers(name: str, array: torch.Tensor) -> None:
    """Raise `ShapeError` unless ``array`` has an integer dtype."""
    if array.dtype.is_floating_point or array.dtype.is_complex or array.dtype == torch.bool:
        raise ShapeError(f"{name}: expected integers, got {type_name(array.dtype)}.")


def as_padding(left_padding: Padding, n: Sizes, device: torch.device) -> torch.Tensor | None:
    """Validate ``left_padding`` and return an int32 tensor on ``device`` with values clamped to 0..S.

    If ``left_padding`` is None, return None.
    """
    if left_padding is None:
        return None
    try:
        first = torch.as_tensor(left_padding)
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(f"left_padding: expected {n.B} integers, got {left_padding!r}.") from None
    check_shape("left_padding", first, (n.B,))
    check_integers("left_padding", first)
    return first.to(device).clamp(0, n.S).to(torch.int32)


def check_real(name: str, array: torch.Tensor) -> None:
    """Raise `ConfigError` unless ``array`` is float32, float16 or bfloat16."""
    if array.dtype not in DTYPES:
        raise ConfigError(f"{name}: expected float32, float16 or bfloat16, got {type_name(array.dtype)}.")


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, such as "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")
