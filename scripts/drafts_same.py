"""Whether `--lossless` says what dense decoding says: tokens one by one, and how often each is sampled.

python scripts/drafts_same.py smollm2 ROWS.jsonl [--context N:PLACES ...] [--tokens N]
python scripts/drafts_same.py tiny ROWS.jsonl [--family FAMILY ...] [--prompts N] [--tokens N]
python scripts/drafts_same.py sampled [--answers N]

`smollm2` and `tiny` answer greedily, densely and with 4 drafts for each check, from copies of one prompt's caches. Each
row has `same`, the tokens before the first that differs, and there `gap`, by which dense attention's two largest logits
lie apart; a `tie` if that is no more than what the two ways' log-probabilities differed by at the tokens before,
`apart`. Rows are appended to the file as they come, and those that it has are not run again.

`sampled` lets a tiny model of 12 tokens, whose drafts are often wrong, give 4 tokens after one prompt as often as it
is told, and compares how often each token and each pair came with the probabilities of dense attention, computed for
every beginning: chi-square (rare cells as one), and `p`, the share of 10,000 simulated counts whose statistic is no
smaller.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from drafts import attn, cached, prompts
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

import mlx_sparse
from mlx_sparse.files import cache_directory
from mlx_sparse.lm.drafts import steps
from mlx_sparse.lm.drafts.figures import DraftFigures
from mlx_sparse.tools.formats import table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))
import family_models as tiny

DRAFTS = 4
FAMILIES = ("llama", "qwen3", "qwen3_next")  # the last has linear layers beside full attention
BAD = "sparq:rank=2,top_k=8,dense_below=0"
SAMPLED = 4  # tokens of an answer: that of the prompt, 2 drafts, and one that comes behind a check
LETTERS = 12  # the vocabulary
RARE = 5
SIMULATED = 10_000
HEADS = ("", "keys", "answers", "tokens", "gap where it differs", "least gap", "apart", "drafts accepted")

Work = tuple[Any, str, dict[str, Any], list[int]]  # a model, its method, what the row is called, a prompt


def said(
    steps_of: Any, model: Any, last: list[int], kept: list[Any], count: int, **options: Any
) -> tuple[list[int], list[mx.array]]:
    """Tokens, and their log-probabilities ``(count, vocabulary)``."""
    found = list(steps_of(mx.array(last), model, max_tokens=count, prompt_cache=copy.deepcopy(kept), **options))
    return [token for token, _ in found], [logprobs for _, logprobs in found]


def compared(model: Any, text: str, prompt: list[int], count: int) -> dict[str, Any]:
    """A row: one prompt answered both ways."""
    kept, last = cached(model, prompt), prompt[-1:]
    tokens, dense = said(steps.original, model, last, kept, count)
    with mlx_sparse.lossless(model, text, draft_tokens=DRAFTS) as report:
        ours, checked = said(steps.generate_step, model, last, kept, count)
    same = [*(a == b for a, b in zip(tokens, ours, strict=True)), False].index(False)
    gaps = [float(np.ptp(np.partition(np.array(row), -2)[-2:])) for row in dense]
    apart = [float(mx.abs(a - b).max()) for a, b in zip(dense[:same], checked, strict=False)]
    row: dict[str, Any] = {"keys": len(prompt), "tokens": count, "same": same}
    if same < count:
        row |= {"gap": gaps[same], "tie": gaps[same] <= max(apart, default=0.0)}
    row |= {"apart": max(apart, default=0.0), "least_gap": min(gaps[: same + 1])}
    drafts = report.drafts
    return row | {"checks": drafts.checks, "drafted": drafts.drafted, "accepted": sum(drafts.accepted)}


def answers(work: Sequence[Work], count: int, file: Path) -> str:
    """Append a row for each prompt that ``file`` does not have yet; a table of all."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for model, text, name, prompt in tqdm(work, desc="answers", file=sys.stderr):
        if not any(name.items() <= row.items() for row in rows):
            rows.append(name | compared(model, text, prompt, count))
            with file.open("a") as sink:
                print(json.dumps(rows[-1]), file=sink)
    lines = []
    for group in dict.fromkeys(row["group"] for row in rows):
        of = [row for row in rows if row["group"] == group]
        others = [row for row in of if row["same"] < row["tokens"]]
        lengths = sorted(row["keys"] for row in of)
        lines.append(
            [
                group,
                f"{lengths[0]:,} to {lengths[-1]:,}",
                f"{len(of) - len(others)} of {len(of)}",
                f"{sum(row['same'] for row in of):,} of {sum(row['tokens'] for row in of):,}",
                ", ".join(f"{row['gap']:.1e}" + " (a tie)" * row["tie"] for row in others) or "-",
                f"{min(row['least_gap'] for row in of):.1e}",
                f"{max(row['apart'] for row in of):.1e}",
                f"{sum(row['accepted'] for row in of):,} of {sum(row['drafted'] for row in of):,}",
            ]
        )
    return table([*HEADS], lines)


def smollm2(contexts: Sequence[str], count: int, file: Path) -> str:
    from mlx_lm import load

    from mlx_sparse.tools.assets.models import find_model

    model, tokenizer, *_ = load(find_model(None, cache_directory()))
    work: list[Work] = []
    for context, places in (map(int, text.split(":")) for text in contexts):
        seen: Counter[str] = Counter()
        for kind, prompt in prompts(tokenizer, context, places):
            name = {"group": f"{kind}", "context": context, "place": seen[kind]}
            work.append((model, f"{attn(32, 128)},dense_below=0", name, prompt))
            seen[kind] += 1
    work.sort(key=lambda one: one[2]["place"])  # each length before another place of the text
    return answers(work, count, file)


