"""Counts of a model's attention calls, which `--attn-report` prints."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from ..model_parts import Part

JSON_KEY = "mlx_sparse_report"  # key of the line that ``--attn-report json`` prints
IN_FLIGHT = 64  # calls whose figures the device may still compute

# All reports share one lock, because adding to a report and reading it are short.
_lock = threading.RLock()


class Counting(Protocol):
    """Figures that the device computes: `mlx_sparse.lm.figures.BucketCounts`."""

    def figures(self) -> Any:
        """Wait for the figures. Any thread may call this, one at a time."""


@dataclass
class Totals:
    """Sums over attention calls; `Report` documents them."""

    sparse_calls: int = 0
    dense_calls: Counter[str] = field(default_factory=Counter)
    formula_bytes: int = 0
    dense_bytes: int = 0
    prefill: Any = None
    sent_bytes: int = 0
    messages: int = 0
    checked_bytes: int = 0
    drafts: Any = None


@dataclass
class Counts(Totals):
    """Totals of one call of a model.

    Attributes:
        decode: further figures of decode steps; None if the method has none.
        counting: figures that the device computes; None if there are none.
    """

    decode: Any = None
    counting: Counting | None = None


@dataclass(kw_only=True)
class Report(Totals):
    """Totals of all calls of one enabled model. Any thread may add to a report or read it at any time.

    A call of the model adds its counts when it returns; a call that raises adds nothing. Reading evaluates no arrays,
    with one exception: with SAAP, `buckets` and `sparse_bytes` wait for the decode steps in flight, because the device
    counts their keys.

    Attributes:
        attn: the text form of the methods, with every "auto" resolved.
        backend: the backend that runs it.
        model_type: the library's name of the model family.
        model: name or path of the model; empty if unknown.
        layers: attention layers.
        served_layers: layers that can attend sparsely.
        dense_layers: number of other layers by reason.
        sparse_calls: decode calls that ran sparsely.
        dense_calls: number of other calls by reason.
        formula_bytes: bytes that the sparse calls moved, by the papers' formulae, without keys that the device counts.
        dense_bytes: bytes that dense attention would have moved in the same calls.
        prefill: figures of the prefill chunks (`mlx_sparse.lm.figures.PrefillFigures`); None without a prefill method.
        decodes: True if there is a decode method.
        crossovers: returns the crossover lengths of the layers, as lines.
        sent_bytes, messages: bytes and messages sent to the other ranks of a sharded context.
        checked_bytes: bytes moved by verification steps of a lossless model, or by its decode steps without drafts.
        drafts: figures of drafts (`mlx_sparse.lm.figures.DraftFigures`); None without `--lossless`.
        part: the part of the model on this process.
        kv_heads: KV heads of a served layer, here and in the whole model; None if layers differ.
        counted: `buckets` without the steps in flight.
    """

    attn: str
    backend: str
    model_type: str
    model: str = ""
    layers: int = 0
    served_layers: int = 0
    dense_layers: Counter[str] = field(default_factory=Counter)
    decodes: bool = True
    crossovers: Callable[[], list[str]] = field(default=list, repr=False)
    part: Part = field(default_factory=Part)
    kv_heads: tuple[int, int] | None = None
    counted: Any = field(default=None, init=False, repr=False)
    _counting: deque[Counting] = field(default_factory=deque, init=False, repr=False)

    def add(self, counts: Counts) -> None:
        """Count a call of the model."""
        with _lock:
            for total in fields(Totals):
                # New objects, so that a reader's copy does not change.
                setattr(self, total.name, _sum(getattr(self, total.name), getattr(counts, total.name)))
            self.counted = _sum(self.counted, counts.decode)
            if counts.counting is not None:
                self._counting.append(counts.counting)
            self._settle(IN_FLIGHT)

    def _settle(self, in_flight: int = 0) -> None:
        """Wait for the figures of all calls except the last ``in_flight``, and add them."""
        while len(self._counting) > in_flight:
            self.counted = _sum(self.counted, self._counting.popleft().figures())

    @property
    def buckets(self) -> Any:
        """Figures of SAAP (`mlx_sparse.lm.figures.BucketFigures`); None with other methods."""
        with _lock:
            self._settle()
            return self.counted

    @property
    def sparse_bytes(self) -> int:
        """Bytes that the sparse calls moved, by the papers' formulae. The device counts the keys of SAAP."""
        with _lock:
            return self.formula_bytes + (self.buckets.bytes if self.buckets else 0)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        with _lock:
            data = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
            data |= {"dense_layers": dict(self.dense_layers), "dense_calls": dict(self.dense_calls)}
            data["prefill"] = self.prefill and self.prefill.as_dict()
            data["buckets"] = self.buckets and self.buckets.as_dict()
            data["drafts"] = self.drafts and self.drafts.as_dict()
            data["crossovers"] = self.crossovers()
            for name in ("formula_bytes", "part", "kv_heads", "counted"):
                del data[name]
            data["sparse_bytes"] = self.sparse_bytes
            return data

    def calls(self) -> Counts:
        """Return the calls so far, without waiting for the device."""
        with _lock:
            return Counts(self.sparse_calls, self.dense_calls, prefill=self.prefill)

    def opening(self) -> list[str]:
        """Return the lines that are known before any call: served layers and crossover lengths."""
        model = ", ".join(filter(None, (self.model_type, self.model)))
        served = f"{self.served_layers} of {self.layers} layers ({model})"
        lines = [f"{self.attn} on {self.backend}: {served}{self._held()}"]
        if self.dense_layers:
            lines.append(f"dense layers: {listing(self.dense_layers)}")
        return lines + self.crossovers()

    def _held(self) -> str:
        """Return a description of the part of the model on this process; empty for a whole model."""
        if self.part.layers is not None:
            last = self.part.first_layer + self.part.layers - 1
            return f", layers {self.part.first_layer} to {last} of the model on this rank"
        if self.part.shards > 1:
            return f", keys and values shared by {self.part.shards} ranks"
        here, whole = self.kv_heads or (0, 0)
        return f", {here} of {whole} KV heads on this rank" if here < whole else ""

    def __str__(self) -> str:
        with _lock:
            return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        first, *more = self.opening()
        lines = [first, *(f"  {line}" for line in more)]
        per_step = self.served_layers / max(self.sparse_calls, 1)
        if self.prefill is not None:
            lines += self.prefill.lines()
        if self.sparse_calls:
            share = self.sparse_bytes / self.dense_bytes
            lines.append(
                f"  sparse calls: {self.sparse_calls:,}, {share:.1%} of the dense bytes by formula "
                f"({_bytes(self.sparse_bytes * per_step)} instead of {_bytes(self.dense_bytes * per_step)} per step)"
            )
            if self.buckets is not None:
                lines.append(f"  selectivity: {self.buckets.selectivity:.1%} of the keys outside the window")
        elif not self.dense_calls and not (self.prefill and self.prefill.calls):
            lines.append("  attention calls: none that came here")
        elif self.decodes:
            lines.append("  sparse calls: none")
        if self.dense_calls:
            lines.append(f"  dense calls: {listing(self.dense_calls)}")
        if self.drafts is not None:
            lines += self.drafts.lines()
            if self.sparse_calls:
                moved = (self.sparse_bytes + self.checked_bytes) / max(self.drafts.tokens, 1)
                dense = self.dense_bytes * per_step
                lines.append(f"  keys and values for each token: {_bytes(moved)}, dense {_bytes(dense)}, by formula")
        if self.messages:
            lines.append(f"  to the other processes: {_bytes(self.sent_bytes)} in {self.messages:,} messages")
        return lines


def _sum(known: Any, more: Any) -> Any:
    """Return the sum of figures that may be None."""
    return more if known is None else known if more is None else known + more


def listing(counts: Counter[str]) -> str:
    """Return counts with their reasons, the most frequent first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
