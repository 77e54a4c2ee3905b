"""``mlx-sparse advise``: decide if sparse attention pays for a model, is safe on a text, and with which settings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..calibrate import Calibration
from ..checks import ConfigError, Parser, check_int, read_length
from ..lm.loading import unfit_warning
from ..lm.model import disable, enable, plan_of
from ..methods import Method, Prefill, parse
from ..model_info import config_of, model_type
from . import environment, formats
from .assets.models import DEFAULT
from .decode_traffic import Served, Traffic, traffic_of
from .evaluate import texts
from .evaluate.inputs import add_options, check_options, load_model, read_tokens
from .evaluate.journal import Journal, as_json
from .evaluate.results import Row, Trial
from .evaluate.runner import DENSE_STEP, Steps, observed_by, run
from .evaluate.table import plus_minus
from .evaluate.tasks import SHORTEST, TASKS
from .evaluate.variants import Variant, read_budget, read_methods, variants_of
from .formats import check_own, write_toml

METHODS, BUDGETS = "sparq,quest,streaming,h2o", "1/2,1/4,1/8"
SHOWN = (4096, 32_768, 131_072)  # contexts, besides --context
FIRST_LINE = "# Written by mlx-sparse advise"
COPIES = 0.5  # share of the tokens that dense attention must copy right for the test of copying to show anything
WORTH = 1.1  # the least speed-up that a user notices
# Thresholds: the change that rounding the weights to 5 bits makes on two models (docs/results/quality.md).
COPY, TEXT = "repetition", "bits_per_byte"  # the tasks: copy an excerpt of the prompt, continue the text
STEPS = 20  # tokens of an example that are predicted
MOST_KL = 0.05  # nats, in both tasks
LEAST_AGREEMENT = {COPY: 0.9, TEXT: 0.8}  # share of tokens with dense attention's most likely token
SLACK = 2.0  # standard errors by which the agreement may be lower
ORACLE = "oracle_top_k"  # the best selection of keys: where it fails, no selection is good enough


@dataclass(frozen=True)
class Attempt:
    """A variant and its rows, one for each task.

    Attributes:
        share: of dense attention's transfers that it reads, by its formula.
    """

    variant: Variant
    share: float | None
    rows: list[Row]

    @property
    def sparse(self) -> bool:
        """True if any call was sparse."""
        return any(row.sparse_calls for row in self.rows)

    @property
    def passes(self) -> bool:
        """True if the variant ran sparsely and is within the thresholds in both tasks."""
        return self.sparse and all(map(passes, self.rows))


def passes(row: Row) -> bool:
    """Return True if the KL is at most `MOST_KL` and the agreement is not clearly below `LEAST_AGREEMENT`."""
    tokens = row.examples * STEPS
    error = (row.mean.agreement * (1 - row.mean.agreement) / tokens) ** 0.5
    return row.mean.kl <= MOST_KL and row.mean.agreement + SLACK * error >= LEAST_AGREEMENT[row.task]


@dataclass(frozen=True)
class Quality:
    """The rows of dense attention, the attempts with the best selection of keys and with methods, and lines about rest.

    Attributes:
        left_out: why budgets could not be run with a method.
    """

    dense: list[Row]
    oracle: list[Attempt]
    attempts: list[Attempt]
    left_out: list[str]

    @property
    def hopeless(self) -> bool:
        """True if even the best selection of keys fails at the largest budget."""
        return not any(attempt.passes for attempt in self.oracle)

    @property
    def best(self) -> Attempt | None:
        """The passing attempt that reads least; None if there is none. `ORACLE` is a bound and saves nothing."""
        passing = [one for one in self.attempts if one.passes and one.share and one.variant.method != ORACLE]
        return None if self.hopeless else min(passing, key=lambda one: one.share or 0, default=None)


def measure(
    model: Any,
    tokenizer: Any,
    tokens: list[int],
    methods: Sequence[str],
    budgets: Sequence[Fraction],
    *,
    context: int,
    limit: int,
    seed: int,
    D: int,
) -> Quality:
    """Run the best selection of keys and then the methods, each from the largest budget down until it fails.

    Args:
        tokens: of the text.
        methods: decode methods as text.
        context: tokens of each prompt.
        limit: examples of each task.
        D: head dim of the layers.

    Raises:
        ConfigError: there is too little text, or no budget is within reach.
    """
    wanted = [ORACLE, *(method for method in methods if method != ORACLE)]
    variants, left_out = variants_of(wanted, sorted(budgets, reverse=True), context, D)
    if not any(variant.method == ORACLE for variant in variants):
        raise ConfigError(f"--budget: expected a share within reach at {context:,} keys, got none. Name a larger one.")
    observed, subjects = observed_by(variants), {}
    for task in (COPY, TEXT):
        made = TASKS[task](tokens, tokenizer, context=context, limit=limit, seed=seed)
        examples = [dataclasses.replace(example, target=example.target[:STEPS]) for example in made]
        subjects[task] = Steps(model, tokenizer, examples, DENSE_STEP, observed=observed)
    journal: Journal[Trial] = Journal(None, "", "", Trial)  # so that dense attention runs once
    found: dict[str, list[Attempt]] = {ORACLE: []}
    dense: list[Row] = []
    with tqdm(variants, unit="run", desc="quality", disable=None) as progress:
        for variant in progress:
            before = found.setdefault(variant.method, [])
            hopeless = variant.method != ORACLE and not any(one.passes for one in found[ORACLE])
            if hopeless or not all(one.passes for one in before):
                continue
            about: dict[str, Any] = {"progress": tqdm(disable=True), "journal": journal, "context": context, "D": D}
            pairs = [run(task, [one], [variant], **about) for task, one in subjects.items()]
            dense = [of_dense for of_dense, _ in pairs]
            before.append(Attempt(variant, variant.formula(context, D), [row for _, row in pairs]))
    oracle = found.pop(ORACLE)
    return Quality(dense, oracle, [one for some in found.values() for one in some], left_out)


@dataclass(frozen=True)
class Candidate:
    """A method on the model: the layers that it serves, those that stay dense by reason, and its crossover length."""

    method: str
    served: list[Served]
    layers: int
    dense: dict[str, int]
    keys: float
    how: str


@dataclass(frozen=True)
class Page:
    """Everything that the command found.

    Attributes:
        family: mlx-lm's name of the model's family.
        made_for: the context that the model is made for, as its config says; None if it does not.
        refused: why methods cannot run.
        quality: None if it was not measured.
    """

    model: str
    family: str
    machine: str
    date: str
    context: int
    made_for: int | None
    traffic: Traffic
    candidates: list[Candidate]
    refused: list[str]
    text: str = ""
    quality: Quality | None = None

    @property
    def chosen(self) -> Method | None:
        """The setting to use; None if nothing passed, or nothing was run."""
        best = self.quality and self.quality.best
        return usable(best) if best else None

    def advice(self) -> list[str]:
        """Return what to do, in sentences."""
        lines = [f"Warning: {known}." if (known := unfit_warning(self.family)) else ""]
        quality, chosen = self.quality, self.chosen
        if not self.candidates:
            lines.append("Do not use it: no method serves a layer of this model.")
        elif quality is None:
            lines.append("Quality was not measured, because of --no-quality.")
        elif quality.hopeless:
            lines.append("Do not use it: even the best selection of keys exceeds the thresholds on this text.")
        elif chosen is None:
            lines.append(
                "Do not use it with these methods and budgets: none is within the thresholds. The best selection of "
                "keys is, so another method or a larger --budget may be."
            )
        else:
            assert quality.best is not None
            lines.append(f'Use --attn "{chosen}": `{quality.best.variant.attn}` is the cheapest that passes here.')
            served = next(one.served for one in self.candidates if one.served[0].config.name == chosen.name)
            bound = self.traffic.bound(self.context, [dataclasses.replace(one, config=chosen) for one in served])
            worth = "" if bound >= WORTH else "It is hardly worth it: "
            lines.append(f"{worth}at {self.context:,} tokens a decode step is at most {bound:.2f} x as fast, by bytes.")
        if quality is not None and quality.dense[0].mean.accuracy < COPIES:
            lines.append("Dense attention itself hardly copies this text, so copying shows little: try another --text.")
        return [line for line in lines if line]

    def __str__(self) -> str:
        head = f"{self.model} ({self.family}) on {self.machine}, {self.date}"
        parts = [head, "\n".join(self._layers()), self._bytes()]
        if self.quality is not None:
            parts.append(self._attempts(self.quality))
        return "\n\n".join([*parts, "\n".join(self.advice())])

    def _layers(self) -> list[str]:
        kept = [f"{count} {kind}" for kind, count in Counter(map(str, self.traffic.kept)).items()]
        lines = [f"Layers with a cache: {', '.join(kept)}."]
        if self.made_for is not None and self.made_for < self.context:
            lines.append(f"The model is made for {self.made_for:,} tokens, fewer than --context {self.context:,}.")
        for one in self.candidates:
            reasons = "".join(f"; {count} {reason}" for reason, count in one.dense.items())
            served = f"serves {sum(part.layers for part in one.served)} of {one.layers}{reasons}"
            lines.append(f"`{one.method}` {served}; sparse at {one.keys:,.0f} keys and longer ({one.how}).")
        return lines + self.refused

    def _bytes(self) -> str:
        traffic, of_each = self.traffic, [one.served for one in self.candidates]
        header = ["tokens", "caches", "share of the step", *(f"`{one.method}`" for one in self.candidates)]
        rows = []
        for S in sorted({*SHOWN, self.context}):
            bounds = [f"{traffic.bound(S, served):.2f} x" for served in of_each]
            rows.append([f"{S:,}", f"{traffic.nbytes(S) / 1e9:.3g} GB", f"{traffic.share(S):.0%}", *bounds])
        return (
            f"A decode step reads {traffic.weights / 1e9:.3g} GB of weights. Speed-ups are bounds: time in proportion "
            f"to bytes, by each method's formula.\n\n{formats.table(header, rows)}"
        )

    def _attempts(self, quality: Quality) -> str:
        rows = []
        for one in (*quality.oracle, *quality.attempts):
            verdict = "passes" if one.passes else "fails" if one.sparse else "ran densely"
            cells = [f"`{one.variant.attn}`", one.variant.budget or ""]
            for row in one.rows:
                cells += [plus_minus(row.mean.kl, row.error.kl, 4), f"{row.mean.agreement:.2f}"]
            rows.append([*cells, f"{one.rows[0].mean.accuracy:.2f}", verdict])
        header = ["method", "budget", "KL, copying", "agreement", "KL, text", "agreement", "copied right", ""]
        return "\n".join(
            [
                f"Quality: {self.text}.\n",
                formats.table(header, rows),
                f"\nA method passes with a KL of at most {MOST_KL} nats and an agreement of at least "
                f"{LEAST_AGREEMENT[COPY]} (copying) and {LEAST_AGREEMENT[TEXT]} (text), less two standard errors.",
                "`oracle_top_k` is a bound: the best selection of keys. After a budget that fails, no smaller one ran.",
                f"Dense attention copies {quality.dense[0].mean.accuracy:.2f} of the tokens right.",
                *quality.left_out,
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        found = {name: getattr(self, name) for name in ("model", "family", "machine", "date", "context", "made_for")}
        traffic = self.traffic
        found |= {"weights": traffic.weights, "layers": list(map(asdict, traffic.kept)), "refused": self.refused}
        found["methods"] = [
            {"method": one.method, "layers": one.layers, "dense": one.dense, "keys": one.keys, "how": one.how}
            | {"served": sum(part.layers for part in one.served)}
            | {"bound": traffic.bound(self.context, one.served)}
            for one in self.candidates
        ]
        if (quality := self.quality) is not None:
            found["text"], found["dense"] = self.text, [as_json(row) for row in quality.dense]
            found["attempts"] = [
                {"attn": one.variant.attn, "budget": one.variant.budget, "share": one.share, "passes": one.passes}
                | {"rows": [as_json(row) for row in one.rows]}
                for one in (*quality.oracle, *quality.attempts)
            ]
        return found | {"attn": None if self.chosen is None else str(self.chosen), "advice": self.advice()}


def usable(best: Attempt) -> Method:
    """Return the method of an attempt for everyday use: sparse where that pays, and with its default number of keys.

    Attempts on short texts run with few keys and without a threshold.
    """
    config = best.variant.stages[1]
    assert config is not None
    (asked,) = parse(best.variant.method)
    if not hasattr(asked, "dense_below"):
        return config
    changes: dict[str, Any] = {"dense_below": asked.dense_below}
    config = dataclasses.replace(config, **changes)
    if config.experiment:
        changes = {config.grows: getattr(type(config), config.grows)}
    return dataclasses.replace(config, **changes)


def toml(config: Method, model: str, day: str, text: str) -> str:
    """Return a file for ``--attn-config``."""
    fields = [field for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    # JSON values of settings are TOML values, and a name as JSON cannot end its comment.
    settings = [f"{field.name} = {json.dumps(getattr(config, field.name))}" for field in fields]
    about = f"{FIRST_LINE} for {json.dumps(model)}, {day}: {json.dumps(text)}"
    return "\n".join([about, f"[{config.name}]", *settings]) + "\n"


def main(argv: Sequence[str]) -> int:
    """Print the page; return 0 if there is a setting to use or quality was not measured, 1 otherwise."""
    args = _parser().parse_args(argv)
    _check(args)
    found = _page(args)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found)
    if args.save is not None and found.chosen is not None:
        write_toml(args.save, toml(found.chosen, found.model, found.date, found.text))
        print(f"Wrote {args.save}: --attn-config {args.save}", file=sys.stderr)
    return 0 if found.chosen is not None or (args.no_quality and found.candidates) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse advise",
        description="One page on your model: the layers that a method serves, the share of the KV cache in the bytes "
        "of a decode step and what a method can save of it, and how far each method is from dense attention on your "
        "text. It ends with the --attn to use, or advises against it.",
        epilog="Example:\n  mlx-sparse advise MODEL --text notes.txt --context 32k --save attn.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, positional=True)
    parser.add_argument("--context", metavar="N", default="32k", help="tokens that you use it with (default: 32k)")
    parser.add_argument("--methods", metavar="METHOD,...", default=METHODS, help="that decode (default: %(default)s)")
    parser.add_argument(
        "--budget",
        metavar="SHARE,...",
        default=BUDGETS,
        help="shares of dense attention's transfers, for settings that METHOD does not name (default: %(default)s)",
    )
    parser.add_argument("--passage", metavar="N", default="1k", help="tokens of the prompts that are run (default: 1k)")
    parser.add_argument("--limit", metavar="N", type=int, default=4, help="examples of each of two tasks (default: 4)")
    parser.add_argument("--no-quality", action="store_true", help="count bytes and run nothing, in seconds")
    parser.add_argument("--save", metavar="FILE.toml", type=Path, help="write the setting to use, for --attn-config")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what is wrong before anything is fetched or loaded, and read the lists."""
    args.methods = read_methods([args.methods])
    for method in args.methods:
        if any(isinstance(config, Prefill) for config in parse(method)):
            raise ConfigError(f"--methods: expected decode methods such as sparq, got {method}.")
    if not args.methods:
        raise ConfigError("--methods: expected a method such as sparq, got none.")
    args.budget = [read_budget(share) for share in args.budget.split(",")]
    args.context, args.passage = read_length(args.context, "--context"), read_length(args.passage, "--passage")
    check_int("--passage", args.passage, SHORTEST)
    check_int("--limit", args.limit, 1)
    check_int("--seed", args.seed, 0, (1 << 63) - 1)
    check_own("--save", args.save, FIRST_LINE)
    check_options(args)


