"""What clang would let pass: findings of the lint, each on its planted line, and of the typed compilation."""

import pytest
from msl.compile import typed_check
from msl.lint import lint
from msl.mutation import barriers

KERNEL = """kernel void k(const device float* x [[buffer(0)]], device float* out [[buffer(1)]],
              constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]],
              uint lane [[thread_index_in_simdgroup]],
              uint sg [[simdgroup_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {{
#line 1 "body"
{body}
out[i] = x[i] + float(lane + sg + group + n);
}}
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# One line of a kernel body, and what the lint says of it.
BODY = [
    ("double wide = 1.0f;", "MSL has no double"),
    ("float y = std::max(1.0f, x[i]);", "MSL has no namespace std"),
    ("goto done;", "not in MSL: goto"),
    ("auto p = new float[3];", "not in MSL: new"),
    ("float y = 0.5 * x[i];", "float literal without suffix: 0.5"),
    ("float y = 1e-6;", "float literal without suffix: 1e-6"),
    ("auto twice = [](float y) { return y + y; };", "lambdas need Metal 3.2"),
    ("threadgroup_barrier(mem_flags::mem_none);", "barrier that orders no memory"),
    ("static float memory = 0.0f;", "static data outside constant"),
    ("float y = 0.0f; float* p = &y;", "no address space: float*"),
    ("float y = *(const float*)x;", "no address space: const float*"),
    (f"if (i < 10) {{ {BARRIER} }}", "threadgroup_barrier where threads may differ"),
    (f"if (sg == 0) {{ {BARRIER} }}", "threadgroup_barrier where threads may differ"),
    (f"for (uint j = lane; j < n; j += 32) {{ {BARRIER} }}", "threadgroup_barrier where threads may differ"),
    ("float y = 0.0f; if (lane < 3) y = simd_sum(x[i]);", "simd_sum where threads may differ"),
    (
        "float y = 0.0f; if (n > 3) y = 1.0f; else if (lane < 3) y = simd_max(x[i]);",
        "simd_max where threads may differ",
    ),
    ("uint j = 2 * lane; float y = j < 3 ? simd_sum(x[i]) : 0.0f;", "simd_sum where threads may differ"),
    (
        "float y = 0.0f; for (uint j = 0; j < n; j++) { if (lane == j) continue; y += simd_sum(y); }",
        "continue where threads may differ",
    ),
    ("float y = x[group * n + i];", "32-bit product as an offset: group * n + i"),
    ("const device float* row = x + group * n;", "32-bit product as an offset: group * n"),
]
# Lines that only look alike.
CLEAN = [
    "float y = 0.5f * x[i] + 1.0f + 1e-6f + 3;",
    "float y = x[size_t(group) * n + i];",
    "size_t row = group; float y = x[row * n + i];",
    "float y = 0.0f; thread float* p = &y;",
    "float y = 0.0f; if (sg == 0) y = simd_sum(x[i]);",
    "float y = 0.0f; if (simd_any(lane < 3)) y = simd_sum(x[i]);",
    f"if (n < 3) {{ {BARRIER} }}",
    f"if (sg < n) {{ {BARRIER} }}  // uniform: one simdgroup per threadgroup",
    "float y = 0.0f; for (uint j = i; j < n; j++) y += 1.0f; for (uint j = sg; j < n; j += 8) y += simd_sum(y);",
    "float y = 0.0f; for (uint j = 0; j < n; j++) { if (lane == j) continue; y += x[j]; }",
    "float y = 0.0f; for (uint j = 0; j < n; j++) { if (group == j) continue; y += simd_sum(y); }",
    "// goto a double std:: 0.5",
    "/* threadgroup_barrier(mem_flags::mem_none); */",
    "float y = x[i] * lane & n;",
]
# Whole texts.
TOTAL = "float total(float y) { return simd_sum(y); }\n" + KERNEL.format(body="if (lane < 3) { total(x[i]); }")
MUTUAL = "int g(int n);\nint f(int n) { return g(n); }\nint g(int n) { return f(n); }"
SHAPE = "device float* a [[buffer(0)]], const constant int* a_shape [[buffer(1)]]"
FILES = [
    ("#include <cmath>\nfloat f(float y) { return y; }", ["no such header in Metal: #include <cmath> at body:1"]),
    ("#include <metal_simdgroup>\nconstant constexpr uint N = 4;", []),
    ("\nconstexpr uint N = 4;", ["file-scope data outside constant: constexpr uint N at body:2"]),
    ("uint counter;", ["file-scope data outside constant: uint counter at body:1"]),
    ("template <typename T, bool B = true> T f(T y) { return y; }", []),
    ("template <typename T> float f(const T* p) {\n return p[0];\n}", ["no address space: const T* at body:1"]),
    ("struct S { uint n; };\nuint f(thread S& s, S& bad) { return s.n; }", ["no address space: S& at body:2"]),
    ("int f(int n) {\n return n < 2 ? 1 : n * f(n - 1); }", ["recursion: f at body:1"]),
    (MUTUAL, ["recursion: f at body:2", "recursion: g at body:3"]),
    ("void f() {\n  threadgroup float s[4];\n}", ["threadgroup object outside a kernel: s at body:2"]),
    (TOTAL, ["total where threads may differ at body:1"]),
    ("kernel void k(device float* a [[buffer(31)]]) { a[0] = 0.0f; }", ["more than 31 buffers at body:1"]),
    (f"kernel void k({SHAPE}) {{\n// a_shape\n}}", ["parameter that only a comment asks for: a_shape at body:1"]),
]


@pytest.mark.parametrize(("line", "problem"), BODY)
def test_line_of_a_kernel_is_found(line: str, problem: str) -> None:
    assert [str(f) for f in lint(KERNEL.format(body=f"// one\n{line}"))] == [f"LINT {problem} at body:2"]


@pytest.mark.parametrize("line", CLEAN)
def test_harmless_line_of_a_kernel_is_not(line: str) -> None:
    assert lint(KERNEL.format(body=line)) == []


@pytest.mark.parametrize(("text", "findings"), FILES)
def test_declarations_and_calls(text: str, findings: list[str]) -> None:
    assert [str(f) for f in lint(text)] == [f"LINT {f}" for f in findings]


def test_each_barrier_is_deleted_once_and_lines_stay() -> None:
    text = f"a;\n{BARRIER}\n// {BARRIER}\nsimdgroup_barrier(\n  mem_flags::mem_none);\nb;"
    mutants = barriers(text)
    assert mutants == [
        f"a;\n;\n// {BARRIER}\nsimdgroup_barrier(\n  mem_flags::mem_none);\nb;",
        f"a;\n{BARRIER}\n// {BARRIER}\n\n;\nb;",
    ]


# One line of a kernel body that clang's plain C++ accepts and Metal's types do not.
TYPED = [
    "device float* p = x;",
    "threadgroup float s[4]; device float* p = s;",
    "const device float* p = &table[0];",
    "auto p = i > 3 ? x : &table[0];",
    "n = 3;",
    "half4 h = float4(1.0f);",
    "float y = max(x[i], half(1));",
    "uint y = max(n, 1);",
    "bfloat b = x[i];",
]
HEAD = "#include <metal_stdlib>\nusing namespace metal;\nconstant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};\n"


def test_typed_check_accepts_a_sound_kernel() -> None:
    assert not typed_check(HEAD + KERNEL.format(body="const constant float* p = &table[n & 3];\nfloat y = p[0];"))


@pytest.mark.parametrize("line", TYPED)
def test_typed_check_refuses(line: str) -> None:
    findings = typed_check(HEAD + KERNEL.format(body=f"// one\n{line}"))
    assert findings
    assert all("body:2" in str(finding) for finding in findings)
