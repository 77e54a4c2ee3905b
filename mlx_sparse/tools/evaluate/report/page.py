"""The report: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from ..results import Row
from . import style
from .markup import Child, document, tag
from .tables import tables
from .words import title

CSS = """
:root { color-scheme: light dark; --line: #d0d0d0; --faint: #666; --mark: #fff3d6; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --faint: #aaa; --mark: #4a3b12; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .7rem; }
code { font-size: .85em; overflow-wrap: anywhere; } small { color: var(--faint); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure svg { background: #fff; max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
:is(td, th):is(:first-child, :last-child) { text-align: left; white-space: normal; min-width: 14rem; }
th { white-space: normal; }
tr.dense { font-weight: 600; } tr.fell-back, tr.partly, tr.failed { background: var(--mark); }
tr.fell-back { color: var(--faint); }
@page { size: landscape; margin: 12mm; }
@media print { body { max-width: none; margin: 0; font-size: 10pt; } .wide { overflow: visible; }
  table { font-size: 6.5pt; } th, td, :is(td, th):is(:first-child, :last-child) { padding: .1rem .25rem; min-width: 0; }
  td:first-child { min-width: 24mm; } figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } }
"""
GUIDE = (
    (
        "Examples",
        "Every method saw the same examples as dense attention, which is the attention of the model as it is.",
    ),
    ("n", "The number of examples."),
    ("±", "One standard error of the mean over the examples. How far chance alone moves it."),
    (
        "Δ",
        "The method less dense attention, example by example, so that hard and easy examples weigh on neither side. "
        "A difference below about twice its ± may be chance.",
    ),
    (
        "Accuracy, all right",
        "The share of the answer's tokens that the model ranked first with the right text before them; and the share "
        "of answers of which that holds for every token.",
    ),
    ("Characters matched", "What stands right before the first wrong token, as greedy decoding would write it."),
    ("Bits per byte", "How many bits the model needs for a byte of the text. Less is better."),
    (
        "Agreement, KL",
        "The share of tokens where method and dense attention rank the same one first, and how far their "
        "probabilities are apart. These show a small loss best.",
    ),
    (
        "Bytes",
        "What a decode step reads of keys and values, and of all that it needs to choose among them, as a share of "
        "what dense attention reads. “By formula” is the formula of the method's paper at this length; “counted” "
        "is what the sparse calls of this run added up to, by the same formulae, step by step. Bytes are not time.",
    ),
    (
        "Density",
        "The share of a prompt's block pairs that was attended, and the range over the layers; “rows sampled” were "
        "scored to choose them. “Mass” is the share of dense attention's weight that fell on what was attended.",
    ),
    (
        "Fell back, partly",
        "A method that could not help ran as dense attention, for the reason given. Where no call was sparse the row "
        "says nothing about the method and is in no picture; where some were, its point is hollow.",
    ),
)


def page(
    facts: Mapping[str, Any],
    rows: Sequence[Row],
    pictures: Mapping[str, Element],
    sections: Sequence[tuple[str, str, Element | None]],
) -> bytes:
    """The file: the tasks of ``rows``, then ``sections``: the name of a picture, a heading, and a table.

    ``pictures`` are SVG by name. A section with neither picture nor table is left out.
    """
    name = facts["model"]["name"]
    body = tag("body", tag("h1", f"What sparse attention costs: {name}"))
    body.extend([tag("pre", tag("code", facts["command"])), _facts(facts), tag("h2", "How to read this"), _guide()])
    for task in dict.fromkeys(row.task for row in rows):
        body.append(tag("h2", title(task)))
        body.extend(_figures(pictures, (f"quality-{task}", f"depths-{task}"), title(task)))
        for caption, found in tables(rows, task):
            body.extend([tag("h3", caption), found])
    for picture, heading, listing in sections:
        parts = [*_figures(pictures, (picture,), heading), *([] if listing is None else [listing])]
        body.extend([tag("h2", heading), *parts] if parts else [])
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"What sparse attention costs: {name}"),
        tag("style", CSS),
    )
    return document(tag("html", head, body, lang="en"))


def _figures(pictures: Mapping[str, Element], names: Sequence[str], label: str) -> Iterator[Element]:
    """Those pictures of ``names`` that there are."""
    for name in names:
        if name in pictures:
            inline = style.to_page(pictures[name], f"{name}-")
            inline.attrib |= {"role": "img", "aria-label": f"{label}: a picture of the figures in the tables"}
            yield tag("figure", inline)


def _guide() -> Element:
    parts = [part for term, text in GUIDE for part in (tag("dt", term), tag("dd", text))]
    return tag("dl", *parts)


def _facts(facts: Mapping[str, Any]) -> Element:
    model, machine = facts["model"], facts["machine"]

    def number(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    heads = f"{number(model['query_heads'])} query heads, {number(model['kv_heads'])} KV heads"
    attention = f"{model['layers']} attention layers, {heads} of {number(model['head_dim'])}"
    memory = machine.get("memory")
    where = [machine.get(key) for key in ("chip", "architecture", "device", "platform")]
    where.append(f"{memory / 1e9:.0f} GB" if isinstance(memory, int) else None)
    found: list[tuple[str, Child]] = [
        ("Date", facts["date"]),
        ("Model", f"{model['name']} ({model['type']}): {attention}"),
        ("Its hash", tag("code", model["hash"])),
    ]
    for text in facts["texts"]:
        size = f"{text['bytes']:,} bytes, {text['tokens']:,} tokens, SHA-256 "
        found.append(("Text", tag("span", f"{text['name']}: {size}", tag("code", text["sha256"]))))
    step = f"steps of {facts['prefill_step_size']:,} tokens in a sparse prompt"
    found += [
        ("Settings", f"seed {facts['seed']}, {facts['batch']} examples decoded together, {step}"),
        ("Versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items())),
        ("Machine", ", ".join(str(part) for part in where if part)),
    ]
    return tag("dl", *(part for term, value in found for part in (tag("dt", term), tag("dd", value))))
