"""Lint MSL tokens: find code that clang accepts but Apple's compiler rejects, and dangerous code.

A rule for an error of Apple's compiler cites a thread with the error message as owner/repository#number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

SPACE = r"\b(?:device|constant|threadgroup|thread)\b"
BUILT_IN = r"(?:bool|u?char|u?short|u?int|u?long|half|b?float|void|(?:size|b?float16|u?int(?:8|16|32|64))_t|atomic|vec)"
LANE = r"thread_(?:position_in_grid|position_in_threadgroup|index_in_threadgroup|index_in_simdgroup)"
VOTE = r"\bsimd_(?:sum|product|min|max|and|or|xor|all|any|ballot|broadcast|broadcast_first)\s*\("
SIMD = r"\b(?:simd_|quad_|simdgroup_(?:load|store|multiply|barrier))\w*(?=\s*\()"
WAIT = r"\bthreadgroup_barrier\b"
WIDE = r"\b(?:size_t|u?long|u?int64_t|ptrdiff_t)\b"
MATRIX = r"\b(?:metal\s*::\s*)?(?:(?:half|b?float)[234]x[234]|matrix\s*<[^<>]*>)"
FLOATING = r"-?\s*(?:(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?f?|INFINITY|NAN|HUGE_VALF|M_\w+_F)"
# Valid attributes of kernels, of parameters and of C++. Others are -Wunknown-attributes (CrossGL/crosstl#904, #917).
STRUCT = r"\bstruct\s+(\w+)\s*\{"
KNOWN = r"""kernel|host_name|buffer|threadgroup|function_constant|max_total_threads_per_threadgroup|visible|
    (?:thread|threads|threadgroup|threadgroups|simdgroup|simdgroups|quadgroup|quadgroups|dispatch|grid)_\w+|
    unroll|maybe_unused|nodiscard|noreturn|fallthrough|deprecated"""
HIDDEN = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\n])*"|^[ \t]*#(?![ \t]*include)(?:\\\n|[^\n])*'

# Rules that are one regular expression over the text without comments, strings and directives.
PATTERNS = {
    r"#\s*include\s*<(?!metal_)[^>]*>": "no such header in Metal: {}",
    r"\bdouble\b": "MSL has no double",
    r"\bstd\s*::": "MSL has no namespace std",
    r"\b(?:virtual|new|delete|throw|try|typeid|dynamic_cast|goto|thread_local|asm)\b": "not in MSL: {}",
    r"(?<=[=(,] )\[[&=\w, ]*\]\s*\(": "lambdas need Metal 3.2",
    r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[+-]?\d+)?(?![\w.])": "float literal without suffix: {}",
    r"\bthreadgroup_barrier\s*\(\s*(?:metal::)?mem_flags::mem_none": "barrier that orders no memory",
    r"\bstatic\b(?![^;{(]*\bconstant\b)[^;{(=]*[=;]": "static data outside constant",
    r"\bbuffer\((?:3[1-9]|[4-9]\d|\d{3,})\)": "more than 31 buffers",
    # bghira/universal-metal-flash-attention#10, ggml-org/llama.cpp#10205: unknown name in older language versions
    r"\bbfloat[234]?\b": "bfloat needs Metal 3.1; MLX's name for what there is: bfloat16_t, not {}",
    # EricLBuehler/mistral.rs#1116: matrix<_MLX_BFloat16, 4, 4> is not a matrix
    r"\bbfloat[234]x[234]\b|\bmatrix\s*<\s*bfloat\w*\b": "matrix of bfloat: {}",
    # exo-explore/exo#1766, EricLBuehler/mistral.rs#1998: a reserved name of Apple's headers
    r"\bbfloat16\b(?!_)": "reserved name of an incomplete type: {}",
    # ollama/ollama#15862: other headers in each macOS; lmstudio-ai/lmstudio-bug-tracker#2040: none before Metal 4
    r"\bmpp\s*::|\bcooperative_tensor\b|#\s*include\s*<metal_tensor>": "tensors need Metal 4: {}",
    # gogpu/naga#79: few operations, on few GPUs
    r"\batomic_u?long\b|\batomic\s*<\s*(?:u?long|u?int64_t|size_t)\s*>": "atomics of 64 bits: {}",
    # KhronosGroup/SPIRV-Cross#2451
    r"\bas_type\s*<[^<>]*\*\s*>": "as_type of a pointer: {}",
}


class Finding(NamedTuple):
    """A finding of the lint."""

    problem: str
    place: str  # as file:line

    def __str__(self) -> str:
        return f"LINT {self.problem} at {self.place}"


class Function(NamedTuple):
    name: str
    kernel: bool
    parameters: str
    start: int  # start of the body in the text
    body: str
    calls: set[str]  # names of functions that the body seems to call


Found = Iterator[tuple[int, str]]


def lint(source: str) -> list[Finding]:
    """Return all findings in text order. A comment `// uniform` marks the control flow of its line as uniform."""
    text = Text(source)
    found = {(m.start(), problem.format(m[0])) for p, problem in PATTERNS.items() for m in re.finditer(p, text.code)}
    for rule in RULES:
        found |= set(rule(text))
    return [Finding(problem, text.place(at)) for at, problem in sorted(found)]


class Text:
    """An MSL text with its code (without comments, strings and directives), bracket pairs and functions."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.code = re.sub(HIDDEN, lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S | re.M)
        self.match: dict[int, int] = {}
        stack: list[int] = []
        for i, c in enumerate(self.code):
            if c in "([{":
                stack.append(i)
            elif c in ")]}":
                self.match[stack.pop()] = i
        self.functions: list[Function] = []
        inside = 0
        for m in re.finditer(r"\b(?!if\b|for\b|while\b|switch\b)(\w+)\s*\(", self.code):
            close = self.match[m.end() - 1]
            if m.start() >= inside and (body := re.match(rf"\)\s*(?:(?:{SPACE}|const)\s*)*{{", self.code[close:])):
                start = close + body.end() - 1
                inside = self.match[start]
                kernel = "kernel" in re.split(r"[;}]", self.code[: m.start()])[-1]
                parameters = self.code[m.end() : close]
                calls = set(re.findall(r"\b(\w+)\s*[(<]", self.code[start:inside]))
                self.functions.append(Function(m[1], kernel, parameters, start, self.code[start:inside], calls))

    def place(self, at: int) -> str:
        """Return file and line of a position as "file:line", by the `#line` directives."""
        lines = self.source[:at].split("\n")
        for back, line in enumerate(reversed(lines)):
            if directive := re.match(r'\s*#\s*line (\d+) "(.*)"', line):
                return f"{directive[2]}:{int(directive[1]) + back - 1}"
        return f"body:{len(lines)}"

    def vouched(self, *positions: int) -> bool:
        lines = [re.split("\n", self.source[self.source.rfind("\n", 0, at) + 1 :], maxsplit=1)[0] for at in positions]
        return any(re.search(r"//.*\buniform\b", line) for line in lines)

    def end(self, at: int) -> int:
        """Return the end position of the statement that starts at a position."""
        at = re.compile(r"\s*").match(self.code, at).end()
        if head := re.compile(r"(?:if|for|while|switch)\s*\(").match(self.code, at):
            end = self.end(self.match[head.end() - 1] + 1)
            other = re.compile(r"\s*else\b").match(self.code, end + 1)
            return self.end(other.end()) if other else end
        while self.code[at] != ";" and self.code[at] != "{":
            at = self.match.get(at, at) + 1
        return self.match.get(at, at)

    def callers(self, names: set[str]) -> set[str]:
        """Return the names of functions that call one of ``names``, directly or indirectly."""
        found: set[str] = set()
        for _ in self.functions:
            found |= {f.name for f in self.functions if f.calls & (names | found)}
        return found


