"""``mlx-sparse tune-sample``: settings of SampleAttention for a model, by range of context length."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...checks import ConfigError, Parser, check_int, check_sample, check_share, read_length
from ...methods import registry
from .. import formats
from ..assets.models import DEFAULT
from ..evaluate.inputs import add_options, check_options, fingerprint, load_model, read_tokens
from ..evaluate.journal import Journal
from ..evaluate.tasks import SHORTEST
from ..formats import check_own, write_toml
from .search import ENOUGH, RETRIEVAL, Measured, Search, Trial, Tuned, by_range, whole_grid

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
        rest = f"the same command resumes from {state}" if state else "without --out nothing is stored"
        print(f"\nmlx-sparse tune-sample: interrupted; {rest}", file=sys.stderr)
        return 130
    name = args.model or DEFAULT
    text = toml(tuned, args.prefer, name, args.block_size)
    if args.out is not None:
        write_toml(args.out, text)
        print(f"Wrote {args.out}; a run with more settings resumes from {state}.", file=sys.stderr)
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
        description="Find the alphas and the number of chunks of SampleAttention for a model, by range of context "
        "length: every setting is tried on needles and repetitions in real text, with questions and answers inside the "
        "sparse prefill. There are two results: accuracy first (no loss) and speed first (at least 90 percent of dense "
        "attention's accuracy), each the setting with the least work.",
    )
    add_options(parser)
    parser.add_argument(
        "--out",
        metavar="FILE.toml",
        type=Path,
        help="write the settings for --attn-config, and every trial to FILE.toml.state.jsonl, from which the same "
        "command resumes after an interruption (default: print them)",
    )
    parser.add_argument("--prefer", choices=("accuracy", "speed"), default="accuracy", help="(default: accuracy)")
    parser.add_argument(
        "--lengths",
        metavar="N,N",
        help="context lengths to tune at (default: of 8k,32k,64k,96k,128k those that the model and the text allow)",
    )
    for name, metavar, kind, values in (
        ("--alpha-column", "A", float, ALPHAS),
        ("--alpha-slash", "A", float, ALPHAS),
        ("--chunks", "N", int, CHUNKS),
    ):
        text = f"(default: {' '.join(map(str, values))})"
        parser.add_argument(name, metavar=metavar, nargs="+", type=kind, default=values, help=text)
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


def _check(args: argparse.Namespace) -> None:
    """Refuse what is wrong before anything is fetched or loaded."""
    check_own("--out", args.out, FIRST_LINE)
    for setting in whole_grid(args.alpha_column, args.alpha_slash, args.chunks):
        check_sample(setting.alpha_column, setting.alpha_slash, setting.chunks, args.block_size)
    check_int("--examples", args.examples, 1)
    check_int("--prefill-step-size", args.prefill_step_size, 1)
    if args.least_accuracy != 0:
        check_share("--least-accuracy", args.least_accuracy)
    registry.require(args.attn_backend, "sample")
    args.lengths = [read_length(length) for length in args.lengths.split(",")] if args.lengths else None
    check_options(args)


def _tune(args: argparse.Namespace, state: Path | None) -> list[Tuned]:
    from tqdm import tqdm

    model, tokenizer, config = load_model(args.model, args.cache_dir, args.accept_licence)
    tokens = read_tokens(tokenizer, args.text, args.cache_dir)
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    bounds = {"the --text, divided by --examples": len(tokens) // args.examples}
    if context is not None:
        bounds["the model's context"] = context
    lengths = _lengths(args.lengths, bounds)
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
    """Return the lengths to tune at: the ``wanted`` ones, or by default those that the bounds allow."""
    name = min(bounds, key=lambda name: bounds[name])
    lengths = wanted or [length for length in LENGTHS if length <= bounds[name]] or [bounds[name]]
    if min(lengths) < SHORTEST or max(lengths) > bounds[name]:
        wrong = min(lengths) if min(lengths) < SHORTEST else max(lengths)
        raise ConfigError(f"--lengths: expected {SHORTEST:,} to {bounds[name]:,} tokens ({name}), got {wrong:,}.")
    return lengths


FIRST_LINE = "# Written by mlx-sparse tune-sample"
HEADER = ["keys", "column", "slash", "chunks", *RETRIEVAL, "accuracy", "density", "sampled", "work", "seconds", ""]
NOT_LOSSLESS = "No setting is without loss; accuracy first is the one that loses least."


def toml(tuned: Sequence[Tuned], prefer: str, model: str, block_size: int) -> str:
    """Return the preferred setting of each range, with its figures and the other setting as comments."""
    # As JSON, a name cannot end its comment.
    lines = [
        f"{FIRST_LINE} for {json.dumps(model)}: {prefer} first.",
        "# Read it with --attn-config. Longer contexts than the last range use the last one.",
        "[sample]",
        f"block_size = {block_size}",
    ]
    for found in tuned:
        first, other = (found.accuracy_first, found.speed_first)[:: 1 if prefer == "accuracy" else -1]
        other_name = "speed" if prefer == "accuracy" else "accuracy"
        assert first.setting is not None
        lines += [
            "",
            f"# Tuned at {', '.join(f'{length:,}' for length in found.lengths)} keys.",
            f"# dense: {_figures(found.dense)}",
            f"# this: {_figures(first)}",
            f"# {other_name} first: {_figures(other)} with {other.setting}",
            *([] if found.lossless else [f"# {NOT_LOSSLESS}"]),
            "[[sample.ranges]]",
            f"up_to = {found.up_to}",
            *(f"{name} = {value}" for name, value in asdict(first.setting).items()),
        ]
    return "\n".join(lines) + "\n"


def _figures(row: Measured) -> str:
    shares = f"accuracy {row.accuracy:.3f}, density {row.density:.3f}, sampled {row.sampled:.3f}"
    return f"{shares}, {row.seconds:.2f} s a prompt"


def table(tuned: Sequence[Tuned]) -> str:
    """Return everything that was measured, and what was selected, as Markdown."""
    rows = []
    for found in tuned:
        for row in (found.dense, *found.measured):
            best = {"accuracy first": found.accuracy_first, "speed first": found.speed_first}
            chosen = ", ".join(name for name, one in best.items() if one is row)
            values = list(asdict(row.setting).values()) if row.setting else ["dense", "", ""]
            shares = [*row.tasks.values(), row.accuracy, row.density, row.sampled, row.work]
            cells = [f"< {found.up_to:,}", *values, *(f"{value:.3f}" for value in shares), f"{row.seconds:.2f}", chosen]
            rows.append(cells)
    lines = [
        formats.table(HEADER, rows),
        "",
        "work = density + sampled / 2: attention's multiply-adds over those of dense, which rank the settings.",
        f"Speed first has at least {ENOUGH:.0%} of dense attention's accuracy.",
    ]
    return "\n".join(lines + [f"Below {one.up_to:,} keys: {NOT_LOSSLESS}" for one in tuned if not one.lossless])


def as_dict(tuned: Sequence[Tuned], model: str, block_size: int) -> dict[str, Any]:
    """Return everything that was measured and selected as plain data for JSON."""
    ranges = [
        {name: getattr(found, name) for name in ("up_to", "lengths", "lossless")}
        | {name: getattr(found, name).as_dict() for name in ("dense", "accuracy_first", "speed_first")}
        | {"measured": [row.as_dict() for row in found.measured]}
        for found in tuned
    ]
    return {"model": model, "block_size": block_size, "ranges": ranges}
