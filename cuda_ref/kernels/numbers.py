"""What the kernels agree on: softmax pieces that a tile without a valid key leaves at -inf and 0."""

import triton
import triton.language as tl


@triton.jit
def finite(largest):
    """``largest``, or 0 where there is none, so that exp(-inf - largest) is 0 and not NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def widen(loaded, UPCAST: tl.constexpr):
    """The interpreter holds bfloat16 as bits and computes nonsense with them: there every load goes to float32."""
    return loaded.to(tl.float32) if UPCAST else loaded


@triton.jit
def rounded_up(length):
    """The next multiple of 16. Masks that end there leave loads of 16 bytes whole."""
    return tl.cdiv(length, 16) * 16