def pointers(text: Text) -> Found:
    # hashcat/hashcat#3540, shader-slang/slang#4129, tile-ai/tilelang#2767
    own = re.findall(r"\b(?:typename|struct|class|using)\s+(\w+)", text.code)
    words = "|".join([BUILT_IN + r"\d?(?:x\d)?", *own])
    space = rf"(?:(?:{SPACE}|\bconst\b|\bmetal\s*::)\s*)*"
    for m in re.finditer(rf"({space})\b(?:{words})\b\s*(?:<[^<>;(){{}}]*>)?\s*({space})[*&](?![&=])", text.code):
        if not re.search(SPACE, m[1] + m[2]):
            yield m.start(), f"no address space: {' '.join(m[0].split())}"


def file_scope(text: Text) -> Found:
    # AliceO2Group/AliceO2#15802, AdaptiveCpp/AdaptiveCpp#864
    head = r"template\s*<(?:[^<>]|<[^<>]*>)*>|#[^\n]*"
    flat, at = list(re.sub(head, lambda m: " " * len(m[0]), text.code)), 0
    for opening in sorted(text.match):
        if opening >= at:
            at = text.match[opening]
            flat[opening + 1 : at] = " " * (at - opening - 1)
    for m in re.finditer(r"[^\s;{}][^;{}]*(?=[;{])", "".join(flat)):
        data = "=" in m[0] or re.fullmatch(r"[\w:<>, ]+\s\w+\s*", m[0])
        if data and not re.match(r"(?:using|typedef|struct|class|enum|.*\b(?:constant|operator)\b)", m[0]):
            yield m.start(), f"file-scope data outside constant: {m[0].split('=')[0].strip()}"


