"""What methods change in what a model says of the user's text, beside changes that everybody takes for harmless."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import mean, stdev
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ...calibrate import free_memory
from ...checks import ConfigError
from ...model_info import leaves
from ..evaluate.results import Outcome
from ..evaluate.runner import DENSE_STEP, Steps, observed_by
from ..evaluate.score import figures_of, log_softmax, step_outcome
from ..evaluate.tasks import TASKS
from ..evaluate.variants import Arm, arms_of

COPY, TEXT = "repetition", "bits_per_byte"  # the tasks: copy an excerpt of the prompt, go on with it
KINDS = (COPY, TEXT)
STEPS = 20  # tokens of a passage that are predicted
ORACLE = "oracle_top_k"  # the best choice of keys: where it fails, no choice is good enough
KV_BITS, WEIGHT_BITS = 8, 5  # of the harmless changes
GROUPS = (64, 32)  # numbers that share a scale, the first that fits
FREE_SHARE = 0.5  # of the memory that is free, which a copy of the weights may take
SLACK = 2.0  # standard errors by which the share of same tokens may be lower than the mark


@dataclass(frozen=True)
class Figures:
    """Passages of one kind, means over all tokens.

    Attributes:
        kl, kl_error: Kullback-Leibler divergence from dense attention's distribution, nats, and its standard error over
            the passages; NaN with one passage.
        agreement: share of the tokens whose most likely one is dense attention's.
        accuracy: share of the tokens that were the most likely ones.
        tokens: how many there are.
    """

    kl: float
    kl_error: float
    agreement: float
    accuracy: float
    tokens: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], tokens: int) -> Figures:
        """Of passages that have so many ``tokens`` together."""
        kl, agreement, accuracy = (mean(getattr(o, name) for o in outcomes) for name in ("kl", "agreement", "accuracy"))
        error = stdev(o.kl for o in outcomes) / math.sqrt(len(outcomes)) if len(outcomes) > 1 else math.nan
        return cls(kl, error, agreement, accuracy, tokens)


Found = Mapping[str, Figures]  # by kind


@dataclass(frozen=True)
class Change:
    """A harmless change, and what it changes; nothing where it could not be tried, for the reason in ``note``."""

    name: str
    found: Found
    note: str = ""


@dataclass(frozen=True)
class Try:
    """A method with the settings of a budget.

    Attributes:
        arm: what ran.
        share: of dense attention's transfers that it reads, by its formula.
        found: what it changes.
        sparse: whether any call was.
        passes: whether it is within the mark.
    """

    arm: Arm
    share: float | None
    found: Found
    sparse: bool
    passes: bool


def mark_of(changes: Sequence[Change]) -> dict[str, Figures]:
    """The pass mark: of every kind the largest KL and the smallest agreement that a harmless change brings.

    Raises:
        ConfigError: none could be tried.
    """
    tried = [change.found for change in changes if change.found]
    if not tried:
        notes = "; ".join(f"{change.name}: {change.note}" for change in changes)
        raise ConfigError(f"--model: expected one with which a harmless change can be tried, got {notes}.")
    most = {kind: max((found[kind] for found in tried), key=lambda figures: figures.kl) for kind in KINDS}
    least = {kind: min(found[kind].agreement for found in tried) for kind in KINDS}
    return {kind: replace(most[kind], agreement=least[kind]) for kind in KINDS}


def passes(found: Found, mark: Found) -> bool:
    """Whether the KL is at most the mark's, and same tokens are not clearly fewer, in passages of every kind."""
    return all(
        found[kind].kl <= mark[kind].kl
        and mark[kind].agreement - found[kind].agreement <= SLACK * _error(found[kind], mark[kind])
        for kind in mark
    )


def _error(*of: Figures) -> float:
    """The standard error of a difference of two shares."""
    return math.sqrt(sum(one.agreement * (1 - one.agreement) / one.tokens for one in of))


