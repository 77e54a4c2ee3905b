"""``mlx_lm.evaluate`` with ``--attn``: the requests of public suites, each run as the methods are made to be run.

lm-eval asks for the likelihood of a continuation after a context, for that of a whole text, and for generated text.
mlx-lm scores continuations and texts in one call of the model, as if they were prompts, so a method that decodes would
have no part in them. With one, they are decoded here: one token at a time, the context's last token included, as when
text is generated.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..checks import BackendUnavailable

if TYPE_CHECKING:
    from .command import Session

# What lm-eval calls the kind of a task, and the kind of request that such a task makes.
REQUESTS = {"multiple_choice": "loglikelihood"}


@contextlib.contextmanager
def scored(session: Session) -> Iterator[None]:
    """Have mlx-lm's evaluation run its requests as ``session``'s methods need it, and say in its results which ran.

    Raises:
        BackendUnavailable: the installed mlx-lm has moved its interfaces.
    """
    import lm_eval
    from mlx_lm import evaluate

    original, simple_evaluate = evaluate.MLXLM, lm_eval.simple_evaluate
    evaluate.MLXLM = _scorer(session, original)  # type: ignore[misc]
    lm_eval.simple_evaluate = _marking(session, simple_evaluate)
    try:
        yield
    finally:
        evaluate.MLXLM = original  # type: ignore[misc]
        lm_eval.simple_evaluate = simple_evaluate


def _scorer(session: Session, original: Any) -> Any:
    """A subclass of mlx-lm's model for lm-eval; without ``--attn`` it does what that does."""
    import mlx.core as mx
    from mlx import nn

    for name in ("_process_prompt", "_score_fn"):
        if "step_size" not in inspect.signature(getattr(original, name, lambda: None)).parameters:
            raise BackendUnavailable(
                f"mlx_lm: expected an evaluate.MLXLM.{name} that takes a step size, got none. Install mlx-lm 0.32."
            )

    class Scorer(original):  # type: ignore[misc]
        """Scores token by token what a decode method is to score, and counts the calls of each kind of request."""

        def _process_prompt(self, prompt: Any, step_size: int = 2048) -> Any:
            if session.decode is None or len(prompt) == 1:
                return super()._process_prompt(prompt, step_size)
            _, cache = super()._process_prompt(prompt[:-1], step_size)
            logits = self._model(mx.array(prompt[-1:])[None], cache=cache)
            return nn.log_softmax(logits[:, -1].astype(mx.float32)), cache

        def _score_fn(self, inputs: Any, cache: Any = None, step_size: int = 2048) -> Any:
            if session.decode is not None and (cache is not None or session.prefill is None):
                step_size = 1
            return super()._score_fn(inputs, cache, step_size)

        def loglikelihood(self, requests: Any) -> Any:
            with _counted(session, "loglikelihood"):
                return super().loglikelihood(requests)

        def loglikelihood_rolling(self, requests: Any) -> Any:
            with _counted(session, "loglikelihood_rolling"):
                return super().loglikelihood_rolling(requests)

        def generate_until(self, requests: Any) -> Any:
            with _counted(session, "generate_until"):
                return super().generate_until(requests)

    return Scorer


@contextlib.contextmanager
def _counted(session: Session, kind: str) -> Iterator[None]:
    """Count the calls that requests of one kind make; warn where a method had no part in them."""
    if not session.reports:
        yield
        return
    (report, *_) = session.reports.values()
    prompts, steps, dense = _calls(report)
    yield
    now = _calls(report)
    prompts, steps, dense = now[0] - prompts, now[1] - steps, now[2] - dense
    session.requests[kind] = {"sparse_prompt": prompts, "sparse_decode": steps, "dense": dict(dense)}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dense.most_common())
    for config, calls, stage in ((session.prefill, prompts, "prompts"), (session.decode, steps, "decoding")):
        if config is not None and not calls:
            figures = "figures are dense attention's" if not prompts + steps else f"{stage} stayed dense"
            print(
                f"[mlx-sparse] warning: {kind} requests made no sparse call with {config.name}, so their {figures}; "
                f"dense calls: {reasons or 'none'}",
                file=sys.stderr,
            )


def _calls(report: Any) -> tuple[int, int, Counter[str]]:
    return report.prefill.calls if report.prefill else 0, report.sparse_calls, Counter(report.dense_calls)


def _marking(session: Session, simple_evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """lm-eval's evaluation, whose results name the method: mlx-lm gives their file the name that dense ones have."""

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        found = simple_evaluate(*args, **kwargs)
        if found is None or not session.reports:
            return found
        for task, result in found["results"].items():
            result["attn"] = next(iter(session.reports.values())).attn
            kind = found.get("configs", {}).get(task, {}).get("output_type")  # none: a group of tasks
            if calls := session.requests.get(REQUESTS.get(kind, kind)):
                result["attn_calls"] = calls
        return found

    return evaluate
