"""What a model's attention calls did: counted while it runs, printed at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# The key of the JSON line that ``--attn-report json`` prints.
JSON_KEY = "mlx_sparse_report"


@dataclass
class Report:
    """Calls of one enabled model.

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
        buckets: what SAAP attended (`mlx_sparse.lm.figures.BucketFigures`); None with any other method.
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
    buckets: Any = None

    @property
    def sparse_bytes(self) -> int:
        """Bytes that the sparse calls moved, by the papers' formulae; SAAP's lists are counted on the device."""
        return self.formula_bytes + (self.buckets.bytes if self.buckets else 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {**self.__dict__, "dense_layers": dict(self.dense_layers), "dense_calls": dict(self.dense_calls)}
        data["prefill"] = self.prefill and self.prefill.as_dict()
        data["buckets"] = self.buckets and self.buckets.as_dict()
        del data["formula_bytes"]
        data["sparse_bytes"] = self.sparse_bytes
        return data

    def __str__(self) -> str:
        model = ", ".join(filter(None, (self.model_type, self.model)))
        lines = [f"{self.attn} on {self.backend}: {self.served_layers} of {self.layers} layers ({model})"]
        if self.dense_layers:
            lines.append(f"  dense layers: {_listing(self.dense_layers)}")
        if self.prefill is not None:
            lines += self.prefill.lines()
        if self.sparse_calls:
            share = self.sparse_bytes / self.dense_bytes
            per_step = self.served_layers / self.sparse_calls
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
            lines.append(f"  dense calls: {_listing(self.dense_calls)}")
        return "\n".join(lines)


def _listing(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
