"""Run Metal kernels on the CPU with the semantics of a GPU, and find their errors."""

from .bridge import Metal, emulated
from .compile import CompileError, typed, typed_check
from .kernel import Fault, Kernel, Report, Traffic
from .lint import lint
from .translate import TranslationError

__all__ = [
    "CompileError",
    "Fault",
    "Kernel",
    "Metal",
    "Report",
    "Traffic",
    "TranslationError",
    "emulated",
    "lint",
    "typed",
    "typed_check",
]
