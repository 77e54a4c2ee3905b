"""Decide whether a method is safe and worth using: the same limits and sentences for `try`, `advise` and `eval`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from ..core import registry
from ..core.decide import NEVER
from .evaluate.results import Row

# The limits are about as large as the effect of rounding model weights to 5 bits.
COPY, TEXT = "copying", "bits_per_byte"  # tasks: copy an excerpt of the prompt, continue the text
STEPS = 20  # smallest number of predicted tokens of an example
MAX_KL = 0.05  # nats, in both tasks
MIN_AGREEMENT = {COPY: 0.9, TEXT: 0.8}  # share of tokens for which dense attention has the same most likely token
SLACK = 2.0  # standard errors by which the agreement may miss its limit
LIMITS = (
    f"a KL divergence from dense attention of at most {MAX_KL} nats and an agreement of at least "
    f"{MIN_AGREEMENT[COPY]} (copying) and {MIN_AGREEMENT[TEXT]} (text), less two standard errors"
)


def is_safe(kl: float, agreement: float, tokens: int, task: str) -> bool:
    """Return True if results over ``tokens`` tokens of ``task`` are within the limits `MAX_KL` and `MIN_AGREEMENT`.

    The agreement may be up to `SLACK` standard errors below its limit. The error is that of an agreement at the limit,
    because a few tokens may all agree, or none.
    """
    limit = MIN_AGREEMENT[task]
    return kl <= MAX_KL and agreement + SLACK * (limit * (1 - limit) / tokens) ** 0.5 >= limit


def passes(row: Row) -> bool:
    """Return True if the results in ``row`` are within the limits."""
    return is_safe(row.mean.kl, row.mean.agreement, row.examples * STEPS, row.task)


def verdict(
    model: str, attn: str, *, unsafe: str = "", useless: str = "", crossover: int = 0, shorter: str = ""
) -> list[str]:
    """Return the verdict as one sentence, followed by the command to run.

    Args:
        model: path or Hugging Face repository of the model, for a command that mlx-lm can run.
        unsafe: reason why the method is not safe, or "".
        useless: reason why dense attention is faster, or "".
        crossover: crossover length in keys.
        shorter: length of the user's context if it is shorter than ``crossover``, or "".
    """
    command = f"mlx_lm.generate --model {shlex.quote(model)}"
    native = "" if registry.unavailable("cpu") else " --attn dense --attn-backend cpu"  # mlx-lm's own is slow
    use, stay = f"{command} --attn {shlex.quote(attn)}", f"Stay with dense attention: {command}{native}"
    if unsafe:
        return [f"Not safe for this model, see the numbers: {unsafe}.", stay]
    if crossover >= NEVER:
        useless = "no length was found at which it is faster"
    if useless:
        return [f"Not worth it on this machine: {useless}.", stay]
    if shorter:
        return [f"Not worth it on this machine below {crossover:,} tokens; {shorter}.", f"For longer prompts: {use}"]
    return [f"Use it{f' from {crossover:,} tokens on' if crossover > 1 else ''}: {use}"]


def verdicts(rows: Iterable[Row]) -> list[str]:
    """Return for each task and context length of ``rows`` which methods are within the limits."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.task in MIN_AGREEMENT and row.served != "dense":
            result = f"{row.method} {'passes' if passes(row) else 'fails'}"
            found.setdefault(f"{row.task} at {row.context:,} tokens", []).append(result)
    lines = [f"{name}: {', '.join(results)}." for name, results in found.items()]
    return [*lines, f"A method passes with {LIMITS}."] if lines else []
