"""How many drafts dense attention accepts, measured, and what that is worth on large models, computed.

python scripts/drafts.py accept [--context N] [--tokens N] [--places N] > ACCEPTED.jsonl
python scripts/drafts.py model ACCEPTED.jsonl
python scripts/drafts.py speed [--context N] [--tokens N] [--turns N]
python scripts/drafts.py families [FAMILY ...]

`accept` lets SmolLM2-135M go on greedily with text of four kinds, `MOST` drafts for each check, and prints a row for
each kind and setting: of the drafts at each position, before which all were accepted, how many were accepted too. It
takes a fast BLAS where one is preloaded, and does not say how fast anything is.

`model` takes a step's time as proportional to its bytes: weights of 4 bits and, by the methods' formulae, keys and
values. ``n`` drafts and a check read the weights ``n + 1`` times (a check those of all experts that its tokens choose,
at random), the caches sparsely ``n`` times and densely once. Rates of acceptance are SmolLM2's: a stand-in. What is
computed, launched and waited for is left out.

`speed` times SmolLM2's answers after one long prompt of prose and one to copy from: densely, with SparQ, losslessly
with 4 drafts a check and with as many as pay, in turns; the lossless ones have to be the dense one's tokens.

`families` lets a tiny random model of each family that mlx-lm has answer densely and losslessly, greedily and with a
seed, and says how many of 24 tokens agree before the first that does not.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machines_model import MODELS, WEIGHT, Model, attention
from tqdm import tqdm

from mlx_sparse.common.files import cache_directory
from mlx_sparse.lm.drafts.pace import fused
from mlx_sparse.methods import Method, parse
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.formats import table

KINDS = ("prose", "copying", "code", "question")
SETTINGS = [(16, 64), (16, 128), (32, 64), (32, 128), (32, 256)]  # rank, top_k; keys in 4 bits
CONTEXTS = (8192, 32_768, 131_072)
DENSE_8B = Model("Qwen3-8B", 36, 4096, Shape(32, 8, 128), 12_288, 151_936)
LENGTHS = range(1, 8)
PIECE = 2048  # tokens of a prompt in one call, as mlx-lm does


def attn(rank: int, top_k: int) -> str:
    return f"sparq:rank={rank},top_k={top_k},key_bits=4"


def prompts(tokenizer: Any, context: int, places: int) -> Iterator[tuple[str, list[int]]]:
    """So many prompts of each kind."""
    from mlx_sparse.tools.demo.text import topics
    from mlx_sparse.tools.evaluate import texts
    from mlx_sparse.tools.evaluate.tasks.plain import bits_per_byte, repetition

    (novels,) = texts.read(["novels"], cache=cache_directory())
    tokens = tokenizer.encode(novels.text)
    for kind, task in (("prose", bits_per_byte), ("copying", repetition)):
        for example in task(tokens, tokenizer, context=context, limit=places, seed=0):
            yield kind, list(example.prompt)
    code = tokenizer.encode(inspect.getsource(argparse))
    reference = tokenizer.encode("\n\n".join(topics[name] for name in ("compound", "typesmapping", "specialnames")))
    for place in range(places):
        yield "code", code[place * context : (place + 1) * context]
        asked = "Here is a text.\n\n" + tokenizer.decode(reference[place * context : (place + 1) * context - 100])
        asked += "\n\nThat was the text. Explain in a few sentences what it says."
        message = [{"role": "user", "content": asked}]
        yield "question", tokenizer.apply_chat_template(message, add_generation_prompt=True)


def accept(context: int, count: int, places: int) -> Iterator[dict[str, Any]]:
    import mlx.core as mx
    from mlx_lm import load

    import mlx_sparse
    from mlx_sparse.lm.drafts import steps
    from mlx_sparse.lm.drafts.pace import MOST
    from mlx_sparse.tools.assets.models import find_model

    model, tokenizer, *_ = load(find_model(None, cache_directory()))
    work = list(prompts(tokenizer, context, places))
    with tqdm(total=len(work) * (1 + len(SETTINGS)), desc="answers", file=sys.stderr) as bar:
        for kind, prompt in work:
            kept = cached(model, prompt)
            bar.update()
            for rank, top_k in SETTINGS:
                text = f"{attn(rank, top_k)},dense_below=0"
                with mlx_sparse.lossless(model, text, draft_tokens=MOST) as report:
                    answer = steps.generate_step(
                        mx.array(prompt[-1:]), model, max_tokens=count, prompt_cache=copy.deepcopy(kept)
                    )
                    tokens = [token for token, _ in answer]
                drafts = report.drafts.as_dict()
                yield {"kind": kind, "rank": rank, "top_k": top_k, "context": len(prompt), "tokens": len(tokens)} | {
                    name: drafts[name] for name in ("checks", "examined", "accepted")
                }
                bar.update()


def cached(model: Any, prompt: list[int]) -> list[Any]:
    """The caches of a prompt, but for its last token."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    kept = make_prompt_cache(model)
    for place in range(0, len(prompt) - 1, PIECE):
        model(mx.array(prompt[place : min(place + PIECE, len(prompt) - 1)])[None], cache=kept)
        mx.eval([cache.state for cache in kept])
    return kept


