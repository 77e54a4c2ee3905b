"""``mlx-sparse tune-sample``: settings of SampleAttention for a model, by range of context length."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...checks import ConfigError, Parser, check_int, check_sample, check_share, read_length
from ...methods import registry
from ..evaluate.inputs import add_options, check_options, fingerprint, load_model, read_tokens
from ..evaluate.journal import Journal
from ..evaluate.tasks import SHORTEST
from .output import as_dict, check_target, table, toml, write_toml
from .search import Search, Trial, Tuned, by_range, whole_grid

# The values in the paper's Table 6, and the chunks it ends with there.
ALPHAS = (0.80, 0.85, 0.90, 0.92, 0.95, 0.98)
CHUNKS = (1, 2)
LENGTHS = tuple(length << 10 for length in (8, 32, 64, 96, 128))  # one in each range


def main(argv: Sequence[str]) -> int:
    """Run ``mlx-sparse tune-sample`` with these arguments; return the exit code."""
    args = _parser().parse_args(argv)
    _check(args)
    state = args.out.with_name(f"{args.out.name}.state.jsonl") if args.out else None
    try:
        tuned = _tune(args, state)
    except KeyboardInterrupt:
        kept = f"the same command goes on from {state}" if state else "without --out nothing is kept"
        print(f"\nmlx-sparse tune-sample: interrupted; {kept}", file=sys.stderr)
        return 130
    name = args.model or "SmolLM2-135M-Instruct"
    text = toml(tuned, args.prefer, name, args.block_size)
    if args.out is not None:
        write_toml(args.out, text)
        print(f"Wrote {args.out}; {state} keeps what was measured for a run with more settings.", file=sys.stderr)
    if args.json:
        print(json.dumps(as_dict(tuned, name, args.block_size)))
    else:
        print(table(tuned))
        if args.out is None:
            print(f"\n{text}", end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse tune-sample",
        description="Find the thresholds and the number of chunks of SampleAttention for a model, by range of context "
        "length: every setting is tried on needles and on repetitions in real text, questions and answers inside the "
        "sparse prefill. Two settings come out: accuracy first (no loss) and speed first (at least 90 percent of dense "
        "attention's accuracy), both the one with the least work.",
    )
    add_options(parser)
    parser.add_argument(
        "--out",
        metavar="FILE.toml",
        type=Path,
        help="write the settings for --attn-config; FILE.toml.state.jsonl keeps what was measured, so that the same "
        "command goes on after an interruption (default: print them)",
    )
    parser.add_argument("--prefer", choices=("accuracy", "speed"), default="accuracy", help="(default: accuracy)")
    parser.add_argument("--force", action="store_true", help="overwrite a file that tune-sample did not write")
    parser.add_argument(
        "--lengths",
        metavar="N,N",
        help="context lengths to tune at (default: of 8k,32k,64k,96k,128k those that the model and the text allow)",
    )
    parser.add_argument("--max-length", metavar="N", help="no longer than this")
    parser.add_argument(
        "--alpha-column", metavar="A", nargs="+", type=float, default=ALPHAS, help=f"{_default(ALPHAS)}"
    )
    parser.add_argument("--alpha-slash", metavar="A", nargs="+", type=float, default=ALPHAS, help=f"{_default(ALPHAS)}")
    parser.add_argument("--chunks", metavar="N", nargs="+", type=int, default=CHUNKS, help=f"{_default(CHUNKS)}")
    parser.add_argument("--block-size", metavar="N", type=int, default=128, help="(default: 128)")
    parser.add_argument("--examples", metavar="N", type=int, default=2, help="per task and length (default: 2)")
    parser.add_argument(
        "--prefill-step-size", metavar="N", type=int, default=2048, help="tokens per step of a prefill (default: 2048)"
    )
    parser.add_argument(
        "--least-accuracy",
        metavar="SHARE",
        type=float,
        default=0.5,
        help="refuse tasks of which dense attention does less than this (default: 0.5)",
    )
    parser.add_argument("--attn-backend", metavar="NAME", default="auto", help="as of mlx-sparse generate")
    return parser


def _default(values: Sequence[Any]) -> str:
    return f"(default: {' '.join(map(str, values))})"


def _check(args: argparse.Namespace) -> None:
    """Refuse what is wrong before anything is fetched or loaded."""
    if args.out is not None:
        check_target(args.out, args.force)
    for setting in whole_grid(args.alpha_column, args.alpha_slash, args.chunks):
        check_sample(setting.alpha_column, setting.alpha_slash, setting.chunks, args.block_size)
    check_int("--examples", args.examples, 1)
    check_int("--prefill-step-size", args.prefill_step_size, 1)
    if args.least_accuracy != 0:
        check_share("--least-accuracy", args.least_accuracy)
    registry.require(args.attn_backend, "sample")
    args.max_length = read_length(args.max_length) if args.max_length else None
    args.lengths = [read_length(length) for length in args.lengths.split(",")] if args.lengths else None
    check_options(args)


def _tune(args: argparse.Namespace, state: Path | None) -> list[Tuned]:
    from tqdm import tqdm

    model, tokenizer, config = load_model(args.model, args.cache_dir, args.accept_licence)
    tokens = read_tokens(tokenizer, args.text, args.cache_dir)
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    bounds = {
        "the model's context": context,
        "--max-length": args.max_length,
        "the --text, divided by --examples": len(tokens) // args.examples,
    }
    lengths = _lengths(args.lengths, {name: bound for name, bound in bounds.items() if bound is not None})
    ranges = by_range(lengths, context or max(lengths))
    options = (args.examples, args.seed, args.prefill_step_size, args.block_size, args.attn_backend)
    search = Search(
        model,
        tokenizer,
        tokens,
        Journal(state, "tune-sample", fingerprint(model, tokens, *options), Trial),
        whole_grid(args.alpha_column, args.alpha_slash, args.chunks),
        args.examples,
        args.seed,
        args.prefill_step_size,
        args.block_size,
        args.attn_backend,
        args.least_accuracy,
    )
    runs = sum(search.runs(lengths) for _, lengths in ranges)
    with tqdm(total=runs, unit="prompt", disable=None) as progress:
        found = []
        for up_to, lengths in ranges:
            progress.set_description(f"below {up_to:,} keys")
            found.append(search.tune(up_to, lengths, progress))
    return found


def _lengths(wanted: Sequence[int] | None, bounds: dict[str, int]) -> Sequence[int]:
    """The lengths to tune at: the ``wanted`` ones, or by default those that the bounds allow."""
    name = min(bounds, key=lambda name: bounds[name])
    if wanted is None:
        lengths = [length for length in LENGTHS if length <= bounds[name]] or [bounds[name]]
    else:
        lengths = list(wanted)
    if min(lengths) < SHORTEST or max(lengths) > bounds[name]:
        wrong = min(lengths) if min(lengths) < SHORTEST else max(lengths)
        raise ConfigError(f"--lengths: expected {SHORTEST:,} to {bounds[name]:,} tokens ({name}), got {wrong:,}.")
    return lengths