class Passages:
    """Passages of a text on a model that is not enabled: half to copy from, half to go on with."""

    def __init__(
        self, model: Any, tokenizer: Any, tokens: list[int], *, context: int, limit: int, seed: int, arms: Sequence[Arm]
    ) -> None:
        """Make the passages.

        Args:
            tokens: of the text.
            context: of each prompt, in tokens.
            limit: passages of each kind.
            arms: that are to run.

        Raises:
            ConfigError: there is too little text.
        """
        self.model, self.tokenizer, self.limit = model, tokenizer, limit
        made = [
            one for kind in KINDS for one in TASKS[kind](tokens, tokenizer, context=context, limit=limit, seed=seed)
        ]
        self.examples = [replace(one, target=one.target[:STEPS]) for one in made]
        self.steps = Steps(model, tokenizer, self.examples, DENSE_STEP, observed=observed_by(arms))

    def dense(self) -> Found:
        """Dense attention itself; this processes the prompts."""
        return self._by_kind(self._outcomes(self.steps.reference))

    def under(self, arm: Arm) -> tuple[Found, bool]:
        """What a method changes, and whether any of its calls was sparse."""
        trials = self.steps.trials(arm)
        return self._by_kind([trial.outcome for trial in trials]), any(trial.sparse_calls for trial in trials)

    def changes(self) -> Iterator[Change]:
        """The harmless changes, one after the other. The prompts stay as they are."""
        cache = self.steps.cache
        here = next(leaf.keys.dtype for leaf in leaves(cache) if getattr(leaf, "keys", None) is not None)
        other = mx.bfloat16 if here == mx.float32 else mx.float32
        name = f"{_name(other)} instead of {_name(here)}"
        parameters: Any = tree_flatten(self.model.parameters())
        needed = sum(array.size * other.size for _, array in parameters if mx.issubdtype(array.dtype, mx.floating))
        if needed <= FREE_SHARE * free_memory():
            yield self._change(name, lambda rows: rows.astype(other), in_type(self.model, other))
        else:
            yield Change(name, {}, f"not tried: it takes {needed / 1e9:.1f} GB more")
        yield self._change(f"keys and values in {KV_BITS} bits", lambda rows: rounded(rows, KV_BITS))
        yield self._change(f"weights in {WEIGHT_BITS} bits", lambda rows: rows, in_bits(self.model, WEIGHT_BITS))

    def _change(
        self,
        name: str,
        change: Callable[[mx.array], mx.array],
        changed: contextlib.AbstractContextManager[None] | None = None,
    ) -> Change:
        """The model as it is while ``changed``, after prompts whose keys and values are changed."""
        mx.eval(self.steps.reference)  # of the model as it is
        try:
            with changed or contextlib.nullcontext():
                return Change(name, self._changed(change))
        except RuntimeError as error:  # a type or a size that MLX does not have on this device
            return Change(name, {}, f"not tried: {error}")

    def _changed(self, change: Callable[[mx.array], mx.array]) -> Found:
        cache = copy.deepcopy(self.steps.cache)
        for leaf in leaves(cache):
            if getattr(leaf, "keys", None) is not None:
                leaf.keys, leaf.values = change(leaf.keys), change(leaf.values)
        logp = log_softmax(self.model(self.steps.inputs, cache=cache))
        mx.eval(logp)
        return self._by_kind(self._outcomes(logp))

    def _outcomes(self, logp: mx.array) -> list[Outcome]:
        rows = zip(logp, self.steps.reference, self.steps.targets, self.examples, strict=True)
        return [
            step_outcome(figures_of(ours, dense, targets), example, self.tokenizer)
            for ours, dense, targets, example in rows
        ]

    def _by_kind(self, outcomes: Sequence[Outcome]) -> dict[str, Figures]:
        parts = {kind: outcomes[i * self.limit :][: self.limit] for i, kind in enumerate(KINDS)}
        return {kind: Figures.of(part, STEPS * len(part)) for kind, part in parts.items()}


@dataclass(frozen=True)
class Quality:
    """What was found out.

    Attributes:
        dense: dense attention itself.
        changes: the harmless ones.
        mark: what they come to.
        oracle, tries: the best choice of keys, and the methods.
        left_out: lines about what could not be run.
    """

    dense: Found
    changes: list[Change]
    mark: Found
    oracle: list[Try]
    tries: list[Try]
    left_out: list[str]

    @property
    def hopeless(self) -> bool:
        """Whether even the best choice of keys fails at the largest budget."""
        return not any(one.passes for one in self.oracle)

    @property
    def best(self) -> Try | None:
        """The one that reads least of those that pass; a bound is none of them."""
        passing = [one for one in self.tries if one.passes and one.share and not one.arm.attn.startswith(ORACLE)]
        return None if self.hopeless else min(passing, key=lambda one: one.share or 0, default=None)