def speed(context: int, count: int, turns: int) -> str:
    import mlx.core as mx
    from mlx_lm import load

    import mlx_sparse
    from mlx_sparse.lm.drafts import steps
    from mlx_sparse.tools.assets.models import find_model

    model, tokenizer, *_ = load(find_model(None, cache_directory()))
    ways: dict[str, dict[str, Any] | None] = {
        "dense": None,
        "`sparq`": {},
        "`sparq`, 4 drafts a check": {"lossless": True, "draft_tokens": 4},
        "`sparq`, as many as pay": {"lossless": True},
    }
    rows = []
    for kind, prompt in prompts(tokenizer, context, 1):
        if kind not in ("prose", "copying"):
            continue
        kept = cached(model, prompt)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        said: dict[str, list[int]] = {}
        drafts = ""
        for turn in tqdm(range(turns), desc=kind, file=sys.stderr):
            for way, options in sorted(ways.items(), key=lambda pair: (list(ways).index(pair[0]) + turn) % len(ways)):
                text = f"{attn(32, 128)},dense_below=0"
                report = None if options is None else mlx_sparse.enable(model, text, **options)
                cache = copy.deepcopy(kept)
                began = time.perf_counter()
                answer = steps.generate_step(mx.array(prompt[-1:]), model, max_tokens=count, prompt_cache=cache)
                said[way] = [token for token, _ in answer]
                rates[way].append(count / (time.perf_counter() - began))
                mlx_sparse.disable(model)
                if report is not None and report.drafts:
                    drafts = " ".join(line.strip() + ";" for line in report.drafts.lines())
        for way, found in rates.items():
            same = sum(a == b for a, b in zip(said[way], said["dense"], strict=True))
            ratios = [one / other for one, other in zip(found, rates["dense"], strict=True)]
            medians = [f"{statistics.median(of):.2f}" for of in (found, ratios)]
            rows.append([kind, way, *medians, f"{same} of {count}"])
        print(drafts, file=sys.stderr)
    return table(["text", "", "tokens/s", "over dense, median of turns", "dense attention's tokens"], rows)


