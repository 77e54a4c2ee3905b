"""List library calls that together launch every variant of the Metal kernels. `scripts/dump_msl.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from adapters import ADAPTERS
from cases import CASES, CODED, PRECISION, SPARQ, Case, every_parameter
from mlx_arrays import to_mlx
from quantized_cases import PackedCase, PackedMlx, packed_cases
from saap_cases import SAAP_CASES, SaapCase, visited
from sample_cases import SAMPLE_CASES, SampleCase

import mlx_sparse
from mlx_sparse.core.attend.metal_rows import attend_rows
from mlx_sparse.core.blocks.layout import MINFERENCE_ROWS
from mlx_sparse.core.packed_rows import BITS
from mlx_sparse.core.registry import METAL_ROWS

# Lengths of key lists: one entry, which MLX passes in the constant address space; a few entries; several splits.
LISTS = (1, 40, 700)
# Quantized KV caches: type of the scales, bits per component, components per group.
EVERY_FORM = [(dtype, bits, (32, 64, 128)[n % 3]) for n, dtype in enumerate(PRECISION) for bits in BITS]
# Query rows per KV head: for one SIMD group, for several SIMD groups, and the maximum.
ROWS = (8, 40, METAL_ROWS)
# Sizes that only one test uses.
OWN = [
    *(Case(1, 4, 2, 20, 64, "f32"), Case(2, 4, 2, 213, 64, "f32"), Case(2, 2, 2, 300, 64, "f32")),
    *(Case(2, 6, 2, 300, 64, "f32"), Case(1, 8, 2, 300, 64, "f32"), Case(2, 4, 2, 213, 64, "f32", padding=(0, 37))),
]
BLOCKS = [SampleCase(1, 4, 2, 150, 230, 16, dtype, size) for dtype in PRECISION for size in (32, 64, 128)]
# Hidden size and type of weights of the routers.
ROUTERS: list[tuple[int | None, str]] = [(None, "f16"), (32, "f32")]
PROMPT = SampleCase(1, 4, 2, 150, 230, 64, "f32", 32, chunks=2)
PAIRS = list(permutations(PRECISION, 2))
MIXES = [*[(queries, other, other) for queries, other in PAIRS], ("f16", "f16", "bf16")]


class Call(NamedTuple):
    """A library call and its name in the dump."""

    name: str
    run: Callable[[], Any]


def metal_calls() -> Iterator[Call]:
    """Yield calls that cover all functions with Metal kernels, all test cases, all settings and all dtypes."""
    yield from _decode()
    yield from _long()
    yield from _lists()
    yield from _rows()
    yield from _packed()
    yield from _biased()
    yield from _buckets()
    yield from _prompts()
    yield from _mixed()


METAL, PACKED = ADAPTERS["metal"], PackedMlx("metal")


def _decode() -> Iterator[Call]:
    for case in [*CASES, *OWN]:
        for setting in SPARQ:
            yield Call(f"sparq {setting} {case}", lambda c=case, s=setting: METAL.sparq(c, every_parameter(c, s)))
        for setting, chosen in CODED.items():
            params = {**every_parameter(case, "paper"), **chosen}
            params["rank"] = params["rank"] or case.D
            yield Call(f"sparq {setting} {case}", lambda c=case, p=params: METAL.sparq(c, p))


def _long() -> Iterator[Call]:
    """Yield calls whose contexts fill several tiles and whose key lists fill several splits."""
    sizes = sorted({(case.Hq // case.Hkv, case.D, case.dtype) for case in CASES})
    settings = {"paper": {}, "4-bits": CODED["4-bits"], "reallocate": {"reallocate": True}}
    for G, D, dtype in sizes:
        case, packed = Case(1, G, 1, 8300, D, dtype), PackedCase(1, G, 1, 8300, D, dtype, bits=4, group_size=32)
        for setting, chosen in settings.items():
            for top_k in (40, 700):
                params = {**every_parameter(case, "paper"), **chosen, "top_k": top_k}
                yield Call(f"sparq {setting} {top_k} of {case}", lambda c=case, p=params: METAL.sparq(c, p))
                if D % packed.group_size == 0:
                    params = {**params, "rank": D}
                    name = f"packed sparq {setting} {top_k} of {packed}"
                    yield Call(name, lambda c=packed, p=params: PACKED.sparq(c, p))


def _indices(case: Case, N: int) -> Any:
    return np.broadcast_to(np.arange(N, dtype=np.int32) % case.S, (case.B, case.Hkv, N))


def _lists() -> Iterator[Call]:
    for case in [*CASES, *OWN]:
        for N in LISTS:
            given = case, _indices(case, N), 0.2
            counts = mx.full((case.B, case.Hkv), N)
            yield Call(f"{N} keys {case}", lambda g=given: METAL.attend_indices(*g))
            yield Call(f"{N} keys counted {case}", lambda g=given, n=counts: METAL.attend_indices(*g, counts=n))


def _rows() -> Iterator[Call]:
    """Yield dense verification steps for a short context (one split) and for a long context (several splits)."""
    for rows, D, dtype, S in product(ROWS, sorted({case.D for case in CASES}), PRECISION, (100, 4200)):
        case = Case(1, 16, 2, S, D, dtype)
        yield Call(f"check of {rows} rows {case}", lambda c=case, n=rows // 8: _check(c, n))


def _check(case: Case, L: int) -> Any:
    return attend_rows(*(to_mlx(array, case.dtype) for array in case.inputs(L=L)), scale=0.2)


def _packed() -> Iterator[Call]:
    whole = [PackedCase(2, 8, 2, 700, 128, *form[:1], bits=form[1], group_size=form[2]) for form in EVERY_FORM]
    for case in [*packed_cases(), *whole]:
        for setting in ("rank-D", "reallocate", "odd-sizes"):
            params = {**every_parameter(case, setting), "rank": case.D}
            yield Call(f"packed sparq {setting} {case}", lambda c=case, p=params: PACKED.sparq(c, p))
        for setting, chosen in CODED.items():
            params = {**every_parameter(case, "paper"), **chosen}
            params["rank"] = params["rank"] or case.D
            yield Call(f"packed sparq {setting} {case}", lambda c=case, p=params: PACKED.sparq(c, p))
        for N in LISTS:
            counts = mx.full((case.B, case.Hkv), N)
            given = case, _indices(case, N), 0.2
            yield Call(f"packed {N} keys {case}", lambda g=given: PACKED.attend_indices(*g))
            yield Call(f"packed {N} keys counted {case}", lambda g=given, n=counts: PACKED.attend_indices(*g, counts=n))


def _biased() -> Iterator[Call]:
    """Yield calls with a bias, for groups of one and of several threadgroups."""
    for (G, D), dtype in product(((4, 64), (20, 512), (128, 512), (64, 576)), PRECISION):
        for S, more in ((300, {}), (300, CODED["4-bits"]), (300, SPARQ["no-window"]), (8300, {})):
            case = Case(1, G, 1, S, D, dtype)
            params = {**every_parameter(case, "no-reallocate"), **more}
            params["bias"] = to_mlx(np.zeros((1, G, 1, S)), dtype)
            yield Call(f"biased sparq of {S} keys {case}", lambda c=case, p=params: METAL.sparq(c, p))


def _buckets() -> Iterator[Call]:
    small = [SaapCase(Case(2, 6, 2, 200, 64, "f32", padding=(0, 60)), "random", probes=n) for n in (1, 2, 3, 16)]
    small += [SaapCase(Case(1, 4, 2, 300, 64, "f32"), "random", hidden=n, weights=w) for n, w in ROUTERS]
    for case in [*SAAP_CASES, *small]:
        chosen = visited(case)
        empty = np.concatenate([chosen, np.full((*chosen.shape[:2], 3), -1)], axis=-1)
        yield Call(f"lists with empty slots {case}", lambda c=case, v=empty: METAL.lists(c, v, c.covered, c.step.S))
        yield Call(f"saap {case}", lambda c=case, v=chosen: METAL.saap(c, v))
        yield Call(f"lists {case}", lambda c=case, v=chosen: METAL.lists(c, v, c.covered, c.step.S + 70))
        given = {"bucket_ids": mx.array(case.bucket_ids()), "visited": mx.array(chosen), **case.window}
        given["left_padding"] = case.step.padding
        yield Call(f"public saap {case}", lambda c=case, g=given: METAL.public("saap_attention", c.step, **g))
        nowhere = {**given, "bucket_ids": mx.full(case.bucket_ids().shape, -1)}
        yield Call(f"no buckets {case}", lambda c=case, g=nowhere: METAL.public("saap_attention", c.step, **g))
        each = np.full(case.step.B, case.covered)
        yield Call(f"lists of each {case}", lambda c=case, v=chosen, n=each: METAL.lists(c, v, n, c.step.S + 70))


def _prompts() -> Iterator[Call]:
    for case in SAMPLE_CASES:
        yield Call(f"scores {case}", lambda c=case: METAL.sample_scores(c))
        yield Call(f"minference scores {case}", lambda c=case: METAL.sample_scores(c, rows=MINFERENCE_ROWS))
    for case in [*SAMPLE_CASES, *BLOCKS]:
        for N in (1, 8):
            blocks = np.zeros((case.B, case.Hq, case.layout.row_blocks, N), np.int32)
            yield Call(f"{N} blocks {case}", lambda c=case, b=blocks: METAL.attend_blocks(c, b))


def _mixed() -> Iterator[Call]:
    """Yield calls whose queries and cache have different types, such as a bfloat16 model with a float16 cache."""
    ids = np.random.default_rng(0).integers(0, 8, size=(1, PROMPT.Hkv, PROMPT.S)).astype(np.int32)
    listed = {"bucket_ids": mx.array(ids), "visited": mx.array([[[1, 4], [0, 6]]], mx.int32)}
    for mix in MIXES:
        q, k, v = (to_mlx(array, dtype) for array, dtype in zip(PROMPT.inputs(), mix, strict=True))
        step, name = (q[:, :, -1:], k, v), "-".join(mix)
        how = {"backend": "metal", "top_k": 32, "rank": 16}
        yield Call(f"sparq {name}", lambda s=step, h=how: mlx_sparse.sparq_attention(*s, **h))
        window = {"backend": "metal", "sink_tokens": 1, "recent_tokens": 20}
        yield Call(f"saap {name}", lambda s=step, w=window: mlx_sparse.saap_attention(*s, **listed, **w))
        prompt = {**PROMPT.parameters, "backend": "metal"}
        yield Call(f"sample {name}", lambda g=(q, k, v), p=prompt: mlx_sparse.sample_attention(*g, **p))
