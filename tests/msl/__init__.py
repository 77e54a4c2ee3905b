"""Run Metal kernels on the CPU with their real semantics, and find what they do wrong."""

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
