"""Decode steps of SparQ: ours as a whole and launch by launch, and one of torch operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from mlx_sparse.methods.scoring_keys import GROUP, KeyCodes

from ..kernels.numbers import NO_WEIGHT
from ..launchers import sparq
from . import dense
from .cases import SparQCase, SparQSetting
from .device import Device, Output, Recorded, Step, Wrong
from .inputs import Choice, SparQInputs

NAMES = {
    "plain-sparq": "SparQ of torch operations (topk, gather, matmul)",
    "sparq": "our sparq_decode",
    "scores": "its first launch: scores",
    "scores+select": "its first two: scores, select",
}
LAUNCHES = ("scores", "scores+select", "sparq")  # each with those before it


def contenders(case: SparQCase, copies: int, device: Device) -> Iterator[Recorded]:
    """Who takes part in a case."""
    inputs = SparQInputs(case, copies, device.torch)
    return dense.contenders(inputs, device, Field, compiled=case.bar is not None)


class Field:
    """One setting's contenders over the inputs of a case."""

    def __init__(self, inputs: SparQInputs, setting: SparQSetting) -> None:
        self._inputs, self._setting, self._choice = inputs, setting, Choice(inputs, setting)
        self.names: Mapping[str, str] = {
            name: what for name, what in NAMES.items() if name != "plain-sparq" or not setting.coded
        }
        self._keys_t = inputs.coded() if setting.coded else list(inputs.keys_t)
        self._exact = inputs.value_mean is not None  # reallocation needs exact logits
        self._tile = 0  # keys, where scores are held in 8 bits

    def bytes(self, name: str) -> int:
        """What a contender has to move."""
        case = self._inputs.case
        if name not in LAUNCHES:
            return int(case.formula(self._setting))
        return sum(case.parts(self._setting)[: LAUNCHES.index(name) + 1])

    def make(self, name: str) -> tuple[Step, Wrong]:
        """A contender's step and its check."""
        case, setting, choice = self._inputs.case, self._setting, self._choice
        if name == "plain-sparq":
            return partial(plain_sparq, self._inputs, setting), partial(wrong_plain, choice, case)
        epsilon = (setting.rank + 16) * torch.finfo(torch.float32).eps
        coarse = 1 / 32 if setting.coded and not self._exact else 0.0  # nats: half of a step of scores in 8 bits
        if name == "scores":
            return self._scores, lambda out: choice.wrong_logits(epsilon, self._widened(*out), coarse)
        if name == "scores+select":
            return self._select, lambda out: choice.wrong(out[0], setting.window, epsilon, coarse)
        chosen = self._select(0)[0]  # the choice is that of the first two launches

        def wrong(out: Output) -> str | None:
            return choice.wrong(chosen, setting.window, epsilon, coarse) or choice.expected(chosen).wrong(out[0])

        return self._sparq, wrong

    @property
    def _selection(self) -> sparq.Selection:
        setting = self._setting
        return sparq.Selection(setting.rank, setting.top_k, setting.window, self._inputs.case.scale)

    def _scored(self, i: int) -> list[torch.Tensor]:
        keys_t = self._keys_t[i]
        return list(keys_t) if isinstance(keys_t, KeyCodes) else [keys_t]

    def _scores(self, i: int) -> Output:
        inputs, keys_t = self._inputs, self._keys_t[i]
        if not isinstance(keys_t, KeyCodes):
            return (sparq.sparq_scores(inputs.queries, keys_t, self._selection).logits,)
        scores = sparq.sparq_code_scores(
            inputs.queries, inputs.keys[i], keys_t, self._selection, narrow=not self._exact
        )
        self._tile = scores.tile
        assert scores.statistics is not None
        return scores.logits, scores.statistics

    def _widened(
        self, logits: torch.Tensor, statistics: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the least that can be told of them."""
        if logits.dtype != torch.uint8:
            return logits, torch.full_like(logits, -torch.inf)
        assert statistics is not None
        S = self._inputs.case.S
        key = torch.arange(logits.shape[3], device=logits.device)
        tile = torch.where(key < S // GROUP * GROUP, key // self._tile, statistics.shape[4] - 1)
        largest = statistics[..., 0, :][..., tile]
        return largest - logits.float() / 16, largest - (NO_WEIGHT.value - 0.5) / 16

    def _select(self, i: int) -> Output:
        given = self._inputs.queries, self._inputs.keys[i], self._scored(i), self._selection
        return sparq.sparq_select(*given, exact=self._exact)[:1]

    def _sparq(self, i: int) -> Output:
        inputs, setting = self._inputs, self._setting
        given = inputs.queries, inputs.keys[i], inputs.values[i], self._scored(i)
        chosen = setting.rank, setting.top_k, setting.window, inputs.case.scale
        out, lse = sparq.sparq_decode(*given, *chosen, value_mean=inputs.value_mean)
        return out, lse


def plain_sparq(inputs: SparQInputs, setting: SparQSetting, i: int) -> Output:
    """SparQ as torch operations, after Algorithm 1: what its authors timed as "SparQ (PyTorch)", for any group.

    As in their benchmark the keys lie there by component too, and no local window is forced. The softmax is float32,
    as in their evaluation: float16 has no numbers for the weights of so many keys. Gives output and chosen keys.
    """
    case = inputs.case
    queries = inputs.queries.view(case.B, case.Hkv, case.G, case.D)
    keys, values, keys_t = inputs.keys[i], inputs.values[i], inputs.keys_t[i]
    size = queries.abs().float()
    components = size.sum(dim=2).topk(setting.rank, dim=2, sorted=False).indices
    columns = components[:, :, None].expand(-1, -1, case.G, -1)
    covered = size.gather(3, columns).sum(dim=3, keepdim=True) / size.sum(dim=3, keepdim=True)
    rows = keys_t.gather(2, components[..., None].expand(-1, -1, -1, case.S))
    logits = (queries.gather(3, columns) @ rows).float() * (case.scale / covered.sqrt())
    weights = logits.softmax(dim=3)
    chosen = weights.sum(dim=2).topk(setting.top_k, dim=2, sorted=False).indices
    places = chosen[..., None].expand(-1, -1, -1, case.D)
    scores = (queries @ keys.gather(2, places).transpose(2, 3)).float() * case.scale
    exact = (scores - scores.amax(dim=3, keepdim=True)).exp()
    out = (exact.to(queries.dtype) @ values.gather(2, places)) / exact.sum(dim=3, keepdim=True)
    if inputs.value_mean is not None:
        alpha = weights.gather(3, chosen[:, :, None].expand(-1, -1, case.G, -1)).sum(dim=3, keepdim=True)
        out = torch.lerp(inputs.value_mean[:, :, None], out, alpha)
    return out.to(queries.dtype), chosen


def wrong_plain(choice: Choice, case: SparQCase, out: Output) -> str | None:
    """Check of `plain_sparq`: its logits are rounded to the type of the keys."""
    chosen = out[1].sort(dim=2).values
    return choice.wrong(chosen, 0, torch.finfo(getattr(torch, case.dtype)).eps) or choice.expected(chosen).wrong(out[0])
