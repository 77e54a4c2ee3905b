"""What is compared: every contender takes one decode step on the same queries and caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import ops, sparq
from .cases import Case, Setting
from .inputs import Caches, Choice, Expected, Inputs, expected_dense
from .model import dense_bytes, sparq_bytes, sparq_parts
from .timing import Output, Step

NAMES = {  # in the order of the tables
    "flash-gqa": "torch SDPA flash, enable_gqa",
    "flash-rows": "torch SDPA flash, group as rows",
    "cudnn-gqa": "torch SDPA cuDNN, enable_gqa",
    "cudnn-rows": "torch SDPA cuDNN, group as rows",
    "efficient-gqa": "torch SDPA memory-efficient, enable_gqa",
    "efficient-rows": "torch SDPA memory-efficient, group as rows",
    "flex": "torch flex_attention, compiled",
    "dense": "our dense_decode",
    "plain-sparq": "SparQ of torch operations (topk, gather, matmul)",
    "sparq": "our sparq_decode",
    "scores": "its first launch: scores",
    "scores+select": "its first two: scores, select",
}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OURS = ("dense", "sparq", "scores", "scores+select")
DENSE = (*(name for name in NAMES if name.split("-")[0] in BACKENDS), "flex", "dense")
NOT_COMPILED = "left out: compiled only for the cases with a bar, for time"


@dataclass(frozen=True)
class Contender:
    """One way to take the step, or a part of it.

    Attributes:
        name: a key of `NAMES`.
        setting: of the method; None for dense attention.
        bytes: what it has to move.
        step: takes it on one set of caches.
        wrong: what is wrong with what a step gave; None if nothing is.
    """

    name: str
    setting: Any
    bytes: int
    step: Step
    wrong: Callable[[Output], str | None]


def names(case: Case) -> list[tuple[str, Setting | None]]:
    """Who takes part in a case. With one query head per KV head the two views of the queries are one."""
    dense = [(name, None) for name in DENSE if case.G > 1 or not name.endswith("-rows")]
    return [*dense, *((name, setting) for setting in case.settings for name in NAMES if name not in DENSE)]


def left_out(name: str, case: Case, device: torch.device) -> str | None:
    """Why a contender does not take part; None if it does."""
    if name == "flex" and device.type == "cuda" and case.bar is None:
        return NOT_COMPILED
    return None


def field(case: Case, copies: int, device: torch.device) -> Field:
    """The contenders of a case."""
    return Field(Inputs(case, copies, device))


class Field:
    """The contenders over the inputs of one case."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._expected: Expected | None = None
        self._choices: dict[Setting, Choice] = {}

    def contender(self, name: str, setting: Setting | None) -> Contender:
        """Make one. What compiling it raises comes with its first step."""
        case = self._inputs.case
        if setting is None:
            step = dense_step(name, self._inputs)
            return Contender(name, None, dense_bytes(case), step, lambda out: self._right_dense().wrong(out[0]))
        parts = [part.bytes for part in sparq_parts(case, setting)]
        choice = self._choices.setdefault(setting, Choice(self._inputs, setting))
        if name == "plain-sparq":
            step = partial(plain_sparq, self._inputs, setting)
            return Contender(name, setting, sparq_bytes(case, setting), step, partial(wrong_plain, choice, case))
        epsilon = (setting.rank + 16) * torch.finfo(torch.float32).eps
        if name == "scores":
            return Contender(name, setting, parts[0], self._scores(setting), partial(choice.wrong_logits, epsilon))
        if name == "scores+select":
            wrong: Any = partial(wrong_choice, choice, setting.window, epsilon)
            return Contender(name, setting, sum(parts[:2]), self._select(setting), wrong)
        chosen = self._select(setting)(0)[0]
        wrong = partial(wrong_sparq, choice, setting.window, epsilon, chosen)
        return Contender(name, setting, sum(parts), self._sparq(setting), wrong)

    def _right_dense(self) -> Expected:
        if self._expected is None:
            self._expected = expected_dense(self._inputs)
        return self._expected

    def _selection(self, setting: Setting) -> dict[str, Any]:
        scale = self._inputs.case.scale
        return {"rank": setting.rank, "component_weight": None, "scale": scale, "left_padding": None}

    def _scores(self, setting: Setting) -> Step:
        inputs, chosen = self._inputs, self._selection(setting)
        return lambda i: (sparq.sparq_scores(inputs.queries, inputs.keys_t[i], **chosen).logits,)

    def _select(self, setting: Setting) -> Step:
        inputs, chosen = self._inputs, self._selection(setting)
        chosen |= {"top_k": setting.top_k, "local_window": setting.window, "group_reduce": "softmax"}
        return lambda i: sparq.sparq_select(inputs.queries, inputs.keys_t[i], **chosen)[:1]

    def _sparq(self, setting: Setting) -> Step:
        inputs = self._inputs

        def step(i: int) -> Output:
            given = inputs.queries, inputs.keys[i], inputs.values[i], inputs.keys_t[i]
            chosen = setting.rank, setting.top_k, setting.window, "softmax", None
            out, lse = ops.sparq_decode(*given, *chosen, inputs.case.scale, None, inputs.value_mean)
            return out, lse

        return step


def dense_step(name: str, inputs: Caches) -> Step:
    """A decode step of dense attention."""
    case, scale = inputs.case, inputs.case.scale
    if name == "dense":
        return lambda i: ops.dense_decode(inputs.queries, inputs.keys[i], inputs.values[i], scale, None)
    if name == "flex":
        attend = flex(inputs.keys.device)
        grouped = case.G > 1
        return lambda i: (attend(inputs.queries, inputs.keys[i], inputs.values[i], enable_gqa=grouped),)
    backend, view = name.split("-")
    rows = view == "rows"
    queries = inputs.queries.view(case.B, case.Hkv, case.G, case.D) if rows else inputs.queries

    def step(i: int) -> Output:
        with sdpa_kernel(BACKENDS[backend]):
            grouped = not rows and case.G > 1
            return (scaled_dot_product_attention(queries, inputs.keys[i], inputs.values[i], enable_gqa=grouped),)

    return step


def flex(device: torch.device) -> Callable[..., torch.Tensor]:
    """flex_attention, compiled for the sizes of one case; on the CPU, where only tests call it, as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    if device.type != "cuda":
        return flex_attention
    torch.compiler.reset()  # it stops to compile after a number of sizes
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


def plain_sparq(inputs: Inputs, setting: Setting, i: int) -> Output:
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


def wrong_plain(choice: Choice, case: Case, out: Output) -> str | None:
    """Check of `plain_sparq`: its logits are rounded to the type of the keys."""
    chosen = out[1].sort(dim=2).values
    return choice.wrong(chosen, 0, torch.finfo(getattr(torch, case.dtype)).eps) or choice.expected(chosen).wrong(out[0])


def wrong_choice(choice: Choice, window: int, epsilon: float, out: Output) -> str | None:
    """Check of the first two launches."""
    return choice.wrong(out[0], window, epsilon)


def wrong_sparq(choice: Choice, window: int, epsilon: float, chosen: torch.Tensor, out: Output) -> str | None:
    """Check of `sparq_decode`, whose choice is that of its first two launches."""
    return choice.wrong(chosen, window, epsilon) or choice.expected(chosen).wrong(out[0])
