"""Build the report of a model's attention calls that `--attn-report` prints."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from ..core.reasons import SHORTER
from ..model_parts import Part

JSON_KEY = "mlx_sparse_report"  # key in the output of ``--attn-report json``
IN_FLIGHT = 64  # maximum number of calls per thread whose statistics the device may still be computing

# All reports share one lock, because updates and reads are short.
_lock = threading.RLock()


# Function that converts the entries of `Counts.later` to statistics. An entry is a pair of host data and an array.
Read = Callable[[list[tuple[Any, Any]]], Any]


@dataclass
class Counts:
    """Tally of one model call. `Report` documents the attributes.

    Attributes:
        device: statistics that the device is still computing: for each attribute, the function that reads its entries,
            and the entries.
    """

    sparse_calls: int = 0
    dense_calls: Counter[str] = field(default_factory=Counter)
    modeled_bytes: int = 0
    dense_bytes: int = 0
    prefill: Any = None
    checked_bytes: int = 0
    drafts: Any = None
    counted: Any = None
    recalls: Any = None
    native_calls: int = 0
    time_to_first_token: tuple[float, ...] = ()
    device: dict[str, tuple[Read, list[tuple[object, object]]]] = field(default_factory=dict, repr=False)

    def later(self, name: str, read: Read, data: object, array: object) -> None:
        """Add an entry to the attribute ``name``. The report calls ``read`` with all entries of this call.

        The array must belong to no other graph, because another thread may read it.
        """
        self.device.setdefault(name, (read, []))[1].append((data, array))

    def settle(self, name: str) -> None:
        """Wait for the entries of the attribute ``name``."""
        if name in self.device:
            read, entries = self.device.pop(name)
            found, known = read(entries), getattr(self, name)
            setattr(self, name, found if known is None else known + found)


@dataclass(kw_only=True)
class Report(Counts):
    """Totals of all calls of one enabled model. Any thread may add to a report or read it at any time.

    A model call adds its counts when it returns. A call that raises an error adds nothing. Most attributes can be read
    without waiting for the device. `recall` waits for the decode steps in flight. If the method is SAAP, `buckets` and
    `sparse_bytes` wait for the decode steps too, because the device counts the attended keys.

    Attributes:
        attn: methods and their options in the format of ``--attn``. Each "auto" is replaced by its value.
        requested: the methods as the user wrote them; empty if unknown.
        backend: names of the backends that run the methods, joined by "and".
        model_type: model family, such as "llama".
        model: name or path of the model; empty if unknown.
        layers: number of attention layers.
        served_layers: number of layers that can use sparse attention.
        dense_layers: for each reason, the number of layers that always use dense attention.
        sparse_calls: number of decode calls that used sparse attention.
        dense_calls: for each reason, the number of calls that used dense attention.
        native_calls: number of dense calls that ran on the `cpu` backend, and not on mlx-lm's attention.
        time_to_first_token: for each prompt of a command of mlx-lm, the time in seconds that mlx-lm measured.
        modeled_bytes: bytes that the sparse calls moved on the backend, as modeled (`Method.step_bytes`). The keys that
            the device counts are excluded.
        dense_bytes: bytes that dense attention would have moved in the sparse calls.
        prefill: statistics of prefill chunks (`mlx_sparse.lm.statistics.PrefillStatistics`); None if there is no
            prefill method.
        decodes: True if there is a decode method.
        crossovers: function that returns the crossover lengths of the layers as lines of text.
        checked_bytes: bytes that the verification steps and dense decode steps of a lossless model moved.
        drafts: statistics of self-speculative decoding (`mlx_sparse.lm.statistics.DraftStatistics`); None if the
            model is not lossless, and before the first generated token.
        part: layers and KV heads of the model that this process runs.
        kv_heads: pair of the number of KV heads of a served layer on this rank and in the whole model; None if the
            numbers differ between layers.
        weight_bytes: number of weight bytes that a decode step reads in this process.
        counted, recalls: values of `buckets` and `recall` that exclude the decode steps in flight.
    """

    attn: str
    backend: str
    model_type: str
    requested: str = ""
    model: str = ""
    layers: int = 0
    served_layers: int = 0
    dense_layers: Counter[str] = field(default_factory=Counter)
    decodes: bool = True
    crossovers: Callable[[], list[str]] = field(default=list, repr=False)
    part: Part = field(default_factory=Part)
    kv_heads: tuple[int, int] | None = None
    weight_bytes: int = 0
    _counting: deque[tuple[int, Counts]] = field(default_factory=deque, init=False, repr=False)

    def add(self, counts: Counts) -> None:
        """Add the tally of one model call."""
        with _lock:
            for name in _SUMMED:
                more, known = getattr(counts, name), getattr(self, name)
                # Replace the objects instead of changing them, because readers may share them.
                if more:
                    setattr(self, name, known + more if known else more)
            if counts.device:
                self._counting.append((threading.get_ident(), counts))
                if len(self._counting) > IN_FLIGHT:
                    # Threads alternate, so the oldest counts are not those of a step that has just started.
                    self._settle(IN_FLIGHT * len({thread for thread, _ in self._counting}))

    def _settle(self, in_flight: int = 0) -> None:
        """Wait for the statistics of all calls except the last ``in_flight``, and add them to the report."""
        while len(self._counting) > in_flight:
            _, counts = self._counting.popleft()
            late = Counts(device=counts.device)
            for name in list(late.device):
                late.settle(name)
            self.add(late)

    @property
    def buckets(self) -> Any:
        """Statistics of SAAP (`mlx_sparse.lm.statistics.BucketStatistics`); None if the method is not SAAP."""
        with _lock:
            if self.counted is not None:  # `Plan` adds zeros if the method is SAAP
                self._settle()
            return self.counted

    @property
    def recall(self) -> Any:
        """Estimated attention recall of decode steps (`mlx_sparse.lm.statistics.RecallStatistics`).

        None before the first sparse decode step, or if the method does not estimate the recall.
        """
        with _lock:
            self._settle()
            return self.recalls

    @property
    def sparse_bytes(self) -> int:
        """Bytes that the sparse calls moved on the backend, as modeled (`Method.step_bytes`).

        If the method is SAAP, reading this property waits for the device.
        """
        with _lock:
            return self.modeled_bytes + (self.buckets.bytes if self.buckets else 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict that can be serialized as JSON."""
        with _lock:
            read = {name: getattr(self, name) for name in ("buckets", "recall", "sparse_bytes")}
            data = vars(self) | {"crossovers": self.crossovers()} | read
            data |= {"dense_layers": dict(self.dense_layers), "dense_calls": dict(self.dense_calls)}
        return {
            name: value.as_dict() if hasattr(value, "as_dict") else value
            for name, value in data.items()
            if name not in _NOT_PRINTED
        }

    def opening(self) -> list[str]:
        """Return the first lines of the report, which list the served layers and the crossover lengths."""
        model = ", ".join(filter(None, (self.model_type, self.model)))
        served = f"{self.served_layers} of {self.layers} layers ({model})"
        lines = [f"{self.requested or self.attn} on {self.backend}: {served}{self._held()}"]
        if self.dense_layers:
            lines.append(f"dense layers: {listing(self.dense_layers)}")
        return lines + self.crossovers()

    def _held(self) -> str:
        """Describe the layers or KV heads that this process runs. The text is empty for a whole model."""
        if self.part.layers is not None:
            last = self.part.first_layer + self.part.layers - 1
            return f", layers {self.part.first_layer} to {last} of the model on this rank"
        here, whole = self.kv_heads or (0, 0)
        return f", {here} of {whole} KV heads on this rank" if here < whole else ""

    def summary(self) -> str:
        """Return at most eight lines about sparse calls, the bytes that they save and dense calls, and a hint."""
        with _lock:
            first = self.opening()[0]
            if self.dense_layers:
                first += f"; dense layers: {listing(self.dense_layers, 1)}"
            saving = f"  estimated saving: {self.saved_share:.0%} of the bytes of a decode step, with the weights"
            hint = self._hint()
            lines = [first, *self._lines(saving if self.sparse_calls and self.weight_bytes else None, most=2)]
            return "\n".join(lines + ([f"  hint: {hint}"] if hint else []))

    @property
    def saved_share(self) -> float:
        """Share of a decode step's bytes that sparse attention saves, averaged over the sparse steps.

        A step reads all weights, and the keys and values of the served layers. The time of a memory-bound step
        decreases by this share.
        """
        sparse, dense = self._step_bytes()
        return (dense - sparse) / max(self.weight_bytes + dense, 1)

    def _step_bytes(self) -> tuple[float, float]:
        """Return the bytes of keys and values that a sparse step moves on average, and those of a dense step."""
        per_step = self.served_layers / max(self.sparse_calls, 1)
        return self.sparse_bytes * per_step, self.dense_bytes * per_step

    def _hint(self) -> str | None:
        short = not self.sparse_calls and any(reason.startswith(SHORTER) for reason in self.dense_calls)
        if short and "dense_below" not in self.attn:
            return "shorter contexts are dense because they are faster so; dense_below=N in --attn changes the length"
        if self.drafts is not None and self.drafts.pauses and not self.drafts.checks:
            return "drafts were slower than dense steps; drop --lossless here"
        if self.sparse_calls and self.weight_bytes and self.saved_share < 0.05:
            return "the weights are most of a step at this length; longer contexts gain more"
        if len(self.dense_calls) > 2 or len(self.dense_layers) > 1:
            return "--attn-report full lists all reasons"
        return None

    def __str__(self) -> str:
        """Return the full report."""
        with _lock:
            first, *more = self.opening()
            more = ([f"settings: {self.attn}"] if self.requested not in ("", self.attn) else []) + more
            buckets = self.buckets if self.sparse_calls else None
            share = buckets and f"  selectivity: {buckets.selectivity:.1%} of the keys outside the window"
            lines = [first, *(f"  {line}" for line in more), *self._lines(share)]
            if self.drafts is not None and self.sparse_calls:
                moved = (self.sparse_bytes + self.checked_bytes) / max(self.drafts.tokens, 1)
                dense = _bytes(self._step_bytes()[1])
                lines.append(f"  keys and values for each token: {_bytes(moved)}, dense {dense}, modeled")
            return "\n".join(lines)

    def _lines(self, saving: str | None, most: int | None = None) -> list[str]:
        """Return the lines about the calls. ``saving`` is a line of text. If ``most`` is 2, leave out details."""
        lines = self.prefill.lines()[:most] if self.prefill else []
        if times := self.time_to_first_token:
            prompts = f" (mean of {len(times):,} prompts)" if len(times) > 1 else ""
            time = f"time to first token: {fmean(times):.2f} s{prompts}"
            lines[:1] = [f"{lines[0]}; {time}" if lines else f"  {time}"]
        if self.sparse_calls:
            share = self.sparse_bytes / self.dense_bytes
            sparse, dense = map(_bytes, self._step_bytes())
            lines.append(
                f"  sparse calls: {self.sparse_calls:,}, {share:.1%} of the dense bytes "
                f"({sparse} instead of {dense} per step, modeled for {self.backend})"
            )
        elif not self.dense_calls and not (self.prefill and self.prefill.calls):
            lines.append("  attention calls: none")
        elif self.decodes:
            lines.append("  sparse calls: none")
        lines += [*(self.recall.lines() if self.recall else []), *([saving] if saving else [])]
        if self.dense_calls:
            native = " (cpu)" if self.native_calls == self.dense_calls.total() else ""
            lines.append(f"  dense{native} calls: {listing(self.dense_calls, most)}")
        return lines + (self.drafts.lines()[: 1 if most else None] if self.drafts else [])


_SUMMED = tuple(total.name for total in fields(Counts) if total.name != "device")
_NOT_PRINTED = {"modeled_bytes", "part", "kv_heads", "counted", "recalls", "device", "_counting"}


def listing(counts: Counter[str], most: int | None = None) -> str:
    """Return numbers of calls by reason as text, for example "3 too short, 1 masked". The largest number is first.

    If there are more than ``most`` reasons, the remaining calls are counted as "for other reasons".
    """
    parts = [f"{count:,} {reason}" for reason, count in counts.most_common(most)]
    if rest := counts.total() - sum(count for _, count in counts.most_common(most)):
        parts.append(f"{rest:,} for other reasons")
    return ", ".join(parts)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
