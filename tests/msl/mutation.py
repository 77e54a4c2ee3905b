"""Mutants of a kernel for tests: each lacks one barrier."""

import re


def barriers(text: str) -> list[str]:
    """Return one text per threadgroup_barrier or simdgroup_barrier call, without the call and with the same lines."""
    code = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
    calls = re.finditer(r"\b(?:metal::)?(?:threadgroup|simdgroup)_barrier\s*\([^;]*\)(?=\s*;)", code)
    return [text[: m.start()] + "\n" * m[0].count("\n") + text[m.end() :] for m in calls]
