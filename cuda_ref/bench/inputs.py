"""Queries, keys and values of a case, the same in every copy, and what is right for them, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mlx_sparse.methods.scoring_keys import GROUP, KeyCodes
from mlx_sparse.tools.bench import core

from ..hf.key_codes import Codes
from .cases import REFERENCE_ELEMENTS, SparQCase, SparQSetting

LEAST_GAP = 1e-5  # between the last component that is taken and the next, relative: no order of sums can swap them


class Caches:
    """One query per head, and ``copies`` equal sets of caches.

    Attributes:
        queries: ``(B, Hq, 1, D)``.
        keys, values: ``(copies, B, Hkv, S, D)``.
    """

    queries: torch.Tensor

    def __init__(self, case: Any, copies: int, device: torch.device) -> None:
        self.case, self.copies = case, copies
        self._generator = torch.Generator(device).manual_seed(1)
        shape = (copies, case.B, case.Hkv, case.S, case.D)
        dtype = getattr(torch, case.dtype)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.keys[0].normal_(generator=self._generator)
        self.keys[0] += torch.randn(case.Hkv, 1, case.D, device=device, generator=self._generator).to(dtype)
        self.values[0].normal_(generator=self._generator)
        for copy in range(1, copies):
            for cache in (self.keys, self.values):
                cache[copy] = cache[0]

    @property
    def grouped(self) -> torch.Tensor:
        """The queries as ``(B Hkv, G, D)``."""
        return self.queries.reshape(self.case.rows, self.case.G, self.case.D)

    def rows(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """KV heads of all sequences, as many at a time as the reference can take: where, queries, keys, values."""
        case = self.case
        step = max(1, REFERENCE_ELEMENTS // (case.S * case.D))
        keys, values = (cache[0].reshape(case.rows, case.S, case.D) for cache in (self.keys, self.values))
        for first in range(0, case.rows, step):
            part = slice(first, first + step)
            yield part, self.grouped[part], keys[part], values[part]


class SparQInputs(Caches):
    """The same for SparQ, its queries heavy-tailed.

    Attributes:
        keys_t: ``(copies, B, Hkv, D, S)``.
        value_mean: float32 ``(B, Hkv, D)`` for one query head per KV head, where SparQ reallocates; None otherwise.
    """

    def __init__(self, case: SparQCase, copies: int, device: torch.device) -> None:
        super().__init__(case, copies, device)
        self.keys_t = torch.empty_like(self.keys.transpose(3, 4), memory_format=torch.contiguous_format)
        self.keys_t[:] = self.keys[0].transpose(-1, -2)
        self.value_mean = self.values[0].mean(dim=2, dtype=torch.float32) if case.G == 1 else None
        self.queries = self._queries().to(self.keys.dtype).reshape(case.B, case.Hq, 1, case.D)

    def coded(self) -> list[KeyCodes]:
        """The keys of every copy in few bits."""
        codes = Codes(self.keys[0], None)
        codes.extend(self.keys[0], self.case.S)
        return [KeyCodes(*(array.clone() for array in codes.read())) for _ in range(self.copies)]

    def _queries(self) -> torch.Tensor:
        """Student's t with three degrees of freedom, drawn again where components tie at a rank that is asked for."""
        case, device = self.case, self.keys.device
        dtype = self.keys.dtype
        made = torch.empty(case.rows, case.G, case.D, device=device)
        again = torch.ones(case.rows, dtype=torch.bool, device=device)
        while again.any():
            normal = torch.randn(4, int(again.sum()), case.G, case.D, device=device, generator=self._generator)
            made[again] = (normal[0] / (normal[1:].square().mean(dim=0)).sqrt()).clamp(-30, 30).to(dtype).float()
            ordered = made.double().abs().sum(dim=1).sort(dim=1, descending=True).values
            gaps = [ordered[:, s.rank - 1] - ordered[:, s.rank] for s in case.settings if s.rank < case.D]
            again = torch.stack([gap <= LEAST_GAP * ordered[:, 0] for gap in gaps] or [~again]).any(dim=0)
        return made