def threadgroup_objects(text: Text) -> Found:
    for f in text.functions:
        for m in re.finditer(r"\bthreadgroup\s+[\w:<>, ]+?\b(\w+)\s*[\[;=]", f.body):
            if not f.kernel:
                yield f.start + m.start(), f"threadgroup object outside a kernel: {m[1]}"


def constructed(text: Text) -> Found:
    # Metal does not construct threadgroup objects: mudler/LocalAI#11624, ggml-org/llama.cpp#26646
    built: set[str] = set()
    for m in re.finditer(STRUCT, text.code):
        body = text.code[m.end() : text.match[m.end() - 1]]
        if re.search(rf"(?<![~\w]){m[1]}\s*\(|^[^()]*=[^=]|{MATRIX}\s+\w+\s*[\[;]", body, re.M):
            built.add(m[1])
    kinds = "|".join([MATRIX, *(rf"\b{name}\b" for name in sorted(built))])
    for m in re.finditer(rf"\bthreadgroup\s+(?:{kinds})(?:\s*<[^<>;]*>)?\s+(\w+)\s*[\[;,]", text.code):
        yield m.start(), f"threadgroup object that has a constructor: {m[1]}"
    for m in re.finditer(r"\bthreadgroup\s+(?!const\b)[\w:<>, ]+?\b(\w+)\s*(?:\[[^;=]*\]\s*)*=(?!=)", text.code):
        yield m.start(), f"threadgroup object with an initial value: {m[1]}"


def brain_floats(text: Text) -> Found:
    # There is no implicit conversion to bfloat: ml-explore/mlx-lm#814, tracel-ai/cubecl#1522
    for kind in {"bfloat16_t", *re.findall(r"\btypename\s+(\w+)", text.code)}:
        for m in re.finditer(rf"\b{kind}\s+\w+\s*=\s*({FLOATING})\s*[;,]", text.code):
            yield m.start(), f"float where {kind} may be bfloat: {m[1]}"


def casts(text: Text) -> Found:
    # KhronosGroup/SPIRV-Cross#2294: converts between mismatching address spaces
    for f in text.functions:
        declared = rf"({SPACE})[\w\s:<>]*?[*&]\s*(?:const\s+)?(\w+)\s*(?=[,;=)\[]|$)"
        owner = {m[2]: m[1] for m in re.finditer(declared, f"{f.parameters};{f.body}")}
        owner |= {m[1]: "threadgroup" for m in re.finditer(r"\bthreadgroup\s+[\w:<>, ]+?\b(\w+)\s*[\[;]", f.body)}
        for m in re.finditer(rf"\((?:const\s+)?({SPACE})[^()*]*\*\s*\)\s*&?\s*(\w+)", f.body):
            if owner.get(m[2], m[1]) != m[1]:
                yield f.start + m.start(), f"cast from {owner[m[2]]} to {m[1]}: {m[2]}"


def kernel_calls(text: Text) -> Found:
    # anthony-chaudhary/fak#12817: call to kernel function
    kernels = {f.name for f in text.functions if f.kernel}
    for f in text.functions:
        for m in re.finditer(rf"\b({'|'.join(sorted(kernels)) or '(?!)'})\s*(?:<[^<>;]*>\s*)?\(", f.body):
            yield f.start + m.start(), f"call of a kernel: {m[1]}"


def attributes(text: Text) -> Found:
    for m in re.finditer(r"\[\[\s*([\w:]+)", text.code):
        if not re.fullmatch(KNOWN, m[1], re.X):
            yield m.start(), f"attribute that Metal ignores: {m[1]}"


def recursion(text: Text) -> Found:
    for f in text.functions:
        if f.name in text.callers({f.name}):
            yield f.start, f"recursion: {f.name}"


