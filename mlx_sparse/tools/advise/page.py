"""What was found as one page, and the setting that it recommends as text and as TOML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...lm.unfit_models import warning
from ...methods import Method, parse
from .. import formats
from ..evaluate.journal import as_json
from ..evaluate.table import plus_minus
from .quality import COPY, ORACLE, STEPS, TEXT, Found, Quality, Try
from .traffic import Here, Served, Traffic

FIRST_LINE = "# Written by mlx-sparse advise"
COPIES = 0.5  # share of the tokens that dense attention has to copy right for copying to show anything
WORTH = 1.1  # the speed-up below which nobody notices


@dataclass(frozen=True)
class Prospect:
    """A method on a model: as ``--attn`` runs it, all choices resolved.

    Attributes:
        method: as text.
        served: the layers that it serves.
        layers: attention layers there are.
        dense: layers that it does not serve, by reason.
        here: what this machine has measured, for the context that is asked about.
        beside: bytes that it keeps beside the caches at that context; None if that is not known.
    """

    method: str
    served: list[Served]
    layers: int
    dense: dict[str, int]
    here: Here
    beside: int | None


@dataclass(frozen=True)
class Page:
    """Everything that the command found.

    Attributes:
        model, family: its name, and mlx-lm's name of its family.
        machine: the chip.
        date: of the run, ISO.
        context, contexts: tokens that are asked about, and all that are shown.
        made_for: tokens that the model is made for, as its config says; None if it does not.
        traffic: what a step reads.
        prospects: of the methods that serve any layer; ``refused`` says why the others do not.
        text: what was read, and how much of it; empty if nothing was.
        quality: None if it was not measured.
    """

    model: str
    family: str
    machine: str
    date: str
    context: int
    contexts: list[int]
    made_for: int | None
    traffic: Traffic
    prospects: list[Prospect]
    refused: list[str]
    text: str = ""
    quality: Quality | None = None

    @property
    def chosen(self) -> Method | None:
        """The setting to use; None if nothing passed, or nothing was tried."""
        best = self.quality and self.quality.best
        return usable(best) if best else None

    def advice(self) -> list[str]:
        """What to do, in sentences; the first one says whether to use it."""
        lines = [f"Warning: {known}." if (known := warning(self.family)) else ""]
        quality, chosen = self.quality, self.chosen
        if not self.prospects:
            lines.append("Do not use it: no method serves a layer of this model.")
        elif quality is None:
            lines.append("Quality was not measured: without --no-quality it is.")
        elif quality.hopeless:
            lines.append(
                f"Do not use it: even the best choice of keys (`{_settings(quality.oracle)}`) changes what this model "
                "says of this text by more than the mark."
            )
        elif chosen is None:
            lines.append(
                "Do not use it with these methods and budgets: none stays within the mark. The best choice of keys "
                f"does (`{_settings(quality.oracle)}`), so another method or a larger --budget may."
            )
        else:
            assert quality.best is not None
            measured = f"`{quality.best.arm.attn}`"
            lines.append(f'Use --attn "{chosen}": {measured} is the cheapest that stays within the mark on this text.')
            lines += self._worth(chosen)
        if quality is not None and quality.dense[COPY].accuracy < COPIES:
            lines.append("Dense attention itself hardly copies here, so that copying shows little: try another --text.")
        return [line for line in lines if line]

    def _worth(self, chosen: Method) -> list[str]:
        serving = next((p.served for p in self.prospects if p.served[0].config.name == chosen.name), [])
        served = [dataclasses.replace(one, config=chosen) for one in serving]
        bound = self.traffic.bound(self.context, served)
        if bound < WORTH:
            return [f"It is hardly worth it at {self.context:,} tokens: by bytes a step gets at most {bound:.2f} x."]
        return [f"At {self.context:,} tokens a step gets at most {bound:.2f} x as fast, by bytes."]

    def __str__(self) -> str:
        head = f"{self.model} ({self.family}) on {self.machine}, {self.date}"
        parts = [head, self._layers(), self._bytes(), self._memory()]
        if self.quality is not None:
            parts += [self._changes(self.quality), self._tries(self.quality)]
        return "\n\n".join([*parts, "\n".join(self.advice())])

    def _layers(self) -> str:
        kinds = [
            f"{kept.layers} {kept.kind}" + (f" of {kept.window:,} tokens" if kept.window else "")
            for kept in self.traffic.kept
        ]
        lines = [f"Layers that keep something: {', '.join(kinds)}."]
        if self.made_for is not None and self.made_for < self.context:
            lines.append(
                f"The model is made for {self.made_for:,} tokens, fewer than the {self.context:,} asked about."
            )
        for prospect in self.prospects:
            count = sum(one.layers for one in prospect.served)
            reasons = "".join(f"; {n} {reason}" for reason, n in prospect.dense.items())
            lines.append(f"`{prospect.method}` serves {count} of {prospect.layers}{reasons}.")
        return "\n".join([*lines, *self.refused])

    def _bytes(self) -> str:
        traffic = self.traffic
        header = ["tokens", "read of the caches", "share of the step", "best possible"]
        header += [f"`{prospect.method}`" for prospect in self.prospects]
        all_served = [one.served for one in self.prospects]
        rows = []
        for S in self.contexts:
            best = max((traffic.best(S, served) for served in all_served), default=1.0)
            row = [f"{S:,}", size(traffic.kv(S)), f"{traffic.share(S):.0%}", f"{best:.2f} x"]
            rows.append([*row, *(f"{traffic.bound(S, served):.2f} x" for served in all_served)])
        lines = [
            f"A decode step reads {size(traffic.weights)} of weights. Speed-ups are bounds: time in proportion to "
            "bytes, and these by each method's formula.",
            "",
            formats.table(header, rows),
            "",
        ]
        return "\n".join([*lines, *map(self._here, self.prospects)])

    def _here(self, prospect: Prospect) -> str:
        found = prospect.here
        line = f"`{prospect.method}` here: sparse from {found.keys:,.0f} keys on ({found.how})"
        if found.ratio is None:
            return f"{line}; mlx-sparse calibrate times it." if prospect.served[0].config.measurable else f"{line}."
        return (
            f"{line}; attention alone {found.ratio:.2f} x at {found.timed:,} keys (measured): were it so at "
            f"{self.context:,}, a step would be {found.step:.2f} x as fast, the weights by their bytes."
        )

    def _memory(self) -> str:
        each, now = self.traffic.nbytes(2) - self.traffic.nbytes(1), self.traffic.nbytes(self.context)
        lines = [f"Caches: {size(each)} a token, {size(now)} at {self.context:,} tokens."]
        for prospect in self.prospects:
            if prospect.beside is None:
                lines.append(f"`{prospect.method}` keeps more beside them, which was not measured.")
            else:
                more = prospect.beside / max(1, now)
                per_token = f"{size(prospect.beside / self.context)} a token"
                lines.append(
                    f"`{prospect.method}` keeps {size(prospect.beside)} beside them ({per_token}, {more:+.0%})."
                )
        return "\n".join(lines)

    def _changes(self, quality: Quality) -> str:
        rows = [[change.name, *(_cells(change.found) or [change.note, "", "", ""])] for change in quality.changes]
        rows.append(["**pass mark**, the most of these", *_cells(quality.mark)])
        header = ["harmless change", "KL, copying", "same token", "KL, text", "same token"]
        return f"Quality: {self.text}.\n\n" + formats.table(header, rows)

    def _tries(self, quality: Quality) -> str:
        rows = []
        for one in (*quality.oracle, *quality.tries):
            name = f"`{one.arm.attn}`" + (" (a bound)" if one.arm.method == ORACLE else "")
            verdict = "passes" if one.passes else "fails" if one.sparse else "ran densely"
            copied = f"{one.found[COPY].accuracy:.2f}"
            rows.append([name, one.arm.budget or "", *_cells(one.found), copied, verdict])
        header = ["method", "budget", "KL, copying", "same token", "KL, text", "same token", "copied right", ""]
        dense = f"Dense attention copies {quality.dense[COPY].accuracy:.2f} of the tokens right. "
        rest = "After the first budget that fails, smaller ones were not run."
        return "\n".join([formats.table(header, rows), "", dense + rest, *quality.left_out])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        traffic = self.traffic
        steps = [
            {"tokens": S, "kv_bytes": traffic.kv(S), "share": traffic.share(S)}
            | {"bounds": {p.method: traffic.bound(S, p.served) for p in self.prospects}}
            for S in self.contexts
        ]
        methods = [
            {"method": p.method, "layers": p.layers, "dense": p.dense, "here": asdict(p.here), "beside": p.beside}
            | {"served": sum(one.layers for one in p.served)}
            for p in self.prospects
        ]
        quality = self.quality
        found = None
        if quality is not None:
            found = {
                "text": self.text,
                "dense": _plain(quality.dense),
                "changes": [{"name": c.name, "note": c.note} | _plain(c.found) for c in quality.changes],
                "mark": _plain(quality.mark),
                "tries": [_plain_try(one) for one in (*quality.oracle, *quality.tries)],
                "left_out": quality.left_out,
            }
        return {
            "model": self.model,
            "family": self.family,
            "machine": self.machine,
            "date": self.date,
            "context": self.context,
            "made_for": self.made_for,
            "weights": traffic.weights,
            "layers": [asdict(kept) for kept in traffic.kept],
            "steps": steps,
            "methods": methods,
            "refused": self.refused,
            "quality": found,
            "attn": None if self.chosen is None else str(self.chosen),
            "advice": self.advice(),
        }


def usable(best: Try) -> Method:
    """The method of a try as one would run it, sparse where that pays.

    Settings for experiments on short texts, which pay nowhere, get as many keys as are the default.
    """
    config = best.arm.stages[1]
    assert config is not None
    (asked,) = parse(best.arm.method)
    if not hasattr(asked, "dense_below"):
        return config
    changes: dict[str, Any] = {"dense_below": asked.dense_below}
    config = dataclasses.replace(config, **changes)
    if config.experiment:
        changes = {config.grows: getattr(type(config), config.grows)}
    return dataclasses.replace(config, **changes)


def toml(config: Method, model: str, date: str, text: str) -> str:
    """A file for ``--attn-config``."""
    fields = [field for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    # A value of JSON is one of TOML, for what settings can be; and as JSON a name cannot end its comment.
    settings = [f"{field.name} = {json.dumps(getattr(config, field.name))}" for field in fields]
    about = f"{FIRST_LINE} for {json.dumps(model)}, {date}: {json.dumps(text)}"
    return "\n".join([about, f"[{config.name}]", *settings]) + "\n"


def described(text: str, context: int, limit: int, seed: int) -> str:
    """What is run, in words."""
    return (
        f"{limit} passages to copy from and {limit} to go on with, of {text}; dense prompts of {context:,} tokens, "
        f"then {STEPS} tokens each, seed {seed}. Longer contexts were not tried (--passage)"
    )


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB" if count < 1000 else f"{count:,.0f} GB"


def _settings(oracle: Sequence[Try]) -> str:
    """The smallest choice that passes, or the largest that does not."""
    passing = [one for one in oracle if one.passes]
    return (passing[-1] if passing else oracle[0]).arm.attn if oracle else ORACLE


def _cells(found: Found) -> list[str]:
    each = [found[kind] for kind in (COPY, TEXT) if kind in found]
    return [cell for one in each for cell in (plus_minus(one.kl, one.kl_error, 4), f"{one.agreement:.2f}")]


def _plain(found: Found) -> dict[str, Any]:
    return {kind: as_json(figures) for kind, figures in found.items()}


def _plain_try(one: Try) -> dict[str, Any]:
    about = {"attn": one.arm.attn, "budget": one.arm.budget, "share": one.share, "sparse": one.sparse}
    return about | {"passes": one.passes} | _plain(one.found)
