"""Create mutants of a kernel for tests. Each mutant lacks one barrier."""

import re


def barriers(text: str) -> list[str]:
    """Return copies of the text that each lack one threadgroup or simdgroup barrier. Line numbers do not change."""
    code = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
    calls = re.finditer(r"\b(?:metal::)?(?:threadgroup|simdgroup)_barrier\s*\([^;]*\)(?=\s*;)", code)
    return [text[: m.start()] + "\n" * m[0].count("\n") + text[m.end() :] for m in calls]
