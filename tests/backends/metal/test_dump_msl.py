"""Test scripts/dump_msl.py: its texts are complete and distinct, equal the launched texts, and cover all kernels."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("the harness of tests/msl runs on Linux", allow_module_level=True)

import dump_msl
from cases import Case, every_parameter
from metal_calls import METAL, Call, metal_calls
from msl import Metal, emulated, typed

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return list(metal_calls())


def test_the_calls_reach_every_kernel(calls: list[Call]) -> None:
    """Make one call of each kind, with several query heads per KV head."""
    kinds: dict[str, Call] = {}
    for call in calls:
        if "H1x1" not in call.name:
            kinds.setdefault(call.name.partition(" B")[0].partition(" of ")[0], call)
    found = dump_msl.texts(kinds.values())
    bodies = {path.stem: path.read_text() for path in (ROOT / "metal").glob("*.metal")}
    packed = {f"{name}_packed" for name, body in bodies.items() if "ROWS(" in body}
    assert {text.kernel for text in found} == bodies.keys() | packed


def texts_of(*calls: Call) -> list[dump_msl.Text]:
    return dump_msl.texts(calls)


def sparq(case: Case) -> Call:
    return Call(str(case), lambda: METAL.sparq(case, every_parameter(case, "paper")))


def test_a_text_is_what_runs(metal: Metal) -> None:
    case = Case(1, 4, 2, 70, 64, "f16")
    METAL.sparq(case, every_parameter(case, "paper"))
    found = {text.kernel: text for text in texts_of(sparq(case))}
    assert list(found) == ["sparq_scores", "sparq_candidates", "attend_indices"]
    for name, text in found.items():
        assert dump_msl.check(text) == []
        assert text.text == re.sub(r'^#line 1 "(?:header|body)"\n', "", metal.texts[name], flags=re.M)
        assert metal.last(name).threadgroup_memory <= typed(text.text).threadgroup_memory <= 32768


def test_a_kernel_that_metal_refuses_is_reported() -> None:
    text = texts_of(sparq(Case(1, 4, 2, 70, 64, "f16")))[0]
    partial = "threadgroup float partial["
    assert partial in text.text
    text.text = text.text.replace(partial, f"threadgroup half4x4 planted[2]; {partial}")
    assert any("threadgroup object that has a constructor: planted" in said for said in dump_msl.check(text))


def test_inputs_of_less_than_eight_numbers_make_a_text_of_their_own_name() -> None:
    """Test small inputs, which MLX passes in the constant address space."""
    short, long = (texts_of(sparq(Case(1, 2, 2, S, 64, "f32"))) for S in (65, 70))
    both = texts_of(sparq(Case(1, 2, 2, 65, 64, "f32")), sparq(Case(1, 2, 2, 70, 64, "f32")))
    assert len({text.text for text in both}) == len({text.name for text in both}) == len(both)
    assert {text.text for text in both} == {text.text for text in (*short, *long)}


def test_a_folder_is_complete_and_replaced_at_once(tmp_path: Path) -> None:
    header = dump_msl.utils()
    folder = tmp_path / "msl"
    for case in (Case(1, 4, 2, 70, 64, "f16"), Case(1, 4, 2, 70, 128, "f16")):
        found = texts_of(sparq(case))
        dump_msl.write(folder, header, found)
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert files == {"mlx_utils.h": header, **{f"{text.name}.metal": text.text for text in found}}
    assert [path.name for path in tmp_path.iterdir()] == ["msl"]
    for text in found:
        assert f'[[host_name("custom_kernel_{text.name}")]]' in text.text


def test_the_header_is_mlx_own_in_the_order_of_its_includes() -> None:
    header = dump_msl.utils()
    parts = [line.split('"')[1].rpartition("/")[2] for line in header.splitlines() if line.startswith("#line")]
    assert parts[-1] == "utils.h"
    assert parts.index("bf16.h") < parts.index("bf16_math.h") < parts.index("complex.h")
    assert len(parts) == len(set(parts))
    assert '#include "' not in header
    assert "#include <metal_stdlib>" in header
    assert "using namespace metal;" in header


def test_a_foreign_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(SystemExit):
        dump_msl.main(["--out", str(tmp_path)])
    assert "--out: expected a new folder or an older dump" in capsys.readouterr().err
    assert (tmp_path / "precious").exists()


def test_nothing_runs_and_results_are_zeros_while_texts_are_recorded() -> None:
    seen: list[Any] = []
    with emulated(record=seen.append) as harness:
        out = METAL.sparq(Case(1, 4, 2, 70, 64, "f16"), every_parameter(Case(1, 4, 2, 70, 64, "f16"), "paper")).out
    assert (out == 0).all()
    assert out.shape == (1, 4, 1, 64)
    assert [generated.kernel for generated in seen]
    assert harness.launches == []
