"""Enable and disable sparse attention for a model of mlx-lm or mlx-vlm."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator

import mlx.core as mx
from mlx import nn

from .. import blas
from ..api.call_report import Report
from ..calibrate import Calibration
from ..checks import ConfigError
from ..core import reasons, registry
from ..core.base import QK_NORMS, Dense, Method, Prefill
from ..files import cache_directory
from ..methods import METHODS, parse
from ..model_info import kv_heads, leaves, model_type, new_caches, package_of, text_model, weights_read
from ..model_parts import part_of
from . import seam
from .call import Call, under_plan
from .hooks import hooks_of
from .plan import Plan, Probe

NORMS_WITHOUT_WEIGHTS = frozenset({"nanochat", "talkie", "muse_glimmer"})

# The end of the error for models with multi-head latent attention.
LATENT_ADVICE = (
    " With MLA, quality was measured on a converted model only. `mlx-sparse advise MODEL --text FILE` measures your "
    "model, and `--attn sparq:component_score=low_rank` turns decode steps on (without --lossless)."
)

Attn = str | Method | tuple[Method, ...]


class NothingServed(ConfigError):
    """Error for a model in which no layer can use sparse attention.

    Attributes:
        report: report with the number of dense layers for each reason. If the model never calls the library's
            attention function, the report has no layers.
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def enable(
    model: nn.Module,
    attn: Attn = "sparq",
    *,
    backend: str = "auto",
    recall: bool = False,
    calibration: Calibration | None = None,
    lossless: bool = False,
    draft_tokens: int | None = None,
) -> Report:
    """Replace the attention of ``model`` with sparse attention.

    If each thread has its own caches, any number of threads may call an enabled model at the same time. All threads may
    read the report. Do not call the model on any thread during `enable` or `disable`.

    Args:
        model: a model loaded by mlx-lm or mlx-vlm. If you use the model's `shard` or `pipeline`, call it first. A SAAP
            artefact is then sliced in the same way, and checked only against the model's family and shapes.
        attn: ``METHOD[:key=value,...][+METHOD...]`` with at most one prefill and one decode method, for example
            ``"gather+sparq:rank=16"``; or a method or a tuple of methods from `mlx_sparse.methods`. ``"dense"``
            computes the same attention as mlx-lm. If the KV cache is quantized, ``"dense"`` never stores the scores of
            a whole prefill chunk.
        backend: "auto" or the name of a backend.
        recall: True to measure the attention recall of prefill, the share of the softmax mass on the attended keys.
            This takes an additional dense pass over the keys.
        calibration: crossover lengths on this machine. If None, use the lengths that `mlx-sparse calibrate` or
            ``--attn`` has measured. Use estimated or default lengths for layer shapes that were not measured.
        lossless: True to generate the same tokens as dense attention. Sparse decode steps draft tokens, and one dense
            call checks several draft tokens. This applies to `mlx_lm.generate`, `mlx_lm.stream_generate` and mlx-lm's
            commands, one sequence at a time. Batches and direct calls of the model use dense decode steps.
        draft_tokens: number of draft tokens per check, 1 to 7; None to select the fastest number.

    Returns:
        A report. Each later call of the model adds to its counts.

    Raises:
        ConfigError: the method or a parameter is invalid, no layer can use the method, or the model is already
            enabled.
        ArtefactError: SAAP's artefact cannot be read, or was trained for another model.
        BackendUnavailable: the backend cannot run here, or the interfaces of the installed mlx-lm or mlx-vlm have
            changed.
    """
    blas.load(cache_directory())
    package = package_of(model)
    seam.require(package)
    seam.library_of(model)
    model = text_model(model)
    if package != "mlx_lm" and lossless:
        raise ConfigError("model: expected a model of mlx-lm, got a model of mlx-vlm. Use lossless=False.")
    if plan_of(model) is not None:
        raise ConfigError("model: expected a model that is not enabled, got an enabled model. Call mlx_sparse.disable.")
    configs = parse(attn) if isinstance(attn, str) else (attn,) if isinstance(attn, Method) else attn
    if not isinstance(configs, tuple) or not all(isinstance(config, Method) for config in configs):
        raise ConfigError(f"attn: expected a string, a method or a tuple of methods, got {attn!r}.")
    prefill, decode = select_methods(configs)
    for config in configs:
        registry.require(backend, config.name)
    hooks = hooks_of(decode)(decode, model)
    plan = Plan(
        prefill, decode, backend, model_type(model), hooks, recall=recall, calibration=calibration or Calibration()
    )
    plan.absorbed = absorbed_attention(model)
    plan.report.requested = attn if isinstance(attn, str) else "+".join(map(str, configs))
    if lossless:
        from .speculative.generation import make_lossless, wrap

        make_lossless(plan, model, draft_tokens)
    elif draft_tokens is not None:
        raise ConfigError(f"draft_tokens: expected None without lossless, got {draft_tokens}.")
    places = seam.bind(model)
    if not places:
        raise NothingServed(
            f"model: expected attention through {package}.models.base.{seam.NAME}, got {plan.report.model_type}, which "
            f"never calls it. Run this model without {plan.name}.",
            plan.report,
        )
    unwrap = wrap() if lossless else None
    cls = type(model)
    # The finalizer restores mlx-lm's functions if the model is deleted without `disable`.
    release = weakref.finalize(model, _release, places, unwrap)
    release.atexit = False
    # A normal assignment would add the attribute to the parameters of the nn.Module.
    object.__setattr__(model, "_mlx_sparse", (plan, cls, release))
    hooks.open()
    try:
        _probe(model, plan)
    except BaseException:
        disable(model)
        raise
    model.__class__ = _sparse_class(cls)
    return plan.report


