"""Memory of a prompt and of the steps after it, with and without quantised caches and sparse attention.

python scripts/kv_bits.py [--model MODEL] [--layers N] [--lengths S,...] [--kv-bits N,...] [--attn METHOD] [--ours]

Without --model a random one with 32 query heads on 8 KV heads of 128. The figures are MLX's own counters.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

import mlx_sparse
from mlx_sparse.checks import read_length
from mlx_sparse.tools import formats
from mlx_sparse.tools.environment import machine

VOCABULARY = 1024
GB = 1e9


@dataclass(frozen=True)
class Figures:
    """Of one run.

    Attributes:
        keys: of the prompt.
        way: options of `mlx_lm.generate`.
        caches: bytes of the caches at the end, with what lies beside them.
        prompt, steps: bytes at the worst moment of the prompt, and of the steps after it, without the weights.
    """

    keys: int
    way: str
    caches: int
    prompt: int
    steps: int


def random_model(layers: int) -> Any:
    """32 query heads on 8 KV heads of 128, small besides."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 32, "num_key_value_heads": 8}
    args = ModelArgs("llama", num_hidden_layers=layers, vocab_size=VOCABULARY, rms_norm_eps=1e-5, head_dim=128, **sizes)
    model = Model(args)
    if mx.default_device() == mx.gpu:
        model.update(tree_map(lambda array: array.astype(mx.float16), model.parameters()))
    mx.eval(model.parameters())
    return model


def run(model: Any, keys: int, tokens: int, attn: str | None, bits: int | None) -> tuple[int, int, int]:
    """Bytes of the caches, and those at the worst moments of the prompt and of the steps."""
    prompt = mx.random.randint(0, VOCABULARY, (keys,), key=mx.random.key(0))
    caches = make_prompt_cache(model)
    mx.clear_cache()
    weights = mx.get_active_memory()
    mx.reset_peak_memory()
    peaks = []
    with mlx_sparse.sparse(model, attn) if attn else nullcontext():
        options: Any = {"kv_bits": bits, "quantized_kv_start": 0, "prompt_cache": caches}
        for step, _ in enumerate(generate_step(prompt, model, max_tokens=tokens, **options)):
            if step == 0:
                peaks.append(mx.get_peak_memory() - weights)
                mx.reset_peak_memory()
    return sum(cache.nbytes for cache in caches), peaks[0], mx.get_peak_memory() - weights


def figures(args: argparse.Namespace) -> Iterator[Figures]:
    model = load(args.model)[0] if args.model else random_model(args.layers)  # type: ignore[misc]
    ways: list[tuple[str | None, int | None]] = [(None, None), (args.attn, None)]
    for bits in map(int, args.kv_bits.split(",")):
        ways += [(None, bits)] * (not args.ours)
        ways += [("dense", bits), (args.attn, bits), (f"{args.attn},score=copy", bits)]
    for keys in map(read_length, args.lengths.split(",")):
        for attn, bits in ways:
            options = [f"--attn {attn}"] * bool(attn) + [f"--kv-bits {bits}"] * bool(bits)
            found = run(model, keys, args.max_tokens, attn, bits)
            print(f"{keys:,} keys: {' '.join(options) or 'plain'} done", file=sys.stderr)
            yield Figures(keys, " ".join(options) or "plain", *found)


def text(rows: list[Figures]) -> str:
    plain = {row.keys: row for row in rows if row.way == "plain"}

    def cell(row: Figures, name: str) -> str:
        found, whole = getattr(row, name), getattr(plain[row.keys], name)
        return f"{found / GB:.3f} ({found / whole:.2f})"

    header = ["keys", "options", "caches, GB (of plain)", "peak of the prompt", "peak of the steps"]
    lines = [[f"{row.keys:,}", f"`{row.way}`", *(cell(row, n) for n in ("caches", "prompt", "steps"))] for row in rows]
    return formats.table(header, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hugging Face repo (default: a random one)")
    parser.add_argument("--layers", type=int, default=2, help="of the random model (default: 2)")
    parser.add_argument("--lengths", default="8k,16k", help="tokens of the prompt (default: 8k,16k)")
    parser.add_argument("--max-tokens", type=int, default=64, help="steps (default: 64)")
    parser.add_argument("--kv-bits", default="4,8", help="(default: 4,8)")
    parser.add_argument("--attn", default="sparq:dense_below=0", help="(default: sparq:dense_below=0)")
    parser.add_argument(
        "--ours", action="store_true", help="leave out --kv-bits without --attn, which a CPU is very slow at"
    )
    formats.add_options(parser)
    args = parser.parse_args()
    formats.check_options(args)
    facts = {"command": shlex.join(["python", "scripts/kv_bits.py", *sys.argv[1:]]), "date": date.today().isoformat()}
    printer = formats.Printer(args, {**facts, "machine": machine()})
    rows = []
    for row in figures(args):
        printer.line(asdict(row))
        rows.append(row)
    printer.end(text(rows), right=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
