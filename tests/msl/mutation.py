"""Texts that ought to fail: each lacks one barrier of a kernel that works."""

import re


def barriers(text: str) -> list[str]:
    """The text once per threadgroup_barrier or simdgroup_barrier call, that call deleted, line numbers kept."""
    code = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
    calls = re.finditer(r"\b(?:metal::)?(?:threadgroup|simdgroup)_barrier\s*\([^;]*\)(?=\s*;)", code)
    return [text[: m.start()] + "\n" * m[0].count("\n") + text[m.end() :] for m in calls]
