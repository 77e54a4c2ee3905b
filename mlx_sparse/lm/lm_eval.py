"""Support ``--attn`` in ``mlx_lm.evaluate``, which runs lm-eval's tasks.

A task requests the likelihood of a continuation after a context, the likelihood of a whole text, or generated text.
mlx-lm computes likelihoods with prefill only, so a decode method would not be used. If a decode method is enabled, this
module runs prefill on the context up to its last token. The module then passes the last token and the continuation to
the model one token at a time, as in generation.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..api.call_report import listing
from ..checks import BackendUnavailable

if TYPE_CHECKING:
    import mlx.core as mx

    from .session import Session

# Name of the request kind for each output type of a task, where the two names differ in lm-eval.
REQUESTS = {"multiple_choice": "loglikelihood"}


@contextlib.contextmanager
def sparse_evaluation(session: Session) -> Iterator[None]:
    """Run lm-eval with the methods of ``session`` inside the ``with`` block, and add these methods to the results.

    Raises:
        BackendUnavailable: the interfaces of the installed mlx-lm have changed.
    """
    import lm_eval
    from mlx_lm import evaluate

    original, simple_evaluate = evaluate.MLXLM, lm_eval.simple_evaluate
    evaluate.MLXLM = _scorer_class(session, original)  # type: ignore[misc]
    lm_eval.simple_evaluate = _with_method(session, simple_evaluate)
    try:
        yield
    finally:
        evaluate.MLXLM = original  # type: ignore[misc]
        lm_eval.simple_evaluate = simple_evaluate


def _scorer_class(session: Session, original: Any) -> Any:
    """Return a subclass of ``original``, mlx-lm's model for lm-eval, that scores with the methods of ``session``."""
    import mlx.core as mx
    from mlx import nn

    for name in ("_process_prompt", "_score_fn"):
        if "step_size" not in inspect.signature(getattr(original, name, lambda: None)).parameters:
            raise BackendUnavailable(
                f"mlx_lm: expected evaluate.MLXLM.{name} with a parameter step_size, got none. Install mlx-lm 0.32."
            )

    class Scorer(original):  # type: ignore[misc]
        """Model for lm-eval that counts attention calls by kind of request.

        If a decode method is enabled, the model scores the continuation token by token.
        """

        def _process_prompt(self, prompt: list[int], step_size: int = 2048) -> object:
            if session.decode is None or len(prompt) == 1:
                return super()._process_prompt(prompt, step_size)
            _, cache = super()._process_prompt(prompt[:-1], step_size)
            logits = self._model(mx.array(prompt[-1:])[None], cache=cache)
            return nn.log_softmax(logits[:, -1].astype(mx.float32)), cache

        def _score_fn(self, inputs: mx.array, cache: object = None, step_size: int = 2048) -> object:
            if session.decode is not None and (cache is not None or session.prefill is None):
                step_size = 1
            return super()._score_fn(inputs, cache, step_size)

        def loglikelihood(self, requests: object) -> object:
            with _counting_calls(session, "loglikelihood"):
                return super().loglikelihood(requests)

        def loglikelihood_rolling(self, requests: object) -> object:
            with _counting_calls(session, "loglikelihood_rolling"):
                return super().loglikelihood_rolling(requests)

        def generate_until(self, requests: object) -> object:
            with _counting_calls(session, "generate_until"):
                return super().generate_until(requests)

    return Scorer


@contextlib.contextmanager
def _counting_calls(session: Session, kind: str) -> Iterator[None]:
    """Count the attention calls for one kind of request. Print a warning if a method made no sparse calls."""
    if not session.reports:
        yield
        return
    before = session.calls()
    yield
    now = session.calls()
    steps, dense = now.sparse_calls - before.sparse_calls, now.dense_calls - before.dense_calls
    prompts = 0 if session.prefill is None else now.prefill - before.prefill
    session.requests[kind] = {"sparse_prompt": prompts, "sparse_decode": steps, "dense": dict(dense)}
    for config, calls, stage in ((session.prefill, prompts, "prefill"), (session.decode, steps, "decoding")):
        if config is not None and not calls:
            effect = "the results are for dense attention" if not prompts + steps else f"{stage} was dense"
            print(
                f"[mlx-sparse] warning: no sparse call with {config.name} in {kind} requests: {effect}; "
                f"dense calls: {listing(dense) or 'none'}",
                file=sys.stderr,
            )


def _with_method(session: Session, simple_evaluate: Callable[..., Any]) -> Callable[..., object]:
    """Wrap lm-eval's ``simple_evaluate`` to add the methods and the attention calls to the results of each task.

    The name of the results file does not change.
    """

    def evaluate(*args: object, **kwargs: object) -> object:
        found = simple_evaluate(*args, **kwargs)
        if found is None or not session.reports:
            return found
        for task, result in found["results"].items():
            result["attn"] = next(iter(session.reports.values())).attn
            kind = found.get("configs", {}).get(task, {}).get("output_type")  # None for a group of tasks
            if calls := session.requests.get(REQUESTS.get(kind, kind)):
                result["attn_calls"] = calls
        return found

    return evaluate