def hidden_parameters(text: Text) -> Found:
    for f in text.functions:
        for pair in re.findall(r"\b(\w+_(?:shape|strides|ndim))\b|(\w+)\s*\[\[(?!buffer)", f.parameters):
            if f.kernel and not re.search(rf"\b{''.join(pair)}\b", f.body):
                yield f.start, f"parameter that only a comment asks for: {''.join(pair)}"


def offsets(text: Text) -> Found:
    wide = "|".join([WIDE, *(rf"\b{name}\b" for name in re.findall(rf"{WIDE}\s+(\w+)", text.code))])
    for f in text.functions:
        names = "|".join(re.findall(r"\b(?:device|constant)\b[^,]*?\*\s*(?:const\s+)?(\w+)", f.parameters))
        for m in re.finditer(rf"\b(?:{names or '(?!)'})\s*([\[+])", f.body):
            at = f.start + m.end()
            end = text.match[at - 1] if m[1] == "[" else at + re.search(r"[;,\]}]", text.code[at:]).start()
            offset = text.code[at:end].strip()
            if re.search(r"[A-Za-z_\])]\w*\s*\*\s*[A-Za-z_(]", offset) and not re.search(wide, offset):
                yield at, f"32-bit product as an offset: {offset}"


def levels(f: Function) -> Callable[[str, int], int]:
    """Return a function that rates the divergence of an expression at a position of the body of `f`.

    The rate is 2 if lanes may differ, 1 if only simdgroups may differ, and 0 if neither is found.
    """
    lanes = re.findall(rf"(\w+)\s*\[\[\s*{LANE}|\b({LANE})\b", f.parameters)
    level = {(name, 0): 2 for pair in lanes for name in pair if name}
    level |= {(name, 0): 1 for name in re.findall(r"(\w+)\s*\[\[\s*simdgroup_index", f.parameters)}
    assigned = list(re.finditer(r"(\b(?!else|return)\w+[>&]?\s+)?\b(\w+)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)([^;]*)", f.body))

    def version(name: str, at: int) -> tuple[str, int]:
        return name, sum(bool(m[1]) and m[2] == name and m.end(2) <= at for m in assigned)

    def measure(expression: str, at: int) -> int:
        most = max((level.get(version(name, at), 0) for name in re.findall(r"\w+", expression)), default=0)
        return min(most, 1) if re.search(VOTE, expression) else most

    for m in assigned * 2:
        name = version(m[2], m.end(2))
        level[name] = max(level.get(name, 0), measure(m[3], m.end(2)))
    return measure


def divergence(text: Text) -> Found:
    own: list[set[str]] = [{f.name for f in text.functions if re.search(p, f.body)} for p in (WAIT, SIMD)]
    meeting = [names | text.callers(names) for names in own]
    for f in text.functions:
        measure = levels(f)
        calls = [
            re.compile("|".join([pattern, *(rf"\b{name}(?=[(<])" for name in names - {f.name})]))
            for pattern, names in zip((WAIT, SIMD), meeting, strict=True)
        ]
        loops: list[tuple[int, int]] = []
        for m in re.finditer(r"\b(?:if|for|while|switch)\s*\(", f.body):
            opening, end = f.start + m.end() - 1, text.end(f.start + m.start())
            close = text.match[opening]
            loops += [(close, end)] * m[0].startswith(("for", "while"))
            around = [loop for loop in loops if opening < loop[1]][-1:]
            for call in calls[: measure(text.code[opening:close], close - f.start)]:
                met = [*call.finditer(text.code, close, end)]
                if any(call.search(text.code, *loop) for loop in around):  # threads may leave the loop early
                    met += re.compile(r"\b(?:continue|break)\b").finditer(text.code, close, end)
                for found in met:
                    if not text.vouched(opening, found.start()):
                        yield found.start(), f"{found[0]} where threads may differ"
        for m in re.finditer(rf"([^;{{}}=]*?)(?:\?|&&|\|\|)[^;{{}}]*?({SIMD})", f.body):
            at = m.start(2)
            if measure(m[1], at) == 2 and not text.vouched(f.start + at):
                yield f.start + at, f"{m[2]} where threads may differ"


RULES: tuple[Callable[[Text], Found], ...] = (
    pointers,
    file_scope,
    threadgroup_objects,
    constructed,
    brain_floats,
    casts,
    kernel_calls,
    attributes,
    recursion,
    hidden_parameters,
    offsets,
    divergence,
)
