"""Refuse what cannot draft, and let a plan draft."""

from __future__ import annotations

import argparse
from typing import Any

from ...checks import BackendUnavailable, ConfigError
from ...methods import Method, Prefill
from ...model_parts import part_of
from . import generation
from .attention import attend_check
from .draft_length import MOST

# By mlx-lm's own masks, several queries of these families in one call attend other keys than one after the other.
UNEVEN = frozenset({"phi3small", "plamo3"})


def check_drafts(prefill: Prefill | None, decode: Method | None, draft_tokens: int | None) -> None:
    """Raise `ConfigError` if ``decode`` cannot draft ``draft_tokens`` tokens, or as many as pay for None."""
    if draft_tokens is not None and not 1 <= draft_tokens <= MOST:
        raise ConfigError(f"lossless: expected 1 to {MOST} drafts for each check, got {draft_tokens}.")
    if prefill is not None:
        raise ConfigError(f"lossless: expected a method for new tokens, got {prefill.name}, which changes prompts.")
    if decode is None or decode.observes_prefill:
        name = "none" if decode is None else f"{decode.name}, which counts every token that it has seen"
        raise ConfigError(f"lossless: expected a method for new tokens that can take them back, got {name}.")


def check_company(args: argparse.Namespace, command: str, *, generates: bool) -> None:
    """Raise `ConfigError` if other options of a command cannot go with ``--lossless``."""
    if not generates:
        raise ConfigError(f"--lossless: expected a command that generates from one prompt, got {command}.")
    for name in ("draft_model", "shard", "max_kv_size"):
        if getattr(args, name, None) is not None:
            raise ConfigError(f"--lossless: expected it without --{name.replace('_', '-')}, got both. Drop one.")
    if getattr(args, "batch_size", 1) > 1:
        raise ConfigError(f"--lossless: expected one sequence at a time, got --batch-size {args.batch_size}.")


def draft(plan: Any, model: Any, draft_tokens: int | None) -> None:
    """Let the decode method of a `Plan` draft.

    Raises:
        ConfigError: the method cannot draft, or the model is a part of one.
        BackendUnavailable: mlx-lm generates in another way than this was made for.
    """
    check_drafts(plan.prefill, plan.decode, draft_tokens)
    if not part_of(model).whole or plan.shards > 1:
        raise ConfigError("lossless: expected a whole model on one process, got a part of one. Run it without.")
    if plan.report.model_type in UNEVEN:
        family = plan.report.model_type
        raise ConfigError(f"lossless: expected a model that checks several tokens as it says them, got {family}.")
    missing = {"prompt", "model", "prompt_cache", "sampler", "logits_processors"} - generation.PARAMETERS
    if missing:
        raise BackendUnavailable(f"mlx-lm: expected generate_step with {', '.join(sorted(missing))}, got one without.")
    plan.lossless, plan.attend_check = draft_tokens or 0, attend_check