def disable(model: nn.Module) -> None:
    """Restore the dense attention of an enabled model. Do nothing if the model is not enabled."""
    model = text_model(model)
    state = getattr(model, "_mlx_sparse", None)
    if state is None:
        return
    plan, cls, release = state
    plan.hooks.close()
    object.__delattr__(model, "_mlx_sparse")
    model.__class__ = cls
    release()


def _release(places: list[seam.Place], unwrap: Callable[[], None] | None) -> None:
    """Restore the library's functions at ``places``. Skip places that another enabled model uses."""
    seam.unbind(places)
    if unwrap is not None:
        unwrap()


@contextlib.contextmanager
def sparse(
    model: nn.Module,
    attn: Attn = "sparq",
    *,
    backend: str = "auto",
    recall: bool = False,
    calibration: Calibration | None = None,
) -> Iterator[Report]:
    """Enable sparse attention for ``model`` inside a ``with`` block. See `enable` for the arguments."""
    report = enable(model, attn, backend=backend, recall=recall, calibration=calibration)
    try:
        yield report
    finally:
        disable(model)


def native_dense(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Run dense attention with native kernels inside a ``with`` block. If they cannot run, mlx-lm's attention runs."""
    return contextlib.nullcontext() if registry.unavailable("cpu") else sparse(model, Dense(), backend="cpu")


@contextlib.contextmanager
def lossless(
    model: nn.Module, attn: Attn = "sparq", *, backend: str = "auto", draft_tokens: int | None = None
) -> Iterator[Report]:
    """Generate the same tokens as dense attention, but faster, inside a ``with`` block.

    Sparse decode steps draft tokens, and one dense call over the same caches checks several draft tokens. A draft token
    is accepted only if dense attention samples the same token. See `enable` for the arguments.
    """
    report = enable(model, attn, backend=backend, lossless=True, draft_tokens=draft_tokens)
    try:
        yield report
    finally:
        disable(model)


def report(model: nn.Module) -> Report | None:
    """Return the report of an enabled model, or None if the model is not enabled."""
    plan = plan_of(model)
    return plan.report if plan else None


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan of an enabled model, or None if the model is not enabled."""
    state = getattr(text_model(model), "_mlx_sparse", None)
    return state[0] if state else None


def select_methods(configs: tuple[Method, ...]) -> tuple[Prefill | None, Method | None]:
    """Return the prefill method and the decode method among ``configs``; None for a stage that stays dense.

    Raises:
        ConfigError: there is no method, a stage has several methods, or a method cannot run in a model.
    """
    if configs == (Dense(),):
        return None, None
    for config in configs:
        if not config.sparse:
            listed = ", ".join(name for name, cls in METHODS.items() if cls.sparse)
            raise ConfigError(f"attn: expected one of {listed} for a model, got {config.name}.")
    prefill = [config for config in configs if isinstance(config, Prefill)]
    decode = [config for config in configs if not isinstance(config, Prefill)]
    for stage, found in (("prefill", prefill), ("decode", decode)):
        if len(found) > 1:
            names = " and ".join(config.name for config in found)
            raise ConfigError(f"attn: expected one {stage} method, got {names}.")
    if prefill and any(config.observes_prefill for config in decode):
        seen, hidden = decode[0].name, prefill[0].name
        raise ConfigError(
            f"attn: expected dense prefill with {seen}, which sums the attention of all queries, got {hidden}."
        )
    if not configs:
        raise ConfigError("attn: expected a prefill or a decode method, got none.")
    return next(iter(prefill), None), next(iter(decode), None)


def has_qk_norm(model: nn.Module) -> bool:
    """Return True if any layer of the model normalizes its queries or keys."""
    modules = model.named_modules()
    switched_on = any(getattr(module, "use_qk_norm", False) is True for _, module in modules)
    return (
        switched_on
        or model_type(model) in NORMS_WITHOUT_WEIGHTS
        or any(name.rpartition(".")[2] in QK_NORMS for name, _ in modules)
    )


def absorbed_attention(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules with multi-head latent attention, in the order of their layers."""
    found = [(name, module) for name, module in model.named_modules() if "embed_q" in module]
    return [module for _, module in sorted(found, key=lambda named: [int(n) for n in re.findall(r"\d+", named[0])])]


def _sparse_class(cls: type[nn.Module]) -> type:
    """Return a subclass of the model class ``cls`` that runs its attention according to the plan of the model."""
    # Copies of the model are not enabled, so that `disable` affects only one model.
    reduce = seam.reduce_as(cls, "_mlx_sparse")
    own = {"__call__": under_plan(cls), "__reduce_ex__": reduce, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), own)


