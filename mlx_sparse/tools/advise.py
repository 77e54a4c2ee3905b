"""Implement ``mlx-sparse advise``: recommend sparse attention settings for a model, a text and this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from mlx import nn

from ..calibrate import Calibration
from ..checks import ConfigError, Parser, check_int, read_length
from ..core.base import Method, Prefill
from ..lm.loading import unfit_warning
from ..lm.model import plan_of, sparse
from ..methods import parse
from ..model_info import config_of, model_type
from . import environment
from .assets.models import DEFAULT
from .comparison import measure_crossover
from .decode_traffic import LATENT, Served, Traffic, traffic_of
from .evaluate import texts
from .evaluate.inputs import add_options, check_options, load_model, read_tokens
from .evaluate.journal import as_json
from .evaluate.table import plus_minus
from .evaluate.tasks import SHORTEST, TASKS
from .evaluate.variants import read_budget, read_methods
from .formats import check_own, write_toml
from .progress import STDERR, stage
from .quality import ORACLE, Attempt, Captured, Quality, captured_shares, measure
from .terminal import fill, table
from .tune import Search
from .tune.results import Measured, Tuned, best, summary
from .verdict import COPY, LIMITS, STEPS, TEXT, verdict

METHODS, BUDGETS = "sparq,streaming,h2o", "1/2,1/4,1/8"
CONTEXTS = (4096, 32_768, 131_072)  # context lengths in the table, in addition to --context
FIRST_LINE = "# Written by mlx-sparse advise"
MIN_COPIED = 0.5  # smallest copying accuracy of dense attention that allows a comparison
LATENT_KEYS = 2048  # smallest recommended `top_k` for latents, of which all query heads attend to the same
MIN_KEPT = 0.99  # share of dense attention's accuracy that a prefill method keeps


@dataclass(frozen=True)
class Candidate:
    """A sparse method, and the layers of the model that can use it.

    Attributes:
        layers: number of attention layers in the model.
        dense: dict from a reason to the number of layers that always stay dense for that reason.
        keys: largest crossover length of the served layers, in keys.
    """

    method: str
    served: list[Served]
    layers: int
    dense: dict[str, int]
    keys: float
    how: str


@dataclass(frozen=True)
class Page:
    """The output of ``mlx-sparse advise``.

    Attributes:
        made_for: maximum context length in the model's config, or None.
        text: description of the examples on which quality was measured.
        captured: captured share of each layer with MLA, on the first example.
        crossover: crossover length of the recommended method in keys, measured on this machine.
        tuned: results of the prefill methods.
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
    captured: Sequence[Captured] = ()
    crossover: int = 0
    tuned: Sequence[Tuned] = ()

    @property
    def prefill(self) -> Method | None:
        """The recommended prefill method; None if dense attention is better or fails the tasks."""
        found = best(self.tuned, "accuracy", MIN_KEPT)
        return found[0].accuracy_first.config if found and found[0].dense.accuracy >= MIN_COPIED else None

    @property
    def chosen(self) -> Method | None:
        """The recommended decode method; None if no attempt passed or quality was not measured."""
        best = self.quality and self.quality.best
        return for_everyday_use(best) if best else None

    def advice(self) -> list[str]:
        """Return remarks about the results, and then the verdict with the command to run."""
        quality, chosen = self.quality, self.chosen
        lines = [f"Warning: {known}."] if (known := unfit_warning(self.family)) else []
        if quality is not None and quality.dense[0].mean.accuracy < MIN_COPIED:
            lines.append("Dense attention copies this text badly, so copying shows little. Try another --text.")
        if not self.candidates:
            return lines + verdict(self.model, "", useless="no method can serve a layer of this model")
        if quality is None:
            return [*lines, "Quality was not measured, because of --no-quality."]
        if quality.oracle_fails:
            return lines + verdict(self.model, "", unsafe="on this text, even the best selection of keys fails")
        if chosen is None:
            lines.append("The best selection of keys passes, so another method or a larger --budget may pass.")
            return lines + verdict(self.model, "", unsafe="none of these methods passes at these budgets")
        assert quality.best is not None
        lines.append(f"`{quality.best.variant.attn}` is the cheapest method that passes.")
        served = next(one.served for one in self.candidates if one.served[0].config.name == chosen.name)
        bound = self.traffic.bound(self.context, [dataclasses.replace(one, config=chosen) for one in served])
        lines.append(f"At {self.context:,} tokens, a decode step is at most {bound:.2f} x faster, by bytes.")
        attn = "+".join(map(str, self.recommended))
        shorter = f"--context is {self.context:,}" if self.context < self.crossover else ""
        return lines + verdict(self.model, attn, crossover=self.crossover, shorter=shorter)

    @property
    def recommended(self) -> list[Method]:
        """The recommended prefill method and decode method, without those that are None."""
        return [config for config in (self.prefill, self.chosen) if config is not None]

    def _prefill_rows(self) -> list[Measured]:
        return [*(one.dense for one in self.tuned[:1]), *(row for one in self.tuned for row in one.measured)]

    def _prefill(self) -> list[str]:
        if not self.tuned:
            return [f"Prefill was not tested: --methods {METHODS},sample,gather tests it at --context."]
        start = f"Prefill of {self.tuned[0].lengths[0]:,} tokens,"
        lines = [f"{start} `{row.config or 'dense'}`: {summary(row)}." for row in self._prefill_rows()]
        stay = f"stay dense: no method is faster and keeps {MIN_KEPT:.0%} of an accuracy of at least {MIN_COPIED}"
        return [*lines, f"For prefill, {f'use `{self.prefill}`' if self.prefill else stay}."]

    def __str__(self) -> str:
        head = f"{self.model} ({self.family}) on {self.machine}, {self.date}"
        parts = [fill(head), fill(*self._layers()), self._bytes()]
        if self.quality is not None:
            parts += [self._attempts(self.quality), fill(*self._prefill())]
        advice = (line if "--model" in line else fill(line) for line in self.advice())  # a command stays one line
        return "\n\n".join([*parts, "\n".join(advice)])

    def _layers(self) -> list[str]:
        caches = [f"{count} {kind}" for kind, count in Counter(map(str, self.traffic.caches)).items()]
        lines = [f"Layers with a cache: {', '.join(caches)}."]
        if self.made_for is not None and self.made_for < self.context:
            lines.append(f"The model's context length, {self.made_for:,}, is less than --context {self.context:,}.")
        for one in self.candidates:
            reasons = "".join(f"; {count} {reason}" for reason, count in one.dense.items())
            served = f"serves {sum(part.layers for part in one.served)} of {one.layers}{reasons}"
            lines.append(f"`{one.method}` {served}; sparse at {one.keys:,.0f} keys and longer ({one.how}).")
        return lines + self.refused

    def _bytes(self) -> str:
        traffic, of_each = self.traffic, [one.served for one in self.candidates]
        header = ["tokens", "caches", "share of bytes", *(f"`{one.method}`" for one in self.candidates)]
        rows = []
        for S in sorted({*CONTEXTS, self.context}):
            bounds = [f"{traffic.bound(S, served):.2f} x" for served in of_each]
            rows.append([f"{S:,}", f"{traffic.nbytes(S) / 1e9:.3g} GB", f"{traffic.share(S):.0%}", *bounds])
        about = (
            f"A decode step reads {traffic.weights / 1e9:.3g} GB of weights. The speed-ups are upper bounds. They "
            "assume that time is proportional to bytes by the formula of each method."
        )
        return f"{fill(about)}\n\n{table(header, rows)}"

    def _attempts(self, quality: Quality) -> str:
        rows = []
        for one in (*quality.oracle, *quality.attempts):
            result = "passes" if one.passes else "fails" if one.sparse else "dense"
            means = [row.mean for row in one.rows]
            kls = [plus_minus(row.mean.kl, row.error.kl, 3) for row in one.rows]
            cells = ["copying\ntext", "\n".join(kls), "\n".join(f"{mean.agreement:.2f}" for mean in means)]
            rows.append([one.variant.attn, one.variant.budget or "", *cells, f"{means[0].accuracy:.2f}", result])
        header = ["method", "budget", "task", "KL, nats", "agreement", "accuracy", ""]
        accuracy = f"The copying accuracy of dense attention is {quality.dense[0].mean.accuracy:.2f}."
        bound = f"{ORACLE} selects the best keys and is only a bound. Budgets below a failing budget are skipped."
        notes = fill(f"A method passes with {LIMITS}.", bound, accuracy, *quality.left_out)
        if self.captured:
            (least, layer, rank), middle = min(self.captured), median(one.share for one in self.captured)
            share = f"Captured share of {rank} components: least {least:.2f}, in layer {layer}; median {middle:.2f}."
            notes = f"{share}\n{notes}"
        return "\n\n".join([fill(f"Quality: {self.text}."), table(header, rows, 2), notes])

    def as_dict(self) -> dict[str, object]:
        """Return the output as a dict for JSON."""
        found = {name: getattr(self, name) for name in ("model", "family", "machine", "date", "context", "made_for")}
        traffic = self.traffic
        found |= {"weights": traffic.weights, "layers": list(map(asdict, traffic.caches)), "refused": self.refused}
        found["methods"] = [
            {"method": one.method, "layers": one.layers, "dense": one.dense, "keys": one.keys, "how": one.how}
            | {"served": sum(part.layers for part in one.served)}
            | {"bound": traffic.bound(self.context, one.served)}
            for one in self.candidates
        ]
        if (quality := self.quality) is not None:
            found["text"], found["dense"] = self.text, [as_json(row) for row in quality.dense]
            found["captured"] = [one._asdict() for one in self.captured]
            found["attempts"] = [
                {"attn": one.variant.attn, "budget": one.variant.budget, "share": one.share, "passes": one.passes}
                | {"rows": [as_json(row) for row in one.rows]}
                for one in (*quality.oracle, *quality.attempts)
            ]
        found["prefill"] = [row.as_dict() for row in self._prefill_rows()]
        return found | {"attn": "+".join(map(str, self.recommended)) or None, "advice": self.advice()}


