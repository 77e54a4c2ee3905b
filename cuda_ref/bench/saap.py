"""Decode steps of SAAP: who takes part in a case, its inputs, and what is right for them.

A query network routes queries before RoPE over an index that is there, and the step attends after RoPE, as in a model.
The network's weights are random, so that the buckets it visits are too; the keys are spread over the buckets
afterwards, so that the visited ones hold the share that is asked for. Every set of caches has weights and an index of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ..launchers import saap
from . import dense
from .cases import SaapCase, SaapSetting
from .device import Device, Output, Recorded, Step, Wrong
from .inputs import Caches, Expected

NAMES = {
    "saap": "our SAAP step",
    "network": "its first two launches: network, choice",
    "network+list": "its first three: network, choice, list",
}
LAUNCHES = ("network", "network+list", "saap")  # each with those before it
# Of what is added up: three products of TF32 numbers keep 22 bits, sums in float32 24, in order of their own.
EPSILON = 64 * torch.finfo(torch.float32).eps
RIGHT_SHARE = 0.01  # relative distance of the measured selectivity from what was asked for


def contenders(case: SaapCase, copies: int, device: Device) -> Iterator[Recorded]:
    """Who takes part in a case."""
    return dense.contenders(SaapInputs(case, copies, device.torch), device, Routed, compiled=False)


class SaapInputs(Caches):
    """Queries after and before RoPE, caches, and the arrays of each setting.

    Attributes:
        before: ``(B, Hq, 1, D)``.
    """

    def __init__(self, case: SaapCase, copies: int, device: torch.device) -> None:
        super().__init__(case, copies, device)
        shape = (2, case.B, case.Hq, 1, case.D)
        drawn = torch.randn(shape, device=device, generator=self._generator).to(self.keys.dtype)
        self.queries, self.before = drawn[0], drawn[1]

    def random(self, *shape: int) -> torch.Tensor:
        """float16 normal numbers, the same in every copy: ``(copies, *shape)``, scaled by the rows of a matrix."""
        scale = shape[-2] ** -0.5 if len(shape) > 2 else 0.1
        drawn = scale * torch.randn(shape, device=self.keys.device, generator=self._generator)
        return drawn.half().expand(self.copies, *shape).contiguous()

    def uniform(self, count: int) -> torch.Tensor:
        return torch.rand(count, device=self.keys.device, generator=self._generator)


class Routed:
    """One setting's arrays over the inputs of a case, and what is right for it. Equation numbers: docs/spec/saap.md.

    Attributes:
        networks: one for each set of caches.
        indices: likewise.
    """

    names: Mapping[str, str] = NAMES

    def __init__(self, inputs: SaapInputs, setting: SaapSetting) -> None:
        case, self.inputs, self.setting = inputs.case, inputs, setting
        Hkv, D, H, C = case.Hkv, case.D, setting.hidden, setting.buckets
        arrays = inputs.random(Hkv, H, C), inputs.random(Hkv, C), inputs.random(Hkv, D, H), inputs.random(Hkv, H)
        self.networks = [saap.Network(*copy) for copy in zip(*arrays, strict=True)]
        self._scores, self._slack = self._exact_scores()
        best = self._scores.topk(setting.probes, dim=2).indices.sort(dim=2).values
        self._bucket_ids = self._spread(best)
        index = saap.Index.of(
            self._bucket_ids,
            buckets=C,
            probes=setting.probes,
            sink_tokens=case.sink_tokens,
            recent_tokens=case.recent_tokens,
        )
        copies = [array.expand(inputs.copies, *array.shape).contiguous() for array in (index.offsets, index.key_ids)]
        self.indices = [replace(index, offsets=copy[0], key_ids=copy[1]) for copy in zip(*copies, strict=True)]
        self._expected: tuple[torch.Tensor, Expected] | None = None

    def _exact_scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(saap.5), (saap.8) in float64, ``(B, Hkv, C)``; and how far rounding can move their logarithms."""
        case = self.inputs.case
        w2, b2, w1, b1 = (array.double() for array in self.networks[0] if array is not None)
        x = self.inputs.before.double().view(case.B, case.Hkv, case.G, case.D)
        hidden = (x @ w1 + b1[:, None]).relu()
        logits = hidden @ w2 + b2[:, None]
        added = (x.abs() @ w1.abs() + b1.abs()[:, None]) @ w2.abs() + b2.abs()[:, None]
        return logits.softmax(dim=3).sum(dim=2), 2 * EPSILON * (1 + added.amax(dim=(2, 3)))

    def _spread(self, visited: torch.Tensor) -> torch.Tensor:
        """``(B, Hkv, S)`` int32: keys in random order over buckets of the sizes that the setting asks for."""
        case, setting, device = self.inputs.case, self.setting, self.inputs.keys.device
        ids = torch.zeros(case.B, case.Hkv, case.S, dtype=torch.int32, device=device)
        for b in range(case.B):
            for h, share in enumerate(setting.head_shares(case.Hkv)):
                others = max(1, setting.buckets - setting.probes)
                shares = torch.full((setting.buckets,), (1 - share) / others, dtype=torch.float64, device=device)
                shares[visited[b, h]] = torch.tensor(setting.bucket_shares(share), dtype=torch.float64, device=device)
                ends = (shares.cumsum(dim=0) * case.outside).round().long()
                bucket = torch.searchsorted(ends, torch.arange(case.outside, device=device), right=True)
                order = self.inputs.uniform(case.outside).argsort()
                ids[b, h, case.sink_tokens : case.sink_tokens + case.outside] = bucket.clamp(max=setting.buckets - 1)[
                    order
                ].int()
        return ids

    def bytes(self, name: str) -> int:
        """What a contender has to move."""
        return sum(self.inputs.case.parts(self.setting)[: LAUNCHES.index(name) + 1])

    def make(self, name: str) -> tuple[Step, Wrong]:
        """A contender's step and its check."""
        if name == "network":
            return lambda i: (self.route(i),), self.wrong_route
        return (self.list, self.wrong_list) if name == "network+list" else (self.step, self.wrong_step)

    def route(self, i: int) -> torch.Tensor:
        """The first two launches."""
        visited: torch.Tensor = saap.saap_route(self.inputs.before, *self.networks[i], self.setting.probes)
        return visited

    def list(self, i: int) -> Output:
        """The first three: indices and counts."""
        index, S = self.indices[i], self.inputs.case.S
        sizes = S, index.covered, index.sink_tokens, index.capacity
        indices, counts = saap.saap_indices(self.route(i), index.offsets, index.key_ids, *sizes, None)
        return indices, counts

    def step(self, i: int) -> Output:
        """All four: output, log-sum-exp and counts."""
        inputs, index = self.inputs, self.indices[i]
        given = inputs.queries, inputs.keys[i], inputs.values[i], self.route(i), index.offsets, index.key_ids
        sizes = index.covered, index.sink_tokens, index.capacity
        out, lse, counts = saap.saap_decode(*given, *sizes, inputs.case.scale, None)
        return out, lse, counts

    def wrong_route(self, out: Output) -> str | None:
        """What is wrong with visited buckets: a better one must not have been left out, but for what rounding moves."""
        visited = out[0].long()
        if bool((visited.diff(dim=2) <= 0).any()) or bool(
            (visited < 0).any() | (visited >= self.setting.buckets).any()
        ):
            return f"wrong buckets: expected {self.setting.probes} ascending ones"
        taken = torch.zeros_like(self._scores, dtype=torch.bool).scatter_(2, visited, True)
        least = self._scores.masked_fill(~taken, torch.inf).amin(dim=2)
        most = self._scores.masked_fill(taken, 0.0).amax(dim=2)
        worst = float((most.log() - least.log() - self._slack).max())
        return None if worst <= 0 else f"wrong buckets: one left out scores {worst:.1e} (log) above one taken"

    def attended(self, visited: torch.Tensor) -> torch.Tensor:
        """(saap.9), (saap.10) key by key: ``(B, Hkv, S)`` bool."""
        case = self.inputs.case
        position = torch.arange(case.S, device=visited.device)
        exact = (position < case.sink_tokens) | (position >= case.S - case.recent_tokens)
        flags = torch.zeros(case.B, case.Hkv, self.setting.buckets, dtype=torch.bool, device=visited.device)
        flags.scatter_(2, visited.long(), True)
        attended: torch.Tensor = exact | flags.gather(2, self._bucket_ids.long())
        return attended

    def wrong_list(self, out: Output) -> str | None:
        """What is wrong with a list: its keys, once each and packed, are those of the visited buckets."""
        visited = self.route(0)
        if wrong := self.wrong_route((visited,)):
            return wrong
        indices, counts = out
        S, expected = self.inputs.case.S, self.attended(visited)
        inside = torch.arange(indices.shape[2], device=indices.device) < counts[..., None]
        filled = (indices >= 0) & (indices < S)
        times = torch.zeros(*expected.shape[:2], S + 1, dtype=torch.int32, device=indices.device)
        times.scatter_add_(2, torch.where(filled, indices, S).long(), torch.ones_like(indices))
        if not torch.equal(inside, filled) or not torch.equal(times[..., :S], expected.int()):
            return "wrong list: expected each key of the exact part and of the visited buckets once"
        exact = S - self.inputs.case.outside
        share = float((expected.sum(dim=2) - exact).float().mean()) / self.inputs.case.outside
        off = abs(share / self.setting.share - 1)
        return (
            None if off <= RIGHT_SHARE else f"wrong share of the keys: {share:.2%}, asked for {self.setting.share:.2%}"
        )

    def wrong_step(self, out: Output) -> str | None:
        """What is wrong with a step, by the visited buckets that its first launches give again."""
        if wrong := self.wrong_list(self.list(0)):
            return wrong
        visited = self.route(0)
        if self._expected is None or not torch.equal(self._expected[0], visited):
            self._expected = visited, expected_over(self.inputs, self.attended(visited))
        return self._expected[1].wrong(out[0])


def expected_over(inputs: Caches, attended: torch.Tensor) -> Expected:
    """Attention over the keys ``attended (B, Hkv, S)``."""
    masks = attended.reshape(inputs.case.rows, inputs.case.S)
    chosen = (
        (queries[row, None], keys[row, mask][None], values[row, mask][None])
        for part, queries, keys, values in inputs.rows()
        for row, mask in enumerate(masks[part])
    )
    return Expected.over(chosen, inputs.case.scale)
