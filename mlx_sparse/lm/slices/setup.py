"""Turning context sharding on for a plan."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from ...cache.shares import BLOCK, Shares
from ...cache.slice_cache import slice_up
from ...checks import ConfigError
from ...methods import SAAP, Sample
from ..options import SHARDS
from ..plan import Plan
from .call import SliceCall
from .exchange import Exchange
from .steps import STEPS


def share_out(plan: Plan, shard: str) -> None:
    """Let the calls of an enabled model share the context with the other processes.

    Raises:
        ConfigError: there are no others, or a method of the plan cannot.
    """
    if shard not in SHARDS:
        raise ConfigError(f"shard: expected one of {', '.join(SHARDS)}, got {shard}.")
    exchange = Exchange()
    if exchange.size == 1:
        raise ConfigError("shard: expected several processes (mlx.launch -n 2 -- ...), got one.")
    served = [*STEPS, SAAP.name]
    if plan.decode is not None and plan.decode.name not in served:
        raise ConfigError(f"shard: expected one of {', '.join(served)} to decode with, got {plan.decode.name}.")
    if plan.decode is not None and BLOCK % plan.decode.together:
        raise ConfigError(f"page_size: expected a divisor of {BLOCK} with shard, got {plan.decode.together}.")
    if plan.prefill is not None and plan.prefill.name != Sample.name:
        raise ConfigError(f"shard: expected {Sample.name} for prompts, got {plan.prefill.name}.")
    if plan.mass:
        raise ConfigError("--attn-report: expected text, json or off with shard, whose ranks do not measure mass.")
    _sample_alike(exchange)
    plan.sharers = exchange.size
    plan.new_call = functools.partial(SliceCall, exchange=exchange, exact=shard == "context")
    shares = Shares(exchange.rank, exchange.size)
    # By what these caches cannot do mlx-lm's server sees that it has to answer one request at a time.
    plan.new_caches = functools.partial(slice_up, shares=shares)


def _sample_alike(exchange: Exchange) -> None:
    """Every rank samples for itself: where no seed was given, with the first one's random numbers."""
    state: Any = mx.random.state
    states: Any = exchange.gather(state[0]).tolist()
    if any(one != states[0] for one in states):
        mx.random.seed(states[0][-1])