@dataclass(frozen=True)
class Expected:
    """A result in float64, and how far one in the type under test may be from it.

    The error of a computation that rounds every step to that type, twice, and the distance of neighbouring numbers.
    """

    out: torch.Tensor
    allowed: float

    @classmethod
    def of(cls, exact: torch.Tensor, plain: torch.Tensor) -> Expected:
        """``plain`` is the computation that rounds, in its type."""
        error = float((plain.double() - exact).abs().max())
        largest = float(exact.abs().max())
        ulp = 2.0 ** torch.tensor(largest).log2().floor().item() * torch.finfo(plain.dtype).eps if largest else 0.0
        return cls(exact, 2 * error + ulp)

    @classmethod
    def over(cls, pieces: Iterable[Sequence[torch.Tensor]], scale: float) -> Expected:
        """Attention in each of ``pieces``, queries ``(n, G, D)`` over keys and values ``(n, N, D)``."""
        made = [(attention(q, k, v, scale), plain_attention(q, k, v, scale)) for q, k, v in pieces]
        return cls.of(torch.cat([exact for exact, _ in made]), torch.cat([plain for _, plain in made]))

    def wrong(self, out: torch.Tensor) -> str | None:
        """What is wrong with a result; None if nothing is."""
        if out.numel() != self.out.numel():
            return f"wrong result: shape {tuple(out.shape)}"
        error = float((out.double().reshape(self.out.shape) - self.out).abs().max())
        return core.wrong(error, self.allowed)


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of ``(n, G, D)`` over ``(n, N, D)`` in float64."""
    scores = (queries.double() * scale) @ keys.double().transpose(1, 2)
    return scores.softmax(dim=2) @ values.double()


def plain_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """The same, every step rounded to the type of the inputs; sums in float32."""
    dtype = queries.dtype
    scores = ((queries.float() * scale).to(dtype).float() @ keys.float().transpose(1, 2)).to(dtype).float()
    weights = (scores - scores.amax(dim=2, keepdim=True)).exp().to(dtype).float()
    return (weights @ values.float() / weights.sum(dim=2, keepdim=True)).to(dtype)


def expected_dense(inputs: Caches) -> Expected:
    """Attention over all keys."""
    return Expected.over((given for _, *given in inputs.rows()), inputs.case.scale)


class Choice:
    """SparQ's approximate logits in float64, and what is right by them. Equation numbers: docs/spec/sparq.md."""

    def __init__(self, inputs: SparQInputs, setting: SparQSetting) -> None:
        self.inputs, self.setting = inputs, setting
        size = inputs.grouped.double().abs()
        order = size.sum(dim=1).sort(dim=1, descending=True, stable=True).indices[:, : setting.rank]  # (sparq.2)
        self._components = order[:, None].expand(-1, inputs.case.G, -1)
        covered = size.gather(2, self._components).sum(dim=2) / size.sum(dim=2)
        self._factor = inputs.case.scale / covered.sqrt()  # (sparq.3)
        self._coded = inputs.coded()[0] if setting.coded else None

    def logits(self, part: slice, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``(n, G, S)`` of some rows, and the sums of the magnitudes added up, by which sums are rounded."""
        components = self._components[part]
        q = self.inputs.grouped[part].double().gather(2, components) * self._factor[part, :, None]
        chosen = self._scored(part, keys, components[:, 0])
        return q @ chosen, q.abs() @ chosen.abs()

    def _scored(self, part: slice, keys: torch.Tensor, components: torch.Tensor) -> torch.Tensor:
        """What (sparq.3) or (sparq.21) takes for ``components (n, r)`` of some rows' keys: ``(n, r, S)`` float64."""
        index = components[:, None].expand(-1, keys.shape[1], -1)
        chosen = keys.gather(2, index).double().transpose(1, 2)
        if self._coded is None:
            return chosen
        rows, taken = self.inputs.case.rows, components[:, :, None]

        def of_rows(array: torch.Tensor) -> torch.Tensor:
            flat = array.reshape(rows, self.inputs.case.D, -1)[part]
            return flat.gather(1, taken.expand(-1, -1, flat.shape[2]))

        codes, lo, step, centre = (of_rows(array) for array in self._coded)
        codes = torch.stack([codes & 15, codes >> 4], dim=3).flatten(2)
        lo, step = (array.double().repeat_interleave(GROUP, dim=2) for array in (lo, step))
        chosen = chosen - centre.double()
        chosen[..., : lo.shape[2]] = lo + step * codes
        return chosen

    def wrong_logits(
        self, epsilon: float, widened: tuple[torch.Tensor, torch.Tensor], coarse: float = 0.0
    ) -> str | None:
        """What is wrong with logits, each ``(B, Hkv, G, S or more)``, that may be off by ``epsilon`` of what was added.

        Args:
            widened: the logits, and for each what it is if it is less than that.
            coarse: nats by which they may be off besides.
        """
        case = self.inputs.case
        found, least = (array[..., : case.S].reshape(case.rows, case.G, case.S) for array in widened)
        worst = 0.0
        for part, _, keys, _ in self.inputs.rows():
            exact, added = self.logits(part, keys)
            off = (found[part].double() - exact.maximum(least[part].double())).abs() - coarse
            off = off / (epsilon * added)
            worst = max(worst, float(off.nan_to_num(torch.inf).max()))
        return None if worst <= 1 else f"wrong logits: error {worst:.1e} times what rounding allows"

    def wrong(self, indices: torch.Tensor, window: int, epsilon: float, coarse: float = 0.0) -> str | None:
        """What is wrong with chosen ``indices (B, Hkv, k)`` when logits are rounded by ``epsilon`` of what was added.

        They have to be ascending keys, the last ``window`` among them, and no other key left out may have a larger
        score than one that was taken, but for what the rounding can move, and ``coarse`` nats.
        """
        case, setting = self.inputs.case, self.setting
        chosen = indices.reshape(case.rows, -1).long()
        if chosen.shape[1] != setting.top_k or not bool((chosen.diff(dim=1) > 0).all()):
            return f"wrong choice: expected {setting.top_k} ascending keys"
        if bool((chosen < 0).any()) or bool((chosen >= case.S).any()):
            return f"wrong choice: expected keys from 0 to {case.S - 1}"
        last = torch.arange(case.S - window, case.S, device=chosen.device)
        if bool((chosen[:, setting.top_k - window :] != last).any()):
            return f"wrong choice: expected the last {window} keys among them"
        worst = 0.0
        for part, _, keys, _ in self.inputs.rows():
            logits, added = self.logits(part, keys)
            scores = logits.softmax(dim=2).sum(dim=1)  # (sparq.4), (sparq.5)
            taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen[part], True)
            taken, scores = taken[:, : case.S - window], scores[:, : case.S - window]
            least = scores.masked_fill(~taken, torch.inf).amin(dim=1)
            most = scores.masked_fill(taken, -torch.inf).amax(dim=1)
            # A logit that is off by x makes a weight off by exp(x), and the largest of the row moves by as much.
            slack = 4 * epsilon * (1 + added.amax(dim=(1, 2))) + 2 * coarse
            worst = max(worst, float((most.log() - least.log() - slack).max()))
        return None if worst <= 0 else f"wrong choice: a key left out scores {worst:.1e} (log) above one taken"

    def expected(self, indices: torch.Tensor) -> Expected:
        """Attention over chosen ``indices (B, Hkv, k)``, mixed with the mean of all values where that is due."""
        case = self.inputs.case
        chosen = indices.reshape(case.rows, -1).long()
        exact, plain = [], []
        for part, queries, keys, values in self.inputs.rows():
            rows = chosen[part, :, None].expand(-1, -1, case.D)
            listed = queries, keys.gather(1, rows), values.gather(1, rows), case.scale
            y, rounded = attention(*listed), plain_attention(*listed)
            if self.inputs.value_mean is not None:
                mean = self.inputs.value_mean.reshape(case.rows, 1, case.D)[part]
                mass = self.logits(part, keys)[0].softmax(dim=2)
                alpha = mass.gather(2, chosen[part, None].expand(-1, case.G, -1)).sum(dim=2, keepdim=True)  # (sparq.8)
                rounded = (alpha.float() * rounded.float() + (1 - alpha.float()) * mean).to(queries.dtype)
                y = alpha * y + (1 - alpha) * mean.double()  # (sparq.10)
            exact.append(y)
            plain.append(rounded)
        return Expected.of(torch.cat(exact), torch.cat(plain))
