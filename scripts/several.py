"""One choice of keys for all queries of a call, or one for each: attention mass and bytes on SmolLM2-135M.

python scripts/several.py [--context N] [--places N]

Text of four kinds goes on for 16 more tokens in one dense call. For the first 2, 4, 8 and 16 of its queries, in every
layer: the attention mass that SparQ keeps (keys in 4 bits, rank 32), and in brackets the bytes of a KV head by formula,
as a share of the dense call's. A choice for each query reads the scores again for each, and of chosen rows the union
of all lists; one choice reads either once. It takes a fast BLAS where one is preloaded.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from drafts import prompts
from mlx_lm import load
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

import mlx_sparse
from mlx_sparse.common.files import cache_directory
from mlx_sparse.common.stats import dense_elements, sparq_elements
from mlx_sparse.ops.key_codes import code_keys, key_spread
from mlx_sparse.ops.sparq import sparq_select
from mlx_sparse.tools.assets.models import find_model
from mlx_sparse.tools.formats import table

MOST, RANK = 16, 32
LENGTHS = (2, 4, 8, 16)
BUDGETS = (128, 192, 256)
SPARQ: dict[str, Any] = {"rank": RANK, "key_bits": 4, "component_score": "query_key"}


def layers(model: Any, prompt: list[int]) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """Queries, keys and values of the last call of a prompt, layer by layer."""
    seen: list[tuple[mx.array, mx.array, mx.array]] = []
    attend = llama.scaled_dot_product_attention

    def listen(queries: mx.array, keys: mx.array, values: mx.array, *more: Any, **how: Any) -> mx.array:
        seen.append((queries, keys, values))
        return attend(queries, keys, values, *more, **how)

    cache = make_prompt_cache(model)
    for first in range(0, len(prompt) - MOST, 512):
        mx.eval(model(mx.array([prompt[first : min(first + 512, len(prompt) - MOST)]]), cache=cache))
    llama.scaled_dot_product_attention = listen
    try:
        mx.eval(model(mx.array([prompt[-MOST:]]), cache=cache))
    finally:
        llama.scaled_dot_product_attention = attend
    yield from seen


def once(q: mx.array, k: mx.array, v: mx.array, top_k: int) -> tuple[float, float]:
    """Kept mass and share of the dense bytes with one choice."""
    _, stats = mlx_sparse.sparq_attention(q, k, v, top_k=top_k, verify="sparse", return_stats="mass", **SPARQ)
    return float(stats.retained_mass.mean().item()), stats.elements / stats.dense_elements


def each(q: mx.array, k: mx.array, v: mx.array, top_k: int) -> tuple[float, float]:
    """The same with a choice for each query."""
    L, (Hkv, S, D) = q.shape[2], k.shape[1:]
    masses, chosen = [], []
    for i in range(L):
        one, seen = q[:, :, i : i + 1], slice(0, S - L + 1 + i)
        keys, values = k[:, :, seen], v[:, :, seen]
        _, stats = mlx_sparse.sparq_attention(one, keys, values, top_k=top_k, return_stats="mass", **SPARQ)
        masses.append(float(stats.retained_mass.mean().item()))
        coded = code_keys(keys, None, key_bits=4)
        spread = key_spread(coded, keys, None, key_bits=4)
        how: dict[str, Any] = {"scale": D**-0.5, "left_padding": None, "group_reduce": "softmax", "key_bits": 4}
        how |= {"rank": RANK, "top_k": top_k, "local_window": top_k // 4}
        chosen.append(sparq_select(one, keys, component_weight=spread, keys_t=coded, **how)[0].tolist()[0])
    union = sum(len({key for lists in chosen for key in lists[h]}) for h in range(Hkv)) / Hkv
    scored = sparq_elements(S, D, rank=RANK, top_k=0, key_bits=4)
    return sum(masses) / L, (L * scored + 2 * union * D) / dense_elements(S, D)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--places", type=int, default=1)
    args = parser.parse_args()
    model, tokenizer, *_ = load(find_model(None, cache_directory()))
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for _, prompt in tqdm(list(prompts(tokenizer, args.context, args.places)), desc="texts", file=sys.stderr):
        for q, k, v in layers(model, prompt):
            S = k.shape[2] - MOST
            for L in LENGTHS:
                part = q[:, :, :L], k[:, :, : S + L], v[:, :, : S + L]
                found[L, "each"].append(each(*part, BUDGETS[0]))
                for top_k in BUDGETS:
                    found[L, str(top_k)].append(once(*part, top_k))
    names = {"each": f"{BUDGETS[0]} for each", **{str(top_k): f"{top_k} for all" for top_k in BUDGETS}}
    rows = []
    for L in LENGTHS:
        means = {name: [sum(one) / len(one) for one in zip(*found[L, name], strict=True)] for name in names}
        rows.append([str(L), *(f"{mass:.4f} ({share:.3f})" for mass, share in means.values())])
    print(table(["queries", *names.values()], rows))


if __name__ == "__main__":
    main()
