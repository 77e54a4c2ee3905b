"""Test the lint and the typed compilation with planted errors that clang does not report."""

import pytest
from msl.compile import typed, typed_check
from msl.lint import lint

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

# One line of a kernel body, and the finding of the lint.
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
    ("threadgroup half4x4 tile[8];", "threadgroup object that has a constructor: tile"),
    ("threadgroup matrix<float, 2, 4> tile;", "threadgroup object that has a constructor: tile"),
    ("threadgroup float best = 0.0f;", "threadgroup object with an initial value: best"),
    ("threadgroup int list[2] = {1, 2};", "threadgroup object with an initial value: list"),
    ("threadgroup float s[4]; device float* p = (device float*)s;", "cast from threadgroup to device: s"),
    ("auto y = *(const constant int*)&x[3];", "cast from device to constant: x"),
    ("bfloat b = bfloat16_t(x[i]);", "bfloat needs Metal 3.1; MLX's name for what there is: bfloat16_t, not bfloat"),
    ("bfloat4 b;", "bfloat needs Metal 3.1; MLX's name for what there is: bfloat16_t, not bfloat4"),
    ("const device bfloat16* b;", "reserved name of an incomplete type: bfloat16"),
    ("matrix<bfloat16_t, 4, 4> m;", "matrix of bfloat: matrix<bfloat16_t"),
    ("bfloat16_t b = 0.5f;", "float where bfloat16_t may be bfloat: 0.5f"),
    ("const bfloat16_t b = -INFINITY;", "float where bfloat16_t may be bfloat: -INFINITY"),
    ("[[mediump]] float y = x[i];", "attribute that Metal ignores: mediump"),
    ("mpp::tensor_ops::matmul2d<d> product;", "tensors need Metal 4: mpp::"),
    ("device atomic<ulong>* counter;", "atomics of 64 bits: atomic<ulong>"),
    ("auto p = as_type<device float*>(n);", "as_type of a pointer: as_type<device float*>"),
]
# Correct lines that look similar.
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
    "threadgroup float s[4]; threadgroup float4* p = (threadgroup float4*)s;",
    "threadgroup half tile[16 * 8], other[4]; threadgroup half4x4* m = (threadgroup half4x4*)tile;",
    "half4x4 m; bfloat16_t b = bfloat16_t(0.5f); float y = 0.5f; uint bits = as_type<uint>(y);",
    "device atomic<uint>* counter; device atomic_float* sum;",
    "[[maybe_unused]] float y = x[i];",
]
# Whole texts.
BUILT = "struct S {{ float sum{};  S(float y) {{ sum = y; }} }};\n"
HOLDS = "struct S { half4x4 tile; };\nkernel void k() {\n threadgroup S s[2]; }"
CALLS = "kernel void f(device float* a [[buffer(0)]]) {}\nkernel void g(device float* a [[buffer(0)]]) {\n f(a); }"
TOTAL = "float total(float y) { return simd_sum(y); }\n" + KERNEL.format(body="if (lane < 3) { total(x[i]); }")
MUTUAL = "int g(int n);\nint f(int n) { return g(n); }\nint g(int n) { return f(n); }"
SHAPE = "device float* a [[buffer(0)]], const constant int* a_shape [[buffer(1)]]"
CONSTRUCTED = "threadgroup object that has a constructor: s"
BRAIN = "float where T may be bfloat: 0.0f"
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
    (BUILT.format("") + "kernel void k() {\n threadgroup S s; }", [f"{CONSTRUCTED} at body:3"]),
    ("struct S { float sum = 0.0f; };\nkernel void k() {\n threadgroup S s[2]; }", [f"{CONSTRUCTED} at body:3"]),
    (HOLDS, [f"{CONSTRUCTED} at body:3"]),
    ("struct S { float sum; };\nkernel void k() {\n threadgroup S s[2]; }", []),
    (CALLS, ["call of a kernel: f at body:3"]),
    ("template <typename T> void f(thread T& y) {\n T z = 0.0f;\n y = z; }", [f"{BRAIN} at body:2"]),
    ("template <typename T> void f(thread T& y) {\n T z = T(0.0f);\n y = z; }", []),
    ("#include <metal_tensor>", ["tensors need Metal 4: #include <metal_tensor> at body:1"]),
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
    # KhronosGroup/SPIRV-Cross#1647: a method of an object that is not in thread memory
    "struct S { float y; float get() { return y; } }; threadgroup S s; s.y = 1.0f; out[i] = s.get();",
]
# ... and one line of code for each warning of Apple's compiler.
WARNED = {
    "uint m = n;": "unused variable 'm'",
    "uint m; m = n;": "variable 'm' set but not used",
    "float y; if (n > 3) y = 1.0f; out[i] = y;": "variable 'y' is used uninitialized whenever 'if' condition is false",
    "int m = int(n); if (i < m) out[i] = 0.0f;": "comparison of integers of different signs",
}
HEAD = "#include <metal_stdlib>\nusing namespace metal;\nconstant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};\n"
HEAD += "inline float entry(uint n) { return table[n & 3]; }\n"


def test_typed_check_accepts_a_sound_kernel() -> None:
    assert not typed_check(HEAD + KERNEL.format(body="const constant float* p = &table[n & 3];\nout[i] = p[0];"))


@pytest.mark.parametrize("line", TYPED)
def test_typed_check_refuses(line: str) -> None:
    findings = typed_check(HEAD + KERNEL.format(body=f"// one\n{line}"))
    assert findings
    assert all("body:2" in str(finding) for finding in findings)


@pytest.mark.parametrize("line", WARNED)
def test_typed_check_warns(line: str) -> None:
    (finding,) = typed_check(HEAD + KERNEL.format(body=f"// one\n{line}"))
    assert finding.startswith(f"WARNING {WARNED[line]}")
    assert finding.endswith("body:2")


def test_typed_check_warns_of_constants_and_functions_that_nobody_uses() -> None:
    lost = "constant constexpr uint LOST = 3;\nstatic uint lost(uint n) { return n; }\n"
    found = typed_check(HEAD + lost + KERNEL.format(body=""))
    assert [finding.partition(" [")[0] for finding in found] == [
        "WARNING unused variable 'LOST'",
        "WARNING unused function 'lost'",
    ]


@pytest.mark.parametrize("N", [2, 8192, 8193])
def test_threadgroup_arrays_are_counted_before_anything_runs(N: int) -> None:
    body = f"threadgroup float s[{N} - 1], last;\ns[0] = x[i]; last = s[0]; out[i] = last;"
    found, reserved = typed(HEAD + KERNEL.format(body=body))
    assert reserved == 4 * N
    assert found == (["ERROR 32772 bytes of threadgroup arrays, 32768 is the most"] if N > 8192 else [])