def _page(args: argparse.Namespace) -> Page:
    model, tokenizer, _ = load_model(args.model, args.cache_dir, args.accept_licence)
    machine, longest = environment.hardware(), config_of(model).get("max_position_embeddings")
    traffic = traffic_of(model)
    candidates, refused = _candidates(model, args.methods)
    found = Page(
        args.model or DEFAULT,
        model_type(model),
        f"{machine['chip'] or machine['architecture']}, {machine['device']}",
        date.today().isoformat(),
        args.context,
        longest if isinstance(longest, int) else None,
        traffic,
        candidates,
        refused,
    )
    if args.no_quality or not candidates:
        return found
    tokens = read_tokens(tokenizer, args.text, args.cache_dir)
    about: dict[str, Any] = {"context": args.passage, "limit": args.limit, "seed": args.seed}
    methods, D = [one.method for one in candidates], candidates[0].served[0].layer.step.D
    names = ", ".join(args.text or [texts.DEFAULT])
    text = (
        f"{args.limit} examples of copying and {args.limit} of plain text, of {names}; dense prompts of "
        f"{args.passage:,} tokens, then {STEPS} tokens each, seed {args.seed}. Longer contexts were not run"
    )
    quality = measure(model, tokenizer, tokens, methods, args.budget, D=D, **about)
    return dataclasses.replace(found, text=text, quality=quality)


def _candidates(model: Any, methods: Sequence[str]) -> tuple[list[Candidate], list[str]]:
    """Return the methods that serve a layer of ``model``, and a line for each other method."""
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
        keys, how = max((t.value, t.how) for t in (calibration.threshold(one.config, one.layer) for one in served))
        found.append(Candidate(method, served, report.layers, dict(report.dense_layers), keys, how))
    return found, refused
