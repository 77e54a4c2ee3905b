"""NumPy's arrays to torch's types and back, where Triton's kernels run. Whoever imports this needs them."""

from cases import Array, Case
from mlx_sparse.cuda_ref import availability
from require import absent

if reason := availability.unavailable():
    absent("triton", reason)

import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
DEVICE = torch.device("cpu" if availability.interpreted() else "cuda")
LINE = 16  # a cache's rows of keys_t start at multiples of this


def to_torch(array: Array, dtype: str) -> torch.Tensor:
    return torch.tensor(array, device=DEVICE).to(DTYPES[dtype])


def to_numpy(array: torch.Tensor) -> Array:
    return (array.float() if array.is_floating_point() else array).cpu().numpy()


def padding(case: Case) -> torch.Tensor | None:
    return None if case.padding is None else torch.tensor(case.padding, dtype=torch.int32, device=DEVICE)


def cached(rows: torch.Tensor, stale: float = 1e3) -> torch.Tensor:
    """``rows (B, H, S, D)`` as a slice of a cache of larger capacity, whose other rows hold ``stale``."""
    B, H, S, D = rows.shape
    buffer = torch.full((B, H, S + LINE - S % LINE, D), stale, dtype=rows.dtype, device=rows.device)
    buffer[:, :, :S] = rows
    return buffer[:, :, :S]


def component_major(keys: torch.Tensor, stale: float = float("nan")) -> torch.Tensor:
    """``keys_t (B, Hkv, D, S)`` as a cache keeps them: a slice of rows that are longer, and hold ``stale`` there."""
    B, H, S, D = keys.shape
    buffer = torch.full((B, H, D, S + LINE - S % LINE), stale, dtype=keys.dtype, device=keys.device)
    buffer[..., :S] = keys.transpose(-1, -2)
    return buffer[..., :S]
