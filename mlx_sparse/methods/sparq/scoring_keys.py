"""Define the formats of int4 scoring keys (docs/spec/sparq.md, sparq.17 to sparq.20) for any array library."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...checks import ConfigError, Sizes, check_shape

GROUP = 64  # number of consecutive keys that share ``lo`` and ``step``
KEY_BITS = (16, 4)  # bits per component; 16 means that keys are not quantized
CODE_BITS = 4
LARGEST_CODE = 2**CODE_BITS - 1
WORDS = GROUP * CODE_BITS // 32  # 32-bit words per component of a group
LARGEST = 65504.0  # largest finite float16

# Fit of a projection (docs/spec/low_rank.md)
RIDGE = 1e-6  # part of the mean eigenvalue that is added to every eigenvalue of a covariance
CAPTURED = 0.9  # smallest captured share of a rank
FITTED_ROWS = 4096  # number of latents of a sequence that the fit reads


class KeyCodes(NamedTuple):
    """Quantized scoring keys (int4) in component-major layout, for the argument ``keys_t``.

    Attributes:
        codes: ``(B, Hkv, D, groups * 32)`` uint8, lowest bits first. In MLX, the bytes form a uint32 array
            ``(B, Hkv, D, groups * 8)``, as `mx.quantize` returns it.
        lo: float16 ``(B, Hkv, D, groups)``, smallest centered component of each group.
        step: float16 ``(B, Hkv, D, groups)``, difference between adjacent codes.
        center: float32 ``(B, Hkv, D)``, vector that is subtracted from each key before quantization.
    """

    codes: Any
    lo: Any
    step: Any
    center: Any

    @property
    def nbytes(self) -> int:
        """Total size of the arrays in bytes."""
        return sum(int(array.nbytes) for array in self)


class Projection(NamedTuple):
    """Projections of queries and latents onto r components, for ``component_score="low_rank"`` (docs/spec/low_rank.md).

    Attributes:
        queries, keys: ``(B, Hkv, D, r)``, one projection per sequence.
        share: NumPy ``(B, Hkv)``, captured share of the r components.
    """

    queries: Any
    keys: Any
    share: Any


def check_keys_t(keys_t: Any, sizes: Sizes, key_bits: int) -> None:
    """Raise an error if ``keys_t`` is not None and does not have the type and the shapes that ``key_bits`` requires.

    Raises:
        ConfigError: ``keys_t`` is an array but `KeyCodes` are needed, or vice versa.
        ShapeError: an array has the wrong shape.
    """
    if keys_t is None:
        return
    if isinstance(keys_t, KeyCodes) != (key_bits < 16):
        wanted = "KeyCodes with" if key_bits < 16 else "an array (B, Hkv, D, S) with"
        raise ConfigError(f"keys_t: expected {wanted} key_bits={key_bits}, got {type(keys_t).__name__}.")
    before = (sizes.B, sizes.Hkv, sizes.D)
    if key_bits == 16:
        check_shape("keys_t", keys_t, (*before, sizes.S))
        return
    groups = sizes.S // GROUP
    word = getattr(keys_t.codes, "itemsize", 1)
    shapes = ((*before, groups * 4 * WORDS // word), (*before, groups), (*before, groups), before)
    for name, array, shape in zip(KeyCodes._fields, keys_t, shapes, strict=True):
        check_shape(f"keys_t.{name}", array, shape)