def families(names: Sequence[str]) -> Iterator[str]:
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    import mlx_sparse
    from mlx_sparse.checks import SparseAttentionError
    from mlx_sparse.lm.drafts import steps
    from mlx_sparse.tools.models import survey, tiny

    def said(generate_step: Any, model: Any, temperature: float) -> list[int]:
        mx.random.seed(3)
        sampler = make_sampler(temperature)
        found = generate_step(mx.array(tiny.prompt_of(70)), model, max_tokens=24, sampler=sampler)
        return [token for token, _ in found]

    for family in tqdm(names or survey.modules(), file=sys.stderr):
        try:
            model = tiny.build(family)
            dense = [said(steps.original, model, temperature) for temperature in (0, 0.8)]
            with mlx_sparse.lossless(model, "sparq:rank=2,top_k=8,dense_below=0", draft_tokens=3) as report:
                ours = [said(steps.generate_step, model, temperature) for temperature in (0, 0.8)]
        except (SparseAttentionError, RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
            yield f"{family}: not run ({str(error).splitlines()[0][:60]})"
            continue
        agree = [[a == b for a, b in zip(*pair, strict=True)] for pair in zip(dense, ours, strict=True)]
        same = [[*one, False].index(False) for one in agree]
        drafts = report.drafts
        yield f"{family}: {same[0]} and {same[1]} of 24; {sum(drafts.accepted)} of {drafts.drafted} drafts accepted"


def chances(rows: Sequence[dict[str, Any]]) -> list[float]:
    """That a draft is accepted where all before it were, by position."""

    def total(name: str, place: int) -> int:
        return sum(row[name][place] for row in rows if place < len(row[name]))

    pairs = [(total("examined", place), total("accepted", place)) for place in range(max(LENGTHS))]
    return [accepted / examined if examined else 0.0 for examined, accepted in pairs]


def per_check(chance: Sequence[float], n: int) -> float:
    """Tokens for each check of ``n`` drafts."""
    found, all_so_far = 1.0, 1.0
    for one in chance[:n]:
        all_so_far *= one
        found += all_so_far
    return found


def weights(model: Model, tokens: int) -> float:
    """Bytes of weights that a call of so many tokens reads: of experts, those that it chooses at random."""
    one = model.weights(1, held=False)
    if model.experts == 1:
        return one
    chosen = model.experts * (1 - (1 - model.active / model.experts) ** tokens)
    return one + WEIGHT * model.layers * model.hidden * 3 * model.units * (chosen - model.active)


def speed_up(model: Model, config: Method, S: int, chance: Sequence[float], n: int) -> float:
    """Of ``n`` drafts for each check over dense steps."""

    def read(method: Method | None) -> float:
        return model.layers * model.shape.Hkv * attention(method, S, model.shape.D)

    dense = weights(model, 1) + read(None)
    taken = n * (weights(model, 1) + read(config)) + weights(model, n + 1) + read(None)
    return per_check(chance, n) * dense / taken


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Acceptance, and the model."""
    blocks = ["### Accepted, by position", ""]
    by_setting = {s: [row for row in rows if (row["rank"], row["top_k"]) == s] for s in SETTINGS}
    found = []
    for (rank, top_k), of in by_setting.items():
        for kind in (*KINDS, "all"):
            chance = chances([row for row in of if kind in (row["kind"], "all")])
            shares = " ".join(f"{one:.2f}" for one in chance)
            lengths = [f"{per_check(chance, n):.2f}" for n in (2, 4, 7)]
            found.append([f"`rank={rank},top_k={top_k}`", kind, shares, *lengths])
    blocks.append(
        table(["setting", "text", "accepted at position 1 to 7", "tokens a check of 2", "of 4", "of 7"], found)
    )
    blocks += ["", "### By bytes: the best length, and how many times as fast as dense steps", ""]
    modelled = []
    for model in (MODELS[1], MODELS[0], DENSE_8B):
        for S in CONTEXTS:
            cells = [model.name, f"{S:,}"]
            for (rank, top_k), of in by_setting.items():
                (config,) = parse(attn(rank, top_k))
                lengths = range(1, fused(model.shape.Hq // model.shape.Hkv) + 1)  # as on a GPU
                best = max(lengths, key=lambda n: speed_up(model, config, S, chances(of), n))
                cells.append(f"{best}: {speed_up(model, config, S, chances(of), best):.2f} x")
            modelled.append(cells)
    heads = [f"`rank={rank},top_k={top_k}`" for rank, top_k in SETTINGS]
    return "\n".join([*blocks, table(["model", "keys", *heads], modelled)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("accept", help="measure on SmolLM2")
    measured.add_argument("--context", type=int, default=2048)
    measured.add_argument("--tokens", type=int, default=64)
    measured.add_argument("--places", type=int, default=2)
    commands.add_parser("model", help="compute from what was measured").add_argument("file", type=Path)
    timed = commands.add_parser("speed", help="time SmolLM2 on this machine")
    timed.add_argument("--context", type=int, default=7936)
    timed.add_argument("--tokens", type=int, default=96)
    timed.add_argument("--turns", type=int, default=3)
    commands.add_parser("families", help="compare tiny models of all families").add_argument("name", nargs="*")
    args = parser.parse_args()
    if args.command == "accept":
        for row in accept(args.context, args.tokens, args.places):
            print(json.dumps(row), flush=True)
    elif args.command == "speed":
        print(speed(args.context, args.tokens, args.turns))
    elif args.command == "families":
        for line in families(args.name):
            print(line, flush=True)
    else:
        print(tables([json.loads(line) for line in args.file.read_text().splitlines()]))


if __name__ == "__main__":
    main()