def measure(
    model: Any,
    tokenizer: Any,
    tokens: list[int],
    methods: Sequence[str],
    budgets: Sequence[Fraction],
    progress: Any,
    *,
    context: int,
    limit: int,
    seed: int,
    D: int,
) -> Quality:
    """Run the methods from the largest budget down, each until it fails.

    Args:
        methods: that decode, as text.
        progress: a bar that is told of every run.
        D: head dim of the layers.

    Raises:
        ConfigError: there is too little text, or no budget is within reach.
    """
    wanted = [ORACLE, *(method for method in methods if method != ORACLE)]
    arms, left_out = arms_of(wanted, sorted(budgets, reverse=True), context, D)
    if not any(arm.method == ORACLE for arm in arms):
        raise ConfigError(f"--budget: expected a share within reach at {context:,} keys, got none. Name a larger one.")
    passages = Passages(model, tokenizer, tokens, context=context, limit=limit, seed=seed, arms=arms)
    progress.total = 4 + len(arms)

    def counted(found: Any) -> Any:
        progress.update()
        return found

    dense = counted(passages.dense())
    changes = [counted(change) for change in passages.changes()]
    mark = mark_of(changes)
    tries: dict[str, list[Try]] = {}
    for arm in arms:
        before = tries.setdefault(arm.method, [])
        hopeless = arm.method != ORACLE and not any(one.passes for one in tries[ORACLE])
        if hopeless or not all(one.passes for one in before):
            progress.update()
            continue
        found, sparse = passages.under(arm)
        share = arm.formula(context, D)
        before.append(counted(Try(arm, share, found, sparse, sparse and passes(found, mark))))
    oracle = tries.pop(ORACLE)
    return Quality(dense, changes, mark, oracle, [one for some in tries.values() for one in some], left_out)


# Harmless changes


def rounded(rows: mx.array, bits: int) -> mx.array:
    """``rows`` with as many values in a group as ``bits`` can tell apart; as they are where they have no size."""
    group = group_of(rows.shape[-1]) if rows.size else 0
    return mx.dequantize(*mx.quantize(rows, group, bits), group, bits) if group else rows


def group_of(size: int) -> int:
    """How many of ``size`` numbers share a scale.

    Raises:
        RuntimeError: no group fits.
    """
    group = next((group for group in GROUPS if size % group == 0), None)
    if group is None:
        raise RuntimeError(f"{size} is no multiple of {GROUPS[-1]}")
    return group


@contextlib.contextmanager
def in_type(model: Any, dtype: mx.Dtype) -> Iterator[None]:
    """The weights of ``model`` in another type meanwhile."""
    before = model.parameters()
    model.update(tree_map(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, before))
    try:
        yield
    finally:
        model.update(before)


@contextlib.contextmanager
def in_bits(model: Any, bits: int) -> Iterator[None]:
    """The matrices of ``model`` rounded to ``bits`` meanwhile: each when it is used, so that no copy of all is made."""
    kinds = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear, nn.Embedding, nn.QuantizedEmbedding)
    found = [module for _, module in model.named_modules() if isinstance(module, kinds)]
    classes = [type(module) for module in found]
    for module, cls in zip(found, classes, strict=True):
        module.__class__ = _rounding(cls, bits)
    try:
        yield
    finally:
        for module, cls in zip(found, classes, strict=True):
            module.__class__ = cls


@functools.cache
def _rounding(cls: type, bits: int) -> type:
    """``cls`` with every call made on rounded weights."""

    def on_rounded(name: str) -> Callable[..., Any]:
        original = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _weight_in(self, bits):
                return original(self, *args, **kwargs)

        return call

    calls = [name for name in ("__call__", "as_linear") if hasattr(cls, name)]
    return type(cls.__name__, (cls,), {name: on_rounded(name) for name in calls})


@contextlib.contextmanager
def _weight_in(module: Any, bits: int) -> Iterator[None]:
    """A quantised module is quantised anew, of others the weight is rounded."""
    arrays = dict(module)
    settings = {name: getattr(module, name) for name in ("bits", "mode", "group_size") if hasattr(module, name)}
    if "scales" in module:
        weight = mx.dequantize(arrays["weight"], arrays["scales"], arrays.get("biases"), **settings)
        group = group_of(weight.shape[-1])
        module.weight, module.scales, module.biases = mx.quantize(weight, group, bits)
        module.bits, module.mode, module.group_size = bits, "affine", group
    elif module.weight.shape[-1] % GROUPS[-1] == 0:  # the few others stay, as mlx-lm's own quantisation leaves them
        module.weight = rounded(module.weight, bits)
    try:
        yield
    finally:
        dict.clear(module)
        dict.update(module, arrays)
        for name, value in settings.items():
            setattr(module, name, value)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