def tinies(names: Sequence[str], places: int, count: int, file: Path) -> str:
    work: list[Work] = []
    for family in names:
        model = tiny.build(family)
        for place in range(places):
            chance = random.Random(place)
            prompt = [chance.randrange(1, tiny.VOCAB) for _ in range(chance.randint(300, 1000))]
            work.append((model, BAD, {"group": family, "place": place}, prompt))
    work.sort(key=lambda one: one[2]["place"])
    return answers(work, count, file)


def small() -> Any:
    """A tiny model of `LETTERS` tokens."""
    from mlx_lm.models import llama

    mx.random.seed(0)
    sizes = {"vocab_size": LETTERS, "num_hidden_layers": 2}
    model: Any = llama.Model(llama.ModelArgs.from_dict(tiny.config_of("llama") | sizes))
    model.lm_head.weight = 2 * model.lm_head.weight  # some tokens are likelier than others
    model.eval()
    return model


def exact(model: Any, prompt: Sequence[int], letters: int) -> np.ndarray[Any, Any]:
    """Dense attention's probability of every answer, float64 ``(letters,) * SAMPLED``."""
    beginnings = itertools.product(range(letters), repeat=SAMPLED - 1)
    logits = model(mx.array([[*prompt, *beginning] for beginning in beginnings]))[:, -SAMPLED:]
    raised = np.exp(np.array(logits.astype(mx.float32)).astype(np.float64))
    p = (raised / raised.sum(axis=-1, keepdims=True)).reshape(*(letters,) * (SAMPLED - 1), SAMPLED, letters)
    found = np.ones(())
    for place in range(SAMPLED):
        of_next = p[(slice(None),) * place + (0,) * (SAMPLED - 1 - place) + (place,)]
        found = found[..., None] * of_next
    return found


def sampled(count: int) -> Iterator[dict[str, Any]]:
    prompt = [1 + (7 * i * i + 3 * i) % (LETTERS - 1) for i in range(120)]
    model = small()
    kept = cached(model, prompt)
    chances = exact(model, prompt, LETTERS)
    seen = np.zeros_like(chances)
    sampler = make_sampler(1.0)
    mx.random.seed(1)
    figures = DraftFigures()
    with tqdm(total=count, desc="answers", file=sys.stderr) as bar:
        for drafts in (1, 2):  # for each check
            with mlx_sparse.lossless(model, BAD, draft_tokens=drafts) as report:
                for _ in range(count // 2):
                    tokens, _ = said(steps.generate_step, model, prompt[-1:], kept, SAMPLED, sampler=sampler)
                    seen[tuple(tokens)] += 1
                    bar.update()
            figures += report.drafts
    chance = np.random.default_rng(0)
    for size in (1, 2):
        for places in itertools.combinations(range(SAMPLED), size):
            others = tuple(place for place in range(SAMPLED) if place not in places)
            p, n = pooled(chances.sum(axis=others).ravel(), seen.sum(axis=others).ravel())
            statistic = chi_square(n, p)
            simulated = chi_square(chance.multinomial(int(n.sum()), p / p.sum(), size=SIMULATED), p)
            yield {
                "tokens": [place + 1 for place in places],
                "chi_square": round(float(statistic), 2),
                "freedom": p.size - 1,
                "p": float(np.mean(simulated >= statistic)),
                "quantile_999": round(float(np.quantile(simulated, 0.999)), 2),
            }
    yield {"answers": int(seen.sum()), "examined": figures.examined, "accepted": figures.accepted}


def pooled(p: np.ndarray[Any, Any], n: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Probabilities and counts with the cells that are expected less than `RARE` times as one."""
    rare = p * n.sum() < RARE
    if not rare.any():
        return p, n
    return np.append(p[~rare], p[rare].sum()), np.append(n[~rare], n[rare].sum())


def chi_square(counts: np.ndarray[Any, Any], p: np.ndarray[Any, Any]) -> Any:
    """Of counts ``(..., cells)`` against probabilities ``(cells,)``."""
    expected = counts.sum(axis=-1, keepdims=True) * p
    return ((counts - expected) ** 2 / expected).sum(axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    real = commands.add_parser("smollm2", help="four kinds of text")
    contexts = ["2048:2", "4096:2", "7936:1"]
    real.add_argument("--context", nargs="+", metavar="N:PLACES", default=contexts, help="places of each kind of text")
    random_models = commands.add_parser("tiny", help="tiny random models")
    random_models.add_argument("--family", nargs="+", default=FAMILIES)
    random_models.add_argument("--prompts", type=int, default=20)
    for one in (real, random_models):
        one.add_argument("--tokens", type=int, default=256)
        one.add_argument("file", type=Path)
    commands.add_parser("sampled", help="how often each token comes").add_argument("--answers", type=int, default=5000)
    args = parser.parse_args()
    if args.command == "smollm2":
        print(smollm2(args.context, args.tokens, args.file))
    elif args.command == "tiny":
        print(tinies(args.family, args.prompts, args.tokens, args.file))
    else:
        for row in sampled(args.answers):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
