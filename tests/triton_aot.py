"""python triton_aot.py [FOLDER] < CASES: compile what the launchers launch, for GPUs that are not here.

FOLDER holds another Triton than the environment. CASES is a JSON list of the fields of `Case`. For every launch of
every case one line of JSON with the fields of `Compiled` goes to the standard output. Launchers get tensors without
memory, and their records are compiled as a launch would compile them, by the JIT with its own specialisation.

The environment must not hold TRITON_INTERPRET. This file is run, and imported by tests for its classes only.
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
PROCESSORS = {80: 108, 90: 132, 100: 148}  # of A100, H100 and H200, B200


@dataclass(frozen=True)
class Case:
    """One call of a launcher: which, on what GPU, with what sizes."""

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
    weighted: bool = False
    padded: bool = False
    reallocate: bool = False
    odd: bool = False  # no stride and no pointer is a multiple of 16 bytes
    block_size: int = 128  # of prompts
    hidden: int = 1024  # of a query network; 0 for a linear router
    buckets: int = 1024
    probes: int = 32
    weights: str = "float16"  # of a query network

    def __str__(self) -> str:
        flags = [name for name in ("weighted", "padded", "reallocate", "odd") if getattr(self, name)]
        sizes = f"B{self.B}-H{self.Hkv * self.G}x{self.Hkv}-S{self.S}-D{self.D}"
        if self.launcher == "saap":
            sizes += f"-H{self.hidden}-C{self.buckets}-probes{self.probes}-{self.weights}"
        else:
            sizes += f"-block{self.block_size}" if self.launcher in PROMPTS else f"-r{self.rank}-k{self.top_k}"
        return "-".join([self.launcher, sizes, self.dtype, *flags, f"sm_{self.architecture}"])


@dataclass
class Compiled:
    """What became of one launch.

    Attributes:
        shared: dynamic shared memory in bytes.
        registers, stack, local: of a thread.
        sass: the instructions in order.
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
    """A GPU that has a name and nothing else. Triton keeps what it compiled by device, so each has its own number."""

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
    """Resources by name, and the SASS."""
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
    """Call the launcher of ``case`` with tensors that have no memory."""
    import torch
    from mlx_sparse.cuda_ref.launchers import attend, blocks, saap, sample, select, sparq

    from mlx_sparse.common.block_layout import Layout

    dtype = getattr(torch, case.dtype)
    B, Hkv, G, S, D = case.B, case.Hkv, case.G, case.S, case.D

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def cache(*shape: int) -> torch.Tensor:
        if not case.odd:
            return empty(*shape, dtype=dtype)
        return empty(*shape[:-1], shape[-1] + 1, dtype=dtype)[..., 1:]

    queries = empty(B, Hkv * G, 1, D, dtype=dtype)
    keys, values, keys_t = cache(B, Hkv, S, D), cache(B, Hkv, S, D), cache(B, Hkv, D, S)
    padding = empty(B, dtype=torch.int32) if case.padded else None
    if case.launcher == "sparq":
        sparq.sparq_decode(
            queries,
            keys,
            values,
            keys_t,
            rank=case.rank,
            top_k=case.top_k,
            local_window=case.top_k // 4,
            group_reduce="softmax",
            component_weight=empty(B, Hkv, D) if case.weighted else None,
            scale=D**-0.5,
            left_padding=padding,
            value_mean=empty(B, Hkv, D) if case.reallocate else None,
        )
    elif case.launcher == "dense":
        attend.dense_decode(queries, keys, values, scale=D**-0.5, left_padding=padding)
    elif case.launcher == "sample":
        layout = Layout(S, S, 2, case.block_size)
        alphas = {"alpha_column": 0.9, "alpha_slash": 0.9}
        sample.sample_prefill(cache(B, Hkv * G, S, D), keys, values, layout, scale=D**-0.5, **alphas)
    elif case.launcher in PROMPTS:
        listed = empty(B, Hkv * G, S // case.block_size, 100, dtype=torch.int32) if case.launcher == "blocks" else None
        heads = cache(B, Hkv * G, S, D)
        blocks.attend_blocks(heads, keys, values, listed, block_size=case.block_size, scale=D**-0.5)
    elif case.launcher == "saap":
        sizes, weights = (Hkv, case.hidden, case.buckets), getattr(torch, case.weights)
        network = saap.Network(empty(Hkv, case.hidden or D, case.buckets, dtype=weights))
        if case.hidden:
            biases = (empty(*sizes[::2], dtype=weights), empty(*sizes[:2], dtype=weights))
            network = saap.Network(network[0], biases[0], empty(Hkv, D, case.hidden, dtype=weights), biases[1])
        visited = saap.saap_route(queries, network, probes=case.probes)
        covered = S - 2047
        offsets, key_ids = empty(B, Hkv, case.buckets + 1, dtype=torch.int32), empty(B, Hkv, covered, dtype=torch.int32)
        index = saap.Index(offsets, key_ids, covered, 1, 2304 + S // 16)
        saap.saap_decode(queries, keys, values, visited, index, scale=D**-0.5, left_padding=padding)
    elif case.launcher == "select":
        select.top_k_select(empty(B, Hkv, S), top_k=case.top_k, local_window=case.top_k // 4, left_padding=padding)


def compile_case(case: Case) -> list[Compiled]:
    """Everything that the launcher of ``case`` launches."""
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
