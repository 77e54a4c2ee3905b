"""Run a tiny model of each family of mlx-lm, and record which layers support sparse attention."""

from __future__ import annotations

import contextlib
import pkgutil
import textwrap
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from types import ModuleType
from typing import Any

import family_models
import mlx.core as mx
import mlx_lm.models
from tiny_models import caches_of, call

from mlx_sparse.api.call_report import Report
from mlx_sparse.core import reasons
from mlx_sparse.lm.model import Attn, NothingServed, has_qk_norm, sparse
from mlx_sparse.methods import SparQ
from mlx_sparse.model_info import leaves

KEEPS_A_STATE = "with a state of fixed size instead of keys"
NO_ATTENTION = "without attention"
PROMPT, STEPS = 96, 4
# Reasons that only the table of models has.
KEEPS_A_STATE, NO_ATTENTION = "with a state of fixed size instead of keys", "without attention"
FEW = "sparq:rank=4,top_k=4,dense_below=0"  # selecting few keys changes the logits
SAMPLE = "sample:block_size=32,dense_below=0"
SAAP = "saap:mode=online,buckets=4,probes=2,sink_tokens=1,recent_tokens=4,dense_layers=0,dense_below=0"
CLOSE = 1e-3  # relative to the largest logit: float32 through a few layers
STATES = {  # part of a class name: name of the state that these layers have in place of keys
    "GatedDelta": "Gated DeltaNet",
    "Delta": "Kimi Delta Attention",
    "KDA": "Kimi Delta Attention",
    "Mamba": "Mamba",
    "FalconH1Mixer": "Mamba",
    "Recurrent": "RG-LRU",
    "RWKV": "RWKV",
    "Rwkv": "RWKV",
    "LinearAttention": "linear attention",
    "ShortConv": "short convolutions",
    "Conv": "convolutions",
}
LATENT = ("kv_a_", "kv_b_", "embed_q")  # modules that compute keys and values from a latent vector


@dataclass(frozen=True)
class EveryStep(SparQ):
    """SparQ that stays sparse even if all keys are selected. Such a step must equal dense attention."""

    def crossover(self, estimate: int) -> int:
        return 0


EVERY_KEY = EveryStep(rank=4, top_k=4096)
MLA = "component_score=query_key"  # turns on sparse decode steps with multi-head latent attention


@dataclass
class Facts:
    """Result of the survey of one family.

    Attributes:
        family: name of mlx-lm's module.
        how: "run" if a tiny model was run; "probed" if its layers were only counted, because no layer is sparse;
            "not run" if the family cannot run here.
        layers: number of layers of the tiny model. Repeated layers of a loop, and halves with an attention each, count
            each time.
        kinds: number of layers by kind of attention.
        served: number of sparse layers by method, per decode step, or per prefill for sample.
        dense: number of dense layers with sparq, by reason.
        qk_norm: True if queries or keys are normalized.
        exact: True if a sparse step over every key gives the logits of dense attention; None without a sparse step.
        shows: True if a sparse step over a few keys gives other logits.
        note: error that prevented a run.
    """

    family: str
    how: str = "run"
    layers: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    dense: dict[str, int] = field(default_factory=dict)
    qk_norm: bool = False
    exact: bool | None = None
    shows: bool | None = None
    note: str = ""


def modules() -> list[str]:
    """Return the names of all modules in the model folder of the installed mlx-lm."""
    return sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))


def installed() -> str:
    """Return the version of the installed mlx-lm."""
    return version("mlx-lm")


def facts(family: str) -> Facts | None:
    """Build and run a tiny model of a family and return the result, or None if the module has no model."""
    try:
        module = family_models.module_of(family)
    except ImportError as error:
        return Facts(family, "not run", note=_shortened(error))
    if not hasattr(module, "Model"):
        return None
    try:
        return _survey(family, module)
    # The code of a family may raise any error for an invented configuration, or require a GPU.
    except Exception as error:
        return Facts(family, "not run", note=_shortened(error))