def _probe(model: nn.Module, plan: Plan) -> None:
    """Find the layers that can use sparse attention. Run the model on one token, but evaluate no arrays.

    Raises:
        ConfigError: no layer of a complete model can use sparse attention, or a parameter does not fit the head dim.
    """
    caches, probe = new_caches(model), Probe(plan)
    with _unchanged(model), Call(plan, caches, probe=probe):
        model(mx.zeros((1, 1), mx.int32), cache=caches)
    if plan.decode is not None:
        plan.decode = plan.decode.for_model(qk_norm=has_qk_norm(model), grouped=probe.grouped)
    seen = [(cache, reason() if callable(reason) else reason) for cache, reason in probe.seen]
    report = plan.report
    report.attn = plan.attn
    report.part = part_of(model)
    heads = {layer.step.heads for _, layer in probe.layers}
    if len(heads) == 1:
        (here,) = heads
        report.kv_heads = here, kv_heads(model, report.part, here)
    plan.layers = probe.layers
    plan.calls = 0 if package_of(model) == "mlx_lm" else len(seen)
    report.backend = " and ".join(sorted(probe.backends)) or plan.backend
    with_calls = {id(cache) for cache, _ in seen}
    found = [reason for _, reason in seen]
    found += [reasons.OWN_ATTENTION for c in leaves(caches) if id(c) not in with_calls]
    report.layers, report.served_layers = len(found), found.count(None)
    report.weight_bytes = weights_read(model)
    report.dense_layers.update(reason for reason in found if reason is not None)
    if report.part.layers is None:  # another stage of a pipeline may have sparse layers
        require_served(report, plan.name)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules after the ``with`` block, because models of mlx-vlm store positions."""
    modules = [(module, dict(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, entries, attributes in modules:
            for place, kept in ((module, entries), (vars(module), attributes)):
                place.clear()
                dict.update(place, kept)  # `nn.Module.update` sets parameters


def require_served(report: Report, methods: str) -> None:
    """Raise `NothingServed` if no layer can use sparse attention."""
    if report.served_layers == 0:
        listed = ", ".join(f"{count} {reason}" for reason, count in report.dense_layers.items())
        advice = LATENT_ADVICE if report.dense_layers[reasons.LATENT] else ""
        raise NothingServed(
            f"model: expected an attention layer that {methods} can serve, got {report.model_type} with "
            f"{report.layers} layers: {listed}.{advice}",
            report,
        )
