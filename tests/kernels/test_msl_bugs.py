"""The harness's own specification: bugs planted one by one, each with the whole message that it must give."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from msl import Fault, Kernel

TABLE = Path(__file__).with_name("msl_bugs.json")
N = 64  # floats in x and in out
SIGNATURE = """
kernel void k(const device float* x [[buffer(0)]], device float* out [[buffer(1)]], constant int& zero [[buffer(2)]],
              device atomic_uint* count [[buffer(3)]], uint i [[thread_position_in_grid]],
              uint t [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
              uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {{
#line 1 "body"
{body}
}}
"""


@dataclass(frozen=True)
class Case:
    """One small kernel, its launch and (for a bug) the message of the harness.

    In ``message``, ``@2`` stands for the location of line 2 and ``~`` for "without a barrier between by".
    """

    name: str
    body: list[str]
    message: str = ""
    thread: int | None = None
    line: int = 0
    group: int = 0
    grid: int = N
    threadgroup: int = N
    out: int = N


def run(case: Case, seed: int = 0) -> np.ndarray:
    source = SIGNATURE.format(body="\n".join(case.body))
    out = np.zeros(case.out, np.float32)
    buffers = {"x": np.arange(N, dtype=np.float32), "out": out, "zero": np.array(0, np.int32)}
    buffers["count"] = np.zeros(1, np.uint32)
    shape = {"grid": (case.grid, 1, 1), "threadgroup": (case.threadgroup, 1, 1)}
    Kernel(source, "k")(buffers, **shape, seed=seed, written=("count",))
    return out


CASES = {name: [Case(**row) for row in rows] for name, rows in json.loads(TABLE.read_text()).items()}


@pytest.mark.parametrize("case", CASES["bugs"], ids=lambda case: case.name)
def test_bug_is_named(case: Case) -> None:
    """The whole message: kind, bytes, buffer, thread, threadgroup, simdgroup, lane, line and source."""
    at = [f"body:{number}: `{line.strip()}`" for number, line in enumerate(case.body, 1)]
    message = case.message.replace("~", "without a barrier between by")
    message = re.sub(r"@(\d+)", lambda m: at[int(m[1]) - 1], message)
    where = ""
    if (t := case.thread) is not None:
        where = f", thread ({t},0,0) of threadgroup ({case.group},0,0), simdgroup {t // 32} lane {t % 32}"
    with pytest.raises(Fault) as caught:
        run(case)
    assert str(caught.value) == f"{message} [kernel k{where}]" + (f" at {at[case.line - 1]}" if where else "")
    assert message.startswith(caught.value.kind)


@pytest.mark.parametrize("case", CASES["sound"], ids=lambda case: case.name)
def test_sound_kernel_raises_nothing(case: Case) -> None:
    results = [run(case, seed) for seed in range(3)]
    assert all((out == results[0]).all() for out in results)
