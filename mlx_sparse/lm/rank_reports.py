"""The reports of several ranks as one: what each has counted, as plain data, and the sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from ..api.call_report import Report
from ..model_parts import Part
from .drafts.figures import DraftFigures
from .figures import BucketFigures, LayerFigures, PrefillFigures

PLAIN = ("attn", "backend", "model_type", "model", "layers", "served_layers", "decodes", "messages")
CALLS = ("sparse_calls",)
BYTES = ("formula_bytes", "dense_bytes", "sent_bytes", "checked_bytes")
SUMS = (*CALLS, *BYTES)


def numbers_of(report: Report, *, wait: bool = True) -> dict[str, Any]:
    """Everything in a report, for `report_of` on another rank.

    Args:
        wait: for what the device is counting.
    """
    now = report.snapshot(wait=wait)
    return {
        **{name: getattr(now, name) for name in (*PLAIN, *SUMS, "dense_calls", "dense_layers", "kv_heads")},
        "outlook": now.outlook(),
        "part": astuple(now.part),
        "prefill": now.prefill and _prefill_numbers(now.prefill),
        "buckets": now.counted and astuple(now.counted),
        "drafts": now.drafts and astuple(now.drafts),
    }


def report_of(numbers: Mapping[str, Any]) -> Report:
    """The report that `numbers_of` was given, to which nothing is added any more."""
    found = Report(**{name: numbers[name] for name in (*PLAIN, *SUMS)})
    found.dense_calls, found.dense_layers = Counter(numbers["dense_calls"]), Counter(numbers["dense_layers"])
    found.kv_heads = numbers["kv_heads"] and tuple(numbers["kv_heads"])
    found.outlook = lambda: list(numbers["outlook"])
    found.part = Part(*numbers["part"])
    found.prefill = numbers["prefill"] and _prefill(numbers["prefill"], found.part.first_layer)
    found.counted = numbers["buckets"] and BucketFigures(*numbers["buckets"])
    if numbers["drafts"]:  # JSON has made lists of tuples
        drafts: Any = [tuple(part) if isinstance(part, list) else part for part in numbers["drafts"]]
        found.drafts = DraftFigures(*drafts)
    return found


def total(by_rank: Mapping[int, Mapping[str, Any]]) -> Report:
    """The sum over ranks of what `numbers_of` gave on each; what the first of them is, the sum is.

    Layers are counted once, whoever holds a share of their heads. Calls, bytes and figures are those of all ranks, but
    ranks that share a context make every call together, which counts once.
    """
    reports = {rank: report_of(numbers) for rank, numbers in sorted(by_rank.items())}
    first, *others = reports.values()
    found = replace(first)
    found.counted = first.counted
    for other in others:
        together = first.part.sharers > 1
        for name in BYTES if together else SUMS:
            setattr(found, name, getattr(found, name) + getattr(other, name))
        found.counted = _sum(found.counted, other.counted)
        found.drafts = _sum(found.drafts, other.drafts)
        if together:
            continue
        found.dense_calls = found.dense_calls + other.dense_calls
        if found.prefill is not None and other.prefill is not None:
            beside = other.part.rank != first.part.rank
            found.prefill = found.prefill.beside(other.prefill) if beside else found.prefill + other.prefill
    held = {report.part.first_layer: report for report in reports.values()}.values()
    found.layers = sum(report.layers for report in held)
    found.served_layers = sum(report.served_layers for report in held)
    found.dense_layers = sum((report.dense_layers for report in held), Counter())
    found.ranks = [_held(rank, report) for rank, report in reports.items()]
    lines = {rank: report.outlook() for rank, report in reports.items()}
    found.outlook = lambda: _together(lines)
    return found


def _held(rank: int, report: Report) -> dict[str, Any]:
    """What a rank holds and has counted, for JSON."""
    here, whole = report.kv_heads or (None, None)
    return {
        "rank": rank,
        "first_layer": report.part.first_layer,
        "layers": report.layers,
        "served_layers": report.served_layers,
        "share": report.part.rank,
        "kv_heads": here,
        "of_kv_heads": whole,
        "sparse_calls": report.sparse_calls,
        "dense_calls": report.dense_calls.total(),
    }


def _together(lines: Mapping[int, list[str]]) -> list[str]:
    """What the ranks have to say, once where they say the same."""
    said = [line for line in lines.values() if line]
    if all(line == said[0] for line in said):
        return said[0] if said else []
    return [f"rank {rank}: {line}" for rank, of_rank in lines.items() for line in of_rank]


def _sum(known: Any, more: Any) -> Any:
    return more if known is None else known if more is None else known + more


def _prefill_numbers(figures: PrefillFigures) -> list[Any]:
    layers = {index: astuple(layer) for index, layer in figures.layers.items()}
    return [figures.calls, figures.queries, figures.sampled_queries, layers, figures.histogram]


def _prefill(numbers: Any, first_layer: int) -> PrefillFigures:
    """Figures whose layers are numbered as in the whole model; JSON has made text of the numbers."""
    calls, queries, sampled, layers, histogram = numbers
    return PrefillFigures(
        calls,
        queries,
        sampled,
        {
            int(index) + first_layer: LayerFigures(pairs, tuple(kept), *more)
            for index, (pairs, kept, *more) in layers.items()
        },
        Counter({int(place): count for place, count in histogram.items()}),
    )
