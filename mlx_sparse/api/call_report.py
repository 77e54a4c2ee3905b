"""What a model's attention calls did: counted while it runs, printed at the end."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..model_parts import Part

# The key of the JSON line that ``--attn-report json`` prints.
JSON_KEY = "mlx_sparse_report"
# Calls whose last figures may be with the device: so many that the oldest has long been computed.
IN_FLIGHT = 64

# Of all reports: whoever adds to one or reads one is done in a moment.
_lock = threading.RLock()


class Counting(Protocol):
    """Figures that the device was told to compute: `mlx_sparse.lm.figures.BucketCounts`."""

    def figures(self) -> Any:
        """The figures, once they are there; on whatever thread, one at a time."""


@dataclass
class Counts:
    """What one call of a model did; the attributes are those of `Report`.

    Attributes:
        decode: figures of decode steps beyond these numbers; None where the method has none.
        counting: more of them, which the device is counting; None if that is all.
        sent_bytes: what this process told others that share the context.
        messages: how many times it did.
        checked_bytes: what the calls moved that checked drafts, or decoded without, for the tokens of dense attention.
        drafts: what came of drafts; None where there are none.
    """

    sparse_calls: int = 0
    dense_calls: Counter[str] = field(default_factory=Counter)
    formula_bytes: int = 0
    dense_bytes: int = 0
    prefill: Any = None
    decode: Any = None
    counting: Counting | None = None
    sent_bytes: int = 0
    messages: int = 0
    checked_bytes: int = 0
    drafts: Any = None


@dataclass
class Report:
    """Calls of one enabled model, made by any number of threads; any thread may read it at any time.

    It holds plain numbers: a call of the model adds what it did when it returns, all of it or, where it raises,
    nothing. So reading evaluates nothing. It waits, with SAAP alone, for the decode steps that the device is computing:
    how many keys they attend, which `buckets` and `sparse_bytes` say, is only known there.

    Attributes:
        attn: the method as text, every automatic choice resolved.
        backend: the backend that runs it.
        model_type: the library's name of the model family.
        model: where the model was loaded from; empty if that is not known.
        layers: attention layers.
        served_layers: layers that can attend sparsely.
        dense_layers: number of other layers by reason.
        sparse_calls: decode calls that ran sparsely.
        dense_calls: number of other calls by reason.
        formula_bytes: bytes that the sparse calls moved, by the papers' formulae, as far as the host knows.
        dense_bytes: bytes that dense attention would have moved in the same calls.
        prefill: figures of the prompts (`mlx_sparse.lm.figures.PrefillFigures`); None without a prefill method.
        decodes: whether there is a decode method.
        outlook: tells from where on layers are sparse, in lines.
        sent_bytes: what this process told others that share the context.
        messages: how many times it did.
        checked_bytes: what the calls moved that checked drafts, or decoded without, for the tokens of dense attention.
        drafts: what came of drafts (`mlx_sparse.lm.drafts.figures.DraftFigures`); None where there are none.
        part: of the model, that this process holds.
        kv_heads: of a served layer, here and in the whole model; None where layers differ.
        counted: `buckets`, but for the steps that the device is still computing.
    """

    attn: str
    backend: str
    model_type: str
    model: str = ""
    layers: int = 0
    served_layers: int = 0
    dense_layers: Counter[str] = field(default_factory=Counter)
    sparse_calls: int = 0
    dense_calls: Counter[str] = field(default_factory=Counter)
    formula_bytes: int = 0
    dense_bytes: int = 0
    prefill: Any = None
    decodes: bool = True
    outlook: Callable[[], list[str]] = field(default=list, repr=False)
    sent_bytes: int = 0
    messages: int = 0
    checked_bytes: int = 0
    drafts: Any = None
    part: Part = field(default_factory=Part)
    kv_heads: tuple[int, int] | None = None
    counted: Any = field(default=None, init=False, repr=False)
    _counting: deque[Counting] = field(default_factory=deque, init=False, repr=False)

    def add(self, counts: Counts) -> None:
        """Count a call of the model."""
        with _lock:
            self.sparse_calls += counts.sparse_calls
            self.formula_bytes += counts.formula_bytes
            self.dense_bytes += counts.dense_bytes
            self.sent_bytes += counts.sent_bytes
            self.messages += counts.messages
            self.checked_bytes += counts.checked_bytes
            self.drafts = _sum(self.drafts, counts.drafts)
            # These are made anew: what somebody is reading stays as it is.
            self.dense_calls = self.dense_calls + counts.dense_calls
            self.prefill = _sum(self.prefill, counts.prefill)
            self.counted = _sum(self.counted, counts.decode)
            if counts.counting is not None:
                self._counting.append(counts.counting)
            self._settle(IN_FLIGHT)

    def _settle(self, in_flight: int = 0) -> None:
        """Add what the device has counted, but for the last so many calls."""
        while len(self._counting) > in_flight:
            self.counted = _sum(self.counted, self._counting.popleft().figures())

    @property
    def buckets(self) -> Any:
        """What SAAP attended (`mlx_sparse.lm.figures.BucketFigures`); None with any other method."""
        with _lock:
            self._settle()
            return self.counted

    @property
    def sparse_bytes(self) -> int:
        """Bytes that the sparse calls moved, by the papers' formulae; SAAP's lists are counted on the device."""
        with _lock:
            return self.formula_bytes + (self.buckets.bytes if self.buckets else 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        with _lock:
            data = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
            data |= {"dense_layers": dict(self.dense_layers), "dense_calls": dict(self.dense_calls)}
            data["prefill"] = self.prefill and self.prefill.as_dict()
            data["buckets"] = self.buckets and self.buckets.as_dict()
            data["drafts"] = self.drafts and self.drafts.as_dict()
            data["outlook"] = self.outlook()
            for name in ("formula_bytes", "part", "kv_heads", "counted"):
                del data[name]
            data["sparse_bytes"] = self.sparse_bytes
            return data

    def calls(self) -> Counts:
        """The calls so far; nobody waits for what the device counts."""
        with _lock:
            return Counts(self.sparse_calls, self.dense_calls, prefill=self.prefill)

    def opening(self) -> list[str]:
        """What is known before any call: the layers that are served, and when they are sparse."""
        model = ", ".join(filter(None, (self.model_type, self.model)))
        served = f"{self.served_layers} of {self.layers} layers ({model})"
        lines = [f"{self.attn} on {self.backend}: {served}{self._held()}"]
        if self.dense_layers:
            lines.append(f"dense layers: {listing(self.dense_layers)}")
        return lines + self.outlook()

    def _held(self) -> str:
        """Return which part of the model this process has; empty for a whole one."""
        if self.part.layers is not None:
            last = self.part.first_layer + self.part.layers - 1
            return f", layers {self.part.first_layer} to {last} of the model on this rank"
        if self.part.sharers > 1:
            return f", keys and values shared by {self.part.sharers} ranks"
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
    """Figures and more of them, either of which may be None."""
    return more if known is None else known if more is None else known + more


def listing(counts: Counter[str]) -> str:
    """Counts with their reasons, the most frequent first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
