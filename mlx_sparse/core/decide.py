"""Decide whether attention is sparse or dense. Every caller passes its own facts, and nothing else decides.

The functions take no arrays. The plan of mlx-lm's layers, the transformers hook, the public functions and the defaults
of exported files call them. The constants estimate when sparse attention is faster.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import reasons

if TYPE_CHECKING:
    from .base import Method, Prefill

NEVER = 1 << 40  # crossover length in keys for methods that stay dense at every context length

PROCESSORS = os.cpu_count() or 1
# Bytes that a decode step of one layer must save to outweigh SparQ's additional work, by device. GPUs are not measured.
# Apple (base and Pro, Max, Ultra): conservative end of a roofline model (docs/methods.md, "The model").
# NVIDIA: 20 microseconds of additional launches at 2.0, 4.3 and 8 TB/s. cpu: from timings of one AMD EPYC. More
# processors may speed up dense attention, but not the additional work.
ENOUGH_SAVED = {
    **{"g": 20 << 20, "s": 36 << 20, "d": 52 << 20},
    **{"sm_80": 40 << 20, "sm_90": 80 << 20, "sm_100": 160 << 20},
    "cpu": PROCESSORS * (3 << 20),
}

# Number of KV heads whose query networks a GPU reads at full memory bandwidth, by kind of GPU. One core reads the
# network of one KV head at 20 GB/s. The numbers are conservative ends of a model, and not measured.
ROUTING_HEADS = {"g": 8, "s": 27, "d": 40}

# Time of a row in a sparse step, relative to a row of dense attention, from timings. cpu: for one processor,
# with SAAP's routing, which array operations run.
GATHERED_ROW = {"ops": 2.5, "cpu": 8.0}

# Number of keys from which SampleAttention is used with ranges, which are tuned for the model. The default alphas lose
# copies at 4,096 and 8,192 tokens (docs/results/prefill.md), so without ranges, prefill stays dense.
SAMPLE_TUNED_BELOW = 8192
# Largest density at which attending to the selected blocks is assumed to be faster than dense attention. ops, cpu:
# from timings of single chunks. metal: not measured; assumes a kernel four times slower per block than MLX's.
SAMPLE_DENSE_ABOVE = {"ops": 0.75, "cpu": 0.8, "metal": 0.22}
# At most 1 / SAMPLE_SHARE of the queries of a chunk are sampled. A larger sample costs more than it saves.
SAMPLE_SHARE = 8


@dataclass(frozen=True)
class Facts:
    """Facts about a layer and an attention call, apart from the lengths.

    Attributes:
        G: number of query heads per KV head.
        sinks: True if the layer has attention sinks.
        latent: True for multi-head latent attention, unless a setting turns it on.
        bias: True if the mask of a decode step is a bias: numbers that are added to the logits.
        other_mask: True if the mask hides more than padding, and is no bias.
        causal: False if queries attend to later keys.
        checked: True if the call must be dense because a lossless model checks tokens with it.
        prompts_only: True if the program only processes prompts.
        unready: the reason why the hooks of the decode method exclude a decode step; None if they allow it.
        estimate: crossover length in keys that was measured or modeled, for methods with ``dense_below="auto"``.
        measured_at: context length at which the crossover length will be measured; None if it will not be measured.
    """

    G: int = 1
    sinks: bool = False
    latent: bool = False
    bias: bool = False
    other_mask: bool = False
    causal: bool = True
    checked: bool = False
    prompts_only: bool = False
    unready: str | None = None
    estimate: int = 0
    measured_at: int | None = None


@dataclass(frozen=True)
class Decision:
    """Decision about the decode steps of a layer. All lengths are numbers of keys without padding.

    Attributes:
        reason: the reason why the steps are dense; None if they are sparse.
        start, stop: the decision is valid while the longest sequence has ``start <= length < stop`` keys.
        served: indices of the sequences that are long enough for sparse attention.
        short: indices of the sequences that need dense attention in a sparse step. A sparse step attends to all keys of
            a sequence with at most ``config.attended`` keys, so these sequences are not listed.
        crossover: length from which on a sequence is long enough.
    """

    reason: str | None
    start: int = 0
    stop: int = NEVER
    served: list[int] = field(default_factory=list)
    short: list[int] = field(default_factory=list)
    crossover: int = NEVER


def skips_keys(attended: int, L: int, S: int) -> bool:
    """Return True for a decode step over more keys than the ``attended`` keys of a sparse step."""
    return L == 1 and S > attended


def exclusion(config: Method, facts: Facts) -> str | None:
    """Return the reason why ``config`` is dense at every length in a layer and under a mask, or None."""
    if facts.latent:
        return reasons.LATENT
    if facts.sinks and not config.supports_sinks(facts.G):
        return reasons.SINKS
    masked = facts.other_mask or (facts.bias and config.for_bias() is None)
    return reasons.ARRAY_MASK if masked else facts.unready


def refusal(config: Method | None, facts: Facts) -> str | None:
    """Return the reason why a decode step of ``config`` is dense at every length, or None."""
    if facts.checked:
        return reasons.CHECKED
    if facts.prompts_only:
        return reasons.LAST_OF_PROMPT
    return reasons.NO_DECODE if config is None else exclusion(config, facts)


def decide(config: Method | None, facts: Facts, lengths: Sequence[int]) -> Decision:
    """Decide whether the next decode steps over sequences of ``lengths`` keys are sparse."""
    reason = refusal(config, facts)
    if reason is not None or config is None:
        return Decision(reason)
    crossover, longest = config.crossover(facts.estimate), max(lengths, default=0)
    if crossover >= NEVER:
        reason = reasons.NOTHING_SAVED
    elif longest < crossover:
        reason = reasons.shorter_than(crossover)
    # Number of further tokens after which the decision about a sequence changes; at most 0 if it has changed.
    changes = [edge - length for length in lengths for edge in (crossover, config.attended + 1)]
    if facts.measured_at is not None:
        changes.append(facts.measured_at - longest)
    return Decision(
        reason,
        start=max((longest + change for change in changes if change <= 0), default=0),
        stop=min((longest + change for change in changes if change > 0), default=NEVER),
        served=[i for i, length in enumerate(lengths) if length >= crossover],
        short=[i for i, n in enumerate(lengths) if skips_keys(config.attended, 1, n) and n < crossover],
        crossover=crossover,
    )


def chunk_refusal(config: Prefill | None, facts: Facts, L: int, S: int) -> str | None:
    """Return the reason why a call with ``L > 1`` queries and ``S`` keys is dense, or None.

    ``config`` is the prefill method; None if prefill is dense.
    """
    if L <= reasons.VERIFY_QUERIES and (S > L or config is not None):
        return reasons.CHECKED if facts.checked and S > L else reasons.A_FEW
    if config is None:
        return reasons.PROMPT
    if (reason := exclusion(config, facts)) is not None or not facts.causal:
        return reason or reasons.NOT_CAUSAL
    shortest = config.shortest_context()
    if shortest >= NEVER:
        return reasons.UNTUNED
    return reasons.shorter_than(shortest) if S < shortest else config.at(S).dense_reason(L, S)


def nvidia_kind(capability: int) -> str:
    """Return a key of `ENOUGH_SAVED`, such as "sm_90", for an NVIDIA GPU with the given compute ``capability``.

    The result is the highest key that is not above ``capability``. If all keys are above it, return the lowest key.
    """
    known = sorted(int(kind[3:]) for kind in ENOUGH_SAVED if kind.startswith("sm_"))
    return f"sm_{max((lower for lower in known if lower <= capability), default=known[0])}"
