"""``mlx-sparse advise``: is sparse attention worth it for your model on this machine, and is it safe."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from ...calibrate import Calibration
from ...checks import ConfigError, Parser, check_int, read_length
from ...files import cache_directory
from ...lm.model import disable, enable, plan_of
from ...methods import Prefill, parse
from ...model_info import config_of, model_type
from .. import environment, formats
from ..assets.models import DEFAULT
from ..evaluate import texts
from ..evaluate.budget import read_budget
from ..evaluate.inputs import add_options, check_options, encode_texts, load_model
from ..evaluate.tasks import SHORTEST
from ..evaluate.variants import read_methods
from ..tune.output import write_toml
from . import page, quality
from .page import Page, Prospect
from .traffic import Served, Traffic, here, side_bytes, traffic_of

METHODS = "sparq,quest,streaming,h2o"
BUDGETS = "1/2,1/4,1/8"
SHOWN = (4096, 32_768, 131_072)  # contexts, besides the one that is asked about


def main(argv: Sequence[str]) -> int:
    """Print the page; return 0 if there is a setting to use or none was looked for, 1 otherwise."""
    args = _parser().parse_args(argv)
    _check(args)
    found = _page(args)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found)
    if args.save is not None and found.chosen is not None:
        write_toml(args.save, page.toml(found.chosen, found.model, found.date, found.text))
        print(f"Wrote {args.save}: --attn-config {args.save}", file=sys.stderr)
    return 0 if found.chosen is not None or (args.no_quality and found.prospects) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse advise",
        description="One page on your model: which of its layers a method serves, how much of a decode step is reading "
        "the KV cache and what can be saved of it, memory, and what each method changes in what the model says of your "
        "text, beside changes that everybody takes for harmless. It ends with the --attn to use, or says not to.",
        epilog="Example:\n  mlx-sparse advise MODEL --text notes.txt --context 32k --save attn.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, positional=True)
    parser.add_argument("--context", metavar="N", default="32k", help="tokens that you use it with (default: 32k)")
    parser.add_argument(
        "--methods", metavar="METHOD,...", default=METHODS, help="that decode, as for --attn (default: %(default)s)"
    )
    parser.add_argument(
        "--budget",
        metavar="SHARE,...",
        default=BUDGETS,
        help="shares of dense attention's transfers, which decide the settings that METHOD does not name "
        "(default: %(default)s)",
    )
    parser.add_argument("--passage", metavar="N", default="1k", help="tokens of the prompts that are run (default: 1k)")
    parser.add_argument("--limit", metavar="N", type=int, default=4, help="passages of each of two kinds (default: 4)")
    parser.add_argument("--no-quality", action="store_true", help="count bytes and run nothing: a matter of seconds")
    parser.add_argument("--save", metavar="FILE.toml", type=Path, help="write the setting to use, for --attn-config")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what is wrong before anything is fetched or loaded, and read the lists."""
    args.methods = read_methods([args.methods])
    for method in args.methods:
        if any(isinstance(config, Prefill) for config in parse(method)):
            raise ConfigError(f"--methods: expected methods that decode, such as sparq, got {method}.")
    if not args.methods:
        raise ConfigError("--methods: expected a method such as sparq, got none.")
    args.budget = [read_budget(share) for share in args.budget.split(",")]
    args.context, args.passage = read_length(args.context, "--context"), read_length(args.passage, "--passage")
    check_int("--passage", args.passage, SHORTEST)
    check_int("--limit", args.limit, 1)
    check_int("--seed", args.seed, 0, (1 << 63) - 1)
    _check_target(args.save)
    check_options(args)


def _check_target(path: Path | None) -> None:
    """Refuse to overwrite what `advise` did not write."""
    formats.check_folder("--save", path)
    if path is None:
        return
    if path.suffix != ".toml":
        raise ConfigError(f"--save: expected a file name in .toml, got {path}.")
    if path.exists():
        with path.open("rb") as file:
            ours = file.read(len(page.FIRST_LINE)) == page.FIRST_LINE.encode()
        if not ours:
            raise ConfigError(f"--save: expected a new file or one of advise's, got {path}. Choose another name.")


def _page(args: argparse.Namespace) -> Page:
    model, tokenizer, _ = load_model(args.model, args.cache_dir, args.accept_licence)
    traffic = traffic_of(model)
    prospects, refused = _prospects(model, args.methods, traffic, args.context)
    machine = environment.hardware()
    name = args.model or DEFAULT
    found = Page(
        name,
        model_type(model),
        f"{machine['chip'] or machine['architecture']}, {machine['device']}",
        date.today().isoformat(),
        args.context,
        sorted({*SHOWN, args.context}),
        longest if isinstance(longest := config_of(model).get("max_position_embeddings"), int) else None,
        traffic,
        prospects,
        refused,
    )
    if args.no_quality or not prospects:
        return found
    return dataclasses.replace(found, **_quality(args, model, tokenizer, prospects))


def _prospects(model: Any, methods: Sequence[str], traffic: Traffic, S: int) -> tuple[list[Prospect], list[str]]:
    """The methods on ``model``, and a line for each that it cannot be run with."""
    calibration = Calibration()
    found, refused = [], []
    for method in methods:
        try:
            report = enable(model, method, calibration=calibration)
        except ConfigError as error:
            refused.append(f"`{method}` cannot run: {error}")
            continue
        plan = plan_of(model)
        assert plan is not None
        served = [Served(config, layer, count) for (config, layer), count in plan.layers.items()]
        disable(model)
        about = here(traffic, served, calibration, S)
        reasons = dict(report.dense_layers)
        found.append(Prospect(method, served, report.layers, reasons, about, side_bytes(served, S)))
    return found, refused


def _quality(args: argparse.Namespace, model: Any, tokenizer: Any, prospects: Sequence[Prospect]) -> dict[str, Any]:
    from tqdm import tqdm

    read = texts.read(args.text, cache=cache_directory(args.cache_dir))
    tokens = [token for of_text in encode_texts(tokenizer, read) for token in of_text]
    about: dict[str, Any] = {"context": args.passage, "limit": args.limit, "seed": args.seed}
    methods, D = [one.method for one in prospects], prospects[0].served[0].layer.step.D
    with tqdm(unit="run", desc="quality", disable=None) as progress:
        found = quality.measure(model, tokenizer, tokens, methods, args.budget, progress, D=D, **about)
    return {"quality": found, "text": page.described(", ".join(text.name for text in read), **about)}
