"""Quantized scoring keys (int4) of (sparq.17) to (sparq.20) in docs/spec/sparq.md: for arrays of any library."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..checks import ConfigError, Sizes, check_shape

GROUP = 64  # consecutive keys that share a range
KEY_BITS = (16, 4)  # of a component; 16 means that keys are not coded
CODE_BITS = 4
LARGEST_CODE = 2**CODE_BITS - 1
WORDS = GROUP * CODE_BITS // 32  # of 32 bits, that a group of codes takes for each component
LARGEST = 65504.0  # of float16


class KeyCodes(NamedTuple):
    """The coded keys of a cache, component-major: what stands in for ``keys_t``.

    Attributes:
        codes: ``(B, Hkv, D, groups * 32)`` uint8, lowest bits first. In MLX the same bytes as a quarter as
            many uint32, which `mx.quantize` has too.
        lo: float16 ``(B, Hkv, D, groups)``.
        step: float16 ``(B, Hkv, D, groups)``.
        centre: float32 ``(B, Hkv, D)``.
    """

    codes: Any
    lo: Any
    step: Any
    centre: Any

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return sum(int(array.nbytes) for array in self)


def check_keys_t(keys_t: Any, sizes: Sizes, key_bits: int) -> None:
    """Raise unless ``keys_t`` is None or what ``key_bits`` make of the keys.

    Raises:
        ConfigError: it is a copy of the keys where codes are needed, or the other way round.
        ShapeError: it is of another shape.
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
