"""Implement ``mlx-sparse train-saap``: train the centroids and query networks of SAAP for a model on text."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...checks import MAX_BUCKETS, ArtefactError, ConfigError, Parser, check_choice, check_int, check_share
from ...methods import SAAP
from ...methods.saap.artefact import MAX_HIDDEN, Artefact, Layer, load, read_tensors, versions, write_tensors
from ...model_info import identity
from ..evaluate.inputs import add_options, check_options, fingerprint, load_model, read_tokens
from ..evaluate.journal import DAMAGED, as_json, from_json
from ..evaluate.texts import check as check_texts
from ..progress import Bar
from .collect import Collection, LayerShape, collect, find_layer_shapes, locked, remove_files
from .layers import HeadReport, Recipe, as_dict, make_layer, report_layer, table
from .network import STARTS, Training
from .rows import Distances

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

LONGEST = 32768  # default upper limit of the tokens of a text
ROWS = 32768  # largest number of training rows per KV head
REPORT = "report"  # metadata key in the file of a layer
LIMITS: dict[str, tuple[int, int | None]] = {
    "buckets": (2, MAX_BUCKETS),
    "seed": (0, (1 << 32) - 1),
    **dict.fromkeys(("batch", "windows", "queries", "recent_tokens"), (1, None)),
    **dict.fromkeys(("steps", "dense_layers", "sink_tokens", "farther_than"), (0, None)),
}


def main(argv: Sequence[str]) -> int:
    """Run ``mlx-sparse train-saap`` with the arguments ``argv``, and return the exit code."""
    args = _parser().parse_args(argv)
    _check(args)
    work = args.work or args.out.with_name(f"{args.out.name}.work")
    try:
        heads = _train(args, work)
    except KeyboardInterrupt:
        print(f"\nmlx-sparse train-saap: interrupted; the same command resumes from {work}", file=sys.stderr)
        return 130
    if args.work is None:
        remove_files(work)
    print(json.dumps({"artefact": str(args.out), **as_dict(heads)}) if args.json else table(heads))
    print(f"Wrote {args.out}. Use it with --attn {_advice(args)}", file=sys.stderr)
    return 0


def _advice(args: argparse.Namespace) -> str:
    """Return the value of ``--attn`` for the trained file, with all settings that differ from the defaults."""
    usual = SAAP()
    own: dict[str, object] = {"probes": min(usual.probes, max(args.buckets // 16, 1))}
    own |= {"sink_tokens": args.sink_tokens, "recent_tokens": args.recent_tokens, "dense_layers": args.dense_layers}
    changed = [f",{name}={value}" for name, value in own.items() if value != getattr(usual, name)]
    return f"saap:artefact={args.out}{''.join(changed)}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse train-saap",
        description="Train SAAP for a model. The command runs the model on text, clusters the pre-RoPE keys of every "
        "layer and KV head, and trains networks that predict the attention per cluster from a query. It writes one "
        "file for --attn saap:artefact=FILE, and reports the recall of each head on held-out text.",
        epilog="Example for texts that are shorter than the paper's: mlx-sparse train-saap --model MODEL --text A.txt "
        "B.txt -o model.saap.safetensors --context 8192 --recent-tokens 511 --farther-than 256 --buckets 128. "
        "Memory: first the model and its cache of one text. Then, per KV head of one layer, --buckets x 64 KiB, "
        "and --buckets x 1 KiB x head dim during clustering. Queries and keys are stored on disk. The command "
        "checks the free space first. The same command resumes after an interruption.",
    )
    number: dict[str, Any] = {"metavar": "N", "type": int}
    add_options(parser)
    parser.add_argument("--held-out", metavar="TEXT", nargs="+", help="text for the report (default: end of --text)")
    parser.add_argument("-o", "--out", metavar="FILE.safetensors", type=Path, required=True, help="output file")
    parser.add_argument("--buckets", default=1024, help="clusters of keys per KV head (default: 1024)", **number)
    parser.add_argument("--hidden", help="hidden units per network (default: twice the head dim)", **number)
    parser.add_argument("--steps", default=300, help="steps, 0 for the k-means router (default: 300)", **number)
    parser.add_argument("--batch", default=512, help="queries per step and head (default: 512)", **number)
    parser.add_argument(
        "--rate", metavar="R", type=float, default=1e-3, help="first learning rate, which decays to 0 (default: 0.001)"
    )
    parser.add_argument("--start", metavar="ROUTER", default="kmeans", help="kmeans or random (default: kmeans)")
    parser.add_argument("--one-text", action="store_true", help="draw the queries of a step and head from one text")
    parser.add_argument(
        "--context", help=f"tokens per text (default: the model's context, at most {LONGEST:,})", **number
    )
    parser.add_argument("--windows", default=8, help="largest number of training texts (default: 8)", **number)
    parser.add_argument("--queries", default=4096, help="sampled queries of each text (default: 4096)", **number)
    parser.add_argument("--sink-tokens", default=1, help="first keys, always attended (default: 1)", **number)
    parser.add_argument("--recent-tokens", default=2047, help="last keys, always attended (default: 2047)", **number)
    parser.add_argument(
        "--farther-than",
        default=1024,
        help="train on queries whose best key is more than N tokens away (default: 1024)",
        **number,
    )
    parser.add_argument("--dense-layers", default=1, help="first layers that stay dense (default: 1)", **number)
    parser.add_argument("--layers", nargs="+", help="only these layers (default: all)", **number)
    parser.add_argument(
        "--work",
        metavar="FOLDER",
        type=Path,
        help="keep the collected and trained files there (default: a folder that is removed at the end)",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    if args.out.suffix != ".safetensors" or not args.out.parent.is_dir():
        raise ConfigError(f"--out: expected a name ending in .safetensors in a folder that exists, got {args.out}.")
    if args.out.exists():
        load(args.out)  # raises an error for a file of another program
    for name, limits in LIMITS.items():
        check_int(f"--{name.replace('_', '-')}", getattr(args, name), *limits)
    check_share("--rate", args.rate)
    check_choice("--start", args.start, STARTS)
    if args.start == "random" and not args.steps:
        raise ConfigError("--steps: expected at least 1 with --start random, got 0. 0 steps keep the k-means router.")
    args.distances = Distances(args.sink_tokens, args.recent_tokens, args.farther_than)
    if args.context is not None:
        _check_context(args.context, args.distances.exact)
    check_options(args)
    check_texts(args.held_out, "--held-out")


def _check_context(context: int, exact: int, most: int | None = None) -> None:
    check_int("--context", context, 1, most)
    if context < 2 * exact:
        raise ConfigError(
            f"--context: expected at least twice the {exact:,} tokens that are always attended, got {context:,}. Use "
            "fewer --recent-tokens for short texts."
        )


def _train(args: argparse.Namespace, work: Path) -> list[HeadReport]:
    model, tokenizer, config = load_model(args.model, args.cache_dir, args.accept_license, only_mlx_lm=True)
    of_model = identity(model)
    if args.out.exists() and dict(load(args.out).model) != of_model:
        raise ConfigError(f"--out: expected a new file or a file for this model, got {args.out} for another model.")
    texts = _texts(args, tokenizer, config)
    layer_shapes = _select_layers(args, model)
    recipe = _recipe(args, layer_shapes, texts[0])
    collections = _collect(args, work, model, layer_shapes, texts)
    del model
    mx.clear_cache()
    options = asdict(recipe)
    about = json.dumps([*(collection.folder.name for collection in collections), options], sort_keys=True)
    key = hashlib.sha256(about.encode()).hexdigest()
    folder = work / f"trained-{key[:12]}"
    with locked(folder):
        layers, heads = _layers(folder, collections, recipe)
    exact = args.sink_tokens, args.recent_tokens
    options |= {"texts": len(texts[0]), "context": len(texts[0][0])}
    made = Artefact(layers, args.buckets, recipe.training.hidden, *exact, of_model, options, versions())
    made.save(args.out)
    return heads


def _texts(
    args: argparse.Namespace, tokenizer: Tokenizer, config: dict[str, Any]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the training texts and the held-out texts. Each text has ``--context`` tokens."""
    limit = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    context: int = min(limit or LONGEST, LONGEST) if args.context is None else args.context
    _check_context(context, args.distances.exact, limit)
    opening = tokenizer.encode("")  # tokens that the model requires before a text
    length = context - len(opening)
    tokens = read_tokens(tokenizer, args.text, args.cache_dir)
    beside = read_tokens(tokenizer, args.held_out, args.cache_dir, "--held-out") if args.held_out else None
    wanted = 1 if beside is not None else 2
    if len(tokens) < wanted * length or (beside is not None and len(beside) < length):
        short, name, wanted = (tokens, "--text", wanted) if len(tokens) < wanted * length else (beside, "--held-out", 1)
        raise ConfigError(
            f"{name}: expected at least {wanted} x {context:,} tokens, got {len(short or []):,}. Give more text, or a "
            "smaller --context."
        )
    held = max(args.windows // 4, 1)
    if beside is None:
        held = max(min(args.windows, len(tokens) // length - 1) // 4, 1)  # use most of a short text for training
        tokens, beside = tokens[: -held * length], tokens[-held * length :]
    return _cut(tokens, length, args.windows, opening), _cut(beside, length, held, opening)


def _cut(tokens: list[int], length: int, most: int, opening: list[int]) -> list[list[int]]:
    """Cut at most ``most`` evenly spaced pieces of ``length`` tokens. Prepend ``opening`` to each piece."""
    count = min(len(tokens) // length, most)
    starts = [i * (len(tokens) - length) // max(count - 1, 1) for i in range(count)]
    return [opening + tokens[start : start + length] for start in starts]


def _select_layers(args: argparse.Namespace, model: nn.Module) -> dict[int, LayerShape]:
    layer_shapes = find_layer_shapes(model, args.dense_layers)
    if args.layers is None:
        return layer_shapes
    for layer in args.layers:
        if layer not in layer_shapes:
            listed = ", ".join(map(str, layer_shapes))
            raise ConfigError(f"--layers: expected some of {listed}, got {layer}.")
    return {layer: layer_shapes[layer] for layer in sorted(set(args.layers))}


def _recipe(args: argparse.Namespace, layer_shapes: dict[int, LayerShape], texts: list[list[int]]) -> Recipe:
    D = max(shape.D for shape in layer_shapes.values())
    keys = len(texts) * (len(texts[0]) - args.sink_tokens)
    if args.buckets > keys:
        raise ConfigError(f"--buckets: expected at most the number of keys, {keys:,}, got {args.buckets:,}.")
    hidden = check_int("--hidden", 2 * D if args.hidden is None else args.hidden, 2 * D, MAX_HIDDEN)
    names = ("steps", "batch", "rate", "start", "one_text", "seed")
    training = Training(hidden, **{name: getattr(args, name) for name in names})
    return Recipe(args.buckets, args.distances, training, ROWS, args.seed)


def _collect(
    args: argparse.Namespace,
    work: Path,
    model: nn.Module,
    layer_shapes: dict[int, LayerShape],
    texts: tuple[list[list[int]], list[list[int]]],
) -> tuple[Collection, Collection]:
    exact = args.distances.exact
    length = len(texts[0][0])
    options = [args.queries, args.seed, exact, sorted(layer_shapes)]
    total = sum(len(windows) * length for windows in texts)
    found = []
    with Bar("running the model", total, "tokens") as progress:
        # Training samples all positions with far keys. The report samples only the second half of a text.
        for windows, first in zip(texts, (exact, max(exact, length // 2)), strict=True):
            key = fingerprint(model, [token for window in windows for token in window], *options, first)
            folder = work / f"collected-{key[:12]}"
            queries = min(args.queries, length - first)
            found.append(Collection(folder, layer_shapes, len(windows), length, queries, first, args.seed))
            with locked(folder):
                collect(model, found[-1], windows, key=key, progress=progress)
    return found[0], found[1]


def _layers(
    folder: Path, collections: tuple[Collection, Collection], recipe: Recipe
) -> tuple[dict[int, Layer], list[HeadReport]]:
    """Train every layer and report its recall. If an interrupted command has finished a layer, load the layer."""
    train, held_out = collections
    steps, layers, heads = recipe.training.steps, {}, list[HeadReport]()
    with Bar("training", steps * len(train.layer_shapes), "steps") as progress:
        for number in train.layer_shapes:
            progress.stage(f"layer {number}")
            path = folder / f"layer-{number:03}.safetensors"
            if path.exists():
                progress.update(steps)
            else:
                layer, rows = make_layer(train.texts(number), recipe, progress=progress)
                report = report_layer(number, held_out.texts(number), layer, rows, recipe)
                write_tensors(path, layer.arrays(), {REPORT: json.dumps(list(map(as_json, report)))})
            layers[number], found = _load(path)
            heads += found
    return layers, heads


def _load(path: Path) -> tuple[Layer, list[HeadReport]]:
    tensors, metadata = read_tensors(path)
    try:
        return Layer(**tensors), from_json(list[HeadReport], json.loads(metadata[REPORT]))
    except DAMAGED:
        raise ArtefactError(
            f"{path}: expected a layer that this command has trained, got another file. Delete the file."
        ) from None