def for_everyday_use(best: Attempt) -> Method:
    """Return the method of the attempt ``best`` with settings for long contexts.

    An attempt runs on short prompts, so its method selects few keys and sets ``dense_below`` to 0. The returned method
    has the ``dense_below`` that the user requested, or its default. If the settings of ``best`` are only for
    experiments on short texts, the returned method also has the default budget setting. For latents, it has at least
    `LATENT_KEYS` keys, if the user requested no number.
    """
    config = best.variant.stages[1]
    assert config is not None
    (requested,) = parse(best.variant.method)
    if not hasattr(requested, "dense_below"):
        return config
    changes: dict[str, object] = {"dense_below": requested.dense_below}
    config = dataclasses.replace(config, **changes)
    if config.scores_latents and getattr(requested, "top_k", 0) == "auto":
        changes = {config.budget_setting: max(LATENT_KEYS, config.attended)}
    elif config.experiment:
        changes = {config.budget_setting: getattr(type(config), config.budget_setting)}
    return dataclasses.replace(config, **changes)


def toml(configs: Sequence[Method], model: str, day: str, text: str) -> str:
    """Return the settings in ``configs`` as TOML text for ``--attn-config``.

    A comment contains the name ``model``, the date ``day``, and ``text``, which describes the measured examples.
    """
    # JSON values are TOML values. JSON text has no line breaks, so a name cannot end the comment.
    lines = [f"{FIRST_LINE} for {json.dumps(model)}, {day}: {json.dumps(text)}"]
    for config in configs:
        fields = [field for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
        settings = [f"{field.name} = {json.dumps(getattr(config, field.name), default=str)}" for field in fields]
        lines += [f"[{config.name}]", *settings]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Print the `Page`. Return 0 if a method is recommended, or with ``--no-quality`` can run, else 1."""
    args = _parser().parse_args(argv)
    _check(args)
    found = _page(args)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found)
    if args.save is not None and found.recommended:
        write_toml(args.save, toml(found.recommended, found.model, found.date, found.text))
        print(f"Wrote {args.save}: --attn-config {args.save}", file=sys.stderr)
    return 0 if found.recommended or (args.no_quality and found.candidates) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse advise",
        description=textwrap.fill(
            "Recommend settings for your model. The page lists the layers that each method serves, the bytes of a "
            "decode step with the largest possible speed-up, and the difference to dense attention on your text. It "
            "ends with the recommended --attn, or advises against sparse attention.",
            78,
        ),
        epilog="Example:\n  mlx-sparse advise MODEL --text notes.txt --context 32k --save attn.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--context", metavar="N", default="32k", help="context length that you use (default: 32k)")
    about = "to test; prefill methods run at --context (default: %(default)s)"
    parser.add_argument("--methods", metavar="METHOD,...", default=METHODS, help=about)
    about = "shares of dense attention's transfers; they set the parameters that METHOD omits (default: %(default)s)"
    parser.add_argument("--budget", metavar="SHARE,...", default=BUDGETS, help=about)
    parser.add_argument("--passage", metavar="N", default="1k", help="tokens of each prompt (default: 1k)")
    parser.add_argument("--limit", metavar="N", type=int, default=4, help="examples of each of two tasks (default: 4)")
    parser.add_argument("--no-quality", action="store_true", help="only count bytes, which takes seconds")
    parser.add_argument("--save", metavar="FILE.toml", type=Path, help="write the recommended method for --attn-config")
    return parser


def _check(args: argparse.Namespace) -> None:
    methods = read_methods([args.methods])
    args.methods = [one for one in methods if not any(isinstance(config, Prefill) for config in parse(one))]
    args.prefill = sorted(set(methods) - set(args.methods))
    for method in methods:
        if len(parse(method)) > 1:
            raise ConfigError(f"--methods: expected a comma between two methods, got {method}.")
    if not args.methods:
        raise ConfigError("--methods: expected a decode method such as sparq, got none.")
    args.budget = [read_budget(share) for share in args.budget.split(",")]
    args.context, args.passage = read_length(args.context, "--context"), read_length(args.passage, "--passage")
    check_int("--passage", args.passage, SHORTEST)
    check_int("--limit", args.limit, 1)
    check_int("--seed", args.seed, 0, (1 << 63) - 1)
    if args.no_quality and args.save is not None:
        raise ConfigError(f"--save: expected none with --no-quality, which recommends no method, got {args.save}.")
    check_own("--save", args.save, FIRST_LINE)
    check_options(args)


def _page(args: argparse.Namespace) -> Page:
    model, tokenizer, _ = load_model(args.model, args.cache_dir, args.accept_license)
    machine, longest = environment.hardware(), config_of(model).get("max_position_embeddings")
    traffic = traffic_of(model)
    if latents := [index for index, cache in enumerate(traffic.caches) if cache.kind == LATENT]:
        args.methods = [_for_latents(method) for method in args.methods]
    candidates, refused = _candidates(model, args.methods)
    tested, unable = _candidates(model, args.prefill)
    found = Page(
        args.model or DEFAULT,
        model_type(model),
        f"{machine['chip'] or machine['architecture']}, {machine['device']}",
        date.today().isoformat(),
        args.context,
        longest if isinstance(longest, int) else None,
        traffic,
        candidates,
        refused + unable,
    )
    if args.no_quality or not candidates:
        return found
    return _measured(found, args, model, tokenizer, [parse(one.method)[0] for one in tested], latents)


def _measured(
    found: Page, args: argparse.Namespace, model: nn.Module, tokenizer: Any, prefills: list[Any], latents: list[int]
) -> Page:
    """Return ``found`` with the quality of its candidates and ``prefills``. ``latents`` are the layers with MLA."""
    tokens, candidates = read_tokens(tokenizer, args.text, args.cache_dir), found.candidates
    about = {"context": args.passage, "limit": args.limit, "seed": args.seed}
    examples = {
        task: [
            dataclasses.replace(made, target=made.target[:STEPS]) for made in TASKS[task](tokens, tokenizer, **about)
        ]
        for task in (COPY, TEXT)
    }
    methods, D = [one.method for one in candidates], candidates[0].served[0].layer.step.D
    names = ", ".join(args.text or [texts.DEFAULT])
    text = (
        f"{args.limit} examples of copying and {args.limit} of plain text, of {names}; dense prompts of "
        f"{args.passage:,} tokens, then {STEPS} decode steps each, seed {args.seed}. Longer contexts were not measured"
    )
    length = min(args.context, found.made_for or args.context)
    grids = [list(settings) for _, settings in groupby(prefills, key=lambda config: config.name)]
    search = Search(model, tokenizer, tokens, grids, examples=args.limit, seed=args.seed)
    tuned = search.run([(length + 1, (length,))]) if grids else []  # first: a text may be too short
    quality = measure(model, tokenizer, examples, methods, args.budget, context=args.passage, D=D)
    configs: list[Any] = [one.config for each in candidates for one in each.served]
    ranks = [config.rank for config in configs if config.scores_latents]
    captured = captured_shares(model, examples[COPY][0].prompt, latents, ranks[0]) if ranks else ()
    found = dataclasses.replace(found, text=text, quality=quality, captured=captured, tuned=tuned)
    if (chosen := found.chosen) is None:
        return found
    with stage(STDERR, f"finding the crossover length of {chosen}"):
        crossover = measure_crossover(model, chosen, Calibration(measures=True))[1]
    return dataclasses.replace(found, crossover=crossover)


def _for_latents(method: str) -> str:
    """Return ``method`` with the setting that turns on sparse decode steps with MLA, if the method has the setting."""
    (config,) = parse(method)
    if getattr(config, "component_score", "") != "auto":
        return method
    return f"{method}{',' if ':' in method else ':'}component_score=low_rank"


def _candidates(model: nn.Module, methods: Sequence[str]) -> tuple[list[Candidate], list[str]]:
    """Return the methods that can run in a layer of ``model``, and an error message for each method that cannot run."""
    calibration = Calibration()
    found, refused = [], []
    for method in methods:
        try:
            with sparse(model, method, calibration=calibration) as report:
                plan = plan_of(model)
                assert plan is not None
        except ConfigError as error:
            refused.append(f"`{method}` cannot run: {error}")
            continue
        served = [Served(config, layer, count) for (config, layer), count in plan.layers.items()]
        keys, how = max((t.value, t.how) for t in (calibration.threshold(one.config, one.layer) for one in served))
        found.append(Candidate(method, served, report.layers, dict(report.dense_layers), keys, how))
    return found, refused
