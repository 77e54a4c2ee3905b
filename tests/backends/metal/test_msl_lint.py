"""Test the lint and the typed compilation with planted errors that clang does not report."""

import pytest
from json_tables import read_tables
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
# "lines" have one line of a kernel body and the finding of the lint, and "clean lines" look similar. "files" are whole
# texts. Plain C++ accepts the lines that are "refused by types". Apple's compiler prints the "warnings".
DATA = read_tables(__file__)


@pytest.mark.parametrize(("line", "problem"), DATA["lines"])
def test_line_of_a_kernel_is_found(line: str, problem: str) -> None:
    assert [str(f) for f in lint(KERNEL.format(body=f"// one\n{line}"))] == [f"LINT {problem} at body:2"]


@pytest.mark.parametrize("line", DATA["clean lines"])
def test_harmless_line_of_a_kernel_is_not(line: str) -> None:
    assert lint(KERNEL.format(body=line)) == []


@pytest.mark.parametrize(("text", "findings"), DATA["files"])
def test_declarations_and_calls(text: str, findings: list[str]) -> None:
    assert [str(f) for f in lint(text)] == [f"LINT {f}" for f in findings]


HEAD = "#include <metal_stdlib>\nusing namespace metal;\nconstant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};\n"
HEAD += "inline float entry(uint n) { return table[n & 3]; }\n"


def test_typed_check_accepts_a_sound_kernel() -> None:
    assert not typed_check(HEAD + KERNEL.format(body="const constant float* p = &table[n & 3];\nout[i] = p[0];"))


@pytest.mark.parametrize("line", DATA["refused by types"])
def test_typed_check_refuses(line: str) -> None:
    findings = typed_check(HEAD + KERNEL.format(body=f"// one\n{line}"))
    assert findings
    assert all("body:2" in str(finding) for finding in findings)


@pytest.mark.parametrize(("line", "warning"), DATA["warnings"])
def test_typed_check_warns(line: str, warning: str) -> None:
    (finding,) = typed_check(HEAD + KERNEL.format(body=f"// one\n{line}"))
    assert finding.startswith(f"WARNING {warning}")
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
