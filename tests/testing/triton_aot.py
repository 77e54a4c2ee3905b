"""Compile all kernel launches for GPUs that this machine does not have: python triton_aot.py [FOLDER] < CASES.

If FOLDER is set, Triton is imported from FOLDER. CASES is a JSON list of `Case` fields. The script prints a JSON line
with the fields of `Compiled` for every launch of every case. The script calls the launchers with tensors that have no
memory. Triton's JIT compiles the launches with the same specialization as in real launches.

The environment must not set TRITON_INTERPRET. Tests import only the classes of this file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = ("sample", "blocks", "prompt")  # launchers
PROCESSORS = {80: 108, 90: 132, 100: 148}  # number of SMs of the A100, of the H100 and H200, and of the B200


@dataclass(frozen=True)
class Case:
    """Arguments of a launcher call: launcher name, GPU architecture and sizes."""

    launcher: str
    architecture: int
    dtype: str = "float16"
    B: int = 1
    Hkv: int = 8
    G: int = 4
    D: int = 128
    S: int = 65536
    rank: int = 32
    top_k: int = 128
    key_bits: int = 16
    weighted: bool = False
    padded: bool = False
    reallocate: bool = False
    odd: bool = False  # strides and pointers that are not multiples of 16 bytes
    block_size: int = 128  # for prefill
    hidden: int = 1024  # size of the query network; 0 for a linear router
    buckets: int = 1024
    probes: int = 32
    weights: str = "float16"  # dtype of the query network

    def __str__(self) -> str:
        flags = [name for name in ("weighted", "padded", "reallocate", "odd") if getattr(self, name)]
        sizes = f"B{self.B}-H{self.Hkv * self.G}x{self.Hkv}-S{self.S}-D{self.D}"
        if self.launcher == "saap":
            sizes += f"-H{self.hidden}-C{self.buckets}-probes{self.probes}-{self.weights}"
        else:
            sizes += f"-block{self.block_size}" if self.launcher in PROMPTS else f"-r{self.rank}-k{self.top_k}"
            sizes += f"-{self.key_bits}bits" if self.key_bits < 16 else ""
        return "-".join([self.launcher, sizes, self.dtype, *flags, f"sm_{self.architecture}"])


@dataclass
class Compiled:
    """A compiled kernel launch.

    Attributes:
        shared: dynamic shared memory in bytes.
        registers: number of registers per thread.
        stack, local: stack memory and local memory per thread in bytes.
        sass: SASS instructions in order.
    """

    case: Case
    kernel: str
    grid: list[int]
    numbers: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int
    stack: int
    local: int
    shared: int
    sass: list[str] = field(repr=False)


class Driver:
    """Fake GPU driver. It returns the architecture as the device number, because Triton caches kernels by device."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def instructions(cubin: bytes) -> tuple[dict[str, int], list[str]]:
    """Disassemble a cubin file. Return a dict from resource name to usage, and a list of SASS instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [tool, "-sass", "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}
    return used, re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.+?) ;", listing, re.MULTILINE)


def call(case: Case) -> None:
    """Call the launcher of ``case`` with tensors that have no memory, because no kernel runs."""
    import torch
    from mlx_sparse.cuda_ref.launchers import attend, blocks, saap, sample, select, sparq

    from mlx_sparse.methods.sparq.scoring_keys import GROUP

    dtype = getattr(torch, case.dtype)
    B, Hkv, G, S, D = case.B, case.Hkv, case.G, case.S, case.D
    empty, scale = torch.empty, D**-0.5

    def cache(*shape: int) -> torch.Tensor:
        if not case.odd:
            return empty(*shape, dtype=dtype)
        return empty(*shape[:-1], shape[-1] + 1, dtype=dtype)[..., 1:]

    queries, keys, values = empty(B, Hkv * G, 1, D, dtype=dtype), cache(B, Hkv, S, D), cache(B, Hkv, S, D)
    padding = empty(B, dtype=torch.int32) if case.padded else None
    if case.launcher == "sparq":
        scored = [cache(B, Hkv, D, S)]
        if case.key_bits < 16:
            lo = empty(B, Hkv, D, S // GROUP, dtype=torch.float16)
            scored = [empty(B, Hkv, D, S // GROUP * 32, dtype=torch.uint8), lo, lo, empty(B, Hkv, D)]
        weight = empty(B, Hkv, D) if case.weighted else None
        mean = empty(B, Hkv, D) if case.reallocate else None
        settings = case.rank, case.top_k, case.top_k // 4, scale
        sparq.sparq_decode(queries, keys, values, scored, *settings, weight, padding, mean)
    elif case.launcher == "dense":
        attend.dense_decode(queries, keys, values, scale, padding)
    elif case.launcher == "select":
        select.top_k_select(empty(B, Hkv, S), case.top_k, case.top_k // 4, padding)
    elif case.launcher == "sample":
        sample.sample_attention(cache(B, Hkv * G, S, D), keys, values, 0.9, 0.9, 2, case.block_size, scale)
    elif case.launcher in PROMPTS:
        listed = empty(B, Hkv * G, S // case.block_size, 100, dtype=torch.int32) if case.launcher == "blocks" else None
        blocks.attend_blocks(cache(B, Hkv * G, S, D), keys, values, listed, case.block_size, scale)
    elif case.launcher == "saap":
        H, C, weights = case.hidden, case.buckets, getattr(torch, case.weights)
        network = [empty(Hkv, H or D, C, dtype=weights), None, None, None]
        if H:
            network[1:] = [empty(Hkv, *shape, dtype=weights) for shape in ((C,), (D, H), (H,))]
        visited = saap.saap_route(queries, *network, case.probes)
        covered = S - 2047
        offsets, key_ids = empty(B, Hkv, C + 1, dtype=torch.int32), empty(B, Hkv, covered, dtype=torch.int32)
        sizes = covered, 1, 2304 + S // 16
        saap.saap_decode(queries, keys, values, visited, offsets, key_ids, *sizes, scale, padding)


def compile_case(case: Case) -> list[Compiled]:
    """Compile all kernel launches of ``case``."""
    import triton
    from mlx_sparse.cuda_ref.launchers import configs, launch

    found: list[Compiled] = []

    def run(record: Any) -> None:
        kernel = record.kernel.warmup(**record.arguments, **record.constants, **record.options, grid=record.grid)
        used, sass = instructions(kernel.asm["cubin"])
        found.append(
            Compiled(
                case=case,
                kernel=record.kernel.__name__,
                grid=list(record.grid),
                numbers={k: v for k, v in record.arguments.items() if isinstance(v, int | float)},
                constants=dict(record.constants),
                warps=record.options["num_warps"],
                stages=record.options["num_stages"],
                registers=used["REG"],
                stack=used["STACK"],
                local=used["LOCAL"],
                shared=kernel.metadata.shared,
                sass=sass,
            )
        )

    launch.Launch.run = run
    configs.capability = lambda device: case.architecture
    configs.processors = lambda device: PROCESSORS[case.architecture]
    triton.runtime.driver.set_active(Driver(case.architecture))
    call(case)
    return found


def main() -> None:
    sys.path[:0] = sys.argv[1:2]
    for fields in json.load(sys.stdin):
        for compiled in compile_case(Case(**fields)):
            print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    main()