def _survey(family: str, module: ModuleType) -> Facts:
    model = family_models.build(family)
    found = Facts(family, qk_norm=has_qk_norm(model))
    report = _probe(model, FEW)
    if latent := reasons.LATENT in report.dense_layers:
        report = _probe(model, f"{FEW},{MLA}")
    found.served, found.dense = {"sparq": report.served_layers}, dict(report.dense_layers)
    if report.served_layers:
        _run(model, found, latent)
    else:
        found.how = "probed"
    unseen = found.dense.pop(reasons.OWN_ATTENTION, 0)
    calls = found.served["sparq"] + sum(found.dense.values())
    caches = caches_of(model)
    with_keys = [any(map(_has_keys, leaves(cache))) for cache in caches]
    states = min(with_keys.count(False), len(model.layers) - with_keys.count(True))
    names = {part for name, _ in model.named_modules() for part in name.split(".")}
    trained = hasattr(module, "Indexer") or any(name.startswith("index") for name in names)
    own = with_keys.count(True) if not calls else 0 if trained else unseen - sum(map(_is_state, leaves(caches)))
    for reason, count in ((reasons.OWN_ATTENTION, own), (KEEPS_A_STATE, states)):
        if count > 0:
            found.dense[reason] = count
    found.layers = max(len(model.layers), found.served["sparq"] + sum(found.dense.values()))
    if rest := found.layers - found.served["sparq"] - sum(found.dense.values()):
        found.dense[NO_ATTENTION] = rest
    found.kinds = _kinds(found, trained, any(name.startswith(LATENT) for name in names), _state(model))
    if latent:
        found.kinds = {"MLA" if kind == "full" else kind: count for kind, count in found.kinds.items()}
    return found


def _probe(model: Any, attn: Attn) -> Report:
    """Return a report of sparse layers and of the reasons for dense layers, without a forward pass."""
    try:
        with sparse(model, attn) as report:
            return report
    except NothingServed as error:
        return error.report


def _run(model: Any, found: Facts, latent: bool) -> None:
    """Run the model and add the measured fields to ``found``."""
    every, few_keys = (replace(EVERY_KEY, component_score="query_key"), f"{FEW},{MLA}") if latent else (EVERY_KEY, FEW)
    dense = _logits(model)
    largest = float(mx.abs(dense).max())
    with sparse(model, every):
        found.exact = bool(mx.abs(_logits(model) - dense).max() < CLOSE * largest)
    with sparse(model, few_keys) as report:
        few = _logits(model, report)
    found.shows = bool(mx.abs(few - dense).max() > CLOSE * largest)
    never = report.dense_layers[reasons.OWN_ATTENTION]
    found.served = {"sparq": report.sparse_calls // STEPS, "sample": 0}
    found.dense = {reason: count // STEPS for reason, count in report.dense_calls.items()}
    found.dense[reasons.OWN_ATTENTION] = never
    with contextlib.suppress(NothingServed), sparse(model, SAMPLE) as report:
        _logits(model)
        found.served["sample"] = report.prefill.calls
    found.served["saap"] = 0
    with contextlib.suppress(NothingServed), sparse(model, SAAP) as report:
        _logits(model)
        found.served["saap"] = report.sparse_calls // STEPS


def _logits(model: Any, report: Report | None = None) -> mx.array:
    prompt = family_models.prompt_of(PROMPT + STEPS)
    return step_logits(model, prompt[:PROMPT], prompt[PROMPT:], report)


def step_logits(model: Any, prompt: list[int], tokens: list[int], report: Report | None = None) -> mx.array:
    """Return the logits of decode steps after a prompt. ``report`` then counts the dense calls of these steps only."""
    cache = caches_of(model)
    mx.eval(call(model, [prompt], cache))
    if report is not None:
        report.dense_calls = Counter()
    rows = []
    for token in tokens:
        rows.append(call(model, [[token]], cache)[:, -1].astype(mx.float32))
        mx.eval(rows)
    logits = mx.concatenate(rows)
    return mx.where(logits == -mx.inf, 0, logits)  # logits of tokens that a family masks


def _has_keys(cache: Any) -> bool:
    """Return True if a cache stores keys and values, or latent vectors in their place."""
    return "KV" in type(cache).__name__ or type(cache).__name__ == "LayerCache"


def _state(model: Any) -> str:
    """Return a phrase for the state that layers without a KV cache store, such as Mamba's."""
    names = {type(module).__name__ for module in model.modules()}
    return next((what for part, what in STATES.items() if any(part in name for name in names)), "a state")


def _is_state(cache: Any) -> bool:
    return not _has_keys(cache)


def _kinds(found: Facts, trained: bool, latent: bool, state: str) -> dict[str, int]:
    """Return the number of layers by kind of attention. The kind of a dense layer follows from its reason."""
    kinds: Counter[str] = Counter({"full": found.served["sparq"]})
    for reason, count in found.dense.items():
        if "sliding" in reason:
            kind = "sliding window"
        elif "Chunked" in reason:
            kind = "chunks"
        elif reason == NO_ATTENTION:
            kind = "without"
        elif reason == KEEPS_A_STATE:
            kind = state
        else:
            kind = "MLA" if latent else "own attention" if reason == reasons.OWN_ATTENTION else "full"
            kind += " with a trained choice of keys" if trained else ""
        kinds[kind] += count
    return {kind: count for kind, count in kinds.items() if count}


def _shortened(error: BaseException) -> str:
    """Return the message of an error, shortened to one line."""
    return textwrap.shorten(str(error) or type(error).__name__, 80, placeholder=" ...")
